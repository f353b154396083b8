"""Leave out one thing the engine does at a time: the device must notice. This tests the tests of the engine."""

import contextlib

import backend
import pytest
import torch
from offloading import Offloaded, train
from scenarios import DEVICE, SCENARIOS, Model, Trained, ids, loss_of, seeded
from schedules import SCHEDULES

from lightning_ckpt.offload.transfers import Transfers

pytestmark = [pytest.mark.usefixtures("sim"), pytest.mark.expect_race]


class WithoutWait(Transfers):
    """Skips the waits for one reason."""

    def __init__(self, reason):
        super().__init__(DEVICE)
        self.reason = reason
        self.skipped = 0

    def has_passed(self, event):
        return False  # as on a device that lags behind; else a wait that is left out may not be missed

    def wait(self, stream, event, reason):
        if reason == self.reason:
            self.skipped += 1
        else:
            super().wait(stream, event, reason)


@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
@pytest.mark.parametrize("reason", ["computed", "left", "allocated", "arrived"])
def test_every_wait_is_needed(reason, policy, seed):
    transfers = WithoutWait(reason)
    with contextlib.suppress(RuntimeError):
        train(SCENARIOS["plain_steps"], Offloaded(transfers=transfers), policy, seed)
    assert transfers.skipped
    assert backend.races()


class EarlyRelease(Transfers):
    """Gives device memory up as soon as its copy is queued."""

    def copy_out(self, records, stream):
        flight = super().copy_out(records, stream)
        flight.forget_sources()
        return flight


@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
def test_device_memory_that_is_given_up_early_is_noticed(policy, seed):
    with contextlib.suppress(RuntimeError):
        train(SCENARIOS["plain_steps"], Offloaded(transfers=EarlyRelease(DEVICE)), policy, seed)
    assert backend.races()


class EarlyRecycling(Transfers):
    """Gives host memory back as soon as it has been read for the first time."""

    engine = None

    def copy_in(self, records, stream):
        load = super().copy_in(records, stream)
        for record in records:
            region, record.region = record.region, None
            self.engine.host.give_back(region)
            record.region = region
        return load


def two_graphs(run):
    """The second forward takes host memory while the first graph still needs its own."""
    model = run.model(seeded(Model))
    with run.forward():
        first = loss_of(model, ids(seed=1))
    torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
    with run.forward():
        second = loss_of(model, ids(seed=2))
    first.backward()
    second.backward()
    run.note_gradients(model)


@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
def test_host_memory_that_is_recycled_early_is_noticed(policy, seed):
    expected = train(two_graphs, Trained())
    assert train(two_graphs, Offloaded(), policy, seed).equals(expected)
    transfers = EarlyRecycling(DEVICE)
    run = Offloaded(transfers=transfers)
    transfers.engine = run.engine
    try:
        train(two_graphs, run, policy, seed)
    except (RuntimeError, ValueError):  # a region that is given back twice
        return
    assert backend.races() or not run.equals(expected)
