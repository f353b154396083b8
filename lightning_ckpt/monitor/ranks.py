"""One row of metrics from those of all ranks, by one collective."""

import math
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_ckpt.monitor.metrics import NAMES, PEAK, PEAK_PHASE, RATES, STEP_TIME, TIMES, StepFigures

_UNKNOWN = float("nan")
_EXTRAS = ("plain_bytes", "model_flops", "recompute_flops", "copy_ms")  # of `StepFigures`: known, but not logged
_COLUMNS = (*NAMES, *_EXTRAS)


class RankRows(Metric):
    """Gathers a row of figures from every rank, in one collective.

    Example::

        rows = RankRows()
        rows.update(to_row(figures))
        rows.compute()   # one row per rank, on every rank
    """

    full_state_update = False
    row: Tensor

    def __init__(self) -> None:
        # The default would gather shapes first, which are known, and wait for all ranks.
        super().__init__(dist_sync_fn=_gather)
        self.add_state("row", torch.full((len(_COLUMNS),), _UNKNOWN, dtype=torch.float64), dist_reduce_fx=None)

    def update(self, row: Tensor) -> None:
        """Set this rank's row."""
        self.row = row

    def compute(self) -> Tensor:
        """All rows, one per rank."""
        return self.row if self.row.dim() == 2 else self.row.unsqueeze(0)


def _gather(row: Tensor, group: Any) -> list[Tensor]:
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return rows


def to_row(figures: StepFigures) -> Tensor:
    """The figures of one rank, one column each; what is not known is NaN."""
    extras = [getattr(figures, name) for name in _EXTRAS]
    values = [figures.metrics.get(name, _UNKNOWN) for name in NAMES]
    values += [_UNKNOWN if value is None else float(value) for value in extras]
    return torch.tensor(values, dtype=torch.float64)


def combine(step: int, rows: Tensor, replicas: int) -> StepFigures:
    """The figures of all ranks: the largest memory, mean and largest times, rates by the slowest rank.

    What is not known on one rank is not known.

    Args:
        step: the Trainer's step.
        rows: one row of `to_row` per rank.
        replicas: in how many parts the ranks have divided the data.
    """
    columns: dict[str, list[float]] = dict(zip(_COLUMNS, rows.T.tolist(), strict=True))
    known = {name: values for name, values in columns.items() if not any(map(math.isnan, values))}
    metrics: dict[str, float] = {}
    for name, values in known.items():
        if name in TIMES:
            metrics[name] = fmean(values)
            metrics[name.replace("time/", "time_max/")] = max(values)
        elif name in RATES:  # all ranks wait for the slowest one
            times = columns[STEP_TIME]
            work = fmean([rate * time for rate, time in zip(values, times, strict=True)])
            metrics[name] = replicas * work / max(times)
        elif name == PEAK_PHASE:
            peaks = columns[PEAK]
            metrics[name] = values[peaks.index(max(peaks))]
        elif name.startswith("flops/"):
            metrics[name] = fmean(values)
        elif name in NAMES:
            metrics[name] = max(values)
    largest = {name: max(known[name]) for name in _EXTRAS if name in known}
    whole = {name: round(value) for name, value in largest.items() if name != "copy_ms"}
    copy_ms = fmean(known["copy_ms"]) if "copy_ms" in known else None
    return StepFigures(step, metrics, **whole, copy_ms=copy_ms)


def by_rank(rows: Tensor) -> dict[str, float]:
    """Every known metric of every rank, under its name and the rank: ``memory/peak_MiB/rank1``."""
    return {
        f"{name}/rank{rank}": value
        for rank, row in enumerate(rows.tolist())
        for name, value in zip(_COLUMNS, row, strict=True)
        if name in NAMES and not math.isnan(value)
    }
