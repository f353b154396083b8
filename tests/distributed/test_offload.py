"""Two real processes with offload equal those without, bit for bit on each rank: nothing can be moved on the CPU.

Runs them with: python -m tests.distributed.test_offload OUT CASE...
"""

import subprocess
import sys
from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader

from lightning_ckpt import (
    ActivationCheckpointing,
    OffloadDDPStrategy,
    OffloadFSDPStrategy,
    OffloadModelParallelStrategy,
)
from lightning_ckpt.strategies import local_ranks
from tests.distributed.two_processes import CPUFSDPStrategy, FullyShard, Save, TwoParts, fsdp, layers_of_parts
from tests.support import Training, blocks, trainer

WHY = "nothing is moved: there is no accelerator"


class CPUOffloadFSDPStrategy(OffloadFSDPStrategy, CPUFSDPStrategy):
    """The same, with offload."""


def offload_callback() -> list[pl.Callback]:
    return [ActivationCheckpointing(layers="Block", offload=True)]


Part = tuple[Callable[[], Strategy | str], Callable[[], list[pl.Callback]]]
CASES: dict[str, tuple[Callable[[], Training], Part, Part]] = {
    "ddp": (
        lambda: Training(blocks()),
        (lambda: "ddp", list),
        (lambda: "ckpt_offload_ddp", list),
    ),
    "ddp_both": (
        lambda: Training(blocks()),
        (lambda: "ddp", list),
        (lambda: OffloadDDPStrategy(keep_last=2), offload_callback),
    ),
    "fsdp": (
        lambda: Training(layers_of_parts()),
        (lambda: fsdp(auto_wrap_policy={TwoParts}), list),
        (lambda: CPUOffloadFSDPStrategy(auto_wrap_policy={TwoParts}, process_group_backend="gloo", move="all"), list),
    ),
    "model_parallel": (
        lambda: FullyShard(layers_of_parts()),
        (lambda: ModelParallelStrategy(process_group_backend="gloo"), list),
        (lambda: OffloadModelParallelStrategy(process_group_backend="gloo", host_budget="8GB"), list),
    ),
}
SPEAKERS = {"ddp": 1, "ddp_both": 2, "fsdp": 1, "model_parallel": 1}


class Shared(pl.Callback):
    """Writes what each rank knows of the others."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = getattr(trainer.strategy, "offload_engine", None)
        kind = type(trainer.strategy).__name__
        torch.save((kind, local_ranks(trainer), engine), f"{self.path}.{trainer.global_rank}")


@pytest.mark.slow
def test_two_processes_with_offload_equal_those_without(tmp_path):
    command = [sys.executable, "-m", "tests.distributed.test_offload", str(tmp_path), *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Said on rank 0 only.
    assert (done.stdout + done.stderr).count(WHY) == sum(SPEAKERS.values())
    kinds = ["OffloadDDPStrategy", "OffloadDDPStrategy", "CPUOffloadFSDPStrategy", "OffloadModelParallelStrategy"]
    for case, kind in zip(CASES, kinds, strict=True):
        for rank in range(2):
            assert torch.load(tmp_path / f"{case}.shared.{rank}") == (kind, 2, None)
            got, want = (torch.load(tmp_path / f"{case}.{mode}.{rank}") for mode in ("with", "without"))
            assert got.keys() == want.keys()
            assert any(name.startswith("gradient") for name in want)
            for name, value in want.items():
                assert torch.equal(got[name], value), f"{case}: {name} on rank {rank}"


def run(make: Callable[[], Training], part: Part, out: str, shared: str | None = None) -> None:
    make_strategy, make_callbacks = part
    torch.manual_seed(0)
    callbacks = [*make_callbacks(), Save(out), *([Shared(shared)] if shared else [])]
    loop = trainer(callbacks, strategy=make_strategy(), devices=2)
    module = make()
    torch.manual_seed(1)
    loop.fit(module, DataLoader(torch.randn(24, 8), batch_size=3))


def main(out: str, *cases: str) -> None:
    torch.set_num_threads(1)
    for case in cases:
        make, plain, offload = CASES[case]
        run(make, plain, f"{out}/{case}.without")
        run(make, offload, f"{out}/{case}.with", f"{out}/{case}.shared")


if __name__ == "__main__":
    main(*sys.argv[1:])
