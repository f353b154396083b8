"""Monitored runs on CPU processes that differ on purpose: python -m tests.distributed.monitored OUT CASE..."""

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.distributed.two_processes import FullyShard, TwoParts, fsdp, layers_of_parts
from tests.support import Block, blocks, trainer

FLOATS_OF_MIB = 2**18


@dataclass
class Plan:
    """What is planted: where a tuple is given, it has one entry per rank.

    Attributes:
        rows: rows of a batch.
        steps: batches per epoch.
        sleep_ms: by `data`, `forward`, `backward`, `optimizer` or `layer` (in every call of a block).
        temporary: MiB that are allocated for a moment, by `forward`, `backward` or `optimizer`.
        fail: the rank that fails, in which batch, and where.
        compiled: ranks on which the second layer is compiled.
        shrink: ranks on which each batch has another number of rows.
        text: ranks whose batches hold tokens.
    """

    rows: tuple[int, ...]
    steps: int = 4
    sleep_ms: dict[str, tuple[int, ...]] = field(default_factory=dict)
    temporary: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fail: tuple[int, int, str] | None = None
    compiled: tuple[int, ...] = ()
    shrink: tuple[int, ...] = ()
    text: tuple[int, ...] = ()


class PlantedBlock(Block):
    """Tells the module of each call."""

    def __init__(self, told: list["Planted"]) -> None:
        super().__init__()
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        for module in self.told:
            module.block_runs()
        return super().forward(x)


class _InBackward(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.call()
        return gradient, None


class Batches(Dataset):
    """Whole batches of this rank."""

    def __init__(self, module: "Planted") -> None:
        self.module = module

    def __len__(self) -> int:
        return self.module.plan.steps

    def __getitem__(self, index: int) -> Any:
        module = self.module
        with module.noting("data"):
            module.sleep("data")
        rank = module.global_rank
        rows = module.plan.rows[rank] - (index if rank in module.plan.shrink else 0)
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(100 * rank + index))
        return {"input_ids": torch.ones(rows, 5, dtype=torch.int64), "x": x} if rank in module.plan.text else {"x": x}


class Planted(pl.LightningModule):
    """Does what is planned and measures what it takes itself, in a way that encloses what the monitor measures.

    Attributes:
        own: for each batch, seconds that are surely a part of a phase, and such that surely contain: `fetch` data,
            `outside` forward, backward and optimizer, `between` the whole.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.told: list[Planted] = []
        self.model = nn.Sequential(nn.Linear(8, 8), *[PlantedBlock(self.told) for _ in range(3)])
        self.own: list[dict[str, float]] = []
        self.now: dict[str, float] = {}
        self.replaying = False
        self.before = self.started = self.ended = 0.0

    # ---------------------------------------------------------------- what is planted

    @property
    def rank(self) -> int:
        return self.global_rank if dist.is_initialized() else 0

    def sleep(self, where: str) -> None:
        time.sleep(self.plan.sleep_ms.get(where, (0,) * 8)[self.rank] / 1e3)

    def happens(self, where: str) -> None:
        self.sleep(where)
        torch.empty(self.plan.temporary.get(where, (0,) * 8)[self.rank] * FLOATS_OF_MIB)
        if self.plan.fail == (self.rank, len(self.own), where):
            raise ValueError(f"planted in {where}")

    def block_runs(self) -> None:
        with self.noting("recompute") if self.replaying else contextlib.nullcontext():
            self.sleep("layer")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.noting("forward"):
            self.happens("forward")
            output = _InBackward.apply(self.model(batch["x"]), lambda: self.happens("backward"))
            loss = output.square().mean()
            self.log("loss", loss)
            return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.05)
        self.log("validated", self.model(batch["x"]).mean(), sync_dist=True)

    def configure_model(self) -> None:
        if self.rank in self.plan.compiled:
            self.model[1] = Block()
            self.model[1].compile(backend="aot_eager")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        def after_step(*args: Any) -> None:
            with self.noting("optimizer"):
                self.happens("optimizer")

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(after_step)
        return optimizer

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self), batch_size=None)

    # ---------------------------------------------------------------- what is measured

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.now[name] = self.now.get(name, 0.0) + time.perf_counter() - since

    def setup(self, stage: str) -> None:
        self.told.append(self)  # not before: a module that refers to itself could not be handed to a process

    def on_before_backward(self, loss: Tensor) -> None:
        self.replaying, self.before = True, time.perf_counter()

    def on_after_backward(self) -> None:
        self.replaying = False
        self.now["backward"] = self.now.get("backward", 0.0) + time.perf_counter() - self.before

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.started = time.perf_counter()
        self.now["fetch"] = self.started - self.ended

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with self.noting("outside"):
            super().optimizer_step(*args, **kwargs)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self.now.setdefault("outside", now - self.started)  # one that only accumulates
        self.now["between"] = now - self.ended
        self.ended = now
        self.own.append(self.now)
        self.now = {}
        if self.plan.fail == (self.rank, len(self.own) - 1, "end"):
            raise ValueError("planted in end")


def collectives() -> int:
    """How many this process has taken part in, whoever called them, in all groups."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    return sum(group._get_sequence_number_for_group() for group in groups)


