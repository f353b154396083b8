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


class Planner:
    """Keeps groups on the device that the link to the host cannot hide, as far as the device has room for them.

    Nothing is measured before the first optimizer step is over: only then is the optimizer's state in memory.

    Args:
        transfers: where times are measured.
        move: see `OffloadOptions`.
        say: called with what a user should know.

    Attributes:
        staying: groups that stay on the device. Empty until a step has been measured.
        timeline: the measurement in progress, None between measurements.
    """

    def __init__(self, transfers: Transfers, move: Literal["hidden", "all"], say: Callable[[str], None]) -> None:
        self.staying: set[Key] = set()
        self.timeline: Timeline | None = None
        self._transfers = transfers
        self._measures = move == "hidden"
        self._say = say
        self._planned_at: int | None = None
        self._room = 0

    def begin(self, steps: int, max_inflight_bytes: int, prefetch_bytes: int) -> None:
        """A forward pass begins, after so many optimizer steps."""
        timeline = self.timeline
        if timeline is not None:
            if not timeline.is_complete:
                self.timeline = None  # its backward never came
            elif timeline.has_passed:
                self.timeline = None
                self._planned_at = steps
                self._choose(timeline, max_inflight_bytes, prefetch_bytes)
        elif self._measures and steps and (self._planned_at is None or steps - self._planned_at >= _PLAN_STEPS):
            self.timeline = Timeline(self._transfers)

    def ends(self, group: Group | None, device: torch.device) -> None:
        """A backward ends, in `group`."""
        if self.timeline is not None and group is not None and not self.timeline.is_complete:
            self.timeline.stops(group)
            self._room = room(device)

    def _choose(self, timeline: Timeline, max_inflight_bytes: int, prefetch_bytes: int) -> None:
        out, into = timeline.bytes_per_s(timeline.flights), timeline.bytes_per_s(timeline.loads)
        if out is None or into is None:
            return
        costs = timeline.costs()
        movable = {cost.key: cost.nbytes for cost in costs if cost.movable}
        free = self._room + sum(nbytes for key, nbytes in movable.items() if key in self.staying)
        moved = choose_groups(costs, Link(out, into, max_inflight_bytes, prefetch_bytes), free)
        self.staying = movable.keys() - moved
        staying_bytes = sum(movable[key] for key in self.staying)
        if staying_bytes:
            self._say(
                f"Offload: {staying_bytes / sum(movable.values()):.0%} of the activations stay on the device, which "
                f"has room for them: the link ({out / 1e9:.1f} GB/s out, {into / 1e9:.1f} GB/s in) cannot hide more "
                "behind compute. `move='all'` moves everything."
            )
