"""What the operating system says of this process."""

import os


def resident_bytes() -> int | None:
    """Bytes of memory that this process has from the operating system now, or None where it cannot be told."""
    try:
        with open("/proc/self/statm", "rb", 0) as file:
            pages = file.read().split()[1]
    except OSError:  # not Linux
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
