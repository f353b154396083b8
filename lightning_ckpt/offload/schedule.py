"""How much to move: as much as the link hides behind compute, told from measured times.

A simulation of one step, in the arithmetic of the engine: copies out queue up behind each other, and compute stops when
too many bytes are under way; backward asks for each group some bytes ahead, and stops for what has not arrived.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_ckpt.offload.groups import Key

_TOLERANCE = 0.01  # of a step's compute time, which a measurement cannot tell from nothing
_CHOICES = 48  # shares of the bytes that are tried


@dataclass(frozen=True)
class GroupCost:
    """What a group costs.

    Attributes:
        key: the group.
        nbytes: bytes that leave the device if it is moved.
        movable: whether it may be moved at all.
        forward_s: seconds of compute in forward.
        backward_s: seconds of compute in backward.
    """

    key: Key
    nbytes: int
    movable: bool
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Link:
    """What the link to the host can carry each way, and the engine's limits on its use."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    max_inflight_bytes: int
    prefetch_bytes: int


def stall(groups: Sequence[GroupCost], moved: Collection[Key], link: Link) -> float:
    """Seconds for which compute stops for copies when the `moved` ones of `groups` travel."""
    travels = [group.movable and group.key in moved and group.nbytes > 0 for group in groups]
    now = link_free = stalled = 0.0
    under_way: deque[tuple[int, float]] = deque()
    inflight_bytes = 0
    for i, group in enumerate(groups):
        now += group.forward_s
        if travels[i]:
            link_free = max(now, link_free) + group.nbytes / link.out_bytes_per_s
            under_way.append((i, link_free))
            inflight_bytes += group.nbytes
        while inflight_bytes > link.max_inflight_bytes:
            gone, left = under_way.popleft()
            inflight_bytes -= groups[gone].nbytes
            stalled += max(0.0, left - now)
            now = max(now, left)
    present = {i: now for i, _ in under_way}  # what has not left when backward begins is used where it is
    order = [i for i in reversed(range(len(groups))) if travels[i]]
    link_free = now
    first = 0  # place in the order of the first group that backward is not through with
    for i in reversed(range(len(groups))):
        while first < len(order) and order[first] > i:
            first += 1
        ahead = 0
        for other in order[first:]:
            nbytes = groups[other].nbytes
            if other < i and ahead and ahead + nbytes > link.prefetch_bytes:
                break
            if other not in present:
                link_free = max(now, link_free) + nbytes / link.in_bytes_per_s
                present[other] = link_free
            if other < i:
                ahead += nbytes
        arrived = present.get(i, now)
        stalled += max(0.0, arrived - now)
        now = max(now, arrived) + groups[i].backward_s
    return stalled


def spread(groups: Sequence[GroupCost], share: float) -> set[Key]:
    """Groups with this share of the bytes that may be moved, as even over the model as their sizes allow.

    The rounding is carried on from the last group to the first, so the last ones stay, if any.
    """
    chosen = set()
    owed = 0.0
    for group in reversed(groups):
        if group.movable and group.nbytes:
            owed += share * group.nbytes
            if owed >= group.nbytes * (1 - 1e-9):
                owed -= group.nbytes
                chosen.add(group.key)
    return chosen


def choose_groups(groups: Sequence[GroupCost], link: Link, room: int) -> set[Key]:
    """The groups to move: as many as cause no stall, and more where those that stay would not fit.

    Args:
        groups: all groups of a step, in the order of forward.
        link: the link to the host.
        room: device memory in bytes that may be taken by groups that stay.
    """
    compute = sum(group.forward_s + group.backward_s for group in groups)
    movable = {group.key: group.nbytes for group in groups if group.movable}
    choices = [spread(groups, count / _CHOICES) for count in range(_CHOICES + 1)]
    allowed = _TOLERANCE * compute
    hidden = next((count for count in range(_CHOICES, 0, -1) if stall(groups, choices[count], link) <= allowed), 0)
    moved = choices[hidden]
    for group in groups:  # sizes may leave gaps that others fill
        if group.movable and group.key not in moved and stall(groups, moved | {group.key}, link) <= allowed:
            moved = moved | {group.key}
    for more in (moved, *choices[hidden + 1 :]):
        if sum(movable.values()) - sum(movable[key] for key in more) <= room:
            return more
    return choices[-1]
