"""What the operating system says of this process."""

import os
import time

_EVERY_S = 0.1


class ResidentMemory:
    """Memory that this process has from the operating system; asked ten times a second at most."""

    def __init__(self) -> None:
        self._bytes: int | None = None
        self._asked = -_EVERY_S

    def bytes(self) -> int | None:
        """Bytes, or None where it cannot be told."""
        now = time.monotonic()
        if now - self._asked >= _EVERY_S:
            self._asked = now
            self._bytes = _resident_bytes()
        return self._bytes


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", "rb", 0) as file:
            pages = file.read().split()[1]
    except OSError:  # not Linux
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
