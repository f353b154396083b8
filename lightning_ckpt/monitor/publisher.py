"""From measured steps to rows in the loggers: once the device has passed them, for all ranks together."""

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ckpt.measure.clock import Clock, HostClock
from lightning_ckpt.measure.step import StepRecord
from lightning_ckpt.monitor.charts import add_charts
from lightning_ckpt.monitor.metrics import RETRIES, StepFigures, figures
from lightning_ckpt.monitor.ranks import RankRows, by_rank, combine, to_row
from lightning_ckpt.monitor.summary import History
from lightning_ckpt.monitor.trainer import replicas_of
from lightning_ckpt.monitor.writer import RowWriter
from lightning_ckpt.offload.statistics import StepStatistics


class Publisher:
    """Logs measured steps.

    On one rank, a row is logged as soon as the device has passed the step. On several ranks they have to agree on when,
    since each row takes a collective: on an accelerator that is at the end of the next measured step, when the device
    has work to go on with while the host waits.

    Args:
        trainer: whose loggers are written to.
        clock: what the steps were measured with.
        per_rank: whether to log the metrics of every rank beside those of all.
        history: told of every row.

    Attributes:
        latest: metrics of the row that was logged last.
    """

    def __init__(self, trainer: pl.Trainer, clock: Clock, per_rank: bool, history: History) -> None:
        self.latest: Mapping[str, float] = {}
        self._clock = clock
        self._device = trainer.strategy.root_device
        self._replicas = replicas_of(trainer)
        self._per_rank = per_rank
        self._history = history
        self._measured: deque[tuple[int, StepRecord, StepStatistics | None]] = deque()
        self._gathered: deque[tuple[int, Tensor, Any]] = deque()
        several = trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
        self._ranks = RankRows().to(self._device) if several else None
        self._writer = RowWriter(trainer, self._publish_passed) if trainer.is_global_zero else None
        self._warned = False
        for logger in trainer.loggers if trainer.is_global_zero else ():
            add_charts(logger)

    def add(self, step: int, record: StepRecord, offload: StepStatistics | None) -> None:
        """A step was measured."""
        self._measured.append((step, record, offload))
        if self._ranks is not None:
            self._gather(leave=0 if isinstance(self._clock, HostClock) else 1)
        self._publish_passed()

    def flush(self) -> None:
        """Log the rows that the Trainer has logged nothing else for."""
        self._publish_passed()
        if self._writer is not None:
            self._writer.flush()

    def finish(self) -> None:
        """Log everything: training is over."""
        if self._ranks is not None:
            self._gather(leave=0)
        self._clock.wait()
        self.close()

    def close(self) -> None:
        """Log what is known, and leave the loggers as they were."""
        with contextlib.suppress(RuntimeError):  # a device that has failed tells nothing more
            self._publish_passed()
        if self._writer is not None:
            self._writer.close()

    def _gather(self, leave: int) -> None:
        assert self._ranks is not None
        while len(self._measured) > leave:
            step, record, offload = self._measured.popleft()
            self._clock.wait_for(record.end)
            row = to_row(figures(step, record, offload))
            if self._device.type != "cpu":
                row = row.pin_memory().to(self._device, non_blocking=True)
            self._ranks.update(row)
            rows = self._ranks.compute().to("cpu", non_blocking=True)
            self._gathered.append((step, rows, self._clock.mark()))

    def _publish_passed(self) -> None:
        while self._gathered and self._clock.has_passed(self._gathered[0][2]):
            step, rows, _ = self._gathered.popleft()
            row = combine(step, rows, self._replicas)
            self._publish(row, by_rank(rows) if self._per_rank else {})
        while self._ranks is None and self._measured and self._clock.has_passed(self._measured[0][1].end):
            self._publish(figures(*self._measured.popleft()), {})

    def _publish(self, row: StepFigures, others: Mapping[str, float]) -> None:
        self.latest = row.metrics
        self._history.add(row)
        if self._writer is not None:
            self._writer.offer(row.step, {**row.metrics, **others})
        retries = row.metrics.get(RETRIES)
        if retries and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Step {row.step}: the allocator had to free its cache {retries:.0f} times to find memory. Training "
                "goes on, but slower, and little is missing to run out of memory: recompute or offload more, or use a "
                "smaller batch."
            )
