"""Host memory for offloaded activations: few large pinned slabs, cut into records by best fit.

Pinning memory costs milliseconds and a device synchronisation, and PyTorch's pinned allocator rounds each request up
to a power of two. So memory is pinned in slabs that are powers of two, only when the free space does not suffice, and
kept.
"""

from bisect import bisect_left, insort
from collections.abc import Callable

import torch
from torch import Tensor

_CACHED_VIEWS = 8192  # steps repeat, and a view costs as much as finding room for it
GRANULE = 4096  # bytes; records begin and end on multiples of it
_GRANULE_BITS = GRANULE.bit_length() - 1
_START_BITS = 44  # of a hole's key, below its size; in granules, so 64 PiB of slabs
_START_MASK = (1 << _START_BITS) - 1


class _Holes:
    """The free space of equal slabs, which lie end to end in one range of numbers. Everything is in granules."""

    def __init__(self, per_slab: int) -> None:
        self.free = 0
        self.closed = False  # the slabs are gone; what is put back here is of no use any more
        self.end = 0  # of the last slab
        self._per_slab = per_slab
        self._inside_slab = per_slab - 1  # mask: 0 on the border of a slab, which no hole and no span crosses
        self._by_size: list[int] = []  # size << _START_BITS | start, sorted
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def add_slab(self) -> None:
        self.end += self._per_slab
        self.put(self.end - self._per_slab, self._per_slab)

    def cut(self, size: int) -> list[tuple[int, int]]:
        """Spans (start, size) that add up to `size`, which is at most `free`; as few as possible.

        The smallest hole that is large enough, the one with the lowest start if there are several. While no hole is
        large enough, the whole of the largest, so the span that is left over is the only one that can be small as long
        as there are large holes.
        """
        by_size, size_at, start_of_end = self._by_size, self._size_at, self._start_of_end
        self.free -= size
        spans = []
        while size:
            index = bisect_left(by_size, size << _START_BITS)
            if index == len(by_size):
                largest = by_size[-1] >> _START_BITS
                index = bisect_left(by_size, largest << _START_BITS)
            key = by_size.pop(index)
            start, hole = key & _START_MASK, key >> _START_BITS
            del size_at[start]
            if hole > size:
                rest = hole - size
                size_at[start + size] = rest
                start_of_end[start + hole] = start + size
                insort(by_size, rest << _START_BITS | start + size)
                spans.append((start, size))
                return spans
            del start_of_end[start + hole]
            spans.append((start, hole))
            size -= hole
        return spans

    def put(self, start: int, size: int) -> None:
        """A span is free again: it becomes one hole with its neighbours in the slab."""
        by_size, size_at, start_of_end = self._by_size, self._size_at, self._start_of_end
        self.free += size
        end = start + size
        if end in size_at and end & self._inside_slab:
            behind = size_at.pop(end)
            del by_size[bisect_left(by_size, behind << _START_BITS | end)]
            end += behind
        if start in start_of_end and start & self._inside_slab:
            before = start_of_end.pop(start)
            del by_size[bisect_left(by_size, size_at[before] << _START_BITS | before)]
            start = before
        size_at[start] = end - start
        start_of_end[end] = start
        insort(by_size, (end - start) << _START_BITS | start)


class Region:
    """Room for one record in host memory. `HostMemory.take` makes it, `HostMemory.give_back` ends it.

    Attributes:
        nbytes: bytes of the record.
        pieces: one-dimensional uint8 tensors on the CPU, to be filled in this order. Their lengths add up to exactly
            `nbytes`; usually there is one. All but the last are a multiple of 4 KiB long, so no element is cut in two.
    """

    __slots__ = ("_holes", "_spans", "nbytes", "pieces")

    def __init__(self, nbytes: int, pieces: list[Tensor], spans: list[tuple[int, int]], holes: _Holes) -> None:
        self.nbytes = nbytes
        self.pieces = pieces
        self._spans: list[tuple[int, int]] | None = spans  # None once given back
        self._holes = holes  # where the spans belong


