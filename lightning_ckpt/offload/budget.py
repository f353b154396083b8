"""How much host memory offload may take: what the host and the container leave, and sizes as users write them."""

import importlib
import math
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path, PurePosixPath

SLAB_BYTES = 64 * 2**20  # of host memory, that is locked at once
_GRANULE = 4096
UNKNOWN_HOST_BYTES = 8 * 2**30  # taken as available where nothing tells

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(e\+?\d{1,2})?\s*([a-z]*)", re.ASCII)
_WHAT_TO_WRITE = "Write a number of bytes, or a text with a unit, such as '8GB' (8 * 10**9) or '8GiB' (8 * 2**30)."


def parse_bytes(value: int | float | str) -> int:
    """Bytes as an integer, from a number of bytes or a text with a unit.

    Units are decimal (kB, MB, GB, TB, PB) or binary (KiB, MiB, GiB, TiB, PiB), in upper or lower case; a space may
    stand in between. A text without a unit is a number of bytes. Fractions of a byte that come from a unit are dropped.

    Raises:
        ValueError: if `value` is no size; the message quotes it and says what to write.

    Example::

        parse_bytes("8GB")      # 8_000_000_000
        parse_bytes("1.5 GiB")  # 1_610_612_736
        parse_bytes(1024)       # 1024
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match is None:
            raise ValueError(f"{value!r} is not a size. {_WHAT_TO_WRITE}")
        number, exponent, unit = match.groups()
        if unit and unit not in _FACTORS:
            raise ValueError(f"{value!r} has an unknown unit. {_unit_advice(number, unit)}")
        amount = Fraction(number + (exponent or "")) * _FACTORS[unit or "b"]
        if unit in ("", "b") and amount.denominator != 1:
            raise ValueError(f"{value!r} is not a whole number of bytes. {_WHAT_TO_WRITE}")
        return int(amount)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a size. {_WHAT_TO_WRITE}")
    if not math.isfinite(value) or value != int(value) or value < 0:
        raise ValueError(f"{value!r} is not a whole number of bytes, 0 or more. {_WHAT_TO_WRITE}")
    return int(value)


def slab_bytes(budget: int) -> int:
    """The size of slabs within a budget of host memory: a small budget is used in small slabs."""
    slab = SLAB_BYTES
    while slab > budget and slab > _GRANULE:
        slab //= 2
    return slab


def _unit_advice(number: str, unit: str) -> str:
    prefix = unit[0].upper()
    if unit in (prefix.lower(), f"{prefix.lower()}i") and f"{prefix}B" in _UNITS:
        return f"Write '{number}{prefix}B' (decimal) or '{number}{prefix}iB' (binary)."
    return f"Units are {', '.join(_UNITS)}."


def default_host_budget(
    local_ranks: int, fraction: float = 0.5, proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup"
) -> int:
    """Bytes of host memory that one rank may take: its share of a fraction of what is available now.

    Available is what the host can give without swapping, or less if a memory limit of the container or of a cgroup
    around it is tighter. File cache that the kernel can drop counts as available. Where the system tells nothing,
    8 GiB are taken as available. Ask before anything is allocated, on every rank: what a rank has taken already is
    no longer available.

    Args:
        local_ranks: training processes on this node.
        fraction: part of the available memory that all of them together may take, above 0 and at most 1.
        proc: where the proc file system is mounted.
        cgroup: where the cgroup file system is mounted, of version 1 or 2.

    Raises:
        ValueError: if `local_ranks` is below 1 or `fraction` is out of range.

    Example::

        memory = HostMemory(budget=default_host_budget(local_ranks=8))
    """
    if local_ranks < 1:
        raise ValueError(f"local_ranks is {local_ranks}; there is at least one rank on a node")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give a number above 0 and at most 1, such as 0.5")
    available = min([_host_available(Path(proc)), *_cgroup_headrooms(Path(proc), Path(cgroup))])
    return int(available * fraction) // local_ranks


def _host_available(proc: Path) -> int:
    """Bytes that the whole machine can still give."""
    kibibytes = _table(proc / "meminfo").get("MemAvailable:")
    if kibibytes is not None:
        return kibibytes * 1024
    try:  # not Linux
        return int(importlib.import_module("psutil").virtual_memory().available)
    except ImportError:
        pass
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no sysconf (Windows), or not this name (macOS)
        return UNKNOWN_HOST_BYTES
    return available if available > 0 else UNKNOWN_HOST_BYTES


def _cgroup_headrooms(proc: Path, root: Path) -> Iterator[int]:
    """Bytes that this process may still take, of each cgroup around it that has a limit."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            for group in _upwards(root, path):
                used, cache = _number(group / "memory.current"), _table(group / "memory.stat").get("inactive_file", 0)
                for limit in (_number(group / "memory.max"), _number(group / "memory.high")):
                    if limit is not None:
                        yield _headroom(limit, used, cache)
        elif "memory" in controllers.split(","):  # version 1
            for group in _upwards(root / "memory", path):
                limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
                if limit is not None:
                    yield _headroom(limit, used, _table(group / "memory.stat").get("total_inactive_file", 0))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a cgroup and of those around it.

    Inside a container, the path may be the one outside, which is not there; then only the mount itself tells.
    """
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:  # outside of what is mounted here
        parts = ()
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _headroom(limit: int, used: int | None, cache: int) -> int:
    used = max(0, (used or 0) - cache)
    return max(0, limit - used)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    """The number in a file, or None if there is no file or no number (`max`: no limit)."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
