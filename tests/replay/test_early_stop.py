"""Early stop: a replay ends with the last saved tensor, and nobody in the layer takes part in that."""

import contextlib
import dataclasses
import warnings

import pytest
import torch
from torch import nn

from tests.replay.support import Layer, assert_exact, assert_exact_or_named, stack


class Guarded(Layer):
    """A fast path, and what to do where it fails."""

    failures = 0

    def forward(self, x):
        try:
            return torch.tanh(self.linear(x)) * x
        except Exception:
            self.failures += 1
            return self.linear(x)


class GuardedFromAll(Guarded):
    def forward(self, x):
        try:
            return torch.tanh(self.linear(x)) * x
        except:  # noqa: E722
            self.failures += 1
            return self.linear(x).exp().sin()


class Explaining(Guarded):
    def forward(self, x):
        try:
            return torch.tanh(self.linear(x)) * x
        except BaseException as error:
            raise RuntimeError(f"failed for an input of shape {tuple(x.shape)}") from error


class Reraising(Guarded):
    def forward(self, x):
        try:
            return torch.tanh(self.linear(x)) * x
        except BaseException:
            self.failures += 1
            raise


class Retrying(Guarded):
    def forward(self, x):
        for gain in (1.0, 0.5):
            try:
                return torch.tanh(self.linear(x * gain)) * x
            except:  # noqa: E722
                self.failures += 1
        raise RuntimeError("no gain worked")


class Finally(Guarded):
    def forward(self, x):
        self.failures += 1
        try:
            return torch.tanh(self.linear(x)) * x
        finally:
            self.failures -= 1


class Returning(Guarded):
    def forward(self, x):
        y = x
        try:
            y = torch.tanh(self.linear(x)) * x
        finally:
            return y.sin()  # noqa: B012


class Suppressing(Guarded):
    def forward(self, x):
        y = x
        with contextlib.suppress(BaseException), warnings.catch_warnings():
            y = torch.tanh(self.linear(x)) * x
        return y


@pytest.mark.parametrize(
    "layer",
    [Guarded, GuardedFromAll, Explaining, Reraising, Retrying, Finally, Returning, Suppressing],
)
def test_handlers_around_the_body_do_not_see_the_end_of_a_replay(layer):
    assert_exact(lambda: stack(layer), observe=lambda module: [made.failures for made in module.model.layers])


# ---------------------------------------------------------------- RReLU


class First(Layer):
    def forward(self, x):
        return super().forward(nn.functional.rrelu(x, training=True))


class Middle(Layer):
    def forward(self, x):
        return nn.functional.rrelu(self.linear(x), 0.1, 0.5, training=True).sin() + x


class Last(Layer):
    def forward(self, x):
        return nn.functional.rrelu(self.linear(x), training=True)


class InPlace(Layer):
    def forward(self, x):
        return nn.functional.rrelu_(self.linear(x), training=True)


class Module(Layer):
    def __init__(self):
        super().__init__()
        self.activation = nn.RReLU(inplace=True)

    def forward(self, x):
        return self.activation(self.linear(x)) * 1


@pytest.mark.parametrize("layer", [First, Middle, Last, InPlace, Module])
def test_rrelu(layer):
    assert_exact(lambda: stack(layer), steps=6)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


@pytest.mark.parametrize(
    "pack",
    [
        lambda y: {"h": [y]},
        Output,
    ],
    ids=["dict", "dataclass"],
)
def test_rrelu_whose_output_is_within_an_object(pack):
    class Packed(Last):
        def forward(self, x):
            return pack(super().forward(x))

    def loss(model, batch):
        x = model.stem(batch)
        for layer in model.layers:
            output = layer(x)
            x = output["h"][0] if isinstance(output, dict) else output.hidden
        return x.square().mean()

    assert_exact(lambda: stack(Packed, loss), steps=6)


