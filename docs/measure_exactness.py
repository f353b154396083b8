"""Measure the table in docs/exactness.md: does a layer that is run again in backward train as without?

Every kind below trains a tiny model of two layers plainly and in three ways of recomputing them, and compares losses,
gradients, buffers, what the kind watches, and random streams bit for bit.

    python docs/measure_exactness.py              # all kinds; rewrites docs/exactness.md between its marker comments
    python docs/measure_exactness.py batch_norm   # some kinds; prints their rows only
"""
# ruff: noqa: D101, D103

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import pathlib
import platform
import queue
import random
import re
import sys
import warnings
from typing import Any

import numpy as np
import torch
import torchmetrics
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import lightning_ckpt
from lightning_ckpt.recompute import attach

PAGE = pathlib.Path(__file__).with_name("exactness.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COMMAND = "python docs/measure_exactness.py"
WIDTH, ROWS, STEPS = 8, 4, 6
RUNS: queue.SimpleQueue[None] = queue.SimpleQueue()  # how often layers ran; nothing that a replay could put back


# ---------------------------------------------------------------- the ways


def with_this_package(model: nn.Module) -> None:
    for i, layer in enumerate(model.layers):
        attach(layer, f"layers.{i}")


def with_checkpoint_wrapper(model: nn.Module) -> None:
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Layer)
    )


def with_gradient_checkpointing_layer(model: nn.Module) -> None:
    """As if the layer's class had been derived from the one of transformers."""
    for layer in model.layers:
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (kind, GradientCheckpointingLayer), {"forward": kind.forward})
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


WAYS = {
    "lightning_ckpt": with_this_package,
    "`checkpoint_wrapper`": with_checkpoint_wrapper,
    "`GradientCheckpointingLayer`": with_gradient_checkpointing_layer,
}


# ---------------------------------------------------------------- a model, its training, and what is compared


class Layer(nn.Module):
    """A layer that is recomputed; kinds override `step`, and what else they need."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.build()

    def build(self) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        RUNS.put(None)
        return self.step(*args, **kwargs)

    def step(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def watched(self) -> list[Any]:
        """More values to compare after training."""
        return []


class Model(nn.Module):
    """A linear map, two layers, and one training step; kinds override how layers are called and trained."""

    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([kind(), kind()])

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def loss(self) -> Tensor:
        return self(torch.randn(ROWS, WIDTH)).square().mean()

    def train_step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = self.loss()
        loss.backward()
        optimizer.step()
        return loss


@dataclasses.dataclass
class Kind:
    name: str
    text: str
    layer: type[Layer]
    model: type[Model]


KINDS: dict[str, Kind] = {}


def kind(text: str, layer: type[Layer] = Layer, model: type[Model] = Model) -> Any:
    """Register the class below as a kind of layer or of model."""

    def register(cls: type) -> type:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        is_layer = issubclass(cls, Layer)
        KINDS[name] = Kind(name, text, cls if is_layer else layer, model if is_layer else cls)
        return cls

    return register


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key.replace("_checkpoint_wrapped_module.", ""): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple, collections.deque)) else value


def train(kind: Kind, way: Any = None) -> list[Any]:
    """Everything that is compared, after some steps of training."""
    global LAYER_CALLS
    LAYER_CALLS = 0
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = kind.model(kind.layer)
    layers = list(model.layers)
    if way is not None:
        way(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.train_step(optimizer)
        seen += [plain(loss), plain({name: p.grad for name, p in model.named_parameters() if p.grad is not None})]
    streams = [torch.rand(()).item(), random.random(), np.random.rand()]
    return [seen, plain(model.state_dict()), [plain(layer.watched()) for layer in layers], LAYER_CALLS, streams]


def runs() -> int:
    """How often layers ran since the last question."""
    count = 0
    with contextlib.suppress(queue.Empty):
        while True:
            RUNS.get_nowait()
            count += 1
    return count


def attempt(kind: Kind, way: Any = None) -> tuple[Any, str, int]:
    """What is compared, or an error's message; and how often layers ran."""
    runs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return train(kind, way), "", runs()
        except Exception as error:
            return None, " ".join(str(error).split()) or type(error).__name__, runs()