class Probe(pl.Callback):
    """Writes down what each rank knows itself; first of the callbacks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.collectives: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.collectives.append(collectives())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.collectives.append(collectives())
        tensors = pl_module.state_dict()
        local = {name: getattr(value, "_local_tensor", value).clone() for name, value in tensors.items()}
        torch.save({**local, "random": torch.rand(4)}, self.folder / f"rank{trainer.global_rank}.pt")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        text = json.dumps({"own": getattr(pl_module, "own", None), "collectives": self.collectives})
        (self.folder / f"rank{trainer.global_rank}.json").write_text(text)


# ---------------------------------------------------------------- cases


class Simple(pl.LightningModule):
    """Trains a module on the ranks' own data."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(24, 8, generator=torch.Generator().manual_seed(3)), batch_size=3)


class SimpleFullyShard(FullyShard, Simple):
    """`fully_shard` in `configure_model`."""

    def __init__(self, model: nn.Module) -> None:
        Simple.__init__(self, model)

    training_step = Simple.training_step
    configure_optimizers = Simple.configure_optimizers


class TensorParallel(Simple):
    """Two layers divided among the ranks, which share their batches; a step takes 50 ms at least."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


class Unused(Planted):
    """Has parameters that nothing uses."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.unused = nn.Linear(8, 8)


