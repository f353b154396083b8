"""A chain of layers, each with the treatments that it may have, and what a plan for it comes to."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)

#: Where a peak is: before the first layer or in the optimizer's step, in the layer of that index, after the last layer.
Binding = int | Literal["floor", "head"]

_NS = 10**9
_LARGEST = 2**52  # sums of bytes and of nanoseconds stay below it, so that they are exact, as floats too


@dataclass(frozen=True)
class Choice:
    """What a layer costs under one treatment.

    Args:
        resident: bytes that it holds on the device between its forward and its backward.
        transient: the most bytes that it needs at once in its own forward or backward, its residents included, those
            of earlier layers not.
        cost_ns: extra time of a step, in nanoseconds.
        moved: bytes that go to host memory in forward and come back in backward. Default: none.
    """

    resident: int
    transient: int
    cost_ns: int
    moved: int = 0


@dataclass(frozen=True)
class Link:
    """The link to host memory.

    Args:
        bytes_per_s: how fast it is, each way.
        inflight_bytes: bytes that may be on their way out at once before compute waits.
        prefetch_bytes: bytes that are brought back ahead of their use.
        host_bytes: host memory that may be used.
        part_bytes: bytes of a layer that are copied at once: their copy starts as soon as they are there, that of the
            last ones as the layer ends.
    """

    bytes_per_s: float
    inflight_bytes: int
    prefetch_bytes: int
    host_bytes: int
    part_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.bytes_per_s < math.inf:
            raise ValueError(f"`bytes_per_s={self.bytes_per_s!r}` must be a number of bytes per second, 1 or more.")
        for name in ("inflight_bytes", "prefetch_bytes", "host_bytes", "part_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be 0 bytes or more.")

    @property
    def window_bytes(self) -> int:
        """Moved bytes that are on the device at once, on their way out or back."""
        return self.inflight_bytes + self.prefetch_bytes

    @property
    def inflight_ns(self) -> int:
        """The time in which all that may be on its way out has left."""
        return int(self.inflight_bytes / self.bytes_per_s * _NS)

    def copy_ns(self, nbytes: int) -> int:
        """The time that a copy takes."""
        return math.ceil(nbytes / self.bytes_per_s * _NS)

    def last_copy_ns(self, nbytes: int) -> int:
        """The time that the last part takes of a layer that moves so many bytes."""
        return self.copy_ns(min(nbytes, self.part_bytes))


@dataclass(frozen=True)
class Chain(Generic[K]):
    """Layers that run one after the other, and backward in reverse.

    Args:
        base: bytes on the device throughout the step.
        layers: for each layer, in the order of forward, its treatments and what it costs under each. Where two are
            worth the same, the one that comes first is preferred.
        forward_ns: time that each layer computes in forward, in nanoseconds. Copies to host memory hide behind it.
        head: the most bytes that are needed after the last layer at once, residents of layers not included.
        floor: bytes that the step needs at some other time, whatever is done with the layers.
        link: the link to host memory. Default: none, and then nothing may be moved.

    Raises:
        ValueError: something has no meaning: a negative number, a layer without a treatment, bytes to move without a
            link, or more of them than host memory whatever is chosen.
        OverflowError: bytes or nanoseconds come to 2**52 or more.
    """

    base: int
    layers: Sequence[Mapping[K, Choice]]
    forward_ns: Sequence[int]
    head: int
    floor: int
    link: Link | None = None

    def __post_init__(self) -> None:
        if len(self.forward_ns) != len(self.layers):
            raise ValueError(
                f"`forward_ns` has {len(self.forward_ns)} entries for {len(self.layers)} layers: give one per layer."
            )
        for name in ("base", "head", "floor"):
            _check(f"{name}={getattr(self, name)!r}", getattr(self, name))
        for i, (choices, forward_ns) in enumerate(zip(self.layers, self.forward_ns, strict=True)):
            _check(f"forward_ns[{i}]={forward_ns!r}", forward_ns)
            if not choices:
                raise ValueError(f"`layers[{i}]` has no treatment: give it one `Choice` at least.")
            for treatment, choice in choices.items():
                place = f"layers[{i}][{treatment!r}]={choice!r}"
                _check(place, choice.resident, choice.transient, choice.cost_ns, choice.moved)
                if choice.moved and self.link is None:
                    raise ValueError(f"`{place}` moves bytes, but `link=None`: give a `Link`, or leave it out.")
        self._check_sums()

    def _check_sums(self) -> None:
        every = [list(choices.values()) for choices in self.layers]
        nbytes = sum(max(c.resident + c.transient + c.moved for c in choices) for choices in every)
        time_ns = sum(max(c.cost_ns for c in choices) for choices in every) + sum(self.forward_ns)
        if self.link is not None:
            least = sum(min(c.moved for c in choices) for choices in every)
            if least > self.link.host_bytes:
                raise ValueError(
                    f"`host_bytes={self.link.host_bytes}` is less than the {least} bytes that every plan moves: "
                    "allow more, or give layers a treatment that moves less."
                )
            time_ns += self.link.inflight_ns + sum(self.link.copy_ns(max(c.moved for c in cs)) for cs in every)
        if max(self.base + nbytes + self.head + self.floor, time_ns) >= _LARGEST:
            raise OverflowError(f"bytes or nanoseconds add up to {_LARGEST} or more: look for a wrong unit")

    def choices(self, plan: Sequence[K]) -> list[Choice]:
        """What the layers cost under a plan."""
        return [choices[treatment] for choices, treatment in zip(self.layers, plan, strict=True)]


def _check(place: str, *numbers: int) -> None:
    if min(numbers) < 0:
        raise ValueError(f"`{place}`: bytes and nanoseconds must be 0 or more.")


def peak(chain: Chain[K], plan: Sequence[K]) -> int:
    """The most bytes on the device at once, under the plan that gives each layer its treatment."""
    return max(needed for _, needed in _demands(chain, plan))


def binding(chain: Chain[K], plan: Sequence[K]) -> Binding:
    """Where the peak of a plan is; the first place where there are several."""
    return max(_demands(chain, plan), key=lambda demand: demand[1])[0]


def _demands(chain: Chain[K], plan: Sequence[K]) -> Iterator[tuple[Binding, int]]:
    yield "floor", chain.floor
    window = 0 if chain.link is None else chain.link.window_bytes
    held, moved = chain.base, 0
    for i, choice in enumerate(chain.choices(plan)):
        yield i, held + min(moved, window) + choice.transient
        held += choice.resident
        moved += choice.moved
    yield "head", held + min(moved, window) + chain.head


def cost(chain: Chain[K], plan: Sequence[K]) -> int:
    """Extra nanoseconds of a step under a plan: those of the treatments, and those in which compute waits for copies.

    Copies queue up behind each other, and compute waits where more of them are on their way than may be. A layer's
    copies start while it computes, but for the last part. The queue is counted as the time that it takes to empty, so
    that all sums are exact.
    """
    choices = chain.choices(plan)
    total = sum(choice.cost_ns for choice in choices)
    if chain.link is not None:
        queue = 0
        for choice, forward_ns in zip(choices, chain.forward_ns, strict=True):
            last_ns = chain.link.last_copy_ns(choice.moved)
            queue = max(0, queue + chain.link.copy_ns(choice.moved) - last_ns - forward_ns) + last_ns
            total += max(0, queue - chain.link.inflight_ns)
            queue = min(queue, chain.link.inflight_ns)
    return total