def measure(kind: Kind) -> tuple[list[str], str]:
    """The verdict on each way, and the message where this package refuses."""
    want, error, plain_runs = attempt(kind)
    if error:  # what is right is what comes out where autograd keeps copies
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
            want, _, plain_runs = attempt(kind)
    verdicts, refusal = [], ""
    for name, way in WAYS.items():
        got, error, times = attempt(kind, way)
        if error:
            verdicts.append("refused" if re.search(r"layers\.\d", error) else "error")
            if name == "lightning_ckpt":
                refusal = error
        elif got != want:
            verdicts.append("**wrong**")
        else:
            verdicts.append("exact" if times > plain_runs else "not recomputed")
    return verdicts, refusal


# ---------------------------------------------------------------- kinds: random numbers


@kind("draws a dropout mask")
class Dropout(Layer):
    def build(self):
        self.dropout = nn.Dropout(0.3)

    def step(self, x):
        return torch.sin(self.dropout(torch.tanh(self.linear(x))))


@kind("draws from Python's `random`")
class PythonRandom(Layer):
    def step(self, x):
        return torch.tanh(self.linear(x)) * random.random() if random.random() < 0.8 else torch.tanh(x)


@kind("draws from `numpy.random`")
class NumpyRandom(Layer):
    def step(self, x):
        return torch.tanh(self.linear(x) * float(np.random.normal()))


@kind("draws from a generator that it holds")
class HeldGenerator(Layer):
    def build(self):
        self.generator = torch.Generator().manual_seed(1)

    def step(self, x):
        return torch.tanh(self.linear(x) * torch.rand(WIDTH, generator=self.generator))


@kind("is an `nn.RReLU`, whose noise is filled in after it was saved")
class RandomReLU(Layer):
    def build(self):
        self.activation = nn.RReLU()

    def step(self, x):
        return self.activation(self.linear(x))


# ---------------------------------------------------------------- kinds: state


@kind("updates running statistics (`nn.BatchNorm1d`)")
class BatchNorm(Layer):
    def build(self):
        self.norm = nn.BatchNorm1d(WIDTH)

    def step(self, x):
        return torch.tanh(self.norm(self.linear(x)))


@kind("updates its power iteration (`torch.nn.utils.spectral_norm`)")
class SpectralNorm(Layer):
    def build(self):
        self.linear = nn.utils.spectral_norm(self.linear)


@kind("carries a hidden state to the next call (spiking and recurrent networks)")
class HiddenState(Layer):
    hidden = 0.0

    def step(self, x):
        hidden = torch.sigmoid(self.linear(x) + self.hidden)
        self.hidden = hidden.detach()
        return torch.sin(hidden)

    def watched(self):
        return [self.hidden]


@kind("averages over a history (`collections.deque`)")
class History(Layer):
    def build(self):
        self.history = collections.deque(maxlen=3)

    def step(self, x):
        self.history.append(x.detach().mean())
        return torch.tanh(self.linear(x) * sum(self.history))

    def watched(self):
        return [self.history]


@kind("counts in a closure (`nonlocal`)")
class Closure(Layer):
    def build(self):
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def step(self, x):
        return torch.tanh(self.linear(x) * self.count())

    def watched(self):
        return [self.count()]


LAYER_CALLS = 0


@kind("counts in a global variable of its module")
class GlobalCounter(Layer):
    def step(self, x):
        global LAYER_CALLS
        LAYER_CALLS += 1
        return torch.tanh(self.linear(x) * LAYER_CALLS)


@kind("initialises its weights from the first batch (ActNorm)")
class DataDependentInit(Layer):
    def build(self):
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.initialised = False

    def step(self, x):
        if not self.initialised:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.initialised = True
        return torch.tanh(self.linear(x + self.bias) * self.bias)


@kind("updates a metric of torchmetrics")
class Metric(Layer):
    def build(self):
        self.metric = torchmetrics.MeanMetric()

    def step(self, x):
        x = torch.tanh(self.linear(x))
        self.metric(x.detach().mean())
        return torch.sin(x)

    def watched(self):
        return [self.metric.mean_value, self.metric.weight]


@kind("has a forward hook that counts on a submodule")
class WatchingHook(Layer):
    def build(self):
        self.calls = []
        self.linear.register_forward_hook(self.watch)

    def watch(self, module, args, output):
        self.calls.append(0)

    def watched(self):
        return [len(self.calls)]


