"""An accelerator's memory counters, shared: peaks of stretches of time, while others read and reset them too.

The allocator keeps one peak, and whoever resets it takes it away from everybody else. So the functions of `torch._C`
that read and reset it are stood in for meanwhile: what our resets take away from the others is remembered and added to
what they read, until they reset the counter themselves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_Peaks = dict[str, dict[str, int]]  # name -> pool -> bytes or blocks
_TRACKED = ("allocated_bytes", "reserved_bytes")


class Reading(NamedTuple):
    """What the counters say of a stretch of time.

    Attributes:
        peak_allocated: the most bytes that tensors held at once.
        peak_reserved: the most bytes that the allocator held at once.
        allocated: bytes that tensors hold now.
        retries: how often, since the process began, the allocator had to free its cache to serve a request.
    """

    peak_allocated: int
    peak_reserved: int
    allocated: int
    retries: int


class _Shared:
    """The counters of one device."""

    def __init__(self) -> None:
        self.taken: _Peaks = {}  # from the others, by our resets
        self.stretches: dict[PeakCounter, dict[str, int]] = {}  # of ours, as far as the counters were reset in them

    def note(self, statistics: dict[str, Any]) -> None:
        """Remember peaks for all stretches of ours, since the counters are about to be reset."""
        for stretch in self.stretches.values():
            for name in _TRACKED:
                stretch[name] = max(stretch.get(name, 0), statistics[name]["all"]["peak"])

    def take(self, statistics: dict[str, Any]) -> None:
        """Remember what the others will not see any more."""
        for name, pool, values in _with_peaks(statistics):
            taken = self.taken.setdefault(name, {})
            taken[pool] = max(taken.get(pool, 0), values["peak"])

    def give_back(self, statistics: dict[str, Any]) -> dict[str, Any]:
        """What the others would read if we had not reset the counters."""
        for name, pool, values in _with_peaks(statistics):
            values["peak"] = max(values["peak"], self.taken.get(name, {}).get(pool, 0))
        return statistics


def _with_peaks(statistics: dict[str, Any]) -> list[tuple[str, str, dict[str, int]]]:
    return [
        (name, pool, values)
        for name, pools in statistics.items()
        if isinstance(pools, dict)
        for pool, values in pools.items()
        if isinstance(values, dict) and "peak" in values
    ]


class _StandIns:
    """In the place of the functions that read and reset the counters, for all devices of one kind."""

    def __init__(self, device_type: str) -> None:
        pairs = [
            ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
            (f"_{device_type}_memoryStats", f"_{device_type}_resetPeakMemoryStats"),
        ]
        self._pairs = [pair for pair in pairs if all(hasattr(torch._C, name) for name in pair)]
        self._originals: dict[str, Callable[..., Any]] = {}
        self.devices: dict[int, _Shared] = {}

    def install(self) -> None:
        if self._originals:
            return
        for read, reset in self._pairs:
            self._originals |= {name: getattr(torch._C, name) for name in (read, reset)}
            setattr(torch._C, read, self._reader(self._originals[read]))
            setattr(torch._C, reset, self._resetter(self._originals[reset]))

    def read(self, index: int) -> dict[str, Any]:
        statistics: dict[str, Any] = self._originals[self._pairs[0][0]](index)
        return statistics

    def reset(self, index: int) -> None:
        self._originals[self._pairs[0][1]](index)

    def _reader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(index: int) -> Any:
            shared = self.devices.get(index)
            statistics = original(index)
            return statistics if shared is None else shared.give_back(statistics)

        return read

    def _resetter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reset(index: int) -> None:
            shared = self.devices.get(index)
            if shared is not None:
                shared.taken.clear()
                shared.note(self.read(index))
            original(index)
            self.leave_if_idle()

        return reset

    def leave_if_idle(self) -> None:
        """Put the functions back once nobody measures and nothing is owed to the others."""
        idle = [index for index, shared in self.devices.items() if not shared.stretches and not shared.taken]
        for index in idle:
            del self.devices[index]
        if not self.devices:
            for name, original in self._originals.items():
                setattr(torch._C, name, original)
            self._originals.clear()


_stand_ins: dict[str, _StandIns] = {}


class PeakCounter:
    """Peaks of stretches of time on an accelerator, each from one `take` to the next, until `close`.

    Args:
        device: an accelerator that keeps memory statistics.

    Example::

        counter = PeakCounter(torch.device("cuda:0"))
        loss = model(batch).mean()
        print(counter.take().peak_allocated)   # of forward
        loss.backward()
        print(counter.take().peak_allocated)   # of backward
        counter.close()
        torch.cuda.max_memory_allocated()      # as if nobody had reset it
    """

    def __init__(self, device: torch.device) -> None:
        self._index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._stand_ins = _stand_ins.setdefault(device.type, _StandIns(device.type))
        self._stand_ins.install()
        self._shared = self._stand_ins.devices.setdefault(self._index, _Shared())
        self.take()

    def take(self) -> Reading:
        """What the counters say of the time since the last call; a new stretch begins."""
        statistics = self._stand_ins.read(self._index)
        self._shared.stretches.setdefault(self, {})
        self._shared.note(statistics)
        self._shared.take(statistics)
        self._stand_ins.reset(self._index)
        peaks, self._shared.stretches[self] = self._shared.stretches[self], {}
        return Reading(
            peaks["allocated_bytes"],
            peaks["reserved_bytes"],
            statistics["allocated_bytes"]["all"]["current"],
            statistics.get("num_alloc_retries", 0),
        )

    def close(self) -> None:
        """Measure no more. What the others would read otherwise stays theirs."""
        self._shared.stretches.pop(self, None)
        self._stand_ins.leave_if_idle()
