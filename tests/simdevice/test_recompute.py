"""Recompute on an accelerator, where layers are replayed in autograd's thread for the device."""

import threading

import pytest
import torch
from scenarios import DEVICE, SCENARIOS, Trained
from torch import nn

from lightning_ckpt.offload import Boundaries, OffloadEngine, OffloadOptions
from lightning_ckpt.recompute import attach, attached
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.selection.detect import find_layers
from lightning_ckpt.selection.modules import outermost

pytestmark = pytest.mark.usefixtures("sim")
SCHEDULES = [("lazy", 0), ("copy_first", 0), ("random", 1), ("random", 2)]


class Recomputed(Trained):
    """A run in which every layer is recomputed."""

    operators = frozenset()

    def __init__(self, keep=None, **keywords):
        super().__init__(watch=self._attach, **keywords)
        self._keep = keep

    def _attach(self, model):
        for name, layer in outermost(find_layers(model).items()).items():
            if attached(layer) is None:
                attach(layer, name, verify="always", policy=self.operators).keep = self._keep


class RecomputedAndOffloaded(Recomputed):
    """A run in which the inputs of the layers travel as well."""

    def __init__(self):
        self.engine = OffloadEngine(DEVICE, OffloadOptions(move="all", min_bytes=64))
        super().__init__(self.engine.pack, step_done=self.engine.step_done)

    def _attach(self, model):
        super()._attach(model)
        self._boundaries = Boundaries(model, outermost(find_layers(model).items()), self.engine)


class ResultsOffloaded(RecomputedAndOffloaded):
    """A run in which the results of matrix products are kept, and travel like the inputs."""

    operators = resolve_policy("matmul")


RUNS = [
    *((make, *schedule) for make in (Recomputed, RecomputedAndOffloaded) for schedule in SCHEDULES),
    (ResultsOffloaded, "lazy", 0),
    (ResultsOffloaded, "random", 1),
]


@pytest.mark.parametrize(("make", "policy", "seed"), RUNS)
@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {"double_backward", "no_layers", "odd_tensors"}))
def test_recompute_is_exact_on_a_device(sim, name, policy, seed, make):
    def train(run):
        torch.manual_seed(0)
        SCENARIOS[name](run)
        return run

    expected = train(Trained())
    sim.configure(policy, seed)
    run = train(make())
    assert run.equals(expected)
    if make is not Recomputed:
        run.engine.begin()
        assert run.engine.take_statistics().out_bytes > 0
        assert run.engine.host.booked_bytes == run.engine.resident_bytes == 0


class _TakesGradients(nn.Module):
    """Takes gradients through an earlier call of itself while it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, earlier=None):
        y = torch.tanh(self.linear(x))
        if earlier is not None:
            (gradient,) = torch.autograd.grad(earlier.sum(), self.linear.weight, retain_graph=True)
            y = y + gradient.sum()
        return y


def test_a_layer_that_takes_gradients_through_itself_does_not_wait_for_itself():
    layer = _TakesGradients().to(DEVICE)
    x = torch.ones(4, 8, device=DEVICE, requires_grad=True)

    def gradient():
        layer.zero_grad()
        y = layer(x)
        layer(y, y).sum().backward()
        return layer.linear.weight.grad.clone()

    expected = gradient()
    attach(layer, "layer")
    results = []
    thread = threading.Thread(target=lambda: results.append(gradient()), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert torch.equal(results[0], expected)