class HostMemory:
    """Hands out host memory for records of any size, pinned if possible. Not thread-safe: the caller holds a lock.

    A slab is allocated only when the free bytes do not suffice, and kept until `close`. So with every record rounded up
    to 4 KiB, `locked_bytes` is always less than the most bytes that were out at once plus one slab, whatever the sizes
    and their order; and steps that stay under an earlier maximum allocate nothing. The price: a record is split where
    no hole is large enough for it. Pieces are as large as the holes allow, so under 1 MiB only at the end of a record,
    unless the holes of 1 MiB and more do not suffice.

    Args:
        budget: the most bytes of slabs, or None for no limit. Only whole slabs count: with less than `slab_bytes`,
            every `take` gives None.
        slab_bytes: size of a slab in bytes, a power of two and at least 4 KiB. Larger slabs mean fewer allocations and
            fewer pieces; on average, half a slab stays unused.
        pin: pin the slabs, which copies need to be fast and asynchronous.
        on_pageable: called once with a message for the user if pinning fails. This and all later slabs are then
            ordinary (pageable) memory.

    Attributes:
        booked_bytes: bytes of the records that are out now.
        peak_booked_bytes: the most that `booked_bytes` has been.
        locked_bytes: bytes of the slabs.
        allocations: slabs allocated so far.
        pinned: whether slabs are pinned; False once pinning has failed.

    Raises:
        ValueError: if `budget` is negative or `slab_bytes` no power of two of at least 4 KiB.

    Example::

        memory = HostMemory(budget=parse_bytes("8GiB"), on_pageable=warnings.warn)
        flat = activation.detach().flatten().view(torch.uint8)
        region = memory.take(flat.numel())
        if region is not None:
            for piece, part in zip(region.pieces, flat.split([len(piece) for piece in region.pieces])):
                piece.copy_(part, non_blocking=True)
            ...
            memory.give_back(region)
    """

    def __init__(
        self,
        budget: int | None,
        slab_bytes: int = 64 << 20,
        pin: bool = True,
        on_pageable: Callable[[str], None] | None = None,
    ) -> None:
        if budget is not None and budget < 0:
            raise ValueError(f"the budget is {budget} bytes; give 0 or more, or None for no limit")
        if slab_bytes < GRANULE or slab_bytes & (slab_bytes - 1):
            raise ValueError(f"slab_bytes is {slab_bytes}; give a power of two of at least {GRANULE}")
        self.booked_bytes = 0
        self.peak_booked_bytes = 0
        self.locked_bytes = 0
        self.allocations = 0
        self.pinned = pin
        self._budget = budget
        self._slab_bytes = slab_bytes
        self._slab_bits = slab_bytes.bit_length() - 1
        self._on_pageable = on_pageable
        self._slabs: list[Tensor] = []
        self._cache: dict[tuple[int, int], Tensor] = {}
        self._holes = _Holes(slab_bytes // GRANULE)

    def take(self, nbytes: int) -> Region | None:
        """Room for a record of `nbytes`, or None if the budget or the host's memory does not allow it.

        Raises:
            ValueError: if `nbytes` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"a record of {nbytes} bytes")
        holes = self._holes
        size = (nbytes + GRANULE - 1) >> _GRANULE_BITS
        if size > holes.free and not self._grow(size - holes.free):
            return None
        spans = holes.cut(size)
        region = Region(nbytes, self._views(spans, nbytes), spans, holes)
        self.booked_bytes += nbytes
        if self.booked_bytes > self.peak_booked_bytes:
            self.peak_booked_bytes = self.booked_bytes
        return region

    def give_back(self, region: Region) -> None:
        """The record is no longer needed. After `close`, this does nothing for a region that was taken before.

        Raises:
            ValueError: if the region was given back before, or comes from another `HostMemory`.
        """
        spans, holes = region._spans, self._holes
        if spans is None:
            raise ValueError(f"a region of {region.nbytes} bytes was given back twice")
        if region._holes is not holes:
            if not region._holes.closed:
                raise ValueError(f"a region of {region.nbytes} bytes was given back to another HostMemory than its own")
            region._spans = None
            return
        region._spans = None
        for start, size in spans:
            holes.put(start, size)
        self.booked_bytes -= region.nbytes

    def close(self) -> None:
        """Drop all slabs. The memory of regions that are still out lives as long as one of their pieces.

        PyTorch keeps freed pinned memory for the next allocation of its size. Taking again begins with no slabs.
        """
        self._holes.closed = True
        self._holes = _Holes(self._slab_bytes // GRANULE)
        self._slabs = []
        self._cache.clear()
        self.booked_bytes = self.locked_bytes = 0

    def _views(self, spans: list[tuple[int, int]], nbytes: int) -> list[Tensor]:
        """The bytes of the spans; of the last one, only those that the record fills."""
        slabs, bits, inside, cache = self._slabs, self._slab_bits, self._slab_bytes - 1, self._cache
        views = []
        for start, size in spans:
            address = start << _GRANULE_BITS
            length = min(size << _GRANULE_BITS, nbytes)
            nbytes -= length
            offset = address & inside
            view = cache.get((address, length))
            if view is None:
                view = slabs[address >> bits][offset : offset + length]
                if len(cache) < _CACHED_VIEWS:
                    cache[address, length] = view
            views.append(view)
        return views

    def _grow(self, missing: int) -> bool:
        """Add as few slabs as give `missing` more granules, or none at all if there is no room for them."""
        count = -(-(missing << _GRANULE_BITS) // self._slab_bytes)
        locked = self.locked_bytes + count * self._slab_bytes
        if self._budget is not None and locked > self._budget:
            return False
        slabs = []
        for _ in range(count):
            slab = self._allocate()
            if slab is None:
                return False
            slabs.append(slab)
        for slab in slabs:
            self._slabs.append(slab)
            self._holes.add_slab()
        self.locked_bytes = locked
        return True

    def _allocate(self) -> Tensor | None:
        """A slab, or None if the host has no memory for it."""
        if self.pinned:
            try:
                slab = _empty(self._slab_bytes, pin=True)
            except RuntimeError as error:
                self.pinned = False
                if self._on_pageable is not None:
                    self._on_pageable(_why_pageable(error, self.locked_bytes))
            else:
                self.allocations += 1
                return slab
        try:
            slab = _empty(self._slab_bytes, pin=False)
        except (RuntimeError, MemoryError):
            return None
        self.allocations += 1
        return slab


def _empty(nbytes: int, pin: bool) -> Tensor:
    # The device is named because the default one may be the accelerator. An inference tensor could not be written to
    # outside of inference mode.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)


def _why_pageable(error: RuntimeError, pinned_bytes: int) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return (
        f"Offloaded activations go to pageable host memory, because it could not be pinned: {reason} "
        f"({pinned_bytes / 2**20:.0f} MiB are pinned already). Training goes on with the same results, but copies are "
        "slower and may block. To get pinned memory, raise the limit on locked memory (`ulimit -l unlimited`; for a "
        "container `--ulimit memlock=-1`) and the container's memory limit, or lower `host_budget`."
    )
