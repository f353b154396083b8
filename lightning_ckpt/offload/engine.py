"""The offload engine: what is saved for backward, where it is, and when it travels."""

import contextlib
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ckpt.offload.admission import Admission
from lightning_ckpt.offload.budget import default_host_budget
from lightning_ckpt.offload.device import room
from lightning_ckpt.offload.groups import Group, Key, Order, Run
from lightning_ckpt.offload.host_memory import HostMemory
from lightning_ckpt.offload.options import OffloadOptions
from lightning_ckpt.offload.records import (
    Flattened,
    Handle,
    Kept,
    Moved,
    Record,
    changed_in_place,
    extent,
    restore,
)
from lightning_ckpt.offload.schedule import Link, choose_layers
from lightning_ckpt.offload.statistics import StepStatistics
from lightning_ckpt.offload.timeline import Timeline
from lightning_ckpt.offload.transfers import Flight, Load, Transfers

_PART_BYTES = 64 * 2**20  # a group is cut here, so that long layers, and models without any, travel in parts
_WARM_UP = 3  # optimizer steps in which host memory may still grow
_PLAN_STEPS = 200  # optimizer steps for which measured times are trusted

_NOWHERE = ("", False, None)  # the name of what runs outside of layers, such as an embedding

_in_backward = torch._C._current_graph_task_id


