"""Context: a replay runs in what surrounded the first run, whether or not it still surrounds backward."""

import contextlib
import contextvars
import weakref

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.replay import support
from tests.replay.support import Layer, Stack, assert_exact, assert_exact_or_named, stack
from tests.support import Training

GAIN = contextvars.ContextVar("GAIN", default=1.0)
FLAGS = {"fast": False}


def inside(make_context, layer=Layer):
    """A training whose forward alone, and not its backward, is inside of a context; every other step."""

    class Inside(Training):
        def training_step(self, batch, batch_idx):
            with make_context(self.model) if batch_idx % 2 == 0 else contextlib.nullcontext():
                return super().training_step(batch, batch_idx)

    return lambda: Inside(Stack(layer))


# ---------------------------------------------------------------- autocast


class Regions(Layer):
    """Leaves autocast for one product and enters it again inside."""

    def forward(self, x):
        x = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.linear.weight.float()
            with torch.autocast("cpu", torch.bfloat16):
                x = self.linear(x).float()
        return torch.tanh(self.linear(x)).float()


@pytest.mark.parametrize("layer", [Layer, Regions])
def test_autocast_around_forward_only(layer):
    assert_exact(inside(lambda model: torch.autocast("cpu", torch.bfloat16), layer))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_of_the_trainer(precision):
    assert_exact(lambda: stack(Layer), precision=precision)


def test_regions_under_mixed_precision():
    assert_exact(lambda: stack(Regions), precision="bf16-mixed")


def test_autocast_around_the_step_and_its_backward():
    class Manual(Training):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            with torch.autocast("cpu", torch.bfloat16):
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss)
                loss = loss + super().training_step(batch * 0.5, batch_idx).detach()
            self.optimizers().step()
            self.optimizers().zero_grad()
            return loss

    assert_exact(lambda: Manual(Stack(Regions)))


def test_autocast_with_weights_shared_by_layers_and_by_the_loss():
    class Tied(Training):
        def __init__(self):
            shared = nn.Linear(8, 8)

            def layer():
                made = Layer()
                made.linear = shared
                return made

            super().__init__(Stack(layer), lambda model, x: shared(model(x)).float().square().mean())

    assert_exact(Tied, precision="bf16-mixed")


def test_autocast_without_a_cache():
    assert_exact(inside(lambda model: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Regions))


# ---------------------------------------------------------------- variables and modes


@contextlib.contextmanager
def gain(value):
    token = GAIN.set(value)
    try:
        yield
    finally:
        GAIN.reset(token)


class Gained(Layer):
    def forward(self, x):
        x = super().forward(x * GAIN.get())
        with gain(GAIN.get() + 1):
            return super().forward(x * GAIN.get())


def test_a_context_variable():
    assert_exact(inside(lambda model: gain(0.3), Gained), steps=6)


class Halves(TorchFunctionMode):
    """Halves what linear functions give."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output * 0.5 if function is nn.functional.linear else output


class HalvesMore(Halves):
    pass


def test_a_function_mode():
    assert_exact(inside(lambda model: Halves()), steps=6)


def test_two_function_modes():
    @contextlib.contextmanager
    def both(model):
        with Halves(), HalvesMore():
            yield

    assert_exact(inside(both), steps=6)


def test_a_function_mode_within_a_default_device():
    torch.set_default_device("cpu")
    try:
        assert_exact(inside(lambda model: Halves()), steps=6)
    finally:
        torch.set_default_device(None)


def test_a_function_mode_that_is_entered_for_backward_only():
    class Backward(Training):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            with Halves():
                self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return loss

    assert_exact(lambda: Backward(Stack(Layer)), steps=6)


class Doubles(TorchDispatchMode):
    """Doubles what `tanh` gives."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output * 2 if function is torch.ops.aten.tanh.default else output


def test_a_dispatch_mode():
    assert_exact(inside(lambda model: Doubles()), steps=6)


class CountsAndDoubles(Doubles):
    """Counts operators too, for its owner."""

    counter = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counter += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


def test_a_dispatch_mode_that_acts_and_counts():
    assert_exact(inside(lambda model: CountsAndDoubles()), steps=6)


class Watches(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
def test_a_function_mode_within_one_that_lasts_until_after_backward(backward, start):
    class Lasting(Training):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            with Watches():
                with Halves() if batch_idx >= start else contextlib.nullcontext():
                    loss = super().training_step(batch, batch_idx)
                backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return loss

    assert_exact(lambda: Lasting(Stack(Layer)), steps=6)


def test_a_device_context():
    class Positions(Layer):
        def forward(self, x):
            return super().forward(x + torch.arange(8))

    assert_exact(inside(lambda model: torch.device("cpu"), Positions))


# ---------------------------------------------------------------- settings of PyTorch


class Attention(Layer):
    def forward(self, x):
        x = self.linear(x).view(1, 2, 2, 8)
        return nn.functional.scaled_dot_product_attention(x, x, x).reshape(4, 8).sin()


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_kernel_of_attention(backend):
    assert_exact(inside(lambda model: sdpa_kernel(backend), Attention))


@contextlib.contextmanager
def setting(put, inside, outside):
    put(inside)
    try:
        yield
    finally:
        put(outside)


class Constants(Layer):
    """Makes tensors of the default dtype."""

    def forward(self, x):
        x = x.to(torch.get_default_dtype()) * torch.linspace(0, 1, 8) * torch.tensor([0.1])
        return super().forward(x.float()).sin()


def test_the_default_dtype():
    assert_exact(inside(lambda m: setting(torch.set_default_dtype, torch.float64, torch.float32), Constants), steps=6)


class Indexed(Layer):
    def forward(self, x):
        index = torch.tensor([0, 1, 1, 0])
        base = self.linear(x).index_add(0, index, torch.tanh(x))
        if torch.are_deterministic_algorithms_enabled():
            base = base * 0.5
        return base.sin()


def test_deterministic_algorithms():
    make = inside(lambda model: setting(torch.use_deterministic_algorithms, True, False), Indexed)
    assert_exact(make, steps=6)


def test_mkldnn_is_off():
    class Convolves(Layer):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv1d(4, 4, 3, padding=1)

        def forward(self, x):
            return super().forward(self.convolution(x))

    assert_exact(inside(lambda model: torch.backends.mkldnn.flags(enabled=False), Convolves), steps=6)


def test_parametrizations_are_cached():
    class Orthogonal(Layer):
        def __init__(self):
            super().__init__()
            self.linear = nn.utils.parametrizations.orthogonal(self.linear)

        def forward(self, x):
            return super().forward(super().forward(x))

    assert_exact(inside(lambda model: nn.utils.parametrize.cached(), Orthogonal))


# ---------------------------------------------------------------- switches of users


class Adapted(Layer):
    def __init__(self):
        super().__init__()
        self.adapters, self.active = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), ["a"]

    def forward(self, x):
        for name in self.active:
            x = x + self.adapters[name](x)
        return super().forward(x)


