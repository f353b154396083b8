"""A layer, and a comparison of a training with and without the recompute of it."""

import torch
from torch import nn

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute.watch import unwatch, watch
from tests.support import Training, assert_equal, batches, fit


class Replays:
    """Counts replays."""

    count = 0

    def replay_begins(self):
        self.count += 1

    def replay_ends(self):
        pass


def compare(make_layer, make_module=Training, steps=4, data=None, **options):
    """Fit plainly and recomputed; both must be equal. The two layers, plain and recomputed."""
    layers = []

    def make():
        layers.append(make_layer())
        return make_module(nn.Sequential(nn.Linear(8, 8), layers[-1], nn.Linear(8, 8)))

    data = batches(steps) if data is None else data
    plain = fit(make, data)
    replays = Replays()
    watch(replays)
    try:
        got = fit(make, data, [ActivationCheckpointing(layers="model.1", **options)])
    finally:
        unwatch(replays)
    assert_equal(got, plain)
    assert replays.count >= len(got.losses) - 1
    return layers


class Scaled(nn.Module):
    """`tanh(linear(x * scale))` for subclasses that get their scale from somewhere."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def use(self, x, scale):
        return torch.tanh(self.linear(x * scale))
