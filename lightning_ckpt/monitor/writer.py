"""Rows of metrics for the Trainer's loggers: in the row that the Trainer writes for the same step, where it does."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars

from lightning_ckpt.monitor.patches import Patches
from lightning_ckpt.monitor.trainer import step_of


class RowWriter:
    """Gives rows to the Trainer's loggers, so that each step has one row in a table.

    The Trainer logs the user's metrics right after the hooks at the end of a batch. A row offered by then is added to
    what it logs for the same step; `flush` logs those that it logs nothing for.

    Args:
        trainer: the Trainer.
        poll: called before the Trainer logs; offers what has become known.
    """

    def __init__(self, trainer: pl.Trainer, poll: Callable[[], object]) -> None:
        self._trainer = trainer
        self._poll = poll
        self._rows: dict[int, Mapping[str, float]] = {}
        self._patches = Patches()
        self._patches.wrap(trainer._logger_connector, "log_metrics", self._log)

    def _log(self, inner: Callable[..., Any], metrics: dict[str, Any], step: int | None = None) -> Any:
        if step is None and "step" not in metrics:  # else the user moves his metrics to a step of his own
            if step_of(self._trainer) not in self._rows:
                # The host waits here for what is logged, as it would a moment later: the device has passed the step.
                convert_tensors_to_scalars(metrics)
                self._poll()
            metrics = {**metrics, **self._rows.pop(step_of(self._trainer), {})}
        return inner(metrics, step=step)

    def offer(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row has become known."""
        self._rows[step] = metrics

    def flush(self) -> None:
        """Log what has been offered and not been logged."""
        rows, self._rows = self._rows, {}
        for logger in self._trainer.loggers if rows else ():
            for step, row in rows.items():
                logger.log_metrics(dict(row), step)
            logger.save()

    def close(self) -> None:
        """Log what is left, and leave the Trainer as it was."""
        self._patches.restore()
        self.flush()
