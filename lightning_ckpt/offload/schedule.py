"""How many layers to move: as many as the link hides behind compute, told from measured times.

A simulation of one step, in the arithmetic of the engine: copies out queue up behind each other, and compute stops when
too many bytes are under way; backward asks for each group some bytes ahead, and stops for what has not arrived.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_ckpt.offload.groups import Key

_TOLERANCE = 0.01  # of a step's compute time, which a measurement cannot tell from nothing


@dataclass(frozen=True)
class GroupCost:
    """What a group costs.

    Attributes:
        key: the group.
        layer: the layer it belongs to, counted from 1; what is saved after a layer belongs to it.
        nbytes: bytes that leave the device if it is moved.
        forward_s: seconds of compute in forward.
        backward_s: seconds of compute in backward.
        movable: whether it may be moved at all.
    """

    key: Key
    layer: int
    nbytes: int
    forward_s: float
    backward_s: float
    movable: bool


@dataclass(frozen=True)
class Link:
    """What the link to the host can carry each way, and the engine's limits on its use."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    max_inflight_bytes: int
    prefetch_bytes: int


def stall(groups: Sequence[GroupCost], moved: Collection[int], link: Link) -> float:
    """Seconds for which compute stops for copies when the `moved` layers of `groups` travel."""
    travelling = [i for i, group in enumerate(groups) if group.movable and group.layer in moved and group.nbytes > 0]
    now = link_free = stalled = 0.0
    under_way: deque[tuple[int, float]] = deque()
    inflight_bytes = 0
    for i, group in enumerate(groups):
        now += group.forward_s
        if i in travelling:
            link_free = max(now, link_free) + group.nbytes / link.out_bytes_per_s
            under_way.append((i, link_free))
            inflight_bytes += group.nbytes
        while inflight_bytes > link.max_inflight_bytes:
            gone, left = under_way.popleft()
            inflight_bytes -= groups[gone].nbytes
            stalled += max(0.0, left - now)
            now = max(now, left)
    present = {i: now for i, _ in under_way}  # what has not left when backward begins is used where it is
    link_free = now
    for i in reversed(range(len(groups))):
        ahead = 0
        for other in (other for other in reversed(travelling) if other <= i):
            if other < i and ahead and ahead + groups[other].nbytes > link.prefetch_bytes:
                break
            if other not in present:
                link_free = max(now, link_free) + groups[other].nbytes / link.in_bytes_per_s
                present[other] = link_free
            if other < i:
                ahead += groups[other].nbytes
        arrived = present.get(i, now)
        stalled += max(0.0, arrived - now)
        now = max(now, arrived) + groups[i].backward_s
    return stalled


def choose_layers(groups: Sequence[GroupCost], link: Link, room: int) -> set[int]:
    """The layers to move: as many as cause no stall, and more where those that stay would not fit.

    Args:
        groups: all groups of a step, in the order of forward.
        link: the link to the host.
        room: device memory in bytes that may be taken by layers that stay.

    Returns:
        Numbers of layers, spread evenly over the model, the first one among them.
    """
    layers = sorted({group.layer for group in groups if group.movable})
    compute = sum(group.forward_s + group.backward_s for group in groups)
    sizes = {layer: sum(group.nbytes for group in groups if group.movable and group.layer == layer) for layer in layers}
    total = sum(sizes.values())

    def spread(count: int) -> set[int]:
        last = len(layers)
        return {
            layer
            for place, layer in enumerate(layers)
            if (last - place) * count // last > (last - place - 1) * count // last
        }

    hidden = next(
        (count for count in range(len(layers), 0, -1) if stall(groups, spread(count), link) <= _TOLERANCE * compute), 0
    )
    for count in range(hidden, len(layers)):
        moved = spread(count)
        if total - sum(sizes[layer] for layer in moved) <= room:
            return moved
    return set(layers)
