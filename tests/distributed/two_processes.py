"""Runs on two CPU processes, with and without the callback: python -m tests.distributed.two_processes OUT CASE..."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from tests.support import Block, Training, blocks, trainer


class SharedAndUnused(nn.Module):
    """One layer used twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return first(second(first(self.stem(x))))


class TwoParts(nn.Module):
    """A layer of two parts, which may be sharded on their own, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x)))


def layers_of_parts() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *[TwoParts() for _ in range(3)])


class FullyShard(Training):
    """`fully_shard` by the user in `configure_model`, of the layers and of their parts."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model[1:]:
            fully_shard(layer.first, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP on CPU processes, for tests."""

    def _setup_model(self, model: nn.Module) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def fsdp(**kwargs: Any) -> FSDPStrategy:
    return CPUFSDPStrategy(process_group_backend="gloo", **kwargs)


CASES = {
    "ddp": lambda: ("ddp_fork", Training(blocks())),
    "ddp_unused": lambda: ("ddp_fork_find_unused_parameters_true", Training(SharedAndUnused())),
    "fsdp_flat": lambda: (fsdp(auto_wrap_policy={TwoParts}, use_orig_params=False), Training(layers_of_parts())),
    "fsdp_nested": lambda: (fsdp(auto_wrap_policy={TwoParts, Block}), Training(layers_of_parts())),
    "fully_shard": lambda: (ModelParallelStrategy(process_group_backend="gloo"), FullyShard(layers_of_parts())),
}


class Save(pl.Callback):
    """Writes each rank's weights, gradients and random stream."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tensors = {f"weight {name}": value for name, value in pl_module.state_dict().items()}
        named = pl_module.named_parameters()
        tensors |= {f"gradient {name}": value.grad for name, value in named if value.grad is not None}
        local = {name: getattr(value, "_local_tensor", value).clone() for name, value in tensors.items()}
        torch.save({**local, "random": torch.rand(4)}, f"{self.path}.{trainer.global_rank}")


def run(case: str, out: str, callbacks: list[pl.Callback]) -> None:
    torch.manual_seed(0)
    strategy, module = CASES[case]()
    loop = trainer([*callbacks, Save(out)], strategy=strategy, devices=2)
    torch.manual_seed(1)
    loop.fit(module, DataLoader(torch.randn(24, 8), batch_size=3))


def main(out: str, *cases: str) -> None:
    torch.set_num_threads(1)
    for case in cases:
        run(case, f"{out}/{case}.without", [])
        layers = "TwoParts" if case.startswith("f") else None
        run(case, f"{out}/{case}.with", [ActivationCheckpointing(layers=layers)])


if __name__ == "__main__":
    main(*sys.argv[1:])
