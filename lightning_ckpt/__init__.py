"""Activation checkpointing for PyTorch Lightning: the same model, bit for bit, trained in less memory."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ckpt.callback import ActivationCheckpointing
    from lightning_ckpt.cli import CheckpointCLI, CheckpointCLIMixin, add_checkpoint_arguments
    from lightning_ckpt.monitor import StepMonitor
    from lightning_ckpt.offload import OffloadOptions
    from lightning_ckpt.planning import Plan, make_plan
    from lightning_ckpt.recompute import is_replaying
    from lightning_ckpt.strategies import (
        OffloadDDPStrategy,
        OffloadDeepSpeedStrategy,
        OffloadFSDPStrategy,
        OffloadMixin,
        OffloadModelParallelStrategy,
        OffloadStrategy,
    )

__version__ = "0.1.0"
__all__ = [
    "ActivationCheckpointing",
    "CheckpointCLI",
    "CheckpointCLIMixin",
    "OffloadDDPStrategy",
    "OffloadDeepSpeedStrategy",
    "OffloadFSDPStrategy",
    "OffloadMixin",
    "OffloadModelParallelStrategy",
    "OffloadOptions",
    "OffloadStrategy",
    "Plan",
    "StepMonitor",
    "add_checkpoint_arguments",
    "is_replaying",
    "make_plan",
]

_homes = {
    "ActivationCheckpointing": "callback",
    "CheckpointCLI": "cli",
    "CheckpointCLIMixin": "cli",
    "OffloadDDPStrategy": "strategies",
    "OffloadDeepSpeedStrategy": "strategies",
    "OffloadFSDPStrategy": "strategies",
    "OffloadMixin": "strategies",
    "OffloadModelParallelStrategy": "strategies",
    "OffloadOptions": "offload",
    "OffloadStrategy": "strategies",
    "Plan": "planning",
    "StepMonitor": "monitor",
    "add_checkpoint_arguments": "cli",
    "is_replaying": "recompute",
    "make_plan": "planning",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `lightning_ckpt.selection` and `lightning_ckpt.recompute` work without Lightning.
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    return getattr(import_module(f"{__name__}.{_homes[name]}"), name)


if find_spec("lightning") is not None:  # a strategy's name is known to Lightning once it is registered
    import_module(f"{__name__}.strategies")
