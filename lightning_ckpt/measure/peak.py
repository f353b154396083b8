"""Peak memory of a batch, phase by phase: asked of the accelerator, counted on the CPU."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_ckpt.measure.counters import PeakCounter
from lightning_ckpt.measure.live import LiveBytes
from lightning_ckpt.measure.sampling import Sample
from lightning_ckpt.measure.saved import SavedBytes
from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.measure.watching import watching


@dataclass(frozen=True)
class BatchMemory:
    """Memory of one batch, in bytes.

    Attributes:
        peaks: the most bytes in use at once, by phase.
        after_forward: bytes in use when backward began, or None if there was no backward.
        peak_reserved: the most bytes that the allocator held at once, or None where there is no such thing.
    """

    peaks: Mapping[str, int]
    after_forward: int | None
    peak_reserved: int | None = None


class PeakMeter(Protocol):
    """Measures one batch after another."""

    @property
    def counts(self) -> bool:
        """Whether there is something to enter around what computes."""

    def begin(self, kind: Hashable, present: Callable[[], Iterable[Tensor]]) -> None:
        """A batch begins. `kind` tells batches apart; `present` gives the tensors that are in memory already."""

    def counting(self) -> AbstractContextManager[object]:
        """Entered around everything that computes; may be entered inside itself."""

    def phase_ends(self, phase: str) -> None:
        """What happened since the last call, or since the beginning, belongs to `phase`."""

    def forward_ends(self) -> None:
        """Backward is about to begin."""

    def end(self, saved: tuple[SavedBytes, ...]) -> BatchMemory | None:
        """Memory of the batch, or None if that is not known. `saved` are its saved activations."""

    def retries(self) -> int:
        """How often the allocator had to free its cache to serve a request, since the process began."""

    def close(self) -> None:
        """Measure no more."""


class AcceleratorPeak:
    """The allocator's own statistics."""

    counts = False

    def __init__(self, device: torch.device) -> None:
        self._counter = PeakCounter(device)
        self._retries = self._counter.take().retries

    def begin(self, kind: Hashable, present: Callable[[], Iterable[Tensor]]) -> None:
        self._retries = self._counter.take().retries
        self._peaks: dict[str, int] = defaultdict(int)
        self._reserved = 0
        self._after_forward: int | None = None
        self._latest: int = 0

    def counting(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def phase_ends(self, phase: str) -> None:
        reading = self._counter.take()
        self._peaks[phase] = max(self._peaks[phase], reading.peak_allocated)
        self._reserved = max(self._reserved, reading.peak_reserved)
        self._latest = reading.allocated
        self._retries = reading.retries

    def forward_ends(self) -> None:
        self._after_forward = max(self._after_forward or 0, self._latest)

    def end(self, saved: tuple[SavedBytes, ...]) -> BatchMemory | None:
        return BatchMemory(dict(self._peaks), self._after_forward, self._reserved)

    def retries(self) -> int:
        return self._retries

    def close(self) -> None:
        self._counter.close()


class CountedPeak:
    """Counts storages on the CPU, in a sample of the batches, since counting slows a batch down (by 7 % and more).

    Batches of one kind (same shapes, same bytes present at the start, same saved activations) have one peak, because
    allocations follow from the shapes.
    """

    def __init__(self) -> None:
        self._sample: Sample[BatchMemory] = Sample()
        self._live: LiveBytes | None = None
        self._entered = False

    def begin(self, kind: Hashable, present: Callable[[], Iterable[Tensor]]) -> None:
        tensors = list(present())
        there = StorageSizes()
        there.add_all(tensors)
        self._live = None
        if self._sample.begin((kind, there.bytes_without())):
            self._live = LiveBytes()
            self._live.adopt(tensors)
            self._peaks: dict[str, int] = defaultdict(int)
            self._after_forward: int | None = None

    @property
    def counts(self) -> bool:
        return self._live is not None and not self._entered

    @contextlib.contextmanager
    def _counting_once(self, live: LiveBytes):  # type: ignore[no-untyped-def]
        self._entered = True
        try:
            with watching(live, self._give_up):
                yield
        finally:
            self._entered = False

    def counting(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._live is None or self._entered else self._counting_once(self._live)

    def phase_ends(self, phase: str) -> None:
        if self._live is not None:
            self._peaks[phase] = max(self._peaks[phase], self._live.take_peak())

    def forward_ends(self) -> None:
        if self._live is not None:
            self._after_forward = max(self._after_forward or 0, self._live.current)

    def _give_up(self) -> None:
        self._live = None

    def end(self, saved: tuple[SavedBytes, ...]) -> BatchMemory | None:
        live, self._live = self._live, None
        memory = None if live is None else BatchMemory(dict(self._peaks), self._after_forward)
        return self._sample.end(saved, memory)

    def retries(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""


def make_peak_meter(device: torch.device) -> PeakMeter | None:
    """The meter for training on `device`, or None where nothing true can be said."""
    if device.type == "cpu":
        return CountedPeak()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    try:
        return AcceleratorPeak(device)
    except (RuntimeError, NotImplementedError, AttributeError):  # a device without memory statistics
        return None
