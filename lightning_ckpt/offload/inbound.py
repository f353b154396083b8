"""The way back: what backward needs is brought to the device ahead of its use."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from lightning_ckpt.offload.groups import Group, Order
from lightning_ckpt.offload.outbound import Outbound
from lightning_ckpt.offload.planner import Planner
from lightning_ckpt.offload.records import Record
from lightning_ckpt.offload.statistics import Ledger
from lightning_ckpt.offload.transfers import Transfers

_LOOK_AHEAD = 16  # groups, most of which may have stayed on the device


class Inbound:
    """Follows backward from group to group.

    Args:
        transfers: the copy streams.
        order: knows what follows.
        planner: is told of groups that begin, while it measures.
        ledger: where it is written down.
        outbound: is told of every group that backward comes to.
        prefetch_bytes: see `OffloadOptions`; None means twice the largest group.
    """

    def __init__(
        self,
        transfers: Transfers,
        order: Order,
        planner: Planner,
        ledger: Ledger,
        outbound: Outbound,
        prefetch_bytes: int | None,
    ) -> None:
        self._transfers = transfers
        self._order = order
        self._planner = planner
        self._ledger = ledger
        self._outbound = outbound
        self._prefetch_bytes = prefetch_bytes
        self._forget()

    def _forget(self) -> None:
        self.tasks: set[int] = set()
        self.group: Group | None = None
        self._newest: Group | None = None
        self._entered: weakref.WeakSet[Group] = weakref.WeakSet()
        self._loaded: list[Record] = []

    @property
    def prefetch_bytes(self) -> int:
        """Bytes that are brought back ahead of their use."""
        return 2 * self._outbound.largest if self._prefetch_bytes is None else self._prefetch_bytes

    def enter(self, group: Group) -> None:
        """Backward needs `group` now."""
        if group is self.group:
            return
        previous, self.group = self.group, group
        self._outbound.follow_backward(group)
        if previous is not None:
            # Under `retain_graph` they outlive their use; their bytes stay on the host.
            self._give_up(
                record for record in previous.records() if record.used and record.first_group == previous.number
            )
        if group not in self._entered:
            if self._newest is not None:
                self._order.learn_backward(self._newest, group)
            self._newest = group
            self._entered.add(group)
            if self._planner.timeline is not None:
                self._planner.timeline.needs(group)
        self._bring(group)

    def _bring(self, group: Group) -> None:
        """What `group` needs, then what follows it as far as the bytes reach, at least one group."""
        self.load([record for record in group.records() if record.is_away], group.stream)
        ahead = 0
        for following in islice(self._order.following(group), _LOOK_AHEAD):
            records = [record for record in following.records() if record.region is not None]
            nbytes = sum(record.nbytes for record in records)
            if ahead and ahead + nbytes > self.prefetch_bytes:
                break
            try:
                self._load([record for record in records if record.is_away], group.stream)
            except torch.OutOfMemoryError:  # there will be room when what is here now has been used
                break
            ahead += nbytes

    def load(self, records: Sequence[Record], stream: torch.Stream) -> None:
        """Start bringing `records` back, if need be at the cost of what was brought back ahead of its use."""
        try:
            self._load(records, stream)
        except torch.OutOfMemoryError:
            self._give_up(record for record in self._loaded if not record.used)
            self._load(records, stream)

    def _load(self, records: Sequence[Record], stream: torch.Stream) -> None:
        if not records:
            return
        load = self._transfers.copy_in(records, stream)
        self._loaded += records
        self._ledger.step.in_bytes += load.copied
        if self._planner.timeline is not None:
            self._planner.timeline.loads.append(load)

    def await_load(self, record: Record) -> None:
        """Hold the device until `record` is there."""
        assert record.load is not None
        self._transfers.await_load(record.load)
        if self._transfers.waits:
            self._ledger.note_waits(self._transfers.waits, self._planner.timeline, in_backward=True)
        record.used = True

    def _give_up(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.loaded is not None:
                self._transfers.give_up(record)
                record.spent, record.used = record.used, False

    def give_back(self, record: Record) -> None:
        """Nothing needs `record` any more."""
        self._give_up([record])

    def settle(self) -> None:
        """Backward is over: what was brought back and is still held, because the graph is, is given up again."""
        self._give_up(self._loaded)
        for record in self._loaded:
            record.spent = False
        self._forget()
