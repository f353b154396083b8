"""What a step needs and takes: measured, logged, summed up, and explained when memory runs out."""

from lightning_ckpt.monitor.monitor import StepMonitor
from lightning_ckpt.monitor.summary import Summary

__all__ = ["StepMonitor", "Summary"]
