"""Times of one step, measured on the device without making the host wait."""

from collections import defaultdict
from itertools import pairwise

import torch

from lightning_ckpt.offload.groups import Group, Key
from lightning_ckpt.offload.schedule import GroupCost
from lightning_ckpt.offload.transfers import Flight, Load, Transfers

Pair = tuple[torch.Event, torch.Event]


class Timeline:
    """When each group of a run began, in forward and in backward, and how long copies took.

    Args:
        transfers: where its marks and waits are recorded.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._forward: list[tuple[Key | None, torch.Event]] = []
        self._backward: list[tuple[Key | None, torch.Event]] = []
        self._waits: list[tuple[bool, int, Pair]] = []
        self._groups: dict[Key, tuple[int, bool]] = {}
        self.flights: list[Flight] = []
        self.loads: list[Load] = []

    def begins(self, group: Group, mark: torch.Event) -> None:
        """Forward of a group began at `mark`."""
        self._forward.append((group.key, mark))

    def ends(self, group: Group, movable: bool) -> None:
        """What a group has saved is known."""
        self._groups[group.key] = (group.nbytes, movable)

    def turns(self, group: Group) -> None:
        """Forward is over and backward begins."""
        if not self._backward:
            self._forward.append((None, self._transfers.mark(group.stream)))

    def needs(self, group: Group) -> None:
        """Backward of a group begins."""
        self._backward.append((group.key, self._transfers.mark(group.stream)))

    def stops(self, group: Group) -> None:
        """Backward is over."""
        self._backward.append((None, self._transfers.mark(group.stream)))

    def waited(self, pair: Pair) -> None:
        """Compute waited for a copy, in the group that began last."""
        in_backward = bool(self._backward)
        self._waits.append((in_backward, len(self._backward if in_backward else self._forward) - 1, pair))

    @property
    def has_passed(self) -> bool:
        """Whether the device is through with it."""
        ends = [
            self._backward[-1][1],
            *(flight.left for flight in self.flights),
            *(load.arrived for load in self.loads),
        ]
        return all(event.query() for event in ends)

    def costs(self) -> list[GroupCost]:
        """What each group cost, waits for copies left out."""
        waited: dict[tuple[bool, int], float] = defaultdict(float)
        for in_backward, index, (start, end) in self._waits:
            waited[in_backward, index] += start.elapsed_time(end)
        seconds: tuple[dict[Key, float], dict[Key, float]] = (defaultdict(float), defaultdict(float))
        for in_backward, marks in ((False, self._forward), (True, self._backward)):
            for index, ((key, start), (_, end)) in enumerate(pairwise(marks)):
                if key is not None:
                    seconds[in_backward][key] += (start.elapsed_time(end) - waited[in_backward, index]) / 1e3
        return [
            GroupCost(key, *self._groups.get(key, (0, False)), seconds[False][key], seconds[True][key])
            for key in dict.fromkeys(key for key, _ in self._forward if key is not None)
        ]

    def bytes_per_s(self, copies: list[Flight] | list[Load]) -> float | None:
        """What the link carried, or None where nothing was copied."""
        nbytes, milliseconds = 0, 0.0
        for copy in copies:
            if copy.copied and copy.started is not None:
                nbytes += copy.copied
                milliseconds += copy.started.elapsed_time(copy.left if isinstance(copy, Flight) else copy.arrived)
        return nbytes / milliseconds * 1e3 if milliseconds > 0 else None
