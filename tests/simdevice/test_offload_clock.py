"""How long a step takes with the engine, on the device's clock: exact, and the same in every schedule."""

import backend
import pytest
import torch
from offloading import Offloaded
from scenarios import DEVICE
from torch import nn

import lightning_ckpt.offload.planner as planner

pytestmark = pytest.mark.usefixtures("sim")

NBYTES = 4 * 1024


class _Work(torch.autograd.Function):
    """Saves its input; takes one second in forward and two in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        backend.clock.spend(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        backend.clock.spend(2.0)
        return gradient + 0 * x


class Layer(nn.Module):
    """A layer of one second."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()  # a layer has parts, or it would not be found

    def forward(self, x):
        return _Work.apply(self.inner(x))


class Chain:
    """Equal layers, trained with an engine.

    Args:
        layers: how many.
        options: those of the engine.

    Attributes:
        ratio: time of the last step, relative to compute alone.
        resident: saved activations on the device after its forward, in layers.
    """

    def __init__(self, layers, **options):
        self.run = Offloaded(**options)
        self.engine = self.run.engine
        self._model = nn.Sequential(*(Layer() for _ in range(layers)))
        self.run.model(self._model)
        self._leaf = torch.zeros(NBYTES // 4, device=DEVICE, requires_grad=True)

    def train(self, x, steps=6):
        """Some steps, on a link that takes `x` seconds per layer."""
        backend.clock.configure(out_bytes_per_s=NBYTES / x, in_bytes_per_s=NBYTES / x)
        for _ in range(steps):
            torch.accelerator.synchronize()
            start = backend.clock.now()
            with self.run.forward():
                loss = self._model(self._leaf * 1).sum()
            self.resident = self.engine.resident_bytes / NBYTES
            loss.backward()
            self.run.step_done()
            del loss
            torch.accelerator.synchronize()
            self.ratio = (backend.clock.now() - start) / (3 * len(self._model))
        return self


@pytest.mark.parametrize("layers", [8, 16, 32, 48])
@pytest.mark.parametrize("x", [0.25, 0.5, 1, 1.5, 2, 4])
def test_moving_everything_takes_the_time_of_the_link_and_no_more(layers, x):
    chain = Chain(layers, move="all").train(x)
    floor = (max(1, x) + max(2, x)) / 3
    assert chain.ratio <= 1.03 * floor
    assert chain.resident <= 3  # the last layer, and two under way


@pytest.mark.parametrize("layers", [8, 16, 32, 48])
@pytest.mark.parametrize("x", [0.25, 0.5, 1, 1.5, 2, 4])
def test_moving_what_the_link_hides_takes_no_time(layers, x):
    chain = Chain(layers, move="hidden").train(x)
    assert chain.ratio <= 1.03
    if x <= 1:
        assert chain.resident <= 3
    else:
        assert chain.resident <= layers * (1 - 1 / x) + 3


@pytest.mark.parametrize(("policy", "seed"), [("eager", 0), ("copy_first", 0), ("random", 1), ("random", 2)])
@pytest.mark.parametrize("move", ["all", "hidden"])
def test_the_time_does_not_depend_on_the_schedule(policy, seed, move):
    expected = Chain(12, move=move).train(1.5).ratio
    backend.configure(policy, seed)
    assert Chain(12, move=move).train(1.5).ratio == pytest.approx(expected, abs=1e-9)


def test_waits_are_reported_as_the_device_had_them():
    chain = Chain(12, move="all").train(4, steps=5)
    chain.engine.take_statistics()
    chain.train(4, steps=1)
    metrics = chain.engine.take_statistics().figures()
    assert metrics["forward_wait_ms"] > 1000
    assert metrics["backward_wait_ms"] > 1000
    waited = (metrics["forward_wait_ms"] + metrics["backward_wait_ms"]) / 1e3
    assert waited == pytest.approx((chain.ratio - 1) * 36)


def test_layers_stay_only_as_far_as_the_device_has_room():
    plenty = Chain(16, move="hidden").train(4)
    assert plenty.engine.staying
    assert "of the activations stay on the device" in plenty.run.said[0]
    backend.set_limit(torch.accelerator.memory_reserved() + 8 * NBYTES)
    tight = Chain(16, move="hidden").train(4)
    assert len(tight.engine.staying) < len(plenty.engine.staying)


def test_the_plan_follows_a_link_that_changes(monkeypatch):
    monkeypatch.setattr(planner, "_PLAN_STEPS", 3)
    chain = Chain(12, move="hidden").train(0.5)
    assert not chain.engine.staying
    assert chain.train(3, steps=8).ratio <= 1.03
    staying = len(chain.engine.staying)
    assert staying > 4
    chain.train(0.5, steps=8)
    assert not chain.engine.staying