class OnlyRankZeroLogs(Planted):
    """As with `Trainer(logger=logger if rank == 0 else False)` in a script."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.global_rank > 0:
            self.trainer.loggers = []


class TrainsAnotherOnRankZero(Planted):
    """Once it is trained, rank 0 trains a model of its own, on one device."""

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            monitors = [StepMonitor() for callback in self.trainer.callbacks if isinstance(callback, StepMonitor)]
            logger = CSVLogger(self.trainer.default_root_dir, name="", version="alone")
            loop = trainer(monitors, logger=logger, strategy="auto")
            loop.fit(Simple(blocks(2)))


def ddp(start_method: str = "fork", seconds: int = 60, **kwargs: Any) -> DDPStrategy:
    # Processes that wait for each other in vain shall not do so for long.
    patience = timedelta(seconds=seconds)
    return DDPStrategy(start_method=start_method, process_group_backend="gloo", timeout=patience, **kwargs)


UNEVEN = Plan(
    rows=(2, 6),
    sleep_ms={"data": (0, 40), "forward": (30, 0), "backward": (0, 30), "optimizer": (20, 0), "layer": (5, 0)},
    temporary={"forward": (2, 0), "optimizer": (0, 5)},
)
FOUR = Plan(
    rows=(1, 2, 3, 4),
    sleep_ms={"data": (0, 0, 20, 0), "forward": (0, 40, 0, 0), "backward": (0, 0, 0, 30), "optimizer": (30, 0, 0, 0)},
    temporary={"forward": (0, 1, 0, 0), "backward": (0, 0, 4, 0), "optimizer": (2, 0, 0, 0)},
)
QUICK = Plan(rows=(2, 6))


@dataclass
class Case:
    """A run.

    Attributes:
        monitor: settings of the monitor, None for the one that `ActivationCheckpointing` brings along.
        compared: whether the run without monitor is run, too.
    """

    module: Callable[[], pl.LightningModule]
    strategy: Callable[[], Any] = ddp
    devices: int = 2
    recompute: bool = True
    monitor: dict[str, Any] | None = field(default_factory=lambda: {"per_rank": True})
    logger: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    layers: Any = None
    compared: bool = False


def planted(plan: Plan, kind: type[Planted] = Planted, **kwargs: Any) -> Case:
    return Case(lambda: kind(plan), **kwargs)


CASES = {
    "uneven": planted(UNEVEN, settings={"log_every_n_steps": 1}, compared=True),
    "swapped": planted(Plan((6, 2), temporary={"forward": (5, 0), "optimizer": (0, 2)}), recompute=False),
    "all_small": planted(Plan((2, 2)), recompute=False),
    "all_large": planted(Plan((6, 6)), recompute=False),
    "plain": planted(QUICK, recompute=False),
    "four": planted(FOUR, devices=4),
    "one": planted(QUICK, devices=1),
    "every_third": planted(Plan((2, 6), steps=7), monitor={"every_n_steps": 3}, compared=True),
    "default": planted(QUICK, monitor=None, settings={"deterministic": True}, compared=True),
    "accumulated": planted(
        Plan(UNEVEN.rows, 5, UNEVEN.sleep_ms, UNEVEN.temporary),
        settings={"accumulate_grad_batches": 2, "val_check_interval": 2, "max_epochs": 2},
        compared=True,
    ),
    "compiled": planted(Plan((2, 6), steps=2, compiled=(1,), text=(0,)), recompute=False),
    "many_kinds": planted(Plan((2, 60), steps=40, shrink=(1,)), recompute=False),
    "silent": planted(QUICK, logger=False, compared=True),
    "bar": planted(QUICK, logger=False, monitor={"progress_bar": True}),
    "unused": planted(QUICK, kind=Unused, strategy=lambda: ddp(find_unused_parameters=True), compared=True),
    "late_optimizer": planted(Plan((4, 4), steps=3, sleep_ms={"optimizer": (0, 300)})),
    "logger_on_rank_0": planted(Plan((2, 2)), kind=OnlyRankZeroLogs, strategy=lambda: ddp(seconds=8), compared=True),
    "another_on_rank_0": planted(
        Plan((2, 2), steps=2), kind=TrainsAnotherOnRankZero, strategy=lambda: ddp(seconds=8), compared=True
    ),
    "fsdp": Case(
        lambda: Simple(layers_of_parts()), lambda: fsdp(auto_wrap_policy={TwoParts}), layers="TwoParts", compared=True
    ),
    "fully_shard": Case(
        lambda: SimpleFullyShard(layers_of_parts()),
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
        layers="TwoParts",
        compared=True,
    ),
    "tensor_parallel": Case(
        TensorParallel,
        lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo"),
        recompute=False,
        compared=True,
    ),
    "spawn": planted(QUICK, strategy=lambda: ddp("spawn"), devices=1),
    "fails_in_backward": planted(Plan((2, 6), fail=(1, 2, "backward"))),
    "fails_in_optimizer": planted(Plan((2, 6), fail=(1, 2, "optimizer")), compared=True),
    "fails_at_the_end": planted(Plan((2, 6), fail=(0, 2, "end")), compared=True),
    "script": planted(Plan((2, 6), fail=(1, 2, "optimizer")), strategy=lambda: ddp("popen")),
}


def run(name: str, mode: str, out: Path) -> None:
    """Mode `with`: monitored; `without`: the same run without monitor."""
    case = CASES[name]
    folder = out / name / mode
    folder.mkdir(parents=True, exist_ok=True)
    callbacks: list[pl.Callback] = [Probe(folder)]
    monitored = mode == "with"
    monitor = StepMonitor(**case.monitor) if monitored and case.monitor is not None else None
    if case.recompute:
        callbacks.append(ActivationCheckpointing(layers=case.layers, monitor=monitored))
    if monitor is not None:
        callbacks.append(monitor)
    loggers: list[Logger] = [CSVLogger(folder, name="", version="csv")]
    if name == "uneven":
        loggers.append(TensorBoardLogger(folder, name="", version="tensorboard"))
    settings = {"devices": case.devices, "logger": loggers if case.logger else False, **case.settings}
    torch.manual_seed(0)
    module = case.module()
    settings |= {"use_distributed_sampler": isinstance(module, Simple), "default_root_dir": folder}
    loop = trainer(callbacks, strategy=case.strategy(), **settings)
    torch.manual_seed(1)
    if "val_check_interval" in settings:
        loop.fit(module, val_dataloaders=DataLoader([{"x": torch.ones(8)}] * 2, batch_size=1))
    else:
        loop.fit(module)
    if monitor is not None and "LOCAL_RANK" not in os.environ:
        (folder / "summary.txt").write_text(str(monitor.summary()))


def main(out: str, *names: str) -> None:
    """Strategies that start scripts start this one, so that they cannot be among others."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    starts_others = "LOCAL_RANK" not in os.environ
    for name in names:
        for mode in ("without", "with") if CASES[name].compared else ("with",):
            if starts_others:
                for stream in (sys.stdout, sys.stderr):
                    print(f"\n=== {name} {mode}", file=stream, flush=True)
            try:
                run(name, mode, Path(out))
            except (mp.ProcessRaisedException, mp.ProcessExitedException):
                (Path(out) / name / mode / "error.txt").write_text(traceback.format_exc())
            torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    main(*sys.argv[1:])
