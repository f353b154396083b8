"""When things happen: host time on the CPU, events on an accelerator, which never make the host wait."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments; the seconds between two of them are known once the later one has passed."""

    def mark(self) -> Any: ...

    def has_passed(self, mark: Any) -> bool: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def wait_for(self, mark: Any) -> None: ...

    def wait(self) -> None: ...


class HostClock:
    """The host's own time, for devices that compute while the host waits."""

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait_for(self, mark: float) -> None:
        """It has passed."""

    def wait(self) -> None:
        """Nothing to wait for."""


class EventClock:
    """Events on the accelerator's current stream: the device's own time, read after it has passed."""

    def mark(self) -> torch.Event:
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.Event) -> bool:
        return mark.query()

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def wait_for(self, mark: torch.Event) -> None:
        mark.synchronize()

    def wait(self) -> None:
        torch.accelerator.synchronize()


def make_clock(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return HostClock() if device.type == "cpu" else EventClock()
