"""What a training step may change beside the model, and what it may write: a rehearsal must do neither."""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_ckpt.monitor.trainer import callbacks_of


def surroundings(trainer: pl.Trainer) -> dict[str, Any]:
    """Objects by name; those of Lightning and of PyTorch by the parts that steps change."""
    around: dict[str, Any] = {f"trainer.callbacks[{i}]": each for i, each in enumerate(callbacks_of(trainer))}
    around["trainer.datamodule"] = getattr(trainer, "datamodule", None)
    around["trainer"] = vars(trainer)
    for i, optimizer in enumerate(trainer.optimizers):
        around[f"trainer.optimizers[{i}]"] = optimizer
    for i, config in enumerate(trainer.lr_scheduler_configs):
        around[f"trainer.lr_scheduler_configs[{i}].scheduler"] = vars(config.scheduler)
    return around


@contextlib.contextmanager
def nothing_logged(trainer: pl.Trainer) -> Iterator[None]:
    """What a step logs goes nowhere: it has no numbers."""
    loop, loggers = trainer.fit_loop.epoch_loop, trainer.loggers
    results = loop._results
    loop._results = _Nowhere()  # type: ignore[assignment]  # for a `log` that was bound before
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        loop._results = results
        trainer.loggers = loggers


class _Nowhere:
    """In the place of what the Trainer collects."""

    def metrics(self, on_step: bool) -> dict[str, dict[str, Any]]:
        """There are none yet."""
        return {"callback": {}, "log": {}, "pbar": {}}

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Note nothing."""

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing."""
