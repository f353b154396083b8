"""Trains on the processes that there are, or that the strategy starts: python -m tests.distributed OUT NAME..."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.distributed.cases import CASES, DISTURBED, REFERENCE, STARTED, TREATMENTS, Treatment
from tests.distributed.checkpoints import KINDS, run_halves
from tests.distributed.matrix import run_cells
from tests.distributed.runs import run_treatments


def run_case(out: Path, name: str) -> None:
    reference = {"reference": REFERENCE} if CASES[name].layers_communicate else {}
    run_treatments(CASES[name], out, name, {**TREATMENTS, **reference})


def run_disturbed(out: Path, name: str) -> None:
    run_treatments(DISTURBED[name], out, name, {"unverified": Treatment({"verify": "off"})})


def run_started(out: Path, name: str) -> None:
    run_treatments(STARTED[name], out, name, {"both": TREATMENTS["both"]})


JOBS: dict[str, Callable[[Path], None]] = {
    **{name: partial(run_case, name=name) for name in CASES},
    **{f"checkpoint {kind}": partial(run_halves, kind=kind) for kind in KINDS},
    **{name: partial(run_disturbed, name=name) for name in DISTURBED},
    **{name: partial(run_started, name=name) for name in STARTED},
    "matrix": run_cells,
}


def main(out: str, *names: str) -> None:
    torch.set_num_threads(1)  # so that sums are in the same order
    warnings.filterwarnings("ignore")
    for name in names:
        JOBS[name](Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
