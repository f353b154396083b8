"""A chain as the solver sees it: numbers only."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ckpt.planning.solver.chain import Chain, K


@dataclass(frozen=True)
class Option:
    """A choice of a layer.

    Attributes:
        resident: bytes that stay on the device until the layer's backward.
        transient: bytes that it needs itself, those included.
        cost_ns: extra time.
        moved: bytes that go to host memory.
        copy_ns: the time that their copy takes.
        last_ns: the part of it that starts as the layer ends.
    """

    resident: int
    transient: int
    cost_ns: int
    moved: int
    copy_ns: int
    last_ns: int


@dataclass(frozen=True)
class Problem:
    """A chain in numbers.

    Attributes:
        base: bytes on the device throughout.
        layers: the options of each layer.
        forward_ns: the time in which each layer computes, and copies go on.
        head: bytes that are needed after the last layer.
        floor: bytes that are needed at another time.
        window: moved bytes that are still on the device.
        inflight_ns: the time of copies that may be on their way out before compute waits.
        host: bytes that may be moved, None where all may.
        byte_ns: the time that the copy of a byte takes.
    """

    base: int
    layers: Sequence[Sequence[Option]]
    forward_ns: Sequence[int]
    head: int
    floor: int
    window: int
    inflight_ns: int
    host: int | None
    byte_ns: float

    @property
    def copies(self) -> bool:
        """Whether copies take time."""
        return any(option.copy_ns for options in self.layers for option in options)


def problem_of(chain: Chain[K], is_free: bool = False) -> Problem:
    """A chain in numbers.

    Args:
        chain: the chain.
        is_free: whether time shall count for nothing.
    """
    link = chain.link if any(choice.moved for choices in chain.layers for choice in choices.values()) else None
    layers = [
        [
            Option(
                choice.resident,
                choice.transient,
                0 if is_free else choice.cost_ns,
                choice.moved,
                0 if is_free or link is None else link.copy_ns(choice.moved),
                0 if is_free or link is None else link.last_copy_ns(choice.moved),
            )
            for choice in choices.values()
        ]
        for choices in chain.layers
    ]
    most = sum(max(option.moved for option in options) for options in layers)
    return Problem(
        chain.base,
        layers,
        chain.forward_ns,
        chain.head,
        chain.floor,
        window=link.window_bytes if link else 0,
        inflight_ns=link.inflight_ns if link else 0,
        host=link.host_bytes if link and link.host_bytes < most else None,
        byte_ns=1e9 / link.bytes_per_s if link else 0.0,
    )
