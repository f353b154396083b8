"""What a user may set about offload."""

from dataclasses import dataclass
from typing import Literal

from lightning_ckpt.offload.budget import parse_bytes


class OffloadError(ValueError):
    """An offload option that cannot work; the message quotes it and says what to write instead."""


@dataclass(frozen=True)
class OffloadOptions:
    """How saved activations travel to host memory and back. Every default is meant to be left alone.

    Sizes are bytes, as an integer or as text with a unit (`"8GB"` is 8e9, `"8GiB"` is 8 * 2**30).

    Args:
        move: ``hidden``: as much as the link to the host can move while the device computes, measured during
            the first steps, and more where the device's memory demands it. ``all``: everything, for the least memory;
            slower where copying a layer takes longer than computing it.
        min_bytes: Tensors below this size stay on the device: starting their copy would cost more than it saves.
        keep_last: Layers at the end of the model that stay on the device: backward needs them at once.
        max_inflight_bytes: Bytes that may be on their way to the host at once before the device waits for them.
            Default: twice the largest group, which is a layer, or a part of one of a 64th of what a step saves.
        prefetch_bytes: Bytes that are brought back ahead of the layer whose backward runs. Default: twice the
            largest group.
        host_budget: Host memory that may be locked on this machine, shared by its ranks. Default: half of what is
            available when training starts, limits of the container included.

    Raises:
        OffloadError: A ``ValueError``: an option has no meaning.
    """

    move: Literal["hidden", "all"] = "hidden"
    min_bytes: int | str = 256 * 2**10
    keep_last: int = 1
    max_inflight_bytes: int | str | None = None
    prefetch_bytes: int | str | None = None
    host_budget: int | str | None = None

    def __post_init__(self) -> None:
        if self.move not in ("hidden", "all"):
            raise OffloadError(f"`move={self.move!r}` must be 'hidden' or 'all'.")
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 0:
            raise OffloadError(f"`keep_last={self.keep_last!r}` must be a number of layers: 0, 1, 2, ...")
        for name in ("min_bytes", "max_inflight_bytes", "prefetch_bytes", "host_budget"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _bytes(name, value))


def _bytes(name: str, value: int | str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise OffloadError(f"`{name}={value!r}`: {error}") from None
