"""What offload does: sums that go on, and those of one optimizer step."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_ckpt.offload.timeline import Pair, Timeline

_MIB = 2**20
_MOST_WAITS = 4096


@dataclass
class StepStatistics:
    """Sums and maxima over the micro-batches of one optimizer step.

    Attributes:
        out_bytes: bytes copied to the host.
        in_bytes: bytes copied back.
        resident_bytes: saved activations on the device when backward began, of those that are large enough to travel;
            the most of all micro-batches.
        host_bytes: host memory that held activations when backward began, the most of all micro-batches.
        locked_bytes: host memory set aside, used or not.
        late_allocations: times that host memory had to be allocated after the first steps.
        stayed: saved tensors that stayed on the device, by reason.
        stayed_bytes: bytes of large enough storages that stayed on the device, by reason.
        forward_waits: pairs of events around each wait of the device for a copy, in forward; the latest ones, if nobody
            asks for them.
        backward_waits: the same in backward.
        link: bytes per second that the link carries out and in, once that has been measured.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    resident_bytes: int = 0
    host_bytes: int = 0
    locked_bytes: int = 0
    late_allocations: int = 0
    stayed: Counter[str] = field(default_factory=Counter)
    stayed_bytes: Counter[str] = field(default_factory=Counter)
    forward_waits: deque[Pair] = field(default_factory=lambda: deque(maxlen=_MOST_WAITS))
    backward_waits: deque[Pair] = field(default_factory=lambda: deque(maxlen=_MOST_WAITS))
    link: tuple[float, float] | None = None

    def figures(self) -> dict[str, float]:
        """Everything in plain numbers, once the device is through with the step: MiB, ms and counts."""
        return {
            "out_MiB": self.out_bytes / _MIB,
            "in_MiB": self.in_bytes / _MIB,
            "resident_MiB": self.resident_bytes / _MIB,
            "host_MiB": self.host_bytes / _MIB,
            "host_locked_MiB": self.locked_bytes / _MIB,
            "late_allocations": float(self.late_allocations),
            "stayed_last_MiB": self.stayed_bytes["last"] / _MIB,
            "stayed_unhidden_MiB": self.stayed_bytes["not hidden"] / _MIB,
            "stayed_budget_MiB": self.stayed_bytes["host budget"] / _MIB,
            "forward_wait_ms": _milliseconds(self.forward_waits),
            "backward_wait_ms": _milliseconds(self.backward_waits),
        }

    def copy_ms(self) -> float | None:
        """Time that the copies took on the link, by its measured speed; None before that is known."""
        if self.link is None:
            return None
        out_speed, in_speed = self.link
        return (self.out_bytes / out_speed + self.in_bytes / in_speed) * 1e3


def _milliseconds(waits: Iterable[Pair]) -> float:
    return sum((start.elapsed_time(end) for start, end in waits), 0.0)


class Ledger:
    """Where the engine writes down what it does.

    Attributes:
        steps: optimizer steps so far.
        resident_bytes: storages on the device now that are large enough to travel.
        step: the statistics of the current optimizer step.
        noted_waits: waits of the device for copies since somebody has asked for them; None while nobody has.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.resident_bytes = 0
        self.step = StepStatistics()
        self.noted_waits: list[Pair] | None = None
        self._taken_at = 0

    def stays(self, reason: str, nbytes: int = 0) -> None:
        """A tensor stays on the device, with a storage of `nbytes` if that would be large enough to travel."""
        self.step.stayed[reason] += 1
        if nbytes:
            self.step.stayed_bytes[reason] += nbytes

    def turn(self, host_bytes: int, locked_bytes: int) -> None:
        """Backward begins."""
        self.step.resident_bytes = max(self.step.resident_bytes, self.resident_bytes)
        self.step.host_bytes = max(self.step.host_bytes, host_bytes)
        self.step.locked_bytes = locked_bytes

    def note_waits(self, waits: list[Pair], timeline: Timeline | None, in_backward: bool) -> None:
        """Take over the waits of the device for copies."""
        if waits:
            (self.step.backward_waits if in_backward else self.step.forward_waits).extend(waits)
            if self.noted_waits is not None:
                self.noted_waits.extend(waits)
            if timeline is not None:
                for pair in waits:
                    timeline.waited(pair)
            waits.clear()

    def take(self, link: tuple[float, float] | None) -> StepStatistics:
        """The statistics of the step, which is over."""
        self.step.link = link
        taken, self.step = self.step, StepStatistics()
        self._taken_at = self.steps
        return taken

    def describe(self) -> str:
        """What travels in a step and what stays, and why, in a sentence."""
        steps = max(1, self.steps - self._taken_at)
        sizes, counts = self.step.stayed_bytes, self.step.stayed
        stayed = [f"{nbytes / steps / _MIB:.1f} MiB ({reason})" for reason, nbytes in sizes.most_common()]
        stayed += [
            f"{count // steps} tensors ({reason})" for reason, count in counts.most_common() if not sizes[reason]
        ]
        return (
            f"{self.step.out_bytes / steps / _MIB:.1f} MiB travel to the host and "
            f"{self.step.in_bytes / steps / _MIB:.1f} back; on the device stay {', '.join(stayed) or 'none'}"
        )
