"""A rehearsal leaves nothing behind, whatever a training step keeps, counts, draws, logs or changes."""

import copy
import functools
import gc
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_ckpt.planning.leaks import LeakError
from lightning_ckpt.planning.make import make_plan
from tests.monitor.support import read
from tests.planning.models import Mlp
from tests.planning.test_budgeted_hostile import (
    WIDTH,
    Result,
    adamw,
    assert_exact,
    budgeted,
    leftovers,
    rows,
    stack,
)
from tests.planning.test_budgeted_hostile import Module as Larger

STEPS = 6  # rehearsed, warm, measured, timed, and two under the plan that follows


class Module(Larger):
    """Two layers, with AdamW."""

    def __init__(self, model: nn.Module | None = None, **settings: Any) -> None:
        super().__init__(stack(2) if model is None else model, **settings)


def data() -> Any:
    """A few batches."""
    return rows(*[128] * STEPS)


class Ends(pl.Callback):
    """Notes what a module and its Trainer hold when training ends.

    Args:
        left: from the module to that, in a form that can be compared.
        found: where it is noted.
    """

    def __init__(self, left: Callable[[Any], Any], found: list[Any]) -> None:
        self.left = left
        self.found = found

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found.append(self.left(pl_module))


def assert_alike(
    make_module: Callable[[], pl.LightningModule],
    left: Callable[[Any], Any] = lambda module: None,
    settings: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Result:
    """Equal to the plain run, in what else training leaves, too.

    Args:
        make_module: makes the module.
        left: from a module after training to whatever it has changed beside its weights.
        settings: those of the Trainer.
        options: other ones of `assert_exact`.
    """
    found: list[Any] = []

    def with_notes() -> dict[str, Any]:
        chosen = settings()
        return {**chosen, "callbacks": [*chosen.get("callbacks", []), Ends(left, found)]}

    result = assert_exact(make_module, settings=with_notes, **{"data": data(), **options})
    plain, budgeted = found
    assert budgeted == plain
    return result


def assert_rehearsed(make_module: Callable[[], pl.LightningModule], *args: Any, **options: Any) -> Result:
    """As `assert_alike`, under a plan that comes from a rehearsal."""
    result = assert_alike(make_module, *args, **options)
    assert result.plans[0] is not None, result.own_words
    return result


# ---------------------------------------------------------------- tensors that are kept outside of the model


@functools.lru_cache
def sized_mask(width: int) -> Tensor:
    return torch.linspace(0.5, 1.5, width)


@functools.lru_cache(maxsize=None)  # noqa: UP033  # as it is often written
def mask_of_any(width: int) -> Tensor:
    return torch.linspace(0.5, 1.5, width)


@functools.lru_cache(maxsize=8)
def masks_by_name(width: int) -> Any:
    return {"masks": [(torch.linspace(0.5, 1.5, width), width)]}


@functools.cache
def twice(number: int) -> int:
    return 2 * number


MASKS: dict[str, tuple[Any, Callable[[], Tensor]]] = {
    "with a size": (sized_mask, lambda: sized_mask(WIDTH)),
    "without a size": (mask_of_any, lambda: mask_of_any(WIDTH)),
    "in containers": (masks_by_name, lambda: masks_by_name(WIDTH)["masks"][0][0]),
}


class MaskedLayer(Mlp):
    """Calls a function that has a cache."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, 4 * WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * MASKS[self.kind][1]()


class MaskedStep(Module):
    """Calls it in its step."""

    kind = ""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.model(batch) * MASKS[self.kind][1]()).square().mean()


@pytest.mark.parametrize(
    ("place", "kind"),
    [("layer", "with a size"), ("step", "without a size"), ("step", "in containers")],
)
def test_functions_that_cache_tensors(place, kind):
    cache, call = MASKS[kind]
    assert twice(3) == 6

    def make() -> pl.LightningModule:
        cache.cache_clear()
        if place == "layer":
            return Module(nn.Sequential(*[MaskedLayer(kind) for _ in range(2)]))
        module = MaskedStep()
        module.kind = kind
        return module

    assert_rehearsed(make, lambda module: cache.cache_info().currsize)
    assert not isinstance(call(), FakeTensor)
    assert twice.cache_info().currsize == 1, "a cache without tensors was cleared"


class Criterion:
    """Makes what it needs when it is first called."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = torch.full((x.shape[-1],), 0.5)
        return (x * self.weight).square().mean()


HOLDER: Any = threading.Event()  # an object of a library, into which nobody looks


def criterion() -> Criterion:
    """The only one."""
    if not hasattr(HOLDER, "criterion"):
        HOLDER.criterion = Criterion()
    return HOLDER.criterion


class Criticized(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return criterion()(self.model(batch))


@pytest.mark.parametrize("is_made_before", [False, True], ids=["made in the step", "made before"])
def test_an_object_outside_of_the_model_that_keeps_a_tensor_is_an_error_with_a_cure(is_made_before):
    vars(HOLDER).pop("criterion", None)
    if is_made_before:
        criterion()
    made: list[Any] = []
    with pytest.raises(LeakError) as caught:
        budgeted(lambda: made.append(Criticized()) or made[0], data())
    assert re.search(
        r"tensor of shape \(32,\) in `weight` of a `Criterion`\. .*Keep it in the model", str(caught.value)
    )
    assert leftovers(made[0]) == []
    assert _get_current_dispatch_mode_stack() == []
    torch.manual_seed(0)
    assert_equal_weights(made[0], Criticized())
    criterion().weight = torch.full((WIDTH,), 0.5)  # made before training, as the message says
    assert_rehearsed(Criticized)
    vars(HOLDER).pop("criterion", None)


@pytest.fixture
def frozen():
    """Everything is hidden from the garbage collector, as servers and loaders with many processes do it."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
def test_what_is_hidden_from_the_garbage_collector_is_found_too():
    test_functions_that_cache_tensors("step", "in containers")
    gc.freeze()
    test_an_object_outside_of_the_model_that_keeps_a_tensor_is_an_error_with_a_cure(is_made_before=True)


def assert_equal_weights(module: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
        assert type(a) is nn.Parameter
        assert torch.equal(a, b), name


class Exponential(torch.autograd.Function):
    """Keeps its output on its context: a cycle, which nothing but the garbage collector ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.output = x.exp()
        return ctx.output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.output


class Softened(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + Exponential.apply(-super().forward(x).abs())


def test_a_function_that_keeps_its_output_on_its_context_is_harmless():
    assert_rehearsed(lambda: Module(nn.Sequential(*[Softened(WIDTH, 2 * WIDTH) for _ in range(2)])))


class Copies(Module):
    """Copies its model in every step, without making the copy a part of it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.copies = [copy.deepcopy(self.model)]
        with torch.no_grad():
            target = 0.9 * self.copies[0](batch)
        return (self.model(batch) - target).square().mean()


def test_a_step_that_copies_the_model():
    assert_rehearsed(Copies, lambda module: [each.tolist() for each in module.copies[0].parameters()])


# ---------------------------------------------------------------- random numbers


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.Generator": (lambda: torch.Generator().manual_seed(3), lambda held: torch.rand(WIDTH, generator=held)),
    "default_rng": (lambda: numpy.random.default_rng(3), lambda held: held.random()),
    "RandomState": (lambda: numpy.random.RandomState(3), lambda held: held.rand()),
    "random.Random": (lambda: random.Random(3), lambda held: held.random()),
}


class Augmentation:
    """A transform with random numbers of its own, or whatever else a step takes something from."""

    def __init__(self, make: Callable[[], Any], draw: Callable[[Any], Any]) -> None:
        self.held = make()
        self.draw = draw

    def __call__(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.draw(self.held))


class AugmentingCallback(pl.Callback):
    """Has one."""

    def __init__(self, augment: Augmentation) -> None:
        self.augment = augment


class AugmentedData(pl.LightningDataModule):
    """Has one, which is made when a fit begins."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def setup(self, stage: str) -> None:
        self.augment = self.make()

    def train_dataloader(self) -> Any:
        return data()


class Augmented(Module):
    """Changes batches by an augmentation that somebody has.

    Args:
        augment: that of its own; None to take that of a callback or of the datamodule.
    """

    def __init__(self, augment: Augmentation | None = None) -> None:
        super().__init__()
        self.augment = augment

    def find(self) -> Any:
        if self.augment is not None:
            return self.augment
        callbacks = [each for each in self.trainer.callbacks if isinstance(each, AugmentingCallback)]
        return (callbacks or [self.trainer.datamodule])[0].augment

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(self.find()(batch)).square().mean()


class Draws(Module):
    """Has a generator itself.

    Args:
        make: makes it.
        draw: takes numbers of it.
    """

    def __init__(self, make: Callable[[], Any], draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.draw = make(), draw

    def find(self) -> Any:
        return self

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch * (1 + 0.1 * self.draw(self.held))).square().mean()


PLACES: dict[str, Callable[..., tuple[Callable[[], pl.LightningModule], dict[str, Any]]]] = {
    "module": lambda *source: (lambda: Draws(*source), {}),
    "augmentation": lambda *source: (lambda: Augmented(Augmentation(*source)), {}),
    "datamodule": lambda *source: (Augmented, {"data": AugmentedData(lambda: Augmentation(*source))}),
    "callback": lambda *source: (
        Augmented,
        {"settings": lambda: {"callbacks": [AugmentingCallback(Augmentation(*source))]}},
    ),
}


def next_draw(module: Any) -> float:
    source = module.find()
    return float(torch.as_tensor(source.draw(source.held)).sum())


@pytest.mark.parametrize(
    ("place", "generator"),
    [
        *(("module", each) for each in GENERATORS),
        *((place, each) for place in PLACES for each in ("torch.Generator", "default_rng") if place != "module"),
    ],
)
def test_generators_of_random_numbers(place, generator):
    make_module, options = PLACES[place](*GENERATORS[generator])
    assert_rehearsed(make_module, next_draw, **options)


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter([0.1 * i for i in range(100)]),
    "generator": lambda: (0.1 * i for i in range(100)),
    "loader": lambda: iter(DataLoader(torch.arange(100.0)[:, None], batch_size=1)),
}

OWNERS = {
    "module": "held",
    "augmentation": "augment.*held",
    "datamodule": r"trainer\.datamodule.*augment.*held",
    "callback": r"trainer\.callbacks.*augment.*held",
}


@pytest.mark.parametrize(
    ("iterator", "place"),
    [*((each, "module") for each in ITERATORS), *(("list", each) for each in PLACES if each != "module")],
)
def test_a_step_that_advances_an_iterator_is_measured(iterator, place):
    make_module, options = PLACES[place](ITERATORS[iterator], next)
    result = assert_alike(make_module, next_draw, **options)
    assert result.plans[0] is None
    assert result.plans[-1] is not None
    said = [line for line in result.own_words if "cannot be rehearsed" in line]
    assert len(said) == 1
    assert re.search(rf"\(it may advance `[^`]*{OWNERS[place]}[^`]*`, an iterator\)", said[0]), said


# ---------------------------------------------------------------- counters, schedulers, optimizers


class Counter(pl.Callback):
    """Counts."""

    def __init__(self) -> None:
        self.count, self.seen = 0, list[int]()


class CountingData(AugmentedData):
    def __init__(self) -> None:
        super().__init__(Counter)


class Counts(Module):
    """Has somebody count steps, and scales its loss by the number.

    Args:
        find: who counts.
    """

    def __init__(self, find: Callable[[Any], Any]) -> None:
        super().__init__()
        self.find = find

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        counter = self.find(self.trainer)
        counter.count = getattr(counter, "count", 0) + 1
        if hasattr(counter, "seen"):
            counter.seen.append(len(batch))
        return super().training_step(batch, batch_idx) * counter.count

    def found(self) -> tuple[int, list[int]]:
        counter = self.find(self.trainer)
        return counter.count, getattr(counter, "seen", [])


COUNTERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "callback": (
        lambda trainer: next(each for each in trainer.callbacks if isinstance(each, Counter)),
        {"settings": lambda: {"callbacks": [Counter()]}},
    ),
    "datamodule": (lambda trainer: trainer.datamodule.augment, {"data": CountingData()}),
    "trainer": (lambda trainer: trainer, {}),
}


@pytest.mark.parametrize(("find", "options"), COUNTERS.values(), ids=COUNTERS)
def test_counters_beside_the_module(find, options):
    result = assert_rehearsed(lambda: Counts(find), lambda module: module.found(), **options)
    assert result.module.found()[0] == STEPS


class StepsScheduler(Module):
    """Steps its scheduler itself, which changes momentum, too."""

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)

    def found(self) -> Any:
        scheduler, group = self.lr_schedulers(), self.optimizers().param_groups[0]
        return scheduler.last_epoch, scheduler._step_count, scheduler.get_last_lr(), group["lr"], group["betas"]


