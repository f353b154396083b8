"""What is trained on two processes with a memory budget: python -m tests.distributed.budgeted OUT NAME...

Every case has two processes of its own, forked from this one, which has imported everything: ranks that wait for each
other in vain are ended and spoil no other case.
"""

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch._dynamo  # a rehearsal needs it, and the processes that are forked have it then
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, StepMonitor, agreement
from tests.distributed import models
from tests.distributed.cases import Make, ddp, fsdp, fsdp2, tensor_parallel
from tests.distributed.models import WIDTH, Layer
from tests.distributed.record import RANKS, Recorder, rank_of, seed
from tests.support import Block, trainer

SECONDS = 60  # for a case, many times what one takes
PATIENCE = timedelta(seconds=20)  # of ranks that wait for each other
LAYERS, ROWS, TOKENS, BATCHES = 4, 2, 64, 15
LATER = 12  # a batch when nothing is measured any more

PLAIN = "plain"


@dataclass
class Seen:
    """What a rank has seen of a training with a budget.

    Attributes:
        came: "trained", or the error.
        treatments: how each layer was treated, by batch.
        stages: what the batches were used for.
        budget: bytes.
        planned: the peak, by batch; None without a plan.
        rows: what the monitor has logged, by step, on rank 0.
    """

    came: str = ""
    treatments: list[list[str]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    budget: int = 0
    planned: list[int | None] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)


def alike(rank: int, index: int) -> int:
    """As many tokens in all batches."""
    return TOKENS


@dataclass(frozen=True)
class Case:
    """Trainings of one model, the plain one first, in one process group.

    Attributes:
        strategy: makes the Trainer's strategy.
        budgets: arguments of the callback, by name of the training; a list has one entry per rank.
        module: makes what is trained.
        layer: the class of its layers.
        tokens: of a batch, by rank and index.
        settings: arguments of the Trainer.
        started: whether the strategy starts the processes.
        first: whether rank 0 is through with the beginning of each batch before rank 1 has come to it.
    """

    strategy: Make
    budgets: Mapping[str, Any]
    module: Callable[[], pl.LightningModule] = models.Trained
    layer: type[nn.Module] = Block
    tokens: Callable[[int, int], int] = alike
    settings: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    first: bool = False


# ---------------------------------------------------------------- what is trained


class Batches(pl.LightningDataModule):
    """Random rows, as many tokens as the case says."""

    def __init__(self, case: "Case") -> None:
        super().__init__()
        self.tokens, self.count = case.tokens, BATCHES * case.settings.get("accumulate_grad_batches", 1)

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        stream = torch.Generator().manual_seed(rank)
        lengths = [self.tokens(rank, index) for index in range(self.count)]
        return DataLoader([torch.randn(ROWS, each, WIDTH, generator=stream) for each in lengths], batch_size=None)


class Reads(models.Trained):
    """Reads a number on rank 1, for which a step on fake tensors has none."""

    tokens = 0  # of the batches in which it does

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch.shape[1] >= self.tokens:
            loss.item()
        return loss


class ReadsLong(Reads):
    """Only in its long batches."""

    tokens = 2 * TOKENS


class OnlyLayers(models.Trained):
    """Nothing runs before the first layer, so that it would be the first to ask for its weights in a rehearsal."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Skips(models.Trained):
    """A layer is left out now and then, as by LayerDrop: on rank 1 in the first batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        layers, skipped = self.layers, 1 if self.trainer.global_rank == 1 and batch_idx == 0 else LAYERS
        x = self.stem(batch)
        for index, layer in enumerate(layers):
            x = x if index == skipped else layer(x)
        return self.head(x).square().mean()


