"""A rehearsal leaves nothing behind in what lies far from the weights: other tensors, other files, hooks, batches."""

import array
import collections
import contextvars
import functools
import multiprocessing
import queue
import random
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

from tests.planning import elsewhere
from tests.planning.elsewhere import Annealed, Meter, augment, count
from tests.planning.models import Mlp
from tests.planning.test_budgeted_hostile import WIDTH, Result, budgeted, leftovers
from tests.planning.test_rehearsal_safety import STEPS, Module, assert_alike, assert_rehearsed, data
from tests.support import assert_equal, fit


def found(module: Any) -> Any:
    return module.found()


def assert_measured(make_module: Callable[[], pl.LightningModule], reason: str, **options: Any) -> Result:
    """As `assert_alike`, without a rehearsal, which is said once.

    Args:
        make_module: makes the module.
        reason: a pattern of what is said of it.
        options: other ones of `assert_alike`.
    """
    result = assert_alike(make_module, **options)
    assert result.plans[0] is None
    assert result.plans[-1] is not None
    said = [line for line in result.own_words if "cannot be rehearsed" in line]
    assert len(said) == 1
    assert re.search(rf"\(it may {reason}\)", said[0]), said
    return result


# ---------------------------------------------------------------- tensors that a step writes in place


class CountsInTensor(Module):
    """Counts in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx) / self.count

    def found(self) -> float:
        return self.count.item()


class Averages(Module):
    """Averages its weights into tensors that are in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = {name: each.detach().clone() for name, each in self.named_parameters()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for name, each in self.named_parameters():
            self.averages[name].mul_(0.9).add_(each.detach(), alpha=0.1)
        penalty = sum(each.square().sum() for each in self.averages.values())
        return super().training_step(batch, batch_idx) + 1e-2 * penalty

    def found(self) -> list[Any]:
        return [each.tolist() for each in self.averages.values()]


class Decays(Module):
    """Decays what its optimizer is for."""

    @torch.no_grad()
    def decay(self) -> None:
        for group in self.optimizers().param_groups:
            for each in group["params"]:
                each.mul_(0.9)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.decay()
        return super().training_step(batch, batch_idx)

    def found(self) -> list[Any]:
        return [each.tolist() for each in self.parameters()]


class TensorRate(Module):
    """Has a learning rate that is a tensor, which it changes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.optimizers().param_groups[0]["lr"].mul_(0.9)
        return super().training_step(batch, batch_idx)

    def found(self) -> float:
        return self.optimizers().param_groups[0]["lr"].item()


class HiddenMetric(Module):
    """Has a metric that is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"error": torchmetrics.MeanSquaredError()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.model(batch)
        self.metrics["error"].update(output.detach(), batch)
        return output.square().mean()

    def found(self) -> Any:
        metric = self.metrics["error"]
        return metric.compute().item(), metric.total.item(), metric.update_count


@pytest.mark.parametrize("make_module", [CountsInTensor, Averages, Decays, TensorRate, HiddenMetric])
def test_tensors_that_a_step_writes_in_place(make_module):
    assert_rehearsed(make_module, found)


# ---------------------------------------------------------------- weights beside the model, and their gradients


class Tempered(Module):
    """Trains a tensor that is no parameter along with its weights, whose gradients stay and are set to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = torch.zeros(1, requires_grad=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (super().training_step(batch, batch_idx) * self.log_alpha.exp()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([*self.parameters(), self.log_alpha], lr=1e-2)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def found(self) -> Any:
        return self.log_alpha.tolist(), gradients_of([self.log_alpha])


def gradients_of(tensors: Iterable[Tensor]) -> list[Any]:
    """With their types."""
    return [(type(each.grad), None if each.grad is None else each.grad.tolist()) for each in tensors]


class Criticized(Module):
    """Has a critic that is not to be in checkpoints, with an optimizer that it steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = [nn.Linear(WIDTH, WIDTH)]
        self.critics_optimizer = torch.optim.AdamW(self.critic[0].parameters(), lr=1e-2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.critic[0](self.model(batch)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.critics_optimizer.step()
        self.critics_optimizer.zero_grad(set_to_none=False)

    def found(self) -> Any:
        return [each.tolist() for each in self.critic[0].parameters()], gradients_of(self.critic[0].parameters())


class TrainsCritic(Criticized):
    """Trains its critic within the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.critics_optimizer.zero_grad()
        (self.critic[0](batch) - batch).square().mean().backward()
        self.critics_optimizer.step()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


HEAD = nn.Linear(WIDTH, WIDTH)


class GlobalHead(Module):
    """Runs a layer that is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        HEAD.zero_grad()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return HEAD(self.model(batch)).square().mean()

    def found(self) -> Any:
        return gradients_of(HEAD.parameters())


class Taught(Module):
    """Has a teacher that is not to be in checkpoints, whose weights are given others, near those of its head.

    Args:
        updates_first: whether that is before the teacher runs.
    """

    def __init__(self, updates_first: bool) -> None:
        super().__init__()
        self.teacher = [nn.Linear(WIDTH, WIDTH)]
        self.head = nn.Linear(WIDTH, WIDTH)
        self.updates_first = updates_first

    def update(self) -> None:
        for slow, fast in zip(self.teacher[0].parameters(), self.head.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.model(batch)
        if self.updates_first:
            self.update()
        target = self.teacher[0](output).detach()
        if not self.updates_first:
            self.update()
        return (self.head(output) - target).square().mean()

    def found(self) -> Any:
        return [(type(each), each.device, each.tolist()) for each in self.teacher[0].parameters()]


@pytest.mark.parametrize(
    "make_module",
    [Tempered, Criticized, TrainsCritic, GlobalHead, functools.partial(Taught, updates_first=False)],
    ids=["tensor", "critic", "critic that the step trains", "global", "teacher"],
)
def test_weights_that_are_not_those_of_the_model(make_module):
    assert_rehearsed(make_module, found)


def test_a_rehearsal_that_fails_leaves_the_weights_of_a_teacher():
    result = assert_alike(lambda: Taught(updates_first=True), found)
    assert sum("cannot be rehearsed" in line for line in result.own_words) == 1, result.own_words


class LateScale(Mlp):
    """Makes a parameter when it first runs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4 * WIDTH)
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(WIDTH))
        return super().forward(x) * self.scale


def test_a_parameter_that_is_made_by_the_first_forward():
    assert_rehearsed(
        lambda: Module(nn.Sequential(*[LateScale() for _ in range(2)])),
        lambda module: [(name, type(each), each.tolist()) for name, each in module.named_parameters()],
    )


# ---------------------------------------------------------------- hooks


class Bert(Module):
    """A model that puts hooks on its layers when hidden states are first asked for."""

    def __init__(self) -> None:
        config = BertConfig(
            vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        super().__init__(BertForMaskedLM(config))
        self.counts: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids = torch.randint(1, 64, (4, 16))
        output = self.model(input_ids=ids, labels=ids, output_hidden_states=True)
        self.counts.append(len(output.hidden_states))
        return output.loss + 1e-3 * sum(each.square().mean() for each in output.hidden_states)

    def found(self) -> Any:
        return self.counts


def half(module: nn.Module, *values: Any) -> Any:
    """A hook before forward, or before or after backward, of a module."""
    return tuple(0.5 * each for each in values[0])


def weaken(weight: Tensor) -> None:
    """A hook after the gradient of a weight."""
    assert weight.grad is not None
    weight.grad.mul_(0.5)


REGISTERS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda module: module.model[2].register_forward_hook(lambda layer, args, output: 1.5 * output),
    "forward pre": lambda module: module.model[2].register_forward_pre_hook(half),
    "backward": lambda module: module.model[2].register_full_backward_hook(half),
    "backward pre": lambda module: module.model[2].register_full_backward_pre_hook(half),
    "gradients": lambda module: [each.register_hook(lambda gradient: 0.5 * gradient) for each in trained_by(module)],
    "after gradients": lambda module: [each.register_post_accumulate_grad_hook(weaken) for each in trained_by(module)],
}


def trained_by(module: Any) -> list[nn.Parameter]:
    return module.optimizers().param_groups[0]["params"]


class HooksOnce(Module):
    """Puts hooks on something in its first step.

    Args:
        register: does so.
    """

    def __init__(self, register: Callable[[Any], Any]) -> None:
        super().__init__()
        self.register = register
        self.is_hooked = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.register(self)
        return super().training_step(batch, batch_idx)

    def found(self) -> Any:
        weights = list(self.parameters())
        return [(len(each._backward_hooks or ()), len(each._post_accumulate_grad_hooks or ())) for each in weights]


HOOKED = {
    "Hugging Face": Bert,
    **{name: functools.partial(HooksOnce, register) for name, register in REGISTERS.items()},
}


@pytest.mark.parametrize("make_module", HOOKED.values(), ids=HOOKED)
def test_hooks_that_a_step_registers_once(make_module):
    made: list[Any] = []
    plain = fit(lambda: made.append(make_module()) or made[0], data())
    result = budgeted(make_module, data())
    assert_equal(result.run, plain)
    assert result.plans[0] is not None, result.own_words
    assert result.module.found() == made[0].found()
    assert hooks_of(result.module) == hooks_of(made[0])
    assert leftovers(result.module) == leftovers(made[0])


def hooks_of(module: nn.Module) -> list[int]:
    tables = [table for part in module.modules() for name, table in vars(part).items() if name.endswith("_hooks")]
    return [len(table) for table in tables]


class Shrinks:
    """A hook that counts its calls and divides gradients by their number."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, gradients: Any, *_: Any) -> Any:
        self.calls += 1
        return tuple(each / self.calls for each in gradients)


class HookWithState(Module):
    """Has such a hook.

    Args:
        kind: the name of the method that puts it on a layer.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        getattr(self.model[2], kind)(Shrinks())

    def found(self) -> list[int]:
        layer = self.model[2]
        return [hook.calls for table in (layer._backward_hooks, layer._backward_pre_hooks) for hook in table.values()]


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_that_have_state(kind):
    assert_rehearsed(lambda: HookWithState(kind), found)


# ---------------------------------------------------------------- far away


class Noise:
    """Random numbers behind something large or deep.

    Args:
        source: gives them.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def __call__(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.source.random())


class Compose:
    """Calls one transform after the other."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Tensor) -> Tensor:
        for each in self.transforms:
            x = each(x)
        return x


class Words(Module):
    """Has two vocabularies, and noise after them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = {str(i): i for i in range(8000)}
        self.words = list(self.numbers)
        self.noise = Noise(random.Random(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.noise(batch), batch_idx)

    def found(self) -> float:
        return self.noise.source.random()


class Nested(Module):
    """Has noise in transforms of transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Compose(Compose(Compose(Compose(Compose(Noise(random.Random(3)))))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.transform(batch), batch_idx)

    def found(self) -> float:
        inner = self.transform
        while isinstance(inner, Compose):
            inner = inner.transforms[0]
        return inner.source.random()


@pytest.mark.parametrize("make_module", [Words, Nested])
def test_generators_behind_something_large_or_deep(make_module):
    assert_rehearsed(make_module, found)


class WordsOneByOne(Words):
    """Has an iterator after them."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = iter(range(100))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * next(self.stream)

    def found(self) -> Any:
        return next(self.stream), super().found()


class GeneratorFunction:
    """Random numbers from a generator, which has a usual name."""

    def __init__(self) -> None:
        self.gen = (0.1 * i for i in range(100))

    def random(self) -> float:
        return next(self.gen)


class Generates(Nested):
    """Has a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Noise(GeneratorFunction())


@pytest.mark.parametrize(
    ("make_module", "reason"),
    [(WordsOneByOne, "advance `stream`, an iterator"), (Generates, r"advance `transform\.source\.gen`, an iterator")],
)
def test_iterators_that_are_easily_overlooked(make_module, reason):
    assert_measured(make_module, reason, left=found)


# ---------------------------------------------------------------- globals


class AugmentsElsewhere(Module):
    """Augments by what another file has."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(augment(batch), batch_idx)


class CountsElsewhere(Module):
    """Has its steps counted by what another file has."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / count()


class MetersElsewhere(Module):
    """Has its steps counted by a class of another file."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.meter()


class CriterionElsewhere(Module):
    """Has a loss of another file."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return elsewhere.criterion(self.model(batch))


class Calls(Module):
    """Calls what it was given.

    Args:
        transform: changes batches.
        divisor: gives a number, by which it divides its loss.
    """

    def __init__(self, transform: Callable[[Tensor], Tensor], divisor: Callable[[], float]) -> None:
        super().__init__()
        self.transform, self.divisor = transform, divisor

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.transform(batch), batch_idx) / self.divisor()


class Hooked(Module):
    """Has a hook that it was given.

    Args:
        hook: runs after backward of a layer.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.model[2].register_full_backward_hook(hook)


ELSEWHERE: dict[str, Callable[[], pl.LightningModule]] = {
    "generator": AugmentsElsewhere,
    "counter": CountsElsewhere,
    "class": MetersElsewhere,
    "criterion": CriterionElsewhere,
    "functions, given": lambda: Calls(elsewhere.augment, elsewhere.count),
    "object, given": lambda: Calls(nn.Identity(), elsewhere.Meter()),
    "hook, given": lambda: Hooked(elsewhere.shrink),
}


@pytest.mark.parametrize("make_module", ELSEWHERE.values(), ids=ELSEWHERE)
def test_state_in_another_file(make_module):
    def make() -> pl.LightningModule:
        elsewhere.reset()
        return make_module()

    assert_rehearsed(make, lambda module: elsewhere.state())


criterion = Annealed()


class GlobalCriterion(Module):
    """Has a global criterion of its own file, with a counter."""

    def __init__(self) -> None:
        criterion.calls = 0
        super().__init__()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return criterion(self.model(batch))

    def found(self) -> int:
        return criterion.calls


STEP = contextvars.ContextVar("STEP", default=0)


class CountsInContext(Module):
    """Counts in a variable of the context."""

    def __init__(self) -> None:
        STEP.set(0)
        super().__init__()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        STEP.set(STEP.get() + 1)
        return super().training_step(batch, batch_idx) / STEP.get()

    def found(self) -> int:
        return STEP.get()


@functools.cache
def only_generator() -> random.Random:
    return random.Random(3)


class DrawsFromCached(Module):
    """Draws from a generator that a function makes when it is first called.

    Args:
        is_made_before: whether that is before training.
    """

    def __init__(self, is_made_before: bool) -> None:
        super().__init__()
        only_generator.cache_clear()
        if is_made_before:
            only_generator()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * only_generator().random()

    def found(self) -> float:
        return only_generator().random()


GLOBALS: dict[str, Callable[[], pl.LightningModule]] = {
    "criterion": GlobalCriterion,
    "context": CountsInContext,
    "cached generator": functools.partial(DrawsFromCached, is_made_before=False),
    "cached generator, made before": functools.partial(DrawsFromCached, is_made_before=True),
}


@pytest.mark.parametrize("make_module", GLOBALS.values(), ids=GLOBALS)
def test_globals(make_module):
    assert_rehearsed(make_module, found)


# ---------------------------------------------------------------- optimizers and schedulers


class Ticks:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


def append(kept: Any) -> int:
    kept.append(len(kept))
    return len(kept)


def append_inside(kept: Any) -> int:
    return append(kept["sizes"])


def count_up(kept: Any) -> int:
    kept["steps"] += 1
    return kept["steps"]


#: What is kept, and what comes of it from step to step.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "list": (list, append),
    "list in a dict": (lambda: {"sizes": []}, append_inside),
    "deque": (collections.deque, append),
    "Counter": (collections.Counter, count_up),
    "object": (Ticks, lambda kept: kept.next()),
    "default_rng": (lambda: numpy.random.default_rng(3), lambda kept: kept.random()),
    "random.Random": (lambda: random.Random(3), lambda kept: kept.random()),
}


class Keeping(torch.optim.SGD):
    """Decays weights by what comes of something that it keeps.

    Args:
        parameters: the weights.
        make: makes it.
        use: takes a number of it.
    """

    total = 0

    def __init__(self, parameters: Any, make: Callable[[], Any], use: Callable[[Any], float]) -> None:
        super().__init__(parameters, lr=0.1)
        self.kept, self.use = make(), use

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        number = self.use(self.kept)
        for group in self.param_groups:
            for each in group["params"]:
                each.mul_(1 - 1e-2 * number)
        return loss


@pytest.mark.parametrize(("make", "use"), KEPT.values(), ids=KEPT)
def test_optimizers_that_keep_something(make, use):
    assert_rehearsed(
        lambda: Module(optimizer=lambda parameters: Keeping(parameters, make, use)),
        lambda module: use(module.optimizers(use_pl_optimizer=False).kept),
    )


class Clipped(torch.optim.SGD):
    """Clips gradients to the median of their norms so far."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.norms: collections.deque[float] = collections.deque(maxlen=50)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradients = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item()
        self.norms.append(norm)
        for each in gradients:
            each.mul_(min(1.0, float(numpy.median(self.norms)) / norm))
        super().step()
        return loss


def test_an_optimizer_that_reads_numbers():
    assert_rehearsed(
        lambda: Module(optimizer=Clipped), lambda module: list(module.optimizers(use_pl_optimizer=False).norms)
    )


class CountsInState(Module):
    """Counts in the state of its optimizer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        state = self.optimizers(use_pl_optimizer=False).state["steps"]
        state["count"] = state.get("count", 0) + 1
        return super().training_step(batch, batch_idx) / state["count"]

    def found(self) -> int:
        return self.optimizers(use_pl_optimizer=False).state["steps"]["count"]


class HoldsScheduler(Module):
    """Has a scheduler of which Lightning does not know."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.scheduler.step()
        return super().training_step(batch, batch_idx)

    def found(self) -> Any:
        scheduler = self.scheduler
        return (
            scheduler.last_epoch,
            scheduler._step_count,
            scheduler.get_last_lr(),
            scheduler.optimizer.param_groups[0]["lr"],
        )


@pytest.mark.parametrize("make_module", [CountsInState, HoldsScheduler])
def test_optimizers_and_schedulers_that_a_step_changes(make_module):
    assert_rehearsed(make_module, found)


# ---------------------------------------------------------------- kinds of objects


class Holds(Module):
    """Divides its loss by what comes of something that it holds.

    Args:
        make: makes it.
        use: takes a number of it and the model.
    """

    def __init__(self, make: Callable[[], Any], use: Callable[[Any, nn.Module], float]) -> None:
        super().__init__()
        self.held, self.use = make(), use

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.use(self.held, self.model))

    def found(self) -> float:
        return self.use(self.held, self.model)


def count_for(held: Any, key: Any) -> int:
    held[key] = held.get(key, 0) + 1
    return held[key]


def test_weak_references():
    assert_rehearsed(lambda: Holds(weakref.WeakKeyDictionary, count_for), found)


def filled() -> Any:
    """A queue with a number for every step and one more."""
    made: Any = queue.SimpleQueue()
    for i in range(STEPS + 1):
        made.put(i)
    return made


def count_first(held: Any, model: nn.Module) -> float:
    held[0] += 1
    return held[0]


def count_shared(held: Any, model: nn.Module) -> int:
    held.value += 1
    return held.value


LOST: dict[str, tuple[Callable[[], Any], Callable[[Any, nn.Module], float], str]] = {
    "queue": (filled, lambda held, model: held.get(timeout=1), "a queue"),
    "array": (lambda: array.array("d", [0.0]), count_first, "an array"),
    "bytes": (lambda: bytearray(1), count_first, "an array"),
    "shared": (lambda: multiprocessing.Value("i", 0), count_shared, "an object of multiprocessing or ctypes"),
}


@pytest.mark.parametrize(("make", "use", "kind"), LOST.values(), ids=LOST)
def test_what_cannot_be_put_back_is_measured(make, use, kind):
    assert_measured(lambda: Holds(make, use), f"change `held[^`]*`, {kind}", left=found)


# ---------------------------------------------------------------- batches


class Batches(Dataset[Any]):
    """Makes each batch when it is asked for.

    Args:
        make: from rows to a batch.
    """

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.rows = data().dataset
        self.make = make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.make(self.rows[i])


class TakesFromBatch(Module):
    """Multiplies rows with what comes of something in its batch."""

    def __init__(self, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.use = use

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["x"] * (1 + self.use(batch["kept"])), batch_idx)


class Sample:
    """Rows that a step changes."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.count = 0


class ChangesBatch(Module):
    """Changes its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.count += 1
        batch.x = 2 * batch.x
        return super().training_step(batch.x, batch_idx) / batch.count


def loader(make: Callable[[Tensor], Any]) -> DataLoader[Any]:
    return DataLoader(Batches(make), batch_size=None)


@pytest.mark.parametrize("kind", ["random.Random", "default_rng", "deque", "object"])
def test_batches_with_state(kind):
    make, use = KEPT[kind]
    assert_rehearsed(lambda: TakesFromBatch(use), data=loader(lambda x: {"x": x, "kept": make()}))


def test_a_batch_that_a_step_changes():
    assert_rehearsed(ChangesBatch, data=loader(Sample))


def test_a_batch_with_an_iterator_is_measured():
    data = loader(lambda x: {"x": x, "kept": iter([0.1, 0.2, 0.3])})
    assert_measured(lambda: TakesFromBatch(next), r"advance `the batch\['kept'\]`, an iterator", data=data)
