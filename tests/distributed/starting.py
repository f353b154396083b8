"""How training starts on two processes that torchrun starts: they differ, or FSDP checkpoints, too."""

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_ckpt import ActivationCheckpointing, OffloadDDPStrategy, agreement, make_plan
from lightning_ckpt.planning import save_plan
from tests.distributed.two_processes import CPUFSDPStrategy
from tests.support import Block, Training, batches, blocks, trainer


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every_n_layers": ({}, {"every_n_layers": 2}),
    "enabled": ({}, {"enabled": False}),
    "verify": ({}, {"verify": "off"}),
    "policy": ({"policy": "matmul"}, {"policy": ["aten.mm", torch.ops.aten.addmm]}),
    "offload": ({}, {"offload": True}),
    "check_fn": ({"check_fn": is_block}, {"check_fn": is_linear}),
    "one rank fails": ({}, {"layers": "Blok"}),
    "another model": ({}, {}),
    "the same": ({"check_fn": is_block, "policy": ["mm"]}, {"check_fn": is_block, "policy": ["mm"]}),
}


class CheckpointingFSDPStrategy(CPUFSDPStrategy):
    """Wraps the model for the CPU, then in checkpoints as `FSDPStrategy` does."""

    def _setup_model(self, model: nn.Module) -> Any:
        wrapped = super()._setup_model(model)
        _setup_activation_checkpointing(wrapped, self._activation_checkpointing_kwargs)
        return wrapped


def checkpointing_fsdp() -> Strategy:
    return CheckpointingFSDPStrategy(
        process_group_backend="gloo", auto_wrap_policy={Block}, activation_checkpointing_policy={Block}
    )


def several(rank: int) -> list[pl.Callback]:
    return [ActivationCheckpointing(layers=name) for name in ("model.1", "model.2")[rank:]]


def fit(callbacks: list[pl.Callback], count: int = 4, strategy: Strategy | str = "ddp") -> str:
    """What comes of it."""
    torch.manual_seed(0)
    try:
        trainer(callbacks, strategy=strategy, devices=2, max_steps=1).fit(Training(blocks(count)), batches())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def planned(path: Path, budget: float) -> list[pl.Callback]:
    """A callback with a plan in a file."""
    plan = make_plan(Training(), next(iter(batches())), budget=budget)
    save_plan(plan, path)
    return [ActivationCheckpointing(plan=str(path))]


def fit_checkpointed() -> str:
    """The warnings of the callback, and how many layers it still recomputes."""
    callback = ActivationCheckpointing(layers=["model.0", "model.1", "Block"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        came = fit([callback], strategy=checkpointing_fsdp())
    said = [str(warning.message) for warning in caught if "ActivationCheckpointing" in str(warning.message)]
    return "\n".join([*said, came, str(callback.selection)])


def main(out: str) -> None:
    torch.set_num_threads(1)
    agreement.PATIENCE = timedelta(seconds=5)
    rank = int(os.environ["RANK"])
    runs: dict[str, Callable[[], str]] = {
        name: lambda name=name, arguments=arguments: fit(  # type: ignore[misc]
            [ActivationCheckpointing(**arguments[rank])], count=4 - rank if name == "another model" else 4
        )
        for name, arguments in ARGUMENTS.items()
    }
    runs["several callbacks"] = lambda: fit(several(rank))
    runs["FSDP"] = fit_checkpointed
    runs["strategy"] = lambda: fit([], strategy=OffloadDDPStrategy(keep_last=1 + rank))
    runs["plan"] = lambda: fit(planned(Path(out) / f"{rank}.yaml", budget=1 - rank))
    runs["one plan in two files"] = lambda: fit(planned(Path(out) / f"same {rank}.yaml", budget=0))
    runs["one rank without"] = lambda: fit([] if rank else [ActivationCheckpointing()])  # the last: ranks are apart now
    for name, run in runs.items():
        (Path(out) / f"{name}.{rank}").write_text(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
