"""A run on two CPU processes, started by the tests: python -m tests.distributed.two_processes OUT with|without."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from tests.support import Block, Training, trainer


class SharedAndUnused(nn.Module):
    """One layer used twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        first, second = self.blocks
        return first(second(first(self.stem(x))))


def main(out: str, mode: str) -> None:
    torch.set_num_threads(1)
    callbacks = [ActivationCheckpointing()] if mode == "with" else []
    for strategy in ("ddp_fork", "ddp_fork_find_unused_parameters_true"):
        torch.manual_seed(0)
        module = Training(SharedAndUnused() if "unused" in strategy else None)
        loop = trainer([*callbacks, Save(f"{out}.{strategy}")], strategy=strategy, devices=2)
        torch.manual_seed(1)
        loop.fit(module, DataLoader(torch.randn(24, 8), batch_size=3))


class Save(pl.Callback):
    """Writes each rank's weights, gradients and random stream."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module):
        gradients = {name: parameter.grad for name, parameter in pl_module.named_parameters()}
        state = {"weights": pl_module.state_dict(), "gradients": gradients, "random": torch.rand(4)}
        torch.save(state, f"{self.path}.{trainer.global_rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
