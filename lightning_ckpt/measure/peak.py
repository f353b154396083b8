"""Peak memory of a step: asked of the accelerator, counted on the CPU."""

import contextlib
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from lightning_ckpt.measure.live import LiveBytes
from lightning_ckpt.measure.saved import SavedBytes
from lightning_ckpt.measure.storage import StorageSizes


class PeakMeter(Protocol):
    """Measures the peak of one batch after another."""

    def begin(self, kind: Hashable, present: Callable[[], Iterable[Tensor]]) -> None:
        """A batch begins. `kind` tells batches apart; `present` gives the tensors that are there already."""

    def counting(self) -> contextlib.AbstractContextManager[object]:
        """Entered around everything that computes; may be entered inside itself."""

    def end(self, saved: list[SavedBytes]) -> int | None:
        """Peak bytes of the batch, or None if they are not known. `saved` are its saved activations."""


class AcceleratorPeak:
    """`torch.accelerator`'s own statistics: bytes allocated by tensors. Resets the peak at the start of each batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, kind: Hashable, present: Callable[[], Iterable[Tensor]]) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def counting(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def end(self, saved: list[SavedBytes]) -> int | None:
        return torch.accelerator.max_memory_allocated(self._device)


class CountedPeak:
    """Counts storages on the CPU, in few batches only, since counting slows a batch down (by 7 % and more).

    Batches of one kind (same shapes, same bytes present at the start, same saved activations) have one peak, because
    allocations follow from the shapes. So the first `WARM_UP` batches and the first of a new kind are counted and the
    others take the figure of their kind, and every `RECOUNT_EVERY` batches one is counted again. If kinds are too many,
    at most one batch in `BUDGET` is counted beside the first ones, and the peak of the others is not known.
    """

    WARM_UP = 4
    BUDGET = 100
    RECOUNT_EVERY = 200

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[list[SavedBytes], int]] = {}
        self._kind: Hashable = None
        self._live: LiveBytes | None = None
        self._entered = False
        self._batches = self._counted = self._last_counted = 0

    def begin(self, kind: Hashable, present: Callable[[], Iterable[Tensor]]) -> None:
        there = StorageSizes()
        for tensor in present():
            there.add(tensor)
        self._kind = (kind, there.bytes_without())
        self._batches += 1
        wanted = (
            self._batches <= self.WARM_UP  # first batches do things that later ones do not
            or self._kind not in self._known
            or self._batches - self._last_counted >= self.RECOUNT_EVERY
        )
        affordable = self._counted < self.WARM_UP + self._batches // self.BUDGET
        self._live = None
        if wanted and affordable:
            self._counted += 1
            self._last_counted = self._batches
            self._live = LiveBytes()
            self._live.adopt(present())

    @contextlib.contextmanager
    def _counting_once(self, live: LiveBytes):  # type: ignore[no-untyped-def]
        self._entered = True
        try:
            with live:
                yield
        finally:
            self._entered = False

    def counting(self) -> contextlib.AbstractContextManager[object]:
        if self._live is None or self._entered:
            return contextlib.nullcontext()
        return self._counting_once(self._live)

    def end(self, saved: list[SavedBytes]) -> int | None:
        live, self._live = self._live, None
        if not all(item.complete for item in saved):  # compiled code allocates unseen
            return None
        if live is not None:
            self._known[self._kind] = (saved, live.peak)
        known_saved, peak = self._known.get(self._kind, ([], 0))
        return peak if peak and known_saved == saved else None


def make_peak_meter(device: torch.device) -> PeakMeter | None:
    """The meter for training on `device`, or None where nothing true can be said."""
    if device.type == "cpu":
        return CountedPeak()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    try:
        torch.accelerator.max_memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # a device without memory statistics
        return None
    return AcceleratorPeak(device)