def test_rrelu_whose_gradient_leaves_by_a_state_alone():
    class Stored(Layer):
        def forward(self, x):
            self.stored = nn.functional.rrelu(self.linear(x), training=True)
            return x * 1.0

    def loss(model, batch):
        return model(batch).square().mean() + sum(layer.stored.square().mean() for layer in model.layers)

    assert_exact(lambda: stack(Stored, loss), steps=6)


def test_rrelu_after_a_warm_up():
    class Late(Layer):
        steps = 0

        def forward(self, x):
            self.steps += 1
            x = self.linear(x)
            return nn.functional.rrelu(x, training=True) if self.steps > 3 else nn.functional.relu(x)

    assert_exact_or_named(lambda: stack(Late), steps=7)


def test_rrelu_in_training_after_evaluation():
    class Late(Module):
        steps = 0

        def forward(self, x):
            self.steps += 1
            self.activation.train(self.steps > 3)
            return super().forward(x)

    assert_exact_or_named(lambda: stack(Late), steps=8)


# ---------------------------------------------------------------- custom functions


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x @ weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx, grad):
        shapes = [saved.shape for saved in ctx.saved_tensors]
        x, weight, product = ctx.saved_tensors
        assert shapes == [x.shape, weight.shape, product.shape]
        grad = grad * (1 - torch.tanh(product) ** 2)
        return grad @ weight.T, x.T @ grad


class KeepsInContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = 0.5 if x.sum() > 0 else 2.0
        ctx.mask = x > 0
        return x * ctx.factor * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor * ctx.mask


class SavesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class ChangesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


@pytest.mark.parametrize(
    "apply",
    [
        lambda self, x: ReadsTwice.apply(x, self.linear.weight),
        lambda self, x: KeepsInContext.apply(torch.tanh(self.linear(x))),
        lambda self, x: SavesNothing.apply(torch.tanh(self.linear(x)) * 4),
        lambda self, x: ChangesInPlace.apply(self.linear(x)),
        lambda self, x: KeepsInContext.apply(x),
    ],
)
def test_functions_of_users(apply):
    class Custom(Layer):
        def forward(self, x):
            return apply(self, x) + x * self.linear.bias

    assert_exact(lambda: stack(Custom), steps=6)


def test_a_function_that_reads_its_saved_tensors_in_two_backward_passes():
    class Custom(Layer):
        def forward(self, x):
            return ReadsTwice.apply(x, self.linear.weight) + x

    def loss(model, batch):
        output = model(batch).square().mean()
        (gradient,) = torch.autograd.grad(output, model.stem.weight, retain_graph=True)
        return output * (1 + gradient.norm())

    assert_exact(lambda: stack(Custom, loss))


# ---------------------------------------------------------------- tails


def test_a_tail_with_side_effects_counts_once():
    class Tail(Layer):
        def __init__(self):
            super().__init__()
            self.calls, self.history = 0, []
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            x = torch.tanh(self.linear(x))
            self.calls += 1
            self.history.append(x.detach().sum().item())
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return x + torch.rand(8)

    assert_exact(lambda: stack(Tail), observe=lambda m: [(layer.calls, layer.history) for layer in m.model.layers])


def test_a_last_operator_that_saves_nothing():
    class Adds(Layer):
        def forward(self, x):
            x = torch.tanh(self.linear(x))
            return (nn.functional.dropout(x, 0.2) + x).view(8, 4).T.reshape(4, 8)

    assert_exact(lambda: stack(Adds))


def test_a_layer_of_which_nothing_is_saved():
    class Shifts(Layer):
        def __init__(self):
            super().__init__()
            self.shift, self.calls = nn.Parameter(torch.zeros(8)), 0

        def forward(self, x):
            self.calls += 1
            return x + self.shift

    def make():
        return stack(lambda: Shifts() if torch.rand(()) < 0.5 else Layer(), count=6)

    assert_exact(make, observe=lambda m: [getattr(layer, "calls", None) for layer in m.model.layers])


def test_a_batch_norm_at_the_end():
    class Ends(Layer):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(torch.tanh(self.linear(x)))

    assert_exact(lambda: stack(Ends))
