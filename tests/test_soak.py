"""Thousands of steps with recomputed layers that keep state: nothing piles up."""

import collections
import gc
import os
import random

import pytest
import torch
from torch import nn

from lightning_ckpt.recompute import attach

WIDTH = 8


class Stateful(nn.Module):
    """Keeps a bit of everything between calls: statistics, a hidden state, a history, an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("average", torch.zeros(5000))
        self.hidden = None
        self.history = collections.deque(maxlen=5)
        self.auxiliary = None
        self.calls = 0

    def forward(self, batch):
        h = batch.pop("h")
        batch["log"].append(len(self.history))
        if random.random() < 0.2:
            batch["h"] = h
            return batch
        self.calls += 1
        hidden = self.linear(self.norm(h)) if self.hidden is None else self.linear(self.norm(h)) + 0.5 * self.hidden
        self.hidden = hidden.detach()
        self.history.append(hidden.detach().mean())
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean())
        self.auxiliary = hidden.square().mean()
        batch["h"] = h + self.dropout(torch.tanh(hidden)) + sum(self.history) + self.average[:WIDTH]
        return batch


def live_tensors():
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture
def _without_leftovers():
    """What earlier tests left is not counted."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("_without_leftovers")
def test_two_thousand_steps_leave_nothing_behind():
    random.seed(0)
    layers = nn.ModuleList([Stateful() for _ in range(3)])
    for i, layer in enumerate(layers):
        attach(layer, f"layers.{i}")
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)

    def forward():
        batch = {"h": torch.randn(4, WIDTH), "log": []}
        for layer in layers:
            batch = layer(batch)
        return batch["h"].square().mean() + sum(layer.auxiliary for layer in layers if layer.auxiliary is not None)

    tensors, memory = {}, {}
    for step in range(1, 2001):
        for layer in layers:
            layer.auxiliary = None
        if step % 7 == 0:
            forward()  # without backward
            for layer in layers:
                layer.auxiliary = None
        loss = forward()
        if loss.requires_grad and step % 11:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step in (200, 2000):
            del loss
            optimizer.zero_grad()  # layers that were left out have no gradients
            for layer in layers:
                layer.auxiliary = None
            tensors[step] = live_tensors()
            if os.path.exists("/proc/self/statm"):
                memory[step] = resident_mib()

    assert all(layer.calls > 1000 for layer in layers)
    assert tensors[2000] == tensors[200]
    if not memory:
        pytest.skip("no /proc/self/statm")
    assert memory[2000] - memory[200] < 4
