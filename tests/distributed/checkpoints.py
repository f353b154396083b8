"""Trainings that end halfway and go on from a checkpoint, which another kind of run has written."""

from pathlib import Path

from tests.distributed.cases import PLAIN, TREATMENTS, Case, ddp, fsdp, fsdp2
from tests.distributed.models import STEPS, FullySharded, Layer
from tests.distributed.runs import path_of, run

#: By how the checkpoint is written.
KINDS: dict[str, Case] = {
    "ddp": Case(ddp()),
    "fsdp full": Case(fsdp(Layer, state_dict_type="full")),
    "fsdp sharded": Case(fsdp(Layer, state_dict_type="sharded")),
    "fsdp2 full": Case(fsdp2(save_distributed_checkpoint=False), FullySharded),
    "fsdp2 sharded": Case(fsdp2(save_distributed_checkpoint=True), FullySharded),
}


#: The least and the most that is changed; nothing else could be seen in a checkpoint.
TREATED = ("recompute", "both")


def checkpoint_of(out: Path, kind: str, treatment: str) -> Path:
    """What the first half has written."""
    return _path_of(out, kind, f"{treatment}.ckpt")


def resumed_path(out: Path, kind: str, first: str, second: str) -> Path:
    """Where the second half is noted."""
    return _path_of(out, kind, f"{first} then {second}")


def whole_path(out: Path, kind: str) -> Path:
    """Where the second half of a plain training without a halt is noted."""
    return _path_of(out, kind, "whole")


def run_halves(out: Path, kind: str) -> None:
    """Plainly without a halt, and by halves, one of which is treated."""
    case = KINDS[kind]
    treatments = {"plain": PLAIN, **{name: TREATMENTS[name] for name in TREATED}}
    run(case, PLAIN, whole_path(out, kind), since=STEPS, max_epochs=2)
    for name, treatment in treatments.items():
        loop = run(case, treatment, _path_of(out, kind, name))
        loop.save_checkpoint(checkpoint_of(out, kind, name))
    for treated in TREATED:
        for first, second in ((treated, "plain"), ("plain", treated)):
            path, written = resumed_path(out, kind, first, second), checkpoint_of(out, kind, first)
            run(case, treatments[second], path, since=STEPS, resumed=written, max_epochs=2)


def _path_of(out: Path, kind: str, name: str) -> Path:
    return path_of(out, f"checkpoint {kind}", name)