@pytest.mark.parametrize("how", ["new list", "in place"])
def test_adapters_switched_on_around_forward(how):
    @contextlib.contextmanager
    def adapters(model, names=("b", "a")):
        kept = [list(layer.active) for layer in model.layers]
        for layer in model.layers:
            if how == "new list":
                layer.active = list(names)
            else:
                layer.active[:] = names
        try:
            yield
        finally:
            for layer, old in zip(model.layers, kept, strict=True):
                layer.active[:] = old

    assert_exact(inside(adapters, Adapted), steps=6)


def test_a_weight_merged_around_forward():
    @contextlib.contextmanager
    def merged(model):
        kept = [layer.linear for layer in model.layers]
        for layer in model.layers:
            layer.linear = layer.adapters["b"]
        try:
            yield
        finally:
            for layer, linear in zip(model.layers, kept, strict=True):
                layer.linear = linear

    assert_exact(inside(merged, Adapted), steps=6)


def test_a_forward_patched_on_a_submodule_around_forward():
    @contextlib.contextmanager
    def patched(model):
        for layer in model.layers:
            plain = layer.linear.forward
            layer.linear.forward = lambda x, plain=plain: plain(x) * 0.5
        try:
            yield
        finally:
            for layer in model.layers:
                del layer.linear.forward

    assert_exact(inside(patched), steps=6)


def test_a_forward_patched_on_a_class_around_forward_is_exact_or_named():
    class Inner(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    class Outer(Layer):
        def __init__(self):
            super().__init__()
            self.linear = Inner(8, 8)

    @contextlib.contextmanager
    def patched(model):
        plain = Inner.forward
        Inner.forward = lambda self, x: plain(self, x) * 0.5
        try:
            yield
        finally:
            Inner.forward = plain

    assert_exact_or_named(inside(patched, Outer), steps=6)


def test_a_flag_in_a_global_of_the_layers_module():
    class Flagged(Layer):
        def forward(self, x):
            return super().forward(x * (2.0 if FLAGS["fast"] else 1.0))

    assert_exact(inside(lambda model: setting(lambda on: FLAGS.update(fast=on), True, False), Flagged), steps=6)


def late(make_context, layer):
    """A training that is inside of a context only around forward, and only after a warm-up."""

    class Late(Training):
        def training_step(self, batch, batch_idx):
            with make_context() if batch_idx > 2 else contextlib.nullcontext():
                return super().training_step(batch, batch_idx)

    return lambda: Late(Stack(layer))


@pytest.mark.parametrize("when", [inside, late])
def test_a_flag_in_a_global_of_another_module(when):
    class Flagged(Layer):
        def forward(self, x):
            return super().forward(x * support.SCALE)

    def put(value):
        support.SCALE = value

    assert_exact_or_named(when(lambda *_: setting(put, 2.0, 1.0), Flagged), steps=6)


@pytest.mark.parametrize("when", [inside, late])
def test_a_number_in_the_closure_of_the_class(when):
    scale = 1.0

    class Flagged(Layer):
        def forward(self, x):
            return super().forward(x * scale)

    def put(value):
        nonlocal scale
        scale = value

    assert_exact_or_named(when(lambda *_: setting(put, 2.0, 1.0), Flagged), steps=6)


@pytest.mark.parametrize("start", [0, 3])
def test_a_number_on_the_module_behind_a_weak_reference(start):
    class Flagged(Layer):
        owner = None

        def forward(self, x):
            return super().forward(x * self.owner().scale)

    class Owner(Training):
        def __init__(self):
            super().__init__(Stack(Flagged))
            self.scale = 1.0
            for layer in self.model.layers:
                layer.owner = weakref.ref(self)

        def training_step(self, batch, batch_idx):
            self.scale = 2.0 if batch_idx >= start else 1.0
            loss = super().training_step(batch, batch_idx)
            self.scale = 1.0
            return loss

    assert_exact_or_named(Owner, steps=6)


def test_a_forward_inside_no_grad_within_the_step():
    class Teacher(Training):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                target = self.model(batch)
            return (self.model(batch * 0.9) - target).square().mean()

    assert_exact(lambda: Teacher(Stack(Layer)))