class SecondLoss(Model):
    def train_step(self, optimizer):
        loss = self.loss()
        loss.backward(retain_graph=True)
        penalty = sum(layer.activation.square().mean() for layer in self.layers)
        penalty.backward()
        optimizer.step()
        return loss + penalty


@kind("stores an activation, of which a second loss is made after the first backward", model=SecondLoss)
class StoredActivation(Layer):
    def step(self, x):
        self.activation = self.linear(x)
        return torch.sin(torch.tanh(self.activation))


# ---------------------------------------------------------------- kinds: arguments


class TakesDict(Layer):
    def step(self, batch):
        return torch.tanh(self.linear(batch["x"]) * batch["scale"])


@kind("gets a dict that its caller changes afterwards", layer=TakesDict)
class DictArgument(Model):
    def forward(self, x):
        batch = {"x": self.stem(x), "scale": 1.0}
        for layer in self.layers:
            batch["x"] = layer(batch)
            batch["scale"] += 1
        return batch["x"]


@kind("changes its own input in place")
class InPlaceInput(Layer):
    def step(self, x):
        x.add_(1)
        return torch.sin(self.linear(x)) + 1


class TakesScale(Layer):
    def step(self, x, scale):
        return torch.tanh(self.linear(x) * scale)


@kind("gets a tensor that is changed in place after the call (an error without recompute too)", layer=TakesScale)
class TensorArgument(Model):
    def forward(self, x):
        x, scale = self.stem(x), torch.ones(WIDTH)
        for layer in self.layers:
            x = layer(x, scale=scale)
            scale += 1
        return x


class Attention(Layer):
    def step(self, x, past_key_values=None):
        keys = values = self.linear(x).view(1, 1, ROWS, WIDTH)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, 0)
        return x + nn.functional.scaled_dot_product_attention(x.view(1, 1, ROWS, WIDTH), keys, values).view(x.shape)


@kind("appends to a key-value cache of transformers that it is given", layer=Attention)
class KeyValueCache(Model):
    def call(self, layer, x):
        cache = transformers.DynamicCache()
        cache.update(torch.ones(1, 1, 2, WIDTH), torch.ones(1, 1, 2, WIDTH), 0)
        return layer(x, past_key_values=cache)


# ---------------------------------------------------------------- kinds: what surrounds the call


ADAPTER = contextvars.ContextVar("ADAPTER", default=1.0)


class ReadsContext(Layer):
    def step(self, x):
        return torch.tanh(self.linear(x) * ADAPTER.get())


@kind("reads a context variable that is set around forward only (adapters)", layer=ReadsContext)
class ContextVariable(Model):
    def loss(self):
        token = ADAPTER.set(2.0)
        try:
            return super().loss()
        finally:
            ADAPTER.reset(token)


@kind("is put into eval mode between forward and backward", layer=Dropout)
class EvalBetween(Model):
    def train_step(self, optimizer):
        loss = self.loss()
        self.eval()
        loss.backward()
        self.train()
        optimizer.step()
        return loss


@kind("trains in eval mode, as a frozen backbone does")
class EvalMode(Model):
    def loss(self):
        self.eval()
        return super().loss()


@kind("is frozen for the generator's loss and not for the discriminator's, both before backward (GAN)")
class RequiresGradToggle(Model):
    def train_step(self, optimizer):
        self.layers.requires_grad_(False)
        generator_loss = self.loss()
        self.layers.requires_grad_(True)
        discriminator_loss = self.loss()
        generator_loss.backward()
        discriminator_loss.backward()
        optimizer.step()
        return generator_loss + discriminator_loss


@kind("is called twice before one backward, with a hidden state", layer=HiddenState)
class TwoForwards(Model):
    def loss(self):
        return super().loss() + super().loss()


# ---------------------------------------------------------------- kinds: what it calls


class ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        first, second = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (first[1] + second[1]) / 2


@kind("calls a function that reads its saved tensors twice in backward")
class SavedTensorsTwice(Layer):
    def step(self, x):
        return ReadTwice.apply(torch.tanh(self.linear(x)))


@kind("catches every exception and counts them (`try`, `except`)")
class TryExcept(Layer):
    failures = 0

    def step(self, x):
        try:
            return torch.tanh(self.linear(x)) * x
        except Exception:
            self.failures += 1
            return x

    def watched(self):
        return [self.failures]


