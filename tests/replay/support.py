"""Trainings that are compared, step by step and with all that surrounds them, with and without the recompute."""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import ReplayError
from lightning_ckpt.recompute.watch import unwatch, watch
from tests.support import Run, Training, assert_equal, batches, fit

WIDTH = 8


class Layer(nn.Module):
    """What is recomputed in these tests; they say what it does besides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """A stem, and layers one after the other."""

    def __init__(self, make_layer: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make_layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def stack(
    make_layer: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor] | None = None, count: int = 3
) -> Training:
    """A LightningModule that trains a `Stack`."""
    return Training(Stack(make_layer, count), loss)


@dataclass
class Fit(pl.Callback):
    """Everything that two trainings must have in common."""

    run: Run
    module: pl.LightningModule
    logged: dict[str, Tensor]
    streams: tuple[Any, ...]
    observed: Any
    replays: int


@dataclass
class _Counter:
    """Counts replays from outside, where no replay can put the count back."""

    replays: int = 0

    def replay_begins(self) -> None:
        self.replays += 1

    def replay_ends(self) -> None: ...


@dataclass
class _Logged(pl.Callback):
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}


def train(
    make_module: Callable[[], pl.LightningModule],
    recomputed: type[nn.Module] | None = Layer,
    steps: int = 5,
    data: DataLoader | None = None,
    callbacks: Callable[[], Iterable[pl.Callback]] = list,
    observe: Callable[[Any], Any] = lambda module: None,
    **trainer_kwargs: Any,
) -> Fit:
    """Train from fixed seeds; with `recomputed`, layers of that class are recomputed."""
    made: list[pl.LightningModule] = []
    logged, counter = _Logged(), _Counter()
    chosen = [] if recomputed is None else [ActivationCheckpointing(layers=recomputed, monitor=False)]
    random.seed(0)
    np.random.seed(0)
    watch(counter)
    try:
        run = fit(
            lambda: made.append(make_module()) or made[0],
            batches(steps) if data is None else data,
            [*chosen, *callbacks(), logged],
            **trainer_kwargs,
        )
    finally:
        unwatch(counter)
    streams = (random.random(), np.random.rand(), np.random.normal(), torch.rand(()).item())
    return Fit(run, made[0], logged.metrics, streams, observe(made[0]), counter.replays)


def assert_exact(
    make_module: Callable[[], pl.LightningModule], recomputed: type[nn.Module] = Layer, **options: Any
) -> Fit:
    """The recomputed training equals the plain one in everything; the recomputed one."""
    plain = train(make_module, None, **options)
    got = train(make_module, recomputed, **options)
    assert got.replays > 0, "nothing was recomputed"
    assert_equal(got.run, plain.run)
    assert got.streams == plain.streams, "random streams after training"
    assert got.logged == plain.logged, f"logged {got.logged} instead of {plain.logged}"
    assert got.observed == plain.observed, f"observed {got.observed} instead of {plain.observed}"
    return got


def assert_exact_or_named(make_module: Callable[[], pl.LightningModule], **options: Any) -> None:
    """The recomputed training equals the plain one, or an error names a layer and says what to do."""
    refusal = ""
    try:
        assert_exact(make_module, **options)
    except ReplayError as error:
        refusal = str(error)
    assert not refusal or re.match(r"Recomputed layer 'model\.layers\.\d' .*(layers=|clone|next calls|after)", refusal)


class Tracker:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0


RECORDED: list[float] = []


def record(value: float) -> None:
    """Keep a value in a global of this module."""
    RECORDED.append(value)


SCALE = 1.0
