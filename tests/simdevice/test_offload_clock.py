"""How long a step takes with the engine, on the device's clock: exact, and the same in every schedule."""

import backend
import pytest
import torch
from offloading import Offloaded
from scenarios import DEVICE
from torch import nn

import lightning_ckpt.offload.planner as planner
from lightning_ckpt.offload.outbound import part_bytes
from lightning_ckpt.planning.solver import Chain as Costs
from lightning_ckpt.planning.solver import Choice, Link, cost

pytestmark = pytest.mark.usefixtures("sim")

NBYTES = 4 * 1024


class Work(torch.autograd.Function):
    """Saves its input; takes some time in forward and twice as much in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.save_for_backward(x)
        ctx.seconds = seconds
        backend.clock.spend(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        backend.clock.spend(2 * ctx.seconds)
        return gradient + 0 * x, None


class Layer(nn.Module):
    """A layer of one second, which saves something so many times."""

    def __init__(self, saves=1):
        super().__init__()
        self.inner = nn.Identity()  # a layer has parts, or it would not be found
        self._saves = saves

    def forward(self, x):
        x = self.inner(x)
        for _ in range(self._saves):
            x = Work.apply(x, 1 / self._saves)
        return x


class Chain:
    """Equal layers, trained with an engine.

    Args:
        layers: how many.
        saves: how many times a layer saves something.
        nbytes: what it saves each time.
        options: those of the engine.

    Attributes:
        ratio: time of the last step, relative to compute alone.
        resident: saved activations on the device after its forward, in layers.
    """

    def __init__(self, layers, saves=1, nbytes=NBYTES, **options):
        self.run = Offloaded(**options)
        self.engine = self.run.engine
        self._model = nn.Sequential(*(Layer(saves) for _ in range(layers)))
        self.run.model(self._model)
        self._leaf = torch.zeros(nbytes // 4, device=DEVICE, requires_grad=True)
        self._of_a_layer = saves * nbytes

    def train(self, x, steps=6):
        """Some steps, on a link that takes `x` seconds per layer."""
        rate = self._of_a_layer / x
        backend.clock.configure(out_bytes_per_s=rate, in_bytes_per_s=rate)
        for _ in range(steps):
            torch.accelerator.synchronize()
            start = backend.clock.now()
            with self.run.forward():
                loss = self._model(self._leaf * 1).sum()
            self.resident = self.engine.resident_bytes / self._of_a_layer
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


@pytest.mark.parametrize("x", [0.3, 0.9, 1.5, 4])
@pytest.mark.parametrize("windows", [0.5, 1, 2])
@pytest.mark.parametrize(("saves", "nbytes"), [(8, 2**20), (8, 2**19), (2, 2**22), (8, 2**17), (1, 2**18)])
def test_waits_in_forward_are_those_that_plans_foresee(saves, nbytes, windows, x):
    """Copies of large layers start while they compute; small layers travel whole."""
    layers, moved = 10, saves * nbytes
    part = min(moved, part_bytes(layers * moved))
    inflight = max(part, int(windows * moved))
    chain = Chain(layers, saves, nbytes, move="all", keep_last=0, max_inflight_bytes=inflight).train(x)
    chain.engine.take_statistics()
    seen = chain.train(x, steps=1).engine.take_statistics().figures()["forward_wait_ms"] / 1e3

    link = Link(moved / x, inflight, 0, 10**12, part)
    costs = Costs(0, [{"offload": Choice(0, 0, 0, moved)}] * layers, [10**9] * layers, 0, 0, link)
    planned = cost(costs, ["offload"] * layers) / 1e9
    at_once = -(-part // nbytes) * nbytes / moved * x  # a copy is waited for as a whole
    assert planned <= seen + 1e-6
    assert seen <= planned + (1.01 * at_once if planned else 0)


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
