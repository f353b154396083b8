"""Activation checkpointing for PyTorch Lightning: the same model, bit for bit, trained in less memory."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ckpt.callback import ActivationCheckpointing
    from lightning_ckpt.cli import CheckpointCLI, CheckpointCLIMixin, add_checkpoint_arguments
    from lightning_ckpt.monitor import StepMonitor
    from lightning_ckpt.recompute import is_replaying

__version__ = "0.1.0"
__all__ = [
    "ActivationCheckpointing",
    "CheckpointCLI",
    "CheckpointCLIMixin",
    "StepMonitor",
    "add_checkpoint_arguments",
    "is_replaying",
]

_homes = {
    "ActivationCheckpointing": "callback",
    "CheckpointCLI": "cli",
    "CheckpointCLIMixin": "cli",
    "StepMonitor": "monitor",
    "add_checkpoint_arguments": "cli",
    "is_replaying": "recompute",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `lightning_ckpt.selection` and `lightning_ckpt.recompute` work without Lightning.
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_homes[name]}"), name)