@kind("calls a `torch.func` transform")
class FunctionTransform(Layer):
    def step(self, x):
        return torch.tanh(self.linear(x)) * torch.func.grad(lambda v: v.sin().sum())(x)


# ---------------------------------------------------------------- kinds: no way to be exact


@kind("has weights that are changed between forward and backward (an error without recompute too)")
class WeightsChanged(Model):
    def train_step(self, optimizer):
        loss = self.loss()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)
        loss.backward()
        return loss


@kind("changes a tensor in place that its gradient needs (an error without recompute too)")
class InPlaceNeeded(Layer):
    def step(self, x):
        y = self.linear(x)
        z = y * y
        y.add_(1)
        return torch.sin(z + y)


class HoldsMask(Layer):
    def build(self):
        self.register_buffer("mask", torch.ones(1000, WIDTH))

    def step(self, x):
        return torch.tanh(self.linear(x) * self.mask[0])


@kind(
    "holds a large buffer that is changed in place between forward and backward (an error without recompute too)",
    layer=HoldsMask,
)
class BufferChanged(Model):
    def train_step(self, optimizer):
        loss = self.loss()
        for layer in self.layers:
            layer.mask.mul_(0.9)
        loss.backward()
        optimizer.step()
        return loss


@kind("multiplies by what an iterator yields")
class IteratorValue(Layer):
    def build(self):
        self.numbers = itertools.count(1)

    def step(self, x):
        return torch.tanh(self.linear(x) * next(self.numbers))


@kind("takes another number of rows from an iterator at every call")
class IteratorShape(Layer):
    def build(self):
        self.numbers = itertools.count()

    def step(self, x):
        rows = ROWS - next(self.numbers) % 2
        return x + torch.sin(self.linear(x[:rows]).sum(0))


@kind("takes a branch that an iterator decides")
class IteratorBranch(Layer):
    def build(self):
        self.numbers = itertools.count()

    def step(self, x):
        x = self.linear(x)
        return x.tanh().exp() if next(self.numbers) % 2 == 0 else x


class Late(Layer):
    """Does something that its first calls did not do."""

    def build(self):
        self.calls = 0
        self.register_buffer("average", torch.zeros(1000, WIDTH))

    def step(self, x):
        self.calls += 1
        return self.late(x) if self.calls > 4 else torch.tanh(self.linear(x))


@kind("draws from `random` or `numpy.random` for the first time in its fifth call")
class LateRandom(Late):
    def late(self, x):
        return torch.tanh(self.linear(x) * random.random())


@kind("changes a large buffer in place for the first time in its fifth call")
class LateBuffer(Late):
    def late(self, x):
        self.average.add_(1)
        return torch.tanh(self.linear(x) * self.average[0])


@kind("changes its input in place for the first time in its fifth call")
class LateInPlaceInput(Late):
    def step(self, x):
        return torch.sin(super().step(x)) + 1

    def late(self, x):
        return self.linear(x.add_(1))


# ---------------------------------------------------------------- the page


def row(kind: Kind, verdicts: list[str]) -> str:
    return f"| {kind.text} | {' | '.join(verdicts)} |"


def measured_part() -> str:
    """The versions, the table, and every message with which this package refused."""
    lines = [
        f"Measured by `{COMMAND}` with lightning_ckpt {lightning_ckpt.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, on the CPU.",
        "",
        f"| a layer that ... | {' | '.join(WAYS)} |",
        f"|---|{'---|' * len(WAYS)}",
    ]
    refusals = []
    for kind in KINDS.values():
        verdicts, refusal = measure(kind)
        lines.append(row(kind, verdicts))
        if refusal:
            refusals += [f"A layer that {kind.text}:", "", f"> {refusal}", ""]
    return "\n".join([*lines, "", "### Messages", "", *refusals])


def main(names: list[str]) -> None:
    """Print the rows of the kinds of these names, or rewrite the page with all of them."""
    torch.set_num_threads(1)
    for name in names:
        print(row(KINDS[name], measure(KINDS[name])[0]))
    if not names:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        part = measured_part()
        PAGE.write_text(f"{before}{BEGIN}\n\n{part}{END}{after}")
        print(part)


if __name__ == "__main__":
    main(sys.argv[1:])
