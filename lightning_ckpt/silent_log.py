"""`self.log` of a LightningModule inside of a layer counts once."""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl


class SilentLog:
    """Keeps `self.log` of the LightningModule from counting twice when a layer calls it.

    It is stopped where the Trainer collects it: a layer may hold `self.log` itself, bound before.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        results = self._trainer._results
        if results is None or "log" in results.__dict__:
            yield
            return
        results.__dict__["log"] = _do_not_log
        try:
            yield
        finally:
            del results.__dict__["log"]


def _do_not_log(*args: Any, **kwargs: Any) -> None:
    """`self.log` in a replay."""
