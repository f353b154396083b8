"""The log of accesses: which pairs are unordered, whatever the values."""

import pytest
import torch
from torch import accelerator

pytestmark = pytest.mark.expect_race

SIZE = 1000


class Bytes:
    """Memory of the device with streams that read and write parts of it, and nothing that orders them."""

    def __init__(self, streams):
        self.memory = torch.zeros(SIZE, dtype=torch.uint8, device="sim")
        self.streams = [torch.Stream() for _ in range(streams)]
        self._hosts = [torch.zeros(2, SIZE, dtype=torch.uint8).pin_memory() for _ in range(streams)]
        accelerator.synchronize()

    def write(self, stream, begin=0, end=SIZE):
        with self.streams[stream]:
            self.memory[begin:end].copy_(self._hosts[stream][0, begin:end], non_blocking=True)

    def read(self, stream, begin=0, end=SIZE):
        with self.streams[stream]:
            self._hosts[stream][1, begin:end].copy_(self.memory[begin:end], non_blocking=True)

    def wait(self, later, earlier):
        self.streams[later].wait_stream(self.streams[earlier])


def pairs(sim):
    """Which streams race, and how: ("RAW", later, earlier)."""
    found = []
    for race in sim.races():
        words = race.replace(",", "").split()
        later, earlier = (words[i + 1] for i, word in enumerate(words) if word == "stream")
        found.append((words[0], int(later), int(earlier)))
    return found


def expected(memory, *races):
    return [
        (hazard, memory.streams[later].stream_id, memory.streams[earlier].stream_id) for hazard, later, earlier in races
    ]


@pytest.mark.parametrize(
    ("first", "second", "hazard"), [("write", "read", "RAW"), ("read", "write", "WAR"), ("write", "write", "WAW")]
)
def test_hazards(sim, first, second, hazard):
    memory = Bytes(2)
    getattr(memory, first)(0)
    getattr(memory, second)(1)
    assert pairs(sim) == expected(memory, (hazard, 1, 0))


def test_reads_do_not_conflict(sim):
    memory = Bytes(2)
    memory.read(0)
    memory.read(1)
    assert not sim.races()


def test_a_wait_orders(sim):
    memory = Bytes(2)
    memory.write(0)
    memory.wait(1, 0)
    memory.write(1)
    assert not sim.races()


def test_a_wait_orders_nothing_that_comes_later(sim):
    memory = Bytes(2)
    memory.wait(1, 0)
    memory.write(0)
    memory.write(1)
    assert pairs(sim) == expected(memory, ("WAW", 1, 0))


def test_waits_are_transitive(sim):
    memory = Bytes(3)
    memory.write(0)
    memory.wait(1, 0)
    memory.wait(2, 1)
    memory.read(2)
    assert not sim.races()


def test_a_wait_is_for_the_event_as_it_is(sim):
    """Recording it again orders nothing more; a copy of an event is taken at the call."""
    memory = Bytes(2)
    event = memory.streams[0].record_event()
    memory.streams[1].wait_event(event)
    memory.write(0)
    event.record(memory.streams[0])
    memory.read(1)
    assert pairs(sim) == expected(memory, ("RAW", 1, 0))


def test_an_ordered_read_does_not_hide_a_write(sim):
    memory = Bytes(3)
    memory.write(0)
    memory.wait(1, 0)
    memory.read(1)
    memory.read(2)
    assert pairs(sim) == expected(memory, ("RAW", 2, 0))


def test_an_ordered_read_does_not_hide_a_read(sim):
    memory = Bytes(3)
    memory.read(0)
    memory.wait(1, 0)
    memory.read(1)
    memory.write(2)
    assert ("WAR", memory.streams[2].stream_id, memory.streams[1].stream_id) in pairs(sim)


def test_an_unordered_write_does_not_hide_a_write(sim):
    memory = Bytes(3)
    memory.write(0)
    memory.write(1)
    memory.wait(2, 1)
    memory.read(2)
    assert pairs(sim) == expected(memory, ("WAW", 1, 0), ("RAW", 2, 0))


def test_a_write_only_hides_what_it_covers(sim):
    memory = Bytes(3)
    memory.write(0)
    memory.wait(1, 0)
    memory.write(1, 0, 10)
    memory.read(2, 500, 600)
    assert pairs(sim) == expected(memory, ("RAW", 2, 0))


@pytest.mark.parametrize("how", ["stream", "event", "query", "device", "value", "other stream"])
def test_the_host_orders(sim, how):
    """What the host has waited for comes before whatever it submits after."""
    memory = Bytes(2)
    sim.configure("eager")
    memory.write(0)
    stream = memory.streams[0]
    if how == "stream":
        stream.synchronize()
    elif how == "event":
        stream.record_event().synchronize()
    elif how == "query":
        assert stream.record_event().query()
    elif how == "device":
        accelerator.synchronize()
    elif how == "value":
        with stream:
            memory.memory[0].item()
    else:
        memory.streams[1].synchronize()
    memory.read(1)
    assert bool(sim.races()) == (how == "other stream")


def test_a_pair_is_reported_once(sim):
    memory = Bytes(2)
    for _ in range(3):
        memory.write(0)
        memory.read(1)
    assert sorted(pairs(sim)) == sorted(expected(memory, ("RAW", 1, 0), ("WAR", 0, 1)))
    sim.clear_races()
    assert not sim.races()
    memory.write(0)
    assert pairs(sim) == expected(memory, ("WAR", 0, 1))


def test_staging_reads_on_the_host(sim):
    """A copy from pinned memory that is not contiguous is read by the host, at the call."""
    host = torch.zeros(SIZE, 2, dtype=torch.uint8).pin_memory()
    tensor = torch.ones(SIZE, 2, dtype=torch.uint8, device="sim")
    stream = torch.Stream()
    stream.wait_stream(accelerator.current_stream())
    with stream:
        host.copy_(tensor, non_blocking=True)
    host[:, 0].to("sim", non_blocking=True)
    (race,) = sim.races()
    assert "staging a copy on the host reads memory that copy_D2H" in race
