"""Every strategy with every treatment in every precision, as a table: python -m tests.distributed.matrix writes it."""

import tempfile
from dataclasses import replace
from pathlib import Path

from tests.distributed import models
from tests.distributed.cases import TREATMENTS, Case, ddp, fsdp, fsdp2, tensor_parallel
from tests.distributed.launch import run
from tests.distributed.record import RANKS, differences, load
from tests.distributed.runs import path_of, run_treatments

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
COMMAND = ("-m", "tests.distributed", "OUT", "matrix")
SECONDS = 500

STRATEGIES = {
    "single device": Case(lambda offload: "ckpt_offload" if offload else "auto", settings={"devices": 1}),
    "DDP": Case(lambda offload: "ckpt_offload_ddp" if offload else "ddp"),
    "DDP, `find_unused_parameters`": Case(ddp(find_unused_parameters=True), models.Unused),
    "FSDP": Case(fsdp(models.Layer)),
    "FSDP2": Case(fsdp2(), lambda: models.FullySharded(nested=True)),
    "tensor parallel": Case(tensor_parallel(), models.TensorParallel),
}
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "transformer-engine")
NAMES = {
    "recompute": "`ActivationCheckpointing()`",
    "policy": '`ActivationCheckpointing(policy="matmul")`',
    "offload inputs": "`ActivationCheckpointing(offload=True)`",
    "offload strategy": "the strategy that offloads",
    "both": "the two last together",
}
INTRODUCTION = """\
# Strategies, treatments, precisions

A small transformer with dropout is trained plainly and with a treatment of its layers, with every strategy and
precision of the Trainer. *exact*: losses, gradients, weights, buffers, the optimizer's state and random streams are
equal to those of the plain run with the same strategy and precision, bit for bit on each process. *refused*: the plain
run ends with the very same error, which is quoted below. Nothing else occurs.

Strategies for several devices run on two CPU processes that communicate with gloo. There, Lightning trains `16-mixed`
as `bf16-mixed`, but for FSDP, whose autocast is the accelerator's: its mixed precisions only cast what FSDP casts.
Without an accelerator offload moves nothing; that training is exact where it does is tested on a simulated one.

Written by `python -m tests.distributed.matrix`; a test compares it with what is run.
"""


def cell_of(strategy: str, precision: str) -> str:
    """The name of the trainings that a cell compares."""
    return f"{strategy}, {precision}"


def run_cells(out: Path) -> None:
    """All trainings, on the processes that the strategies start."""
    treatments = {name: replace(treatment, counted=False) for name, treatment in TREATMENTS.items()}
    for strategy in sorted(STRATEGIES, key="single device".__eq__):  # that one last: it starts no processes
        for precision in PRECISIONS:
            case = STRATEGIES[strategy]
            case = replace(case, settings={**case.settings, "precision": precision})
            run_treatments(case, out, cell_of(strategy, precision), treatments, refusable=True)


def verdict(out: Path, strategy: str, precision: str, treatment: str) -> str:
    """`exact`, `refused: ...`, or what is wrong."""
    got, want = (path_of(out, cell_of(strategy, precision), name) for name in (treatment, "plain"))
    found = differences(got, want)
    if found:
        return f"wrong: {len(found)} differences, {found[0]}"
    refusals = {load(want, rank).error for rank in RANKS}
    if refusals != {None}:
        return "refused: " + " / ".join(" ".join(str(refusal).split()) for refusal in sorted(map(str, refusals)))
    times = 1 if TREATMENTS[treatment].callback is None else 2
    if any(load(got, rank).forwards != times * load(want, rank).forwards for rank in RANKS):
        return "wrong: without effect"
    return "exact"


def page(out: Path) -> str:
    """The whole text, of what has been run."""
    notes: dict[str, int] = {}
    rows = [("strategy", "treatment", *(f"`{precision}`" for precision in PRECISIONS))]
    rows.append(("---",) * len(rows[0]))
    for strategy in STRATEGIES:
        for treatment, name in NAMES.items():
            verdicts = [verdict(out, strategy, precision, treatment) for precision in PRECISIONS]
            rows.append((strategy, name, *(_noted(text, notes) for text in verdicts)))
    rows.append(("DeepSpeed", "see [its page](deepspeed.md)", *[""] * len(PRECISIONS)))
    table = [f"| {' | '.join(row)} |" for row in rows]
    footnotes = [f"[^{number}]: {text}" for text, number in notes.items()]
    return "\n".join([INTRODUCTION, *table, "", *footnotes, ""])


def _noted(text: str, notes: dict[str, int]) -> str:
    """The first word of a verdict, with the rest in a footnote."""
    word, _, message = text.partition(": ")
    return f"{word}[^{notes.setdefault(message, len(notes) + 1)}]" if message else word


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = run(COMMAND, Path(folder), SECONDS)
        assert done.code == 0, done.stdout + done.stderr
        PAGE.write_text(page(Path(folder)))


if __name__ == "__main__":
    main()
