"""Measure a step once in a while, and choose from it which layers travel."""

from collections.abc import Callable
from typing import Literal

import torch

from lightning_ckpt.offload.device import room
from lightning_ckpt.offload.groups import Group, Key
from lightning_ckpt.offload.schedule import Link, choose_groups
from lightning_ckpt.offload.timeline import Timeline
from lightning_ckpt.offload.transfers import Transfers

_PLAN_STEPS = 200  # optimizer steps for which measured times are trusted
_NEW_STEPS = 10  # optimizer steps between two plans at least, however many groups are new


class Planner:
    """Keeps groups on the device that the link to the host cannot hide, as far as the device has room for them.

    Nothing is measured before the first optimizer step is over: only then is the optimizer's state in memory.

    Args:
        transfers: where times are measured.
        move: see `OffloadOptions`.
        say: called with what a user should know.

    Attributes:
        link: bytes per second that the link to the host carries out and in, None until that has been measured.
        staying: groups that stay on the device, and the bytes that were measured. Empty until a step has been measured.
        timeline: the measurement in progress, None between measurements.
    """

    def __init__(self, transfers: Transfers, move: Literal["hidden", "all"], say: Callable[[str], None]) -> None:
        self.link: tuple[float, float] | None = None
        self.staying: dict[Key, int] = {}
        self.timeline: Timeline | None = None
        self._transfers = transfers
        self._chooses = move == "hidden"
        self._say = say
        self._measured: Timeline | None = None
        self._known: set[Key] = set()
        self._has_new = True
        self._planned_at = 0
        self._room = 0

    def begin(self, steps: int, max_inflight_bytes: int, prefetch_bytes: int) -> None:
        """A forward pass begins, after so many optimizer steps."""
        self._measure(False)  # a backward that has not come by now never will
        if self._measured is not None:
            if self._measured.has_passed:
                self._choose(self._measured, max_inflight_bytes, prefetch_bytes)
                self._measured = None
                self._planned_at = steps
        elif steps and self._is_due(steps - self._planned_at):
            self._measure(True)

    def _is_due(self, steps: int) -> bool:
        return steps >= _PLAN_STEPS or (self._has_new and (steps >= _NEW_STEPS or not self._known))

    def _measure(self, on: bool) -> None:
        self.timeline = Timeline(self._transfers) if on else None
        self._transfers.timed = on

    def stays(self, group: Group) -> bool:
        """Whether a group stays on the device: one that is larger than when it was measured does not."""
        if group.key not in self._known:
            self._has_new = True
        return group.nbytes <= self.staying.get(group.key, -1)

    def ends(self, group: Group | None, device: torch.device) -> None:
        """A backward ends, in `group`."""
        if self.timeline is not None and group is not None:
            self.timeline.stops(group)
            self._measured = self.timeline
            self._measure(False)
            self._room = room(device)

    def watch_room(self, device: torch.device) -> None:
        """An optimizer step is over: if memory has become tight since the plan was made, nothing stays any more."""
        if self.staying and room(device) == 0:
            self.staying = {}

    def _choose(self, timeline: Timeline, max_inflight_bytes: int, prefetch_bytes: int) -> None:
        costs = timeline.costs()
        self._has_new = False
        self._known |= {cost.key for cost in costs}
        out, into = timeline.bytes_per_s(timeline.flights), timeline.bytes_per_s(timeline.loads)
        if out is None or into is None:
            return
        self.link = out, into
        if not self._chooses:
            return
        movable = {cost.key: cost.nbytes for cost in costs if cost.movable}
        free = self._room + sum(nbytes for key, nbytes in movable.items() if key in self.staying)
        moved = choose_groups(costs, Link(out, into, max_inflight_bytes, prefetch_bytes), free)
        others = {key: nbytes for key, nbytes in self.staying.items() if key not in movable}
        staying = {key: nbytes for key, nbytes in movable.items() if key not in moved}
        self.staying = others | staying
        if any(staying.values()):
            self._say(
                f"Offload: {sum(staying.values()) / sum(movable.values()):.0%} of the activations stay on the device, "
                f"which has room for them: the link ({out / 1e9:.1f} GB/s out, {into / 1e9:.1f} GB/s in) cannot hide "
                "more behind compute. `move='all'` moves everything."
            )