class SetsRate(Module):
    """Sets the learning rate itself, and notes something in the optimizer's groups."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        group = self.optimizers().param_groups[0]
        group["lr"] *= 0.9
        group["count"] = group.get("count", 0) + 1
        return super().training_step(batch, batch_idx)

    def found(self) -> Any:
        group = self.optimizers().param_groups[0]
        return group["lr"], group["count"]


class Lookahead(torch.optim.SGD):
    """Steps an optimizer of its own, and goes part of the way back after every third step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=1e-2)
        self.steps: list[int] = []
        self.extra = {"count": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps.append(len(self.steps))
        self.extra["count"] += 1
        self.inner.step()
        for each in self.param_groups[0]["params"]:
            slow = self.state[each].setdefault("slow", each.clone())
            if self.extra["count"] % 3 == 0:
                each.copy_(slow.lerp_(each, 0.5))
        return loss


class LooksAhead(Module):
    def __init__(self) -> None:
        super().__init__(optimizer=Lookahead)

    def found(self) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        states = [*optimizer.state.values(), *optimizer.inner.state.values()]
        values = [[(name, type(value), value.tolist()) for name, value in state.items()] for state in states]
        return optimizer.steps, optimizer.extra, values


@pytest.mark.parametrize("make_module", [StepsScheduler, SetsRate, LooksAhead])
def test_schedulers_and_optimizers(make_module):
    assert_rehearsed(make_module, lambda module: module.found())


def test_the_state_of_an_optimizer_within_an_optimizer_is_planned_for():
    modules = LooksAhead(), Module(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    ahead, plain = (make_plan(module, torch.zeros(128, WIDTH), 0.0, step=mean_square) for module in modules)
    weights = list(modules[0].parameters())
    # Two moments and a number of steps, and where each weight was before.
    assert ahead.peak_bytes - plain.peak_bytes == sum(3 * each.nbytes + 4 for each in weights)


def mean_square(module: Any, batch: Tensor) -> Tensor:
    return module.model(batch).square().mean()


# ---------------------------------------------------------------- logging


class LogsItself(Module):
    """Gives rows to its logger itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.logger.log_metrics({"own": float(batch_idx)}, step=self.global_step)
        for logger in self.loggers:
            logger.log_metrics({"other": 2.0 * batch_idx}, step=self.global_step)
        return super().training_step(batch, batch_idx)


class Says(Module):
    """Logs by a method that was bound before."""

    def __init__(self, bind: Callable[[Any], Any]) -> None:
        super().__init__()
        self.say = bind(self.log)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.say("loss", loss)
        return loss


class LoggingLoss(nn.Module):
    """Logs by the method of the module that it is a part of."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self.log = log

    def forward(self, output: Tensor) -> Tensor:
        loss = output.square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class HasLoggingLoss(Module):
    """Has such a loss.

    Args:
        bind: from `self.log` to what the loss calls.
    """

    def __init__(self, bind: Callable[[Any], Any]) -> None:
        super().__init__()
        self.criterion = LoggingLoss(bind(self.log))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.criterion(self.model(batch))


class LogsByClass(Module):
    """Logs by the method of the class, and by way of the Trainer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        pl.LightningModule.log(self, "loss", loss)
        self.trainer.lightning_module.log("again", loss.detach(), on_epoch=True)
        return loss


LOGGING: dict[str, Callable[[], pl.LightningModule]] = {
    "own rows": LogsItself,
    "bound": lambda: Says(lambda log: log),
    "partial": lambda: Says(lambda log: functools.partial(log, on_step=True, on_epoch=True)),
    "loss module, bound": lambda: HasLoggingLoss(lambda log: log),
    "loss module, partial": lambda: HasLoggingLoss(lambda log: functools.partial(log, prog_bar=True)),
    "by the class": LogsByClass,
}


@pytest.mark.parametrize("make_module", LOGGING.values(), ids=LOGGING)
def test_what_is_logged_is_what_the_plain_run_logs(make_module, tmp_path):
    assert_rehearsed(make_module, settings=lambda: {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1})
    plain, trained = (read(CSVLogger(tmp_path, version=version)) for version in (0, 1))
    assert trained == plain
    assert [row["step"] for row in plain if "own" in row or "loss" in row or "loss_step" in row] == list(range(STEPS))


# ---------------------------------------------------------------- weights


class ReplacesData(Module):
    """Gives its weights other tensors, as for a Wasserstein critic."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for group in self.optimizers().param_groups:
            for each in group["params"]:
                each.data = each.data.clamp(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class Clamps(Module):
    """Clamps its weights where they are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for group in self.optimizers().param_groups:
                for each in group["params"]:
                    each.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class Penalizes(Module):
    """Has a list of its weights, which no rehearsal can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [each for each in self.model.parameters() if each.dim() > 1]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        penalty = sum(each.square().sum() for each in self.listed)
        return super().training_step(batch, batch_idx) + 1e-3 * penalty


class ZeroesInPlace(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class PenalizesAndZeroes(Penalizes, ZeroesInPlace):
    """Gradients of a rehearsal, if any were left, would be added to."""


class Marks(Module):
    """Groups weights by marks that they have, and asks for the marks in its step, too."""

    def __init__(self) -> None:
        super().__init__()
        for name, each in self.model.named_parameters():
            each.no_decay = each.dim() < 2
            each.rate = 1e-3 if "up" in name else 1e-2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: dict[Any, list[nn.Parameter]] = {}
        for each in self.parameters():
            groups.setdefault((each.no_decay, each.rate), []).append(each)
        return torch.optim.SGD(
            [{"params": group, "momentum": 0.0 if marks[0] else 0.9, "lr": marks[1]} for marks, group in groups.items()]
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        marked = [each.square().sum() for each in self.parameters() if each.no_decay]
        return super().training_step(batch, batch_idx) + 1e-3 * sum(marked)


WEIGHTS = [ReplacesData, Clamps, Penalizes, ZeroesInPlace, PenalizesAndZeroes, Marks]


@pytest.mark.parametrize(("make_module", "accumulates"), [*((each, 1) for each in WEIGHTS), (PenalizesAndZeroes, 2)])
def test_weights_that_a_step_changes_or_knows_otherwise(make_module, accumulates):
    def left(module: Any) -> Any:
        return [(type(each), None if each.grad is None else each.grad.tolist()) for each in module.parameters()]

    assert_rehearsed(make_module, left, settings=lambda: {"accumulate_grad_batches": accumulates})


# ---------------------------------------------------------------- plans without a Trainer


@pytest.mark.parametrize("make_module", [Marks, StepsScheduler])
def test_plans_without_a_trainer_take_the_optimizers_of_the_module(make_module):
    torch.manual_seed(0)
    module = make_module()
    configured = module.configure_optimizers()
    given = configured[0] if isinstance(configured, tuple) else configured
    peaks = [
        make_plan(module, torch.zeros(128, WIDTH), 0.3, step=mean_square, optimizers=optimizers).peak_bytes
        for optimizers in (None, given, [])
    ]
    assert peaks[0] == peaks[1] > peaks[2]
    torch.manual_seed(0)
    assert_equal_weights(module, make_module())
