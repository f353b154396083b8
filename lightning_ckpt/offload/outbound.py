"""The way to the host: groups of saved tensors are closed, sent, and given up on the device."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_ckpt.offload.groups import Group, Order, Run
from lightning_ckpt.offload.host_memory import HostMemory
from lightning_ckpt.offload.planner import Planner
from lightning_ckpt.offload.records import Holder, Record
from lightning_ckpt.offload.statistics import Ledger
from lightning_ckpt.offload.transfers import Flight, Transfers

# A group is cut where it becomes large, so that long layers, and models without any, travel in parts: at this share of
# what a forward pass saves, within limits that keep the cost of a part in proportion.
_SHARE = 64
_PART_BYTES = (2**20, 64 * 2**20)
_OPERATOR_SAVES = 16  # storages that one operator saves, at most
_WARM_UP = 3  # optimizer steps in which host memory may still grow


def part_bytes(saved: int) -> int:
    """The size of the parts in which large layers travel.

    Args:
        saved: bytes that a forward pass saves.
    """
    least, most = _PART_BYTES
    return min(max(saved // _SHARE, least), most)


class _Announced(NamedTuple):
    """What the next tensor that is saved belongs to."""

    name: str
    starts_layer: bool
    mark: torch.Event | None


_NOWHERE = _Announced("", False, None)  # what runs outside of layers, such as an embedding


class Outbound:
    """Gathers what is saved in groups, and starts their copies where they end.

    Args:
        transfers: the copy streams.
        host: where the bytes go.
        order: what is known of earlier steps.
        planner: knows what stays.
        ledger: where it is written down.
        keep_last: layers at the end that stay.
        max_inflight_bytes: see `OffloadOptions`; None means twice the largest group.
        say: called with what a user should know.

    Attributes:
        run: the forward work since the last backward, None if there is none.
    """

    def __init__(
        self,
        transfers: Transfers,
        host: HostMemory,
        order: Order,
        planner: Planner,
        ledger: Ledger,
        keep_last: int,
        max_inflight_bytes: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.run: Run | None = None
        self._transfers = transfers
        self._host = host
        self._order = order
        self._planner = planner
        self._ledger = ledger
        self._keep_last = keep_last
        self._max_inflight_bytes = max_inflight_bytes
        self._say = say
        self._alive: dict[int, Record] = {}
        self._records: dict[int, Record] = {}
        self._flights: deque[Flight] = deque()
        self._inflight_bytes = 0
        self._group: Group | None = None
        self._announced = _NOWHERE
        self._part_of: Group | None = None
        self._held_back: list[Record] = []
        self._gathered = 0
        self._saved = 0
        self._part_bytes = _PART_BYTES[1]
        self._largest = [0, 0]  # of the run before, and of this one

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way to the host."""
        return 2 * self.largest if self._max_inflight_bytes is None else self._max_inflight_bytes

    @property
    def largest(self) -> int:
        """Bytes of the largest group."""
        return max(self._largest)

    def boundary(self, name: str, starts_layer: bool, stream: torch.Stream) -> None:
        """What is saved from now on belongs to another group."""
        if self._held_back:
            self.group(stream)
        self._close_group()
        self._part_of = None
        self._announced = _Announced(name, starts_layer, self._mark(stream))

    def _mark(self, stream: torch.Stream) -> torch.Event | None:
        return None if self._planner.timeline is None else self._transfers.mark(stream)

    def group(self, stream: torch.Stream) -> Group:
        """The group that is open. It opens with the first tensor: a layer that saves nothing has none."""
        if self._group is None:
            announced, self._announced = self._announced, _NOWHERE
            if self.run is None:
                self.run = self._order.new_run()
            if self._part_of is not None:
                self._group = self.run.open_part(self._part_of)
            else:
                self._group = self.run.open(announced.name, announced.starts_layer, stream)
            self._gathered = 0
            for record in self._held_back:
                self._group.add(record, is_new=False)
                record.last_group = self._group.number
            self._held_back = []
            if self._planner.timeline is not None:
                self._planner.timeline.begins(self._group, announced.mark or self._transfers.mark(stream))
        return self._group

    def find(self, storage: torch.UntypedStorage) -> Holder | None:
        """What the handles on a storage hold, if it has been saved before."""
        record = self._records.get(storage._cdata)
        return None if record is None else record.holder()

    def add(self, record: Record, group: Group) -> None:
        """A storage is saved for the first time."""
        self._alive[id(record)] = self._records[record.identity] = record
        self._ledger.resident_bytes += record.nbytes
        self._gathered += record.nbytes
        group.add(record, is_new=True)

    @property
    def is_full(self) -> bool:
        """Whether the group that is open has become large."""
        return self._gathered >= self._part_bytes

    def cut(self, group: Group) -> None:
        """Close the group and go on with another part of it.

        Unlike at the boundary of a layer, an operator may be at work, which has not filled yet what it has saved.
        """
        assert self._group is not None
        self._held_back = [record for record in self._group.newest(_OPERATOR_SAVES) if record.may_be_blank]
        self._close_group()
        self._announced = _Announced(group.key[0], True, self._mark(group.stream))
        if group.layer:  # else nobody has said where layers begin, and parts have to do
            self._part_of = group

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        self._largest[1] = max(self._largest[1], group.nbytes)
        self._saved += group.nbytes
        timeline = self._planner.timeline
        reason = self._reason_to_stay(group)
        if timeline is not None:
            timeline.ends(group, movable=reason in (None, "not hidden"))
        held_back = self._held_back
        records = [record for record in group.records() if record.waits_for_copy and record not in held_back]
        if reason is not None:
            self._leave(records, reason)
        elif records := self._with_host_memory(records):
            flight = self._transfers.copy_out(records, group.stream)
            self._flights.append(flight)
            self._inflight_bytes += flight.nbytes
            self._ledger.step.out_bytes += flight.copied
            if timeline is not None:
                timeline.flights.append(flight)
        while self._inflight_bytes > self.max_inflight_bytes:
            self._retire(self._flights.popleft())

    def _reason_to_stay(self, group: Group) -> str | None:
        layers_after = self._order.layers_after(group)
        if layers_after is not None and layers_after < self._keep_last:
            return "last"
        return "not hidden" if self._planner.stays(group) else None

    def _with_host_memory(self, records: Sequence[Record]) -> list[Record]:
        ready = []
        for record in records:
            if record.is_sparse:
                self._leave([record], "sparse view")
                continue
            allocations = self._host.allocations
            record.region = self._host.take(record.end - record.start)
            if self._host.allocations > allocations and self._ledger.steps >= _WARM_UP:
                self._ledger.step.late_allocations += 1
            if record.region is None:
                self._leave([record], "host budget")
                self._say(
                    f"Offload: the host memory for this process is used up ({self._host.locked_bytes / 2**30:.2f} GiB "
                    "are locked), so the rest of the activations stays on the device. Raise `host_budget`, or "
                    "recompute more layers."
                )
            else:
                ready.append(record)
        return ready

    def _leave(self, records: Sequence[Record], reason: str) -> None:
        for record in records:
            record.stays = True
            self._ledger.stays(reason, record.nbytes)

    def _retire(self, flight: Flight, in_backward: bool = False) -> None:
        self._transfers.retire(flight)
        self._inflight_bytes -= flight.nbytes
        self._ledger.resident_bytes -= flight.nbytes
        if self._transfers.waits:
            self._ledger.note_waits(self._transfers.waits, self._planner.timeline, in_backward)

    def follow_backward(self, group: Group) -> None:
        """Backward of `group` begins: give up what was still under way when its own backward used it.

        Its copy is waited for only when backward has gone on for as many bytes as may be under way, so that the link
        has had the time.
        """
        for flight in [flight for flight in self._flights if not flight.is_needed()]:
            flight.overtaken += group.nbytes
            if self._transfers.has_passed(flight.left) or flight.overtaken > self.max_inflight_bytes:
                self._flights.remove(flight)
                self._retire(flight, in_backward=True)

    def turn(self) -> None:
        """The forward work is over, since a backward begins."""
        if self.run is not None:
            self._order.learn_forward(self.run)
            self._part_bytes = part_bytes(self._saved)
            self._largest = [self._largest[1], 0]
            self._saved = 0
        self.run = self._group = self._part_of = None
        self._held_back = []
        self._announced = _NOWHERE

    def end(self) -> None:
        """The forward work is over, since another forward pass begins."""
        self._close_group()
        self.turn()

    def settle(self) -> None:
        """Nothing stays under way."""
        while self._flights:
            self._retire(self._flights.popleft(), in_backward=True)

    def give_back(self, record: Record) -> None:
        """Nothing needs `record` any more."""
        del self._alive[id(record)]
        if self._records.get(record.identity) is record:
            del self._records[record.identity]
        if record.region is not None:  # if it is still under way, its flight holds the device memory
            self._host.give_back(record.region)
        else:
            self._ledger.resident_bytes -= record.nbytes
        record.region = record.source = None

    def settle_abandoned(self) -> None:
        """Nothing stays under way that nobody needs."""
        for flight in [flight for flight in self._flights if not flight.is_needed()]:
            self._flights.remove(flight)
            self._retire(flight)
