"""Memory and time of one optimizer step after another."""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt.measure.clock import make_clock
from lightning_ckpt.measure.flops import FlopMeter, Flops
from lightning_ckpt.measure.host import ResidentMemory
from lightning_ckpt.measure.peak import BatchMemory, make_peak_meter
from lightning_ckpt.measure.phases import Phases
from lightning_ckpt.measure.saved import SavedBytes, saved_bytes
from lightning_ckpt.measure.work import Work

MONITOR = "monitor"  # the phase of what measuring costs itself


@dataclass
class StepRecord:
    """What was measured in one optimizer step, one entry per micro-batch in every list.

    Attributes:
        phases: times; those of `data`, `forward`, `backward` and `optimizer` exclude each other, `recompute` is a part
            of `backward`, and `step` is the whole: data, and from the first phase of a micro-batch to its last.
        saved: saved activations, for each backward.
        memory: memory of each micro-batch, None where it is not known.
        flops: floating-point operations of each micro-batch, None where they are not known.
        work: what each micro-batch held.
        planned_bytes: what a memory plan says the peak will be; None without one.
        retries: how often the allocator had to free its cache to serve a request since the last record.
        process_bytes: memory of the process at the end, on the CPU; None where it cannot be told.
        end: mark of the clock at the end.
    """

    phases: Phases
    saved: list[SavedBytes] = field(default_factory=list)
    memory: list[BatchMemory | None] = field(default_factory=list)
    flops: list[Flops | None] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    planned_bytes: int | None = None
    retries: int = 0
    process_bytes: int | None = None
    end: Any = None

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes in use at once, None where that is not known of every micro-batch."""
        known = [memory for memory in self.memory if memory is not None]
        if not known or len(known) < len(self.memory):
            return None
        return max((peak for memory in known for peak in memory.peaks.values()), default=0)


class StepMeter:
    """Measures optimizer steps on one device; between `step_ends` and the next `begin` it costs nothing.

    A watcher of replays (`recompute.watch`).

    Args:
        device: where the model trains.
        count_flops: whether to count floating-point operations. Default: no.
    """

    def __init__(self, device: torch.device, count_flops: bool = False) -> None:
        self.clock = make_clock(device)
        self._process = ResidentMemory() if device.type == "cpu" else None
        self._peak = make_peak_meter(device)
        self._flops = FlopMeter() if count_flops else None
        self._meters = [meter for meter in (self._peak, self._flops) if meter is not None]
        self._record: StepRecord | None = None
        self._fetch: tuple[Any, Any] | None = None  # marks around the last one outside of a micro-batch
        self._in_batch = False
        self._inner_fetch: AbstractContextManager[None] | None = None
        self._replays: list[Any] = []
        self._retries = 0 if self._peak is None else self._peak.retries()

    @property
    def is_measuring(self) -> bool:
        """Whether a step is being measured."""
        return self._record is not None

    def begin(self) -> None:
        """Measure the step that begins, or goes on."""
        if self._record is None:
            self._record = StepRecord(Phases(self.clock, self._phase_ends))

    def drop(self) -> None:
        """Forget the step: it has been broken off."""
        self._record = self._fetch = self._inner_fetch = None
        self._in_batch = False
        self._replays.clear()

    def close(self) -> None:
        """Measure no more."""
        self.drop()
        if self._peak is not None:
            self._peak.close()

    # ---------------------------------------------------------------- data

    def fetch_begins(self) -> None:
        """Data is waited for: for the next micro-batch, or inside this one."""
        if self._record is None:
            return
        if self._in_batch:
            self._inner_fetch = self._record.phases.phase("data")
            self._inner_fetch.__enter__()
            return
        if self._fetch is not None:  # fetched ahead
            self._add_data(*self._fetch)
        mark = self.clock.mark()
        self._fetch = mark, mark

    def fetch_ends(self) -> None:
        """It has been fetched."""
        if self._inner_fetch is not None:
            self._inner_fetch.__exit__(None, None, None)
            self._inner_fetch = None
        elif self._fetch is not None:
            self._fetch = self._fetch[0], self.clock.mark()

    def data_ends(self) -> None:
        """The data of the next micro-batch is ready, on the device."""
        if self._fetch is not None:
            self._add_data(self._fetch[0], self.clock.mark())
            self._fetch = None

    def _add_data(self, start: Any, end: Any) -> None:
        assert self._record is not None
        for name in ("data", "step"):
            self._record.phases.add(name, start, end)

    # ---------------------------------------------------------------- micro-batches

    def batch_begins(
        self, kind: Hashable, parameters: Sequence[Tensor], present: Callable[[], Iterable[Tensor]]
    ) -> None:
        """The next micro-batch begins.

        Args:
            kind: equal for micro-batches of the same shapes that do the same.
            parameters: parameters and buffers, which do not count as saved activations.
            present: gives all tensors that are in memory already, parameters and buffers included.
        """
        record = self._record
        if record is None:
            return
        if self._fetch is not None:  # nobody has said that the data was ready
            self._add_data(*self._fetch)
            self._fetch = None
        self._in_batch = True
        self._parameters = parameters
        self._saved: list[SavedBytes] = []
        kind = kind, len(record.memory)  # the first of a step frees old gradients, a later one adds to new ones
        record.phases.take_stretch()
        if self._peak is not None:
            self._peak.begin(kind, present)
        if self._flops is not None:
            self._flops.begin(kind)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """What runs inside belongs to this phase of the micro-batch, but for phases inside it."""
        if self._record is None or not self._in_batch:
            return contextlib.nullcontext()
        phase = self._record.phases.phase(name)
        counting = [meter.counting() for meter in self._meters if meter.counts]
        return _entered([phase, *counting]) if counting else phase

    def _phase_ends(self, phase: str) -> None:
        if self._peak is not None and self._in_batch:
            self._peak.phase_ends(phase)

    def backward_begins(self, loss: Tensor) -> None:
        """Forward is over, and backward will start at `loss`."""
        if self._record is None or not self._in_batch:
            return
        with self._record.phases.phase(MONITOR):
            if self._peak is not None:
                self._peak.forward_ends()
            self._saved.append(saved_bytes([loss], self._parameters))

    def batch_ends(self, work: Work) -> None:
        """The micro-batch is over.

        Args:
            work: what it held.
        """
        record = self._record
        if record is None or not self._in_batch:
            return
        self._phase_ends(Phases.REST)
        stretch = record.phases.take_stretch()
        if stretch is not None:
            record.phases.add("step", *stretch)
            record.end = stretch[1]
        record.work.append(work)
        record.saved += self._saved
        seen = tuple(self._saved)
        record.memory.append(None if self._peak is None else self._peak.end(seen))
        if self._flops is not None:
            record.flops.append(self._flops.end(seen))
        self._in_batch = False

    def step_ends(self) -> StepRecord | None:
        """The optimizer step is over: what was measured, or None if it was not measured."""
        record, self._record = self._record, None
        if record is None or record.end is None:
            return None
        if self._peak is not None:
            retries = self._peak.retries()
            record.retries, self._retries = retries - self._retries, retries
        if self._process is not None:
            record.process_bytes = self._process.bytes()
        return record

    # ---------------------------------------------------------------- replays

    def replay_begins(self) -> None:
        """Told by a recomputed layer when it runs again."""
        if not self._replays and self._flops is not None:  # one inside another counts once
            self._flops.replay_begins()
        self._replays.append(None if self._record is None else self.clock.mark())

    def replay_ends(self) -> None:
        """Told by a recomputed layer when its second run is over."""
        since = self._replays.pop()
        if not self._replays and self._record is not None and since is not None:
            self._record.phases.add("recompute", since, self.clock.mark())
            if self._flops is not None:
                self._flops.replay_ends()


@contextlib.contextmanager
def _entered(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