class CannotBeWatched(Reads):
    """On rank 1, the gradient of a product computes otherwise while a mode is on."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + 0 * self.head.bias.prod()) if self.trainer.global_rank == 1 else loss


class RankZeroFirst(pl.Callback):
    """Rank 1 begins a batch when rank 0 has begun it, unless that takes long: rank 0 may wait for it, too."""

    def __init__(self, title: str, rank: int) -> None:
        self.title, self.rank = title, rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.global_rank == self.rank:
            store, key = _get_default_store(), f"tests/{self.title}/{index}"
            if self.rank == 0:
                store.set(key, "")
            else:
                with contextlib.suppress(torch.distributed.DistStoreError):
                    store.wait([key], timedelta(seconds=1))


# ---------------------------------------------------------------- what is noted


class Rows(Logger):
    """Keeps what is logged."""

    name, version = "rows", 0

    def __init__(self, rows: list[dict[str, float]]) -> None:
        super().__init__()
        self.rows = rows

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """None of interest."""


class Witness(pl.Callback):
    """Notes how layers are really treated; behind the callback that does so."""

    def __init__(self, path: Path, checkpointing: ActivationCheckpointing, rows: list[dict[str, float]]) -> None:
        self.path, self.checkpointing, self.seen = path, checkpointing, Seen(rows=rows)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, index: int) -> None:
        keeper = self.checkpointing.budget_keeper
        layers = self.checkpointing._recomputed
        kinds = [("policy" if layer.policy else "recompute") if layer.recomputes else "keep" for layer in layers]
        self.seen.treatments.append(kinds)
        self.seen.stages.append(keeper.stage.name)
        self.seen.budget = keeper._knowledge.limit
        self.seen.planned.append(None if keeper.plan is None else keeper.plan.peak_bytes)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._save("trained")

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._save(f"{type(exception).__name__}: {exception}")

    def _save(self, came: str) -> None:
        self.seen.came = came
        Path(f"{self.path}.seen.{rank_of()}").write_text(json.dumps(asdict(self.seen)))


def seen(out: Path, case: str, title: str) -> list[Seen]:
    """What the ranks have seen."""
    paths = [out / case / f"{title}.seen.{rank}" for rank in RANKS]
    return [Seen(**json.loads(path.read_text())) if path.exists() else Seen("time was up") for path in paths]


# ---------------------------------------------------------------- how


def fit(case: Case, name: str, title: str, arguments: Any, out: Path) -> None:
    """One training."""
    seed(0)
    module = case.module()
    module.layers = nn.ModuleList([case.layer() for _ in range(LAYERS)])
    path, rows = out / name / title, list[dict[str, float]]()
    callbacks: list[pl.Callback] = [Recorder(path, case.layer, operators=False)]
    callbacks += [RankZeroFirst(f"{name}/{title}", 1)] if case.first else []
    for each in () if arguments is None else arguments if isinstance(arguments, tuple) else (arguments,):
        mine = each[rank_of()] if isinstance(each, list) else each
        checkpointing = ActivationCheckpointing(**{"layers": case.layer.__name__, **mine})
        callbacks += [checkpointing, Witness(path, checkpointing, rows)]
    callbacks += [StepMonitor(per_rank=True, table=False)] if arguments is not None else []
    callbacks += [RankZeroFirst(f"{name}/{title}", 0)] if case.first else []
    defaults = {"strategy": case.strategy(False), "devices": 2, "use_distributed_sampler": False, "logger": Rows(rows)}
    trainer(callbacks, **{**defaults, **case.settings}).fit(module, datamodule=Batches(case))


def run(case: Case, name: str, out: Path) -> None:
    """All trainings of a case, on this rank."""
    agreement.PATIENCE = PATIENCE
    for title, arguments in {PLAIN: None, **case.budgets}.items():
        fit(case, name, title, arguments, out)


def fork(case: Case, name: str, out: Path) -> None:
    """Run a case on two new processes, until its time is up."""
    # The store is here, as with torchrun, so that a rank that stops first does not take it from the other.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "NODE_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    (out / name).mkdir(parents=True)
    processes = []
    sys.stdout.flush()
    for rank in RANKS[: 1 if case.started else None]:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.environ.update({} if case.started else {**environment, "LOCAL_RANK": str(rank)})
                run(case, name, out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)  # also where the process group would wait for the other rank
        processes.append(process)
    ends = time.monotonic() + SECONDS
    while processes:
        processes = [process for process in processes if os.waitpid(process, os.WNOHANG) == (0, 0)]
        if processes and time.monotonic() > ends:
            print(f"{name}: time is up", file=sys.stderr)
            for process in processes:
                os.kill(process, 9)
                os.waitpid(process, 0)
            processes = []
        time.sleep(0.02)


HALF: dict[str, Any] = {"0.5": {"memory_budget": 0.5}}
BOTH: dict[str, Any] = {"0.0": {"memory_budget": 0.0}, **HALF}


def in_bytes(budget: int) -> dict[str, Any]:
    """All layers kept take some 100 000 bytes, all recomputed 50 000; twice as many with twice as many tokens."""
    return {"bytes": {"memory_budget": budget}}


def longer_on_one(rank: int, index: int) -> int:
    """Rank 1 has longer batches from the start."""
    return 2 * TOKENS if rank else TOKENS


def longer_once(which: int, *factors: float) -> Callable[[int, int], int]:
    """A batch that is longer, by one factor for each rank."""
    return lambda rank, index: int(TOKENS * factors[rank]) if index == which else TOKENS


def parts() -> Make:
    """Layers of which parts are sharded, so that they communicate whenever they run."""
    return fsdp(Layer, models.Attention, models.MLP)


#: Steps that can be rehearsed.
REHEARSED = {
    "ddp": Case(ddp(), BOTH),
    "ddp static_graph": Case(ddp(static_graph=True), HALF),
    "ddp find_unused_parameters": Case(ddp(find_unused_parameters=True), HALF, models.Unused),
    "ddp gradient_as_bucket_view": Case(ddp(gradient_as_bucket_view=True), HALF),
    "ddp accumulate_grad_batches": Case(ddp(), HALF, settings={"accumulate_grad_batches": 2}),
    "ddp bf16-mixed": Case(ddp(), HALF, settings={"precision": "bf16-mixed"}),
    "ddp_fork": Case(lambda offload: "ddp_fork", HALF, started=True),
}

#: Steps that are measured, since weights are sharded.
MEASURED = {
    "fsdp": Case(fsdp(Block), HALF),
    "fsdp use_orig_params=False": Case(fsdp(Block, use_orig_params=False), HALF),
    "fsdp layers first": Case(fsdp(Block), HALF, OnlyLayers),
    "fsdp of parts": Case(parts(), HALF, layer=Layer),
    "fsdp2": Case(fsdp2(), BOTH, models.FullySharded),
    "fsdp2 of parts": Case(fsdp2(), HALF, lambda: models.FullySharded(nested=True), Layer),
    "fsdp2 mixed precision": Case(
        fsdp2(), HALF, lambda: models.FullySharded(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ),
    "tensor parallel": Case(tensor_parallel(), HALF, models.TensorParallel, Layer),
}

#: Ranks differ in what they need.
LONGER = {
    "longer on one": Case(ddp(), {**BOTH, **in_bytes(110_000)}, tokens=longer_on_one),
    "longer on one, fsdp2": Case(fsdp2(), {**HALF, **in_bytes(95_000)}, models.FullySharded, tokens=longer_on_one),
    "longer on one later": Case(ddp(), in_bytes(150_000), tokens=longer_once(LATER, 1, 2)),
    "longer on both later": Case(ddp(), in_bytes(130_000), tokens=longer_once(LATER, 1.5, 2), first=True),
    "longer on one before the final plan": Case(ddp(), HALF, tokens=longer_once(3, 1, 2), first=True),
    "longer on one later, fsdp of parts": Case(
        parts(), {"1.0": {"memory_budget": 1.0}}, layer=Layer, tokens=longer_once(LATER, 1, 2), first=True
    ),
    "longer on one later, two trainings": Case(
        ddp(), {"first": {"memory_budget": 0.5}, "second": {"memory_budget": 1.0}}, tokens=longer_once(LATER, 1, 2)
    ),
    "longer on one later, two callbacks": Case(
        ddp(),
        {"two": ({"memory_budget": 0.5, "layers": "layers.0"}, {"memory_budget": 0.5, "layers": "layers.[123]"})},
        tokens=longer_once(LATER, 1, 2),
    ),
}

#: Ranks differ in what can be known of them.
APART = {
    "one reads": Case(ddp(), HALF, Reads),
    "one reads later": Case(ddp(), HALF, ReadsLong, tokens=longer_once(LATER, 1, 2)),
    "one cannot be watched": Case(ddp(), HALF, CannotBeWatched),
    "one skips a layer": Case(ddp(find_unused_parameters=True), HALF, Skips),
}

REFUSED = {
    "other budgets": Case(ddp(), {"other": [{"memory_budget": 0.5}, {"memory_budget": 0.25}]}),
    "too little on one": Case(ddp(), in_bytes(60_000), tokens=longer_on_one),
    "too little on one, fsdp2": Case(fsdp2(), in_bytes(60_000), models.FullySharded, tokens=longer_on_one),
}

CASES = {**REHEARSED, **MEASURED, **LONGER, **APART, **REFUSED}


def main(out: str, *names: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in names or CASES:
        started = time.monotonic()
        fork(CASES[name], name, Path(out))
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
