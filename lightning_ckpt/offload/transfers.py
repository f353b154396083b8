"""Copies between device and host on two streams of their own, and everything that has to wait for something else.

The host never waits, and no memory is handed from one stream to another: what the device's allocator gives out belongs
to the stream that computes, which waits for a copy before memory under that copy is given up. Four waits order
everything. A copy out waits until its bytes are computed; device memory is given up once they have left; a copy back
waits until its target may be written; and compute waits until it has arrived. What else has to be in order follows:
host memory is used again only after compute has waited for the copy that read it, and the next copy out waits for
compute.
All waits go through `Transfers.wait`, so that a test can leave one out.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_ckpt.offload.device import current_stream
from lightning_ckpt.offload.host_memory import Region
from lightning_ckpt.offload.records import Record, flat_bytes


class Flight:
    """Storages on their way to the host.

    Attributes:
        stream: the stream that computed them, to whose memory they belong.
        nbytes: device memory that is given up once they have left.
        copied: bytes that are copied.
        started: recorded before the copies, if they are timed.
        left: recorded behind the copies.
        overtaken: bytes of the groups whose backward has begun since nobody needs it any more.
    """

    def __init__(self, records: Sequence[Record], stream: torch.Stream) -> None:
        self.stream = stream
        self.nbytes = 0
        self.copied = 0
        self.started: torch.Event | None = None
        self.left: torch.Event
        self.overtaken = 0
        self._records = records
        self._sources: list[torch.UntypedStorage] = []  # alive until they have left, whatever autograd drops

    def add(self, record: Record, source: torch.UntypedStorage) -> None:
        """The bytes of a record, which are in `source`, leave with it."""
        self.nbytes += record.nbytes
        self.copied += record.end - record.start
        self._sources.append(source)

    def is_needed(self) -> bool:
        """Whether backward may still ask for one of them."""
        return any(record.holder() is not None for record in self._records)

    def forget_sources(self) -> None:
        """Give the device memory up."""
        for record in self._records:
            record.source = None
        self._sources.clear()


class Load:
    """Storages on their way back.

    Attributes:
        stream: the stream that will compute with them, to whose memory they belong.
        copied: bytes that are copied.
        started: recorded before the copies, if they are timed.
        arrived: recorded behind the copies.
        awaited: whether the stream has been told to wait for them.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream
        self.copied = 0
        self.started: torch.Event | None = None
        self.arrived: torch.Event
        self.awaited = False


class Transfers:
    """The two copy streams of one device.

    Args:
        device: an accelerator.

    Attributes:
        timed: whether copies are timed.
        waits: a pair of events around every wait of a stream that computes, as far as it had something to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timed = False
        self.waits: list[tuple[torch.Event, torch.Event]] = []
        self._out = torch.Stream(device=device)
        self._into = torch.Stream(device=device)

    def wait(self, stream: torch.Stream, event: torch.Event, reason: str) -> None:
        """Hold `stream`, on the device, until `event` has passed.

        Args:
            stream: the one that waits.
            event: what it waits for.
            reason: what has to be true first: `computed` (before a copy out), `left` (before device memory is given
                up), `allocated` (before a copy back) or `arrived` (before it is computed with).
        """
        stream.wait_event(event)

    def has_passed(self, event: torch.Event) -> bool:
        """Whether the host can see that `event` has passed: whatever it queues from now on comes after it."""
        return event.query()

    def copy_out(self, records: Sequence[Record], stream: torch.Stream) -> Flight:
        """Copy the bytes of `records`, which `stream` computes, into their regions."""
        flight = Flight(records, stream)
        self.wait(self._out, stream.record_event(), "computed")
        flight.started = self.mark(self._out) if self.timed else None
        with self._out:
            for record in records:
                assert record.source is not None
                assert record.region is not None
                flight.add(record, record.source)
                for piece, part in _pieces(record.region, flat_bytes(record.source, record.start, record.end)):
                    piece.copy_(part, non_blocking=True)
        flight.left = self.mark(self._out) if self.timed else self._out.record_event()
        return flight

    def retire(self, flight: Flight) -> None:
        """Give up the device memory of a flight, once it has left."""
        self._hold(flight.stream, flight.left, "left")
        flight.forget_sources()

    def copy_in(self, records: Sequence[Record], stream: torch.Stream) -> Load:
        """Bring the bytes of `records` back, into memory of `stream`."""
        load = Load(stream)
        # In the backward of a custom function another stream may be the current one.
        with nullcontext() if current_stream(self.device.index) == stream else stream:
            sizes = [record.end - record.start for record in records]
            targets = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        self.wait(self._into, stream.record_event(), "allocated")
        load.started = self.mark(self._into) if self.timed else None
        with self._into:
            for record, target in zip(records, targets, strict=True):
                assert record.region is not None
                for piece, part in _pieces(record.region, target):
                    part.copy_(piece, non_blocking=True)
                record.loaded = target
                record.load = load
                load.copied += target.numel()
        load.arrived = self.mark(self._into) if self.timed else self._into.record_event()
        return load

    def await_load(self, load: Load) -> None:
        """Hold the stream that computes until the load has arrived, and the current one, should that be another."""
        if not load.awaited:
            load.awaited = True
            self._hold(load.stream, load.arrived, "arrived")
        stream = current_stream(self.device.index)
        if stream != load.stream:
            self.wait(stream, load.arrived, "arrived")

    def give_up(self, record: Record) -> None:
        """Give up what was brought back for `record`, used or not."""
        if record.load is not None:  # if nobody used it, its copy may still be writing
            self.await_load(record.load)
        record.loaded = record.load = None

    def mark(self, stream: torch.Stream) -> torch.Event:
        """An event at the end of what is queued on `stream`, which knows the time when it passes."""
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(stream)
        return event

    def _hold(self, stream: torch.Stream, event: torch.Event, reason: str) -> None:
        if self.has_passed(event):
            return
        before = self.mark(stream)
        self.wait(stream, event, reason)
        self.waits.append((before, self.mark(stream)))


def _pieces(region: Region, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if len(region.pieces) == 1:
        return ((region.pieces[0], flat),)
    return zip(region.pieces, flat.split([piece.numel() for piece in region.pieces]), strict=True)