class OffloadEngine:
    """Moves saved activations to host memory during forward and back during backward.

    Between `boundary` calls, what autograd saves inside `forward` (and what is given to `keep`) gathers in a group,
    usually one per layer. At the boundary its copy to the host starts on a stream of its own, and its device memory is
    given up when the copy has ended and `max_inflight_bytes` are under way. In backward, groups are brought back ahead
    of their use. The results are those without the engine, bit for bit.

    Args:
        device: the accelerator whose memory is to be saved.
        options: what a user may set. Default: everything as it comes.
        local_ranks: processes on this machine that share its memory. Default: 1.
        say: called with what a user should know, each message once. Default: `warnings.warn`.
        transfers: the copy streams. Default: new ones.
        host: host memory. Default: pinned slabs within `options.host_budget`.

    Example::

        engine = OffloadEngine(torch.device("cuda"))
        boundaries = attach_boundaries(model, list(model.layers), engine)
        for batch in batches:
            with engine.forward():
                loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            engine.step_done()
    """

    def __init__(
        self,
        device: torch.device,
        options: OffloadOptions | None = None,
        *,
        local_ranks: int = 1,
        say: Callable[[str], None] = warnings.warn,
        transfers: Transfers | None = None,
        host: HostMemory | None = None,
    ) -> None:
        options = options or OffloadOptions()
        self.device = _with_index(device)
        self.options = options
        self.statistics = StepStatistics()
        self.steps = 0
        #: Bytes of storages on the device that are large enough to travel.
        self.resident_bytes = 0
        #: Groups that stay on the device because the link cannot hide them, once that is known.
        self.staying: set[Key] = set()
        self.layers = 0
        self._say = _once(say)
        self._min_bytes = _as_bytes(options.min_bytes) or 0
        self._max_inflight = _as_bytes(options.max_inflight_bytes)
        self._prefetch = _as_bytes(options.prefetch_bytes)
        self._admission = Admission(self.device, self._min_bytes)
        self._transfers = transfers or Transfers(self.device)
        if host is None:
            given = _as_bytes(options.host_budget)
            budget = default_host_budget(local_ranks) if given is None else given // local_ranks
            host = HostMemory(budget, on_pageable=self._say)
        self.host = host
        self._blank = torch.empty(0, device=self.device)
        self._lock = threading.Lock()
        self._dead: deque[Record] = deque()
        self._records: dict[int, weakref.ref[Record]] = {}
        self._order = Order()
        self._run: Run | None = None
        self._group: Group | None = None
        self._announced: tuple[str, bool, torch.Event | None] = _NOWHERE
        self._pending_bytes = 0
        self._largest = 0
        self._flights: deque[Flight] = deque()
        self._backward = _Backward()
        self._timeline: Timeline | None = None
        self._planned_at: int | None = None
        self._room = 0
        self._closed = False

    # ---------------------------------------------------------------- forward

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Everything that autograd saves inside goes through the engine; backward may run inside or afterwards."""
        self.begin()
        with saved_tensors_hooks(self.pack, _unpack):
            try:
                yield
            except BaseException:
                self.begin()
                raise

    def begin(self) -> None:
        """A training step begins: whatever an earlier one has left under way is brought to an end."""
        with self._lock:
            self._reap()
            if self._run is not None:
                self._order.learn_forward(self._run)
            self._settle()
            self._run = self._group = None
            self._announced = _NOWHERE
            self._plan()

    def boundary(self, name: str, starts_layer: bool) -> None:
        """A layer begins or ends.

        Args:
            name: of the layer, or of what comes after one; the same in every step.
            starts_layer: whether a layer begins.
        """
        if self._closed or _in_backward() != -1:
            return
        with self._lock:
            self._reap()
            self._close_group()
            self._announced = (name, starts_layer, None if self._timeline is None else self._mark())

    def pack(self, tensor: Tensor) -> Handle:
        """What autograd keeps in the place of `tensor`."""
        if _in_backward() != -1 or self._closed:
            return self._stay(tensor, "saved in backward")
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter:
            return self._pack_subclass(tensor)
        try:
            reason = self._admission.reason_to_stay(tensor)
        except (NotImplementedError, RuntimeError):  # functional and other tensors without a storage
            reason = "layout"
        return self._stay(tensor, reason) if reason is not None else self._pack_plain(tensor)

    def keep(self, tensor: Tensor) -> Handle:
        """Keep a tensor for backward, as if autograd had saved it here."""
        return self.pack(tensor)

    def _pack_plain(self, tensor: Tensor) -> Moved:
        # Shares the version counter with the tensor, but not its memory.
        probe = tensor.detach()
        probe.data = self._blank
        storage = tensor.untyped_storage()
        start, end = extent(tensor)
        with self._lock:
            self._reap()
            group = self._group or self._open_group()
            reference = self._records.get(storage._cdata)
            record = reference() if reference is not None else None
            if record is None or record.is_dead or not record.serves(storage, probe, start, end):
                record = Record(self, storage, probe, group)
                self._records[storage._cdata] = weakref.ref(record)
                self.resident_bytes += record.nbytes
                self._pending_bytes += record.nbytes
                group.add(record, is_new=True)
            elif record.last_group is not group:
                group.add(record, is_new=False)
            record.last_group = group
            record.include(start, end, tensor.nbytes)
            handle = Moved(tensor, probe, record, group)
            if self._pending_bytes >= _PART_BYTES:
                self._close_group()
                self._announced = (group.key[0], group.layer == 0, None if self._timeline is None else self._mark())
        return handle

    def _pack_subclass(self, tensor: Tensor) -> Handle:
        if not is_traceable_wrapper_subclass(tensor):  # also fake tensors of a compiler, which only looks
            return self._stay(tensor, "parameter" if isinstance(tensor, nn.Parameter) else "subclass")
        if isinstance(tensor, nn.Parameter):
            return self._stay(tensor, "parameter")
        names, context = tensor.__tensor_flatten__()
        kind, size, stride = type(tensor), tensor.size(), tensor.stride()

        def rebuild(parts: dict[str, Tensor]) -> Tensor:
            return kind.__tensor_unflatten__(parts, context, size, stride)

        return Flattened({name: self.pack(getattr(tensor, name)) for name in names}, rebuild)

    def _stay(self, tensor: Tensor, reason: str) -> Kept:
        self.statistics.stayed[reason] += 1
        return Kept(tensor, reason)

    def _open_group(self) -> Group:
        """The group that was announced; a layer that saves nothing, as without gradients, has none."""
        name, starts_layer, mark = self._announced
        self._announced = _NOWHERE
        if self._run is None:
            self._run = self._order.new_run()
        group = self._group = self._run.open(name, starts_layer, torch.accelerator.current_stream(self.device))
        self._pending_bytes = 0
        if self._timeline is not None:
            self._timeline.begins(group, mark or self._mark())
        return group

    def _mark(self) -> torch.Event:
        return self._transfers.mark(torch.accelerator.current_stream(self.device))

    def _close_group(self) -> None:
        """Send a finished group on its way, and bound what is under way."""
        group, self._group = self._group, None
        if group is None:
            return
        self._largest = max(self._largest, group.nbytes)
        reason = self._reason_to_stay(group)
        if self._timeline is not None:
            self._timeline.ends(group, movable=reason in (None, "not hidden"))
        records = [record for record in group.records() if record.waits_for_copy]
        if reason is None:
            records = self._with_host_memory(records)
        else:
            self._note_stayed(records, reason)
            records = []
        if records:
            flight = self._transfers.copy_out(records, group.stream)
            self._flights.append(flight)
            self.statistics.out_bytes += flight.copied
            if self._timeline is not None:
                self._timeline.flights.append(flight)
        while self._flights and sum(flight.nbytes for flight in self._flights) > self.max_inflight_bytes:
            self._retire(self._flights.popleft(), in_backward=False)

    def _reason_to_stay(self, group: Group) -> str | None:
        after = self._order.layers_after(group)
        if after is not None and after < self.options.keep_last:
            return "last"
        if group.key in self.staying:
            return "not hidden"
        return None

    def _with_host_memory(self, records: Sequence[Record]) -> list[Record]:
        ready = []
        for record in records:
            if record.is_sparse:
                self._note_stayed([record], "sparse view")
                continue
            before = self.host.allocations
            record.region = self.host.take(record.end - record.start)
            if self.host.allocations > before and self.steps >= _WARM_UP:
                self.statistics.late_allocations += 1
            if record.region is None:
                self._note_stayed([record], "host budget")
                self._say(
                    f"Offload: the host memory for this process is used up ({self.host.locked_bytes / 2**30:.2f} GiB "
                    "are locked), so the rest of the activations stays on the device. Raise `host_budget`, or "
                    "recompute more layers."
                )
            else:
                ready.append(record)
        return ready

    def _note_stayed(self, records: Sequence[Record], reason: str) -> None:
        self.statistics.stayed[reason] += len(records)
        self.statistics.stayed_bytes[reason] += sum(record.nbytes for record in records)
        for record in records:
            record.stays = True

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way to the host."""
        return 2 * self._largest if self._max_inflight is None else self._max_inflight

    @property
    def prefetch_bytes(self) -> int:
        """Bytes that are brought back ahead of their use."""
        return 2 * self._largest if self._prefetch is None else self._prefetch

    def _retire(self, flight: Flight, in_backward: bool) -> None:
        self._transfers.retire(flight)
        self._note_waits(in_backward)
        self.resident_bytes -= flight.nbytes

    # ---------------------------------------------------------------- backward

    def unpack(self, handle: Moved) -> Tensor:
        """The tensor that `handle` stands for, on the device."""
        record = handle.record
        with self._lock:
            self._reap()
            if handle.is_changed:
                raise changed_in_place(handle.dtype, handle.size, handle.probe._version, handle.version)
            task = _in_backward()
            if task != -1:
                self._enter(handle.group, task)
            if record.source is not None:
                return restore(handle, record.source, 0)
            if record.loaded is None:
                self._load([record], handle.group.stream)
            assert record.load is not None
            assert record.loaded is not None
            self._transfers.await_load(record.load)
            self._note_waits(in_backward=True)
            record.used = True
            return restore(handle, record.loaded.untyped_storage(), record.start)

    def _enter(self, group: Group, task: int) -> None:
        """Backward needs `group` now: bring it and what follows back, give the one before up."""
        backward = self._backward
        if task not in backward.tasks:
            backward.tasks.add(task)
            # Runs when this backward is over; never if it fails, and then the next step settles what is left.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ends(task))
            self._backward_begins(group)
        if group is backward.group:
            return
        previous, backward.group = backward.group, group
        if previous is not None:
            # Under `retain_graph` they outlive their use; their bytes stay on the host.
            self._give_up(record for record in previous.records() if record.used and record.first_group is previous)
        if group not in backward.entered:
            if backward.newest is not None:
                self._order.learn_backward(backward.newest, group)
            backward.newest = group
            backward.entered.add(group)
            if self._timeline is not None:
                self._timeline.needs(group)
        self._bring(group)

    def _backward_begins(self, group: Group) -> None:
        if self._run is not None:
            self._order.learn_forward(self._run)
            self.layers = max(self.layers, self._run.layers)
            self._run = self._group = None  # what is saved after this belongs to another backward
            self._announced = _NOWHERE
            if self._timeline is not None:
                self._timeline.turns(group)
        statistics = self.statistics
        statistics.resident_bytes = max(statistics.resident_bytes, self.resident_bytes)
        statistics.host_bytes = max(statistics.host_bytes, self.host.booked_bytes)
        statistics.locked_bytes = self.host.locked_bytes

    def _bring(self, group: Group) -> None:
        """Load what `group` needs, then what follows it as far as `prefetch_bytes` reach, at least one group."""
        self._load([record for record in group.records() if record.is_away], group.stream)
        ahead = 0
        for following in self._order.following(group):
            if following.stream != group.stream:  # its memory has to come from its own stream
                continue
            records = [record for record in following.records() if record.travels]
            nbytes = sum(record.nbytes for record in records)
            if ahead and ahead + nbytes > self.prefetch_bytes:
                break
            self._load([record for record in records if record.is_away], group.stream)
            ahead += nbytes

    def _load(self, records: Sequence[Record], stream: torch.Stream) -> None:
        if not records:
            return
        load = self._transfers.copy_in(records, stream)
        self._backward.loads.append((load, [weakref.ref(record) for record in records]))
        self.statistics.in_bytes += load.copied
        if self._timeline is not None:
            self._timeline.loads.append(load)

    def _give_up(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.loaded is not None:
                self._transfers.give_up(record)
                record.used = False

    def _backward_ends(self, task: int) -> None:
        with self._lock:
            self._reap()
            backward = self._backward
            backward.tasks.discard(task)
            if backward.tasks:  # one inside another
                return
            if self._timeline is not None and backward.group is not None and not self._timeline.is_complete:
                self._timeline.stops(backward.group)
                self._room = room(self.device)
            self._settle()

    def _settle(self) -> None:
        """Nothing stays under way, and nothing that a graph may still need is lost."""
        while self._flights:
            self._retire(self._flights.popleft(), in_backward=True)
        for _, references in self._backward.loads:
            self._give_up(record for record in (reference() for reference in references) if record is not None)
        self._backward = _Backward()

    # ---------------------------------------------------------------- lifetimes

    def bury(self, record: Record) -> None:
        """A record has died: what it held is given back at the next opportunity."""
        self._dead.append(record)
        if self._lock.acquire(blocking=False):  # else whoever holds it, perhaps this thread, does it
            try:
                self._reap()
            finally:
                self._lock.release()

    def _reap(self) -> None:
        if not self._dead:
            return
        while self._dead:
            record = self._dead.popleft()
            reference = self._records.get(record.identity)
            if reference is not None and reference() is record:
                del self._records[record.identity]
            if record.load is not None:
                self._transfers.give_up(record)
            if record.region is not None:
                self.host.give_back(record.region)
                record.region = None
            elif record.source is not None:
                self.resident_bytes -= record.nbytes
            record.source = None
        if _in_backward() == -1:  # a graph was dropped: nothing will come for what is under way
            for flight in [flight for flight in self._flights if not flight.is_needed()]:
                self._flights.remove(flight)
                self._retire(flight, in_backward=False)

    # ---------------------------------------------------------------- measuring and planning

    def _note_waits(self, in_backward: bool) -> None:
        """Note for how long the device waited for copies just now."""
        waits = self._transfers.waits
        if waits:
            statistics = self.statistics
            (statistics.backward_waits if in_backward else statistics.forward_waits).extend(waits)
            if self._timeline is not None and not self._timeline.is_complete:
                for pair in waits:
                    self._timeline.waited(pair)
            waits.clear()

    def step_done(self) -> None:
        """An optimizer step is over, so all memory of a step has been taken once."""
        self.steps += 1

    def take_statistics(self) -> StepStatistics:
        """What offload did since this was called last."""
        with self._lock:
            self._reap()
            taken, self.statistics = self.statistics, StepStatistics()
            return taken

    def _plan(self) -> None:
        """Measure a step once in a while, and choose from it which layers the link can hide."""
        timeline = self._timeline
        if timeline is not None:
            if not timeline.is_complete:
                self._timeline = None  # its backward never came
            elif timeline.has_passed:
                self._timeline = None
                self._choose(timeline)
        elif self.options.move == "hidden" and self.steps and self._is_plan_due():
            self._timeline = Timeline(self._transfers)

    def _is_plan_due(self) -> bool:
        return self._planned_at is None or self.steps - self._planned_at >= _PLAN_STEPS

    def _choose(self, timeline: Timeline) -> None:
        self._planned_at = self.steps
        out, into = timeline.bytes_per_s(timeline.flights), timeline.bytes_per_s(timeline.loads)
        if out is None or into is None:
            return
        costs = [cost for cost in timeline.costs() if cost.nbytes]
        free = self._room + sum(cost.nbytes for cost in costs if cost.key in self.staying)
        moved = choose_layers(costs, Link(out, into, self.max_inflight_bytes, self.prefetch_bytes), free)
        self.staying = {cost.key for cost in costs if cost.movable and cost.layer not in moved}
        staying = {cost.layer for cost in costs if cost.key in self.staying}
        if staying:
            self._say(
                f"Offload: {len(staying)} of {self.layers} layers stay on the device, which has room for them: the "
                f"link ({out / 1e9:.1f} GB/s out, {into / 1e9:.1f} GB/s in) cannot hide more behind compute. "
                "`move='all'` moves every layer."
            )

    def learn(self, model: nn.Module | None) -> None:
        """Note what `model` keeps in memory anyway: its parameters and buffers never travel."""
        self._admission.learn(model)

    def close(self) -> None:
        """Stop: everything under way ends, nothing more is moved, host memory is given back.

        Graphs that still wait for their backward keep what they need.
        """
        with self._lock:
            self._reap()
            if self._closed:
                return
            self._settle()
            self._run = self._group = self._timeline = None
            self._closed = True
            self.host.close()


class _Backward:
    """What is known while a backward runs."""

    def __init__(self) -> None:
        self.tasks: set[int] = set()
        self.group: Group | None = None
        self.newest: Group | None = None
        self.entered: weakref.WeakSet[Group] = weakref.WeakSet()
        self.loads: list[tuple[Load, list[weakref.ref[Record]]]] = []


def _unpack(handle: Handle) -> Tensor:
    return handle.tensor()


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _as_bytes(value: int | str | None) -> int | None:
    return value if value is None else int(value)  # options hold integers once they are checked


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    said: set[str] = set()

    def say_once(message: str) -> None:
        if message not in said:
            said.add(message)
            say(message)

    return say_once
