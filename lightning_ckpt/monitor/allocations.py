"""The recent history of allocations, and PyTorch's snapshot of it when memory runs out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ENTRIES = 100_000  # recent allocations and releases that are kept

_observers: dict[str, "AllocationHistory | None"] = {}  # by kind of device; PyTorch's own list of them only grows


class AllocationHistory:
    """Has an accelerator record its allocations, and writes them to a file when memory runs out.

    The files are PyTorch's own and are looked at on https://pytorch.org/memory_viz.

    Args:
        device: an accelerator that can record (`can_record`).
        path: gives the file to write.
    """

    def __init__(self, device: torch.device, path: Callable[[], Path]) -> None:
        self._type = device.type
        self._path = path
        self._outcome: str | None = None
        self._memory = torch.get_device_module(device).memory
        self._memory._record_memory_history(max_entries=_ENTRIES)
        attach = getattr(torch._C, f"_{self._type}_attach_out_of_memory_observer", None)
        if attach is not None:  # told by the device at the moment itself, before anything is unwound
            if self._type not in _observers:
                attach(lambda *args: _out_of_memory(device.type))
            _observers[self._type] = self

    @staticmethod
    def can_record(device: torch.device) -> bool:
        """Whether the device can record its allocations."""
        memory: Any = None if device.type == "cpu" else getattr(torch.get_device_module(device), "memory", None)
        return hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")

    def write(self) -> None:
        """Write the snapshot, or remember why that was not possible: the error that comes is the user's own."""
        path = self._path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(path))
            self._outcome = str(path)
        except Exception as failure:
            self._outcome = f"{path} could not be written: {failure!r}"

    def after_error(self) -> str:
        """Where the snapshot is, or why there is none. It is written now where the device has not told by itself."""
        if self._outcome is None:
            self.write()
        outcome, self._outcome = self._outcome, None
        return str(outcome)

    def close(self) -> None:
        """Record no more."""
        self._memory._record_memory_history(enabled=None)
        if _observers.get(self._type) is self:
            _observers[self._type] = None


def _out_of_memory(device_type: str) -> None:
    history = _observers.get(device_type)
    if history is not None:
        history.write()
