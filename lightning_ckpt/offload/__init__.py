"""Saved activations in host memory, copied there and back behind compute. Plain PyTorch, no Lightning."""

from lightning_ckpt.measure.boundaries import Boundaries, find_compiled_whole
from lightning_ckpt.offload.device import why_not
from lightning_ckpt.offload.engine import OffloadEngine
from lightning_ckpt.offload.options import OffloadError, OffloadOptions

__all__ = ["Boundaries", "OffloadEngine", "OffloadError", "OffloadOptions", "find_compiled_whole", "why_not"]
