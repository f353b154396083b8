"""Runs cases, on the processes that there are or that the strategy starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_ckpt import ActivationCheckpointing
from tests.distributed import models
from tests.distributed.cases import PLAIN, Case, Treatment
from tests.distributed.record import Record, Recorder, rank_of, save, seed
from tests.support import trainer


def path_of(out: Path, case: str, treatment: str) -> Path:
    """Where a run is noted."""
    return out / case / treatment


def run(
    case: Case, treatment: Treatment, path: Path, since: int = 0, resumed: Path | None = None, **settings: Any
) -> pl.Trainer:
    """Train, and note everything in `path`.

    Args:
        case: what.
        treatment: how. Where operators are counted, there is no monitor, whose own counting would be in between.
        path: where it is noted.
        since: the first step that is noted.
        resumed: the checkpoint that it begins with.
        settings: of the Trainer.
    """
    seed(0)
    callbacks = [Recorder(path, getattr(models, case.layers), since, treatment.counted)]
    callbacks += [*case.callbacks(), *treatment.callbacks()]
    if treatment.callback is not None:
        monitor = not treatment.counted
        callbacks.append(ActivationCheckpointing(layers=case.layers, monitor=monitor, **treatment.callback))
    defaults = {"strategy": case.strategy(treatment.offload), "devices": 2}
    loop = trainer(callbacks, **{**defaults, **case.settings, **settings})
    loop.fit(case.module(), ckpt_path=resumed)
    return loop


def run_treatments(
    case: Case, out: Path, name: str, treatments: Mapping[str, Treatment], refusable: bool = False
) -> None:
    """Plainly and with treatments.

    An error ends everything, unless it may be that the case cannot be run, and the plain run cannot, either.
    """
    refused = False
    for title, treatment in {"plain": PLAIN, **treatments}.items():
        path = path_of(out, name, title)
        try:
            run(case, treatment, path)
        except Exception as error:
            save(Record(error=f"{type(error).__name__}: {error}"), path, rank_of())
            refused |= refusable and title == "plain"
            if not refused:
                raise
