"""Records in slabs of host memory: where they lie, how much is locked, and what happens when there is no more."""

import random
import time
import weakref

import hypothesis
import pytest
import torch
from hypothesis import strategies

from lightning_ckpt.offload import host_memory
from lightning_ckpt.offload.host_memory import GRANULE, HostMemory

KIB, MIB = 2**10, 2**20


def rounded(nbytes):
    return -(-nbytes // GRANULE) * GRANULE


class Checked:
    """A pageable `HostMemory` and the regions that are out of it; every take is checked against a plain model."""

    def __init__(self, slab_bytes, budget=None):
        self.memory = HostMemory(budget, slab_bytes, pin=False)
        self.slab_bytes = slab_bytes
        self.budget = budget
        self.live = []
        self.booked = self.peak = 0  # rounded
        self.exact = self.exact_peak = 0

    def holes(self):
        """Free ranges as (length, slab, offset), found from the pieces that are out alone."""
        slabs = [slab.data_ptr() for slab in self.memory._slabs]
        used = [[] for _ in slabs]
        for region in self.live:
            for piece in region.pieces:
                slab = next(i for i, start in enumerate(slabs) if 0 <= piece.data_ptr() - start < self.slab_bytes)
                offset = piece.data_ptr() - slabs[slab]
                used[slab].append((offset, offset + rounded(len(piece))))
        holes = []
        for slab, ranges in enumerate(used):
            end = 0
            for start, stop in [*sorted(ranges), (self.slab_bytes, None)]:
                assert start >= end, "pieces overlap"
                assert start % GRANULE == 0
                if start > end:
                    holes.append((start - end, slab, end))
                end = stop
        return holes

    def take(self, nbytes):
        before, locked = self.holes(), self.memory.locked_bytes
        region = self.memory.take(nbytes)
        slabs = [slab.data_ptr() for slab in self.memory._slabs]
        new = range(locked // self.slab_bytes, len(slabs))
        free = sum(length for length, _, _ in before)
        if region is None:
            missing = -(-(rounded(nbytes) - free) // self.slab_bytes) * self.slab_bytes
            assert missing > 0
            assert locked + missing > self.budget
            assert not new
            return None
        # Slabs come only when the free bytes do not suffice, and no more than needed.
        assert len(new) == max(0, -(-(rounded(nbytes) - free) // self.slab_bytes))
        holes = before + [(self.slab_bytes, slab, 0) for slab in new]
        lengths = [len(piece) for piece in region.pieces]
        assert sum(lengths) == region.nbytes == nbytes
        assert all(length % GRANULE == 0 for length in lengths[:-1])
        fitting = [hole for hole in holes if hole[0] >= rounded(nbytes)]
        if nbytes and fitting:  # best fit, the lowest one
            _, slab, offset = min(fitting)
            assert [piece.data_ptr() for piece in region.pieces] == [slabs[slab] + offset]
        large = sum(length for length, _, _ in holes if length >= MIB)
        if rounded(nbytes) <= large:
            assert all(length >= MIB for length in lengths[:-1])
        assert all(piece.dtype == torch.uint8 and piece.dim() == 1 and piece.is_contiguous() for piece in region.pieces)
        self.live.append(region)
        self.booked += rounded(nbytes)
        self.peak = max(self.peak, self.booked)
        self.exact += nbytes
        self.exact_peak = max(self.exact_peak, self.exact)
        self.check()
        return region

    def give_back(self, index):
        region = self.live.pop(index)
        self.memory.give_back(region)
        self.booked -= rounded(region.nbytes)
        self.exact -= region.nbytes
        self.check()

    def check(self):
        memory = self.memory
        assert memory.booked_bytes == self.exact
        assert memory.peak_booked_bytes == self.exact_peak
        assert memory.locked_bytes == memory.allocations * self.slab_bytes
        assert sum(length for length, _, _ in self.holes()) == memory.locked_bytes - self.booked
        assert memory.locked_bytes < self.peak + self.slab_bytes
        assert self.budget is None or memory.locked_bytes <= self.budget


# ---------------------------------------------------------------- where records lie


sizes = strategies.one_of(
    strategies.integers(0, 64 * KIB),
    strategies.integers(64 * KIB, 9 * MIB),
    strategies.sampled_from([GRANULE, MIB - 1, MIB, MIB + 1, 2 * MIB, 4 * MIB, 4 * MIB + 1]),
)
# A size to take, or where to give one back from.
actions = strategies.lists(strategies.one_of(sizes, sizes, strategies.floats(0, 1, exclude_max=True)), max_size=60)


@hypothesis.given(actions, strategies.sampled_from([64 * KIB, MIB, 4 * MIB]), strategies.sampled_from([None, 24 * MIB]))
@hypothesis.settings(derandomize=True, deadline=None, max_examples=150)
def test_any_takes_and_give_backs(actions, slab_bytes, budget):
    checked = Checked(slab_bytes, budget)
    for action in actions:
        if isinstance(action, int):
            checked.take(action)
        elif checked.live:
            checked.give_back(int(action * len(checked.live)))
    while checked.live:
        checked.give_back(-1)
    assert checked.holes() == [(slab_bytes, slab, 0) for slab in range(checked.memory.allocations)]


@pytest.mark.parametrize("seed", range(3))
def test_a_full_memory_with_changing_records(seed):
    rng = random.Random(seed)
    checked = Checked(16 * MIB, budget=64 * MIB)
    for _ in range(600):
        while checked.take(int(2 ** rng.uniform(12, 24))) is None:
            checked.give_back(rng.randrange(len(checked.live)))
    assert checked.memory.locked_bytes == 64 * MIB


def test_records_keep_their_bytes():
    rng = random.Random(0)
    memory = HostMemory(48 * MIB, 8 * MIB, pin=False)
    live = []
    split = 0
    for count in range(300):
        record = torch.randint(256, (int(2 ** rng.uniform(12, 23.5)),), dtype=torch.uint8)
        while (region := memory.take(len(record))) is None:
            there, kept = live.pop(rng.randrange(len(live)))
            assert torch.equal(torch.cat(there.pieces), kept), count
            memory.give_back(there)
        for piece, part in zip(region.pieces, record.split([len(piece) for piece in region.pieces]), strict=True):
            piece.copy_(part)
        live.append((region, record))
        split += len(region.pieces) > 1
    assert all(torch.equal(torch.cat(region.pieces), record) for region, record in live)
    assert split > 10


def test_a_record_larger_than_a_slab():
    memory = HostMemory(None, 4 * MIB, pin=False)
    region = memory.take(10 * MIB + 1)
    assert [len(piece) for piece in region.pieces] == [4 * MIB, 4 * MIB, 2 * MIB + 1]
    assert memory.allocations == 3


def test_an_empty_record_needs_nothing():
    memory = HostMemory(0, pin=False)
    region = memory.take(0)
    assert region.pieces == []
    memory.give_back(region)
    assert memory.locked_bytes == 0


def test_a_negative_record_is_an_error():
    with pytest.raises(ValueError, match="-1"):
        HostMemory(None).take(-1)


# ---------------------------------------------------------------- how much is locked


def log_uniform(low, high):
    return lambda rng: int(2 ** rng.uniform(low, high))


MIXES = {
    "small": log_uniform(16, 18),
    "medium": log_uniform(16, 24),
    "all": log_uniform(16, 29),
    "large": log_uniform(26, 31),
    "few shapes": lambda rng: rng.choice([256 * KIB, 1536 * KIB, 24 * MIB, 40 * MIB + 64]),
    "just over half a slab": lambda rng: 32 * MIB + rng.choice([1, 4096, 100_000]),
    "just over a slab": lambda rng: 64 * MIB + 1,
    "powers of two and a bit": lambda rng: 2 ** rng.randint(17, 27) + 512,
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_locked_bytes_follow_live_bytes(mix):
    rng = random.Random(0)
    memory = HostMemory(None, pin=False)
    peak = 0
    for _ in range(6):  # every step has other sizes, a part of which outlives it, in any order
        live = []
        for _ in range(rng.randrange(50, 300)):
            live.append(memory.take(mix(rng)))
            peak = max(peak, sum(region.nbytes for region in live))
            assert memory.locked_bytes <= 1.05 * peak + 64 * MIB
            if rng.random() < 0.3:
                memory.give_back(live.pop(rng.randrange(len(live))))
        rng.shuffle(live)
        while live:
            memory.give_back(live.pop())
    assert peak == memory.peak_booked_bytes


def test_a_chequered_memory_is_filled():
    """Every other record is gone, and each of the next is larger than any of their holes."""
    memory = HostMemory(None, 16 * MIB, pin=False)
    old = [memory.take(64 * KIB) for _ in range(2048)]
    for region in old[::2]:
        memory.give_back(region)
    new = [memory.take(128 * KIB) for _ in range(512)]
    assert [len(region.pieces) for region in new] == [2] * 512
    assert memory.locked_bytes == memory.booked_bytes == 128 * MIB


ORDERS = {
    "reverse": lambda count: list(range(count))[::-1],
    "forward": lambda count: list(range(count)),
    "shuffled": lambda count: random.Random(5).sample(range(count), count),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_repeated_step_allocates_once_and_lies_where_it_lay(order):
    rng = random.Random(1)
    records = [MIXES["all" if i % 10 == 0 else "medium"](rng) for i in range(200)]
    memory = HostMemory(None, pin=False)
    places, allocations = [], []
    for _ in range(5):
        regions = [memory.take(nbytes) for nbytes in records]
        places.append([[piece.data_ptr() for piece in region.pieces] for region in regions])
        for i in order(len(regions)):
            memory.give_back(regions[i])
        allocations.append(memory.allocations)
    assert len(set(allocations)) == 1
    assert places[1] == places[2] == places[3] == places[4]


def test_takes_and_give_backs_interleaved_allocate_once():
    """Each step begins before the last one has given everything back."""
    rng = random.Random(2)
    records = [MIXES["medium"](rng) for _ in range(200)]
    memory = HostMemory(None, pin=False)
    allocations, left = [], []
    for _ in range(8):
        regions = []
        for nbytes in records:
            regions.append(memory.take(nbytes))
            if left:
                memory.give_back(left.pop())
        left = regions
        allocations.append(memory.allocations)
    assert len(set(allocations[1:])) == 1


def test_steps_under_an_earlier_maximum_allocate_nothing():
    rng = random.Random(3)
    memory = HostMemory(None, pin=False)
    limit = 700 * MIB
    largest = memory.take(limit)
    memory.give_back(largest)
    allocations = memory.allocations
    live = []
    for _ in range(3000):
        nbytes = MIXES["medium"](rng)
        while memory.booked_bytes + len(live) * GRANULE + rounded(nbytes) > limit:
            memory.give_back(live.pop(rng.randrange(len(live))))
        live.append(memory.take(nbytes))
    assert memory.allocations == allocations
    assert memory.booked_bytes > 600 * MIB


def test_it_is_fast():
    """An order of magnitude above what it takes, so that only a change of complexity is noticed."""
    memory = HostMemory(None, pin=False)
    rng = random.Random(4)
    records = [MIXES["medium"](rng) for _ in range(400)]
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for region in [memory.take(nbytes) for nbytes in records]:
            memory.give_back(region)
        best = min(best, time.perf_counter() - start)
    assert best / len(records) < 50e-6


# ---------------------------------------------------------------- limits


def test_the_budget_holds_and_room_comes_back():
    memory = HostMemory(3 * MIB + MIB // 2, MIB, pin=False)
    first = memory.take(2 * MIB)
    assert memory.take(MIB + 1) is None  # would be a slab beyond the budget
    assert memory.allocations == 2
    assert memory.take(MIB) is not None
    assert memory.take(1) is None
    memory.give_back(first)
    assert memory.take(2 * MIB) is not None
    assert (memory.locked_bytes, memory.booked_bytes, memory.peak_booked_bytes) == (3 * MIB,) * 3


def test_a_budget_below_a_slab_gives_nothing():
    assert HostMemory(MIB - 1, MIB, pin=False).take(1) is None


@pytest.mark.parametrize("arguments", [(-1,), (None, 0), (None, 2048), (None, 3 * MIB), (None, -MIB)])
def test_impossible_settings(arguments):
    with pytest.raises(ValueError, match=r"budget is -1|slab_bytes is -?\d+"):
        HostMemory(*arguments)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_where_nothing_can_be_pinned_memory_is_pageable_and_said_once():
    messages = []
    memory = HostMemory(None, MIB, on_pageable=messages.append)
    assert memory.pinned
    regions = [memory.take(MIB) for _ in range(3)]
    assert not memory.pinned
    assert memory.allocations == 3
    assert not any(piece.is_pinned() for region in regions for piece in region.pieces)
    (message,) = messages
    for part in ("could not be pinned: ", "slower", "block", "ulimit -l", "`host_budget`"):
        assert part in message


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_nobody_needs_to_be_told():
    memory = HostMemory(None, MIB)
    assert memory.take(1) is not None
    assert not memory.pinned


def test_what_was_pinned_stays_when_the_limit_is_reached(monkeypatch):
    asked = []

    def limited(nbytes, pin):
        asked.append(pin)
        if pin and len(asked) > 2:
            raise torch.OutOfMemoryError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "_empty", limited)
    messages = []
    memory = HostMemory(None, MIB, on_pageable=messages.append)
    region = memory.take(4 * MIB)
    assert len(region.pieces) == 4
    assert asked == [True, True, True, False, False]
    assert not memory.pinned
    assert len(messages) == 1
    assert "CUDA error: out of memory (" in messages[0]


def test_memory_that_the_host_does_not_have_counts_as_over_budget():
    memory = HostMemory(None, 2**60, pin=False)
    assert memory.take(1) is None
    assert (memory.locked_bytes, memory.allocations, memory.booked_bytes) == (0, 0, 0)


def test_a_record_that_does_not_fit_leaves_no_slabs_behind(monkeypatch):
    made = []

    def limited(nbytes, pin):
        if len(made) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        slab = torch.empty(nbytes, dtype=torch.uint8)
        made.append(weakref.ref(slab))
        return slab

    monkeypatch.setattr(host_memory, "_empty", limited)
    memory = HostMemory(None, MIB, pin=False)
    kept = memory.take(MIB)
    assert memory.take(5 * MIB) is None
    assert [slab() is None for slab in made] == [False, True, True]
    assert memory.locked_bytes == MIB
    memory.give_back(kept)
    assert memory.take(MIB) is not None


@pytest.mark.parametrize("surroundings", [torch.inference_mode, lambda: torch.device("meta")])
def test_slabs_do_not_depend_on_where_they_are_allocated(surroundings):
    memory = HostMemory(None, MIB, pin=False)
    with surroundings():
        memory.give_back(memory.take(MIB))
    (piece,) = memory.take(KIB).pieces
    piece.fill_(3)
    assert piece.sum() == 3 * KIB


# ---------------------------------------------------------------- give_back and close


def test_giving_back_twice_is_an_error():
    memory = HostMemory(None, MIB, pin=False)
    region = memory.take(10 * KIB)
    memory.give_back(region)
    other = memory.take(10 * KIB)
    with pytest.raises(ValueError, match=r"10240 bytes .* twice"):
        memory.give_back(region)
    assert memory.booked_bytes == other.nbytes


def test_a_region_belongs_to_one_memory():
    memory, other = HostMemory(None, MIB, pin=False), HostMemory(None, MIB, pin=False)
    region = memory.take(10 * KIB)
    with pytest.raises(ValueError, match="another HostMemory"):
        other.give_back(region)
    memory.give_back(region)


def test_close_drops_the_slabs_but_not_what_is_out():
    memory = HostMemory(None, MIB, pin=False)
    out = memory.take(MIB)
    unused = memory.take(MIB)
    out.pieces[0].fill_(7)
    slabs = [weakref.ref(slab) for slab in memory._slabs]
    memory.give_back(unused)
    del unused
    memory.close()
    assert (memory.booked_bytes, memory.locked_bytes, memory.peak_booked_bytes) == (0, 0, 2 * MIB)
    assert [slab() is None for slab in slabs][1]
    assert (out.pieces[0] == 7).all()

    again = memory.take(MIB)
    assert again.pieces[0].data_ptr() != out.pieces[0].data_ptr()
    memory.give_back(out)  # of no consequence any more
    assert memory.booked_bytes == MIB
    with pytest.raises(ValueError, match="twice"):
        memory.give_back(out)
    memory.give_back(again)
    memory.close()
    memory.close()
    assert memory.allocations == 3
