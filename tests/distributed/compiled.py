"""Compiled runs on two CPU processes, plain and treated: python -m tests.distributed.compiled OUT."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from tests.compile.support import TREATMENTS, Backend, Watch, blocks, compile_each
from tests.support import Training, trainer


def module(backend: Any) -> pl.LightningModule:
    return torch.compile(Training(blocks()), backend=backend)


def submodule(backend: Any) -> pl.LightningModule:
    return Training(torch.compile(blocks(), backend=backend))


def layers(backend: Any) -> pl.LightningModule:
    model = blocks()
    compile_each(model[1:], backend, fullgraph=True)
    return Training(model)


CASES = {"module": module, "submodule": submodule, "layers": layers}
TREATED = {"module": ["recompute"], "submodule": ["recompute", "matmul"], "layers": ["recompute"]}


class Save(pl.Callback):
    """Writes each rank's weights, gradients and random stream, and what was compiled and saved."""

    def __init__(self, path: str, watch: Watch) -> None:
        self.path, self.watch = path, watch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tensors = {f"weight {name}": value for name, value in pl_module.state_dict().items()}
        tensors |= {f"gradient {name}": value.grad for name, value in pl_module.named_parameters()}
        breaks = sum(counters["graph_break"].values())
        seen = {"saved": sum(self.watch.saved), "graphs": self.watch.graphs, "breaks": breaks}
        torch.save((seen, {**tensors, "random": torch.rand(4)}), f"{self.path}.{trainer.global_rank}")


def run(case: str, path: str, callbacks: list[pl.Callback]) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    backend = Backend()
    module = CASES[case](backend)
    watch = Watch(backend)
    strategy = DDPStrategy(start_method="fork", bucket_cap_mb=0.001)
    loop = trainer([*callbacks, watch, Save(path, watch)], strategy=strategy, devices=2)
    torch.manual_seed(1)
    loop.fit(module, DataLoader(torch.randn(1024, 16), batch_size=256))


def main(out: str) -> None:
    torch.set_num_threads(1)
    # Small buckets, so that the compiler, which splits graphs where DDP's buckets end, has something to split.
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 512
    for case in CASES:
        run(case, f"{out}/{case}.plain", [])
        for name in TREATED[case]:
            run(case, f"{out}/{case}.{name}", [ActivationCheckpointing(**TREATMENTS[name])])


if __name__ == "__main__":
    main(*sys.argv[1:])
