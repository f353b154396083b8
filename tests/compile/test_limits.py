"""Where compiled code cannot be exact by itself: half precision fused, changed state, compiled backwards, budgets."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import ReplayError
from tests.compile.support import TREATMENTS, Backend, blocks, compile_each, rows, train
from tests.support import Block, Training, assert_equal, fit


def test_layers_that_fall_back_to_eager_are_recomputed_exactly():
    """Beyond its limit of recompilations, PyTorch runs a frame eagerly: our own recompute takes over."""

    def make(backend):
        model = blocks(dropout=0.0)
        compile_each(model[1:], backend, dynamic=False)
        return Training(model)

    data = DataLoader([torch.randn(256 + 32 * i, 16) for i in range(4)], batch_size=None)
    with torch._dynamo.config.patch(recompile_limit=2):
        plain = train(make, [], data)
        got = train(make, [ActivationCheckpointing()], data)
    assert_equal(got.run, plain.run)
    assert max(plain.graphs) == max(got.graphs) == 2
    assert all(a < b / 2 for a, b in zip(got.saved, plain.saved, strict=True))


class Prints(Block):
    """Breaks its graph."""

    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y


def test_a_graph_break_inside_a_recomputed_layer_is_an_error_and_outside_is_none():
    def make(inside):
        stem = Block(16) if inside else Prints(16)
        model = nn.Sequential(stem, *[Prints(16) if inside else Block(16) for _ in range(2)])
        return Training(torch.compile(model, backend=Backend()))

    layers = {"layers": r"model\.[12]"}
    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"),
        pytest.warns(UserWarning, match=r"put `@torch\.compiler\.disable` on its `forward`"),
    ):
        fit(lambda: make(True), rows(), [ActivationCheckpointing(**layers)])
    torch._dynamo.reset()
    plain = fit(lambda: make(False), rows())
    torch._dynamo.reset()
    assert_equal(fit(lambda: make(False), rows(), [ActivationCheckpointing(**layers)]), plain)


class CompiledBackward(Training):
    """Its backward is compiled, whatever its forward is."""

    def backward(self, loss):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()


def test_compiled_layers_under_a_compiled_backward():
    def make(backend):
        model = blocks(1)
        compile_each(model[1:], backend)
        return CompiledBackward(model)

    plain = train(make, [])
    got = train(make, [ActivationCheckpointing(layers=Block)])
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0
    assert_equal(got.run, plain.run)
    assert sum(got.saved) < 0.75 * sum(plain.saved)


def test_a_compiled_backward_of_eager_layers_is_refused():
    with pytest.raises(ReplayError, match=r"'model.1' would .* while compiled autograd .*`layer.compile\(\)`"):
        fit(lambda: CompiledBackward(blocks(1)), rows(), [ActivationCheckpointing(layers=Block)])


def test_a_memory_budget_of_the_compiler_is_refused():
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        with pytest.raises(MisconfigurationException, match=r"memory_budget=0\.5` has the compiler recompute"):
            fit(lambda: Training(blocks()), rows(), [ActivationCheckpointing()])
        fit(lambda: Training(blocks()), rows(), [ActivationCheckpointing(enabled=False)])


@pytest.mark.parametrize(("precision", "emulates"), [("bf16-mixed", False), ("bf16-mixed", True), ("32-true", False)])
def test_rounding_that_fusion_changes_is_said(precision, emulates, recwarn):
    def make():
        model = blocks(1)
        compile_each(model[1:], Backend())
        return Training(model)

    with torch._inductor.config.patch(emulate_precision_casts=emulates):
        fit(make, rows(), [ActivationCheckpointing(layers=Block)], precision=precision)
    said = any("torch._inductor.config.emulate_precision_casts = True" in str(warning.message) for warning in recwarn)
    assert said == (precision == "bf16-mixed" and not emulates)


class Part(nn.Linear):
    """A part of a layer that becomes one graph."""

    def forward(self, x):
        return torch.sigmoid(super().forward(x))


class BrokenPart(Part):
    """A part whose graph ends in the middle; what is between two graphs runs eagerly, under the compiler's eyes."""

    def forward(self, x):
        y = x.exp()
        torch._dynamo.graph_break()
        return super().forward(y)


@pytest.mark.parametrize("part", [Part, BrokenPart, nn.Linear])  # PyTorch's own modules are never compiled alone
def test_a_layer_whose_parts_are_compiled_is_recomputed_around_them(part):
    def make(backend):
        model = blocks(dropout=0.0)
        for layer in model[1:]:
            layer.linear = part(16, 16)
            layer.linear.compile(backend=backend)
        return Training(model)

    plain = train(make, [])
    for treatment in TREATMENTS.values():
        got = train(make, [ActivationCheckpointing(layers=Block, **treatment)])
        assert_equal(got.run, plain.run)
        assert got.graphs == plain.graphs
        assert got.breaks == plain.breaks
