"""How much memory a plan may take, as users write it, and what it comes to on a device."""

import os
import re
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_ckpt.offload.budget import default_host_budget, parse_bytes

#: Part of a device's memory that `"auto"` leaves to other shapes, validation, workspaces and fragments.
MARGIN = 0.1

_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{0,10})?)\s*%")
_FRACTION = re.compile(r"(?:0|1)(?:\.\d{0,30})?|\.\d{1,30}")
_WHAT_TO_WRITE = (
    "Write a size ('20GiB', or a number of bytes), a share of the device's memory ('80%'), a fraction between all "
    "layers recomputed (0.0) and all kept (1.0), or 'auto'."
)


class BudgetError(ValueError):
    """A budget that cannot work; the message quotes it and says what to write, or what would help."""


@dataclass(frozen=True)
class Budget:
    """How much memory a training step may take.

    Attributes:
        written: what the user wrote.
        kind: what it means: ``bytes``; a ``share`` of the device's memory; a ``fraction`` of the way from the peak
            with all layers recomputed to that with all kept; ``auto``, what is free on the device but for a margin.
        value: the number behind it; 0.0 for ``auto``.
    """

    written: int | float | str
    kind: Literal["bytes", "share", "fraction", "auto"]
    value: float = 0.0

    def bytes(self, recomputed: int, kept: int, device: torch.device, device_bytes: int | None = None) -> int:
        """The budget in bytes.

        Args:
            recomputed: the peak with all layers recomputed, in bytes.
            kept: the peak with all layers kept.
            device: where the model trains.
            device_bytes: the memory of that device, if it is another one than this machine has.
        """
        if self.kind == "bytes":
            return int(self.value)
        if self.kind == "fraction":
            return int(recomputed + self.value * (kept - recomputed))
        free, total = (device_bytes, device_bytes) if device_bytes is not None else device_memory(device)
        return int(self.value * total) if self.kind == "share" else int(free - MARGIN * total)


def parse_budget(written: int | float | str, name: str = "memory_budget") -> Budget:
    """Read what a user has written.

    Args:
        written: ``"20GiB"`` or a number of bytes; ``"80%"`` of the device's memory; ``0.5``, halfway between all
            layers recomputed and all kept; or ``"auto"``.
        name: what the user has called it, for messages.

    Raises:
        BudgetError: it is none of these.

    Example::

        parse_budget("20GiB").value   # 21_474_836_480
    """
    text = str(written).strip()
    if isinstance(written, bool):
        raise BudgetError(f"`{name}={written!r}` is no budget. {_WHAT_TO_WRITE}")
    if isinstance(written, (int, float)) and 0 <= written <= 1:
        return Budget(written, "fraction", abs(float(written)))
    if text.lower() == "auto":
        return Budget(written, "auto")
    percent = _PERCENT.fullmatch(text)
    if percent:
        share = float(percent[1]) / 100
        if not 0 < share <= 1:
            raise BudgetError(f"`{name}={written!r}` must be above 0% and at most 100% of the device's memory.")
        return Budget(written, "share", share)
    if _FRACTION.fullmatch(text) and float(text) <= 1:
        return Budget(written, "fraction", float(text))
    try:
        return Budget(written, "bytes", parse_bytes(written))
    except ValueError as error:
        raise BudgetError(f"`{name}={written!r}`: {error} {_WHAT_TO_WRITE}") from None


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that this process may take on a device, what it has taken included, and all bytes of the device.

    On the CPU both are what the machine, or the container if that has less, leaves to this process.
    """
    if device.type == "cpu":
        mine = min(_physical(), default_host_budget(1, fraction=1.0) + _resident())
        return mine, mine
    free, total = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device), total


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**62


def _resident() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
