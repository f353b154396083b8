"""The offload engine: what is saved for backward, where it is, and when it travels."""

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ckpt.offload.admission import Admission
from lightning_ckpt.offload.budget import default_host_budget, slab_bytes
from lightning_ckpt.offload.device import current_backward, current_stream
from lightning_ckpt.offload.groups import Group, Key, Order
from lightning_ckpt.offload.guard import Guard
from lightning_ckpt.offload.host_memory import HostMemory
from lightning_ckpt.offload.inbound import Inbound
from lightning_ckpt.offload.options import OffloadOptions
from lightning_ckpt.offload.outbound import Outbound
from lightning_ckpt.offload.planner import Planner
from lightning_ckpt.offload.records import (
    Flattened,
    Handle,
    Holder,
    Kept,
    Moved,
    Record,
    changed_in_place,
    extent,
    restore,
)
from lightning_ckpt.offload.statistics import Ledger, StepStatistics
from lightning_ckpt.offload.transfers import Transfers


class OffloadEngine:
    """Moves saved activations to host memory during forward and back during backward.

    Between `boundary` calls, what autograd saves inside `forward` (and what is given to `pack`) gathers in a group,
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
        engine.learn(model)
        boundaries = Boundaries(model, {f"layer {i}": layer for i, layer in enumerate(model.layers)}, engine)
        for batch in batches:
            with engine.forward():
                loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            engine.step_done()
        boundaries.remove()
        engine.close()
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
        self._guard = Guard(say)
        say = self._guard.say
        self.device = _with_index(device)
        self.options = options
        self.host = host or _host_memory(options, local_ranks, say)
        self._ledger = Ledger()
        self._admission = Admission(self.device, int(options.min_bytes))
        transfers = transfers or Transfers(self.device)
        order = Order()
        self._transfers = transfers
        self._planner = Planner(transfers, options.move, say)
        self._outbound = Outbound(
            transfers,
            self.host,
            order,
            self._planner,
            self._ledger,
            options.keep_last,
            _bytes(options.max_inflight_bytes),
            say,
        )
        self._inbound = Inbound(
            transfers, order, self._planner, self._ledger, self._outbound, _bytes(options.prefetch_bytes)
        )
        self._stream = current_stream(self.device.index)
        self._has_several_streams = False
        self._blank = torch.empty(0, device=self.device)
        self._dead: deque[Record] = deque()
        self._closed = False

    @property
    def resident_bytes(self) -> int:
        """Bytes of saved storages that are on the device now, of those that are large enough to travel."""
        return self._ledger.resident_bytes

    @property
    def staying(self) -> Mapping[Key, int]:
        """Groups that stay on the device because the link cannot hide them, with their bytes, once that is known."""
        return self._planner.staying

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
        with self._guard as entered:
            if not entered or self._closed:
                return
            self._reap()
            self._outbound.end()
            self._settle()
            stream = current_stream(self.device.index)
            if stream != self._stream:
                self._transfers.wait(stream, self._stream.record_event(), "computed")
                self._stream = stream
            self._planner.begin(self._ledger.steps, self._outbound.max_inflight_bytes, self._inbound.prefetch_bytes)

    def boundary(self, name: str, starts_layer: bool) -> None:
        """A layer begins or ends.

        Args:
            name: of the layer, or of what comes after one; the same in every step.
            starts_layer: whether a layer begins.
        """
        if self._closed or current_backward() != -1:
            return
        with self._guard as entered:
            if entered:
                self._reap()
                self._outbound.boundary(name, starts_layer, self._stream)

    def pack(self, tensor: Tensor) -> Handle:
        """Keep `tensor` for backward; what autograd is given in its place."""
        kind = type(tensor)
        if kind is nn.Parameter:
            return self._stay(tensor, "parameter")
        if self._closed:
            return self._stay(tensor, "closed")
        if current_backward() != -1:
            return self._stay(tensor, "saved in backward")
        if self._has_several_streams or current_stream(self.device.index) != self._stream:
            self._find_several_streams()
            return self._stay(tensor, "several streams")
        if kind is not Tensor:
            return self._pack_subclass(tensor)
        try:
            reason = self._admission.reason_to_stay(tensor)
        except (NotImplementedError, RuntimeError):  # functional and other tensors without a storage
            reason = "layout"
        return self._stay(tensor, reason) if reason is not None else self._pack_plain(tensor)

    def _pack_plain(self, tensor: Tensor) -> Handle:
        # Shares the version counter with the tensor, but not its memory.
        probe = tensor.detach()
        probe.data = self._blank
        storage = tensor.untyped_storage()
        start, end = extent(tensor, storage)
        outbound = self._outbound
        with self._guard as entered:
            if not entered:
                return self._stay(tensor, "saved by a finalizer")
            self._reap()
            group = outbound.group(self._stream)
            holder = outbound.find(storage)
            if holder is None or not holder.record.serves(storage, probe, start, end):
                record = Record(self, storage, probe, group.number, not tensor.requires_grad)
                holder = Holder(record)
                outbound.add(record, group)
            else:
                record = holder.record
                if record.last_group != group.number:
                    group.add(record, is_new=False)
                    record.last_group = group.number
            record.include(start, end, tensor.nbytes)
            handle = Moved(tensor, probe, holder, group)
            if outbound.is_full:
                outbound.cut(group)
        return handle

    def _pack_subclass(self, tensor: Tensor) -> Handle:
        if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return self._stay(tensor, "parameter")
        if not is_traceable_wrapper_subclass(tensor):  # also fake tensors of a compiler, which only looks
            return self._stay(tensor, "subclass")
        if tensor.is_nested:  # its ragged size is known by the very tensor that holds it
            return self._stay(tensor, "layout")
        names, context = tensor.__tensor_flatten__()
        kind, size, stride = type(tensor), tensor.size(), tensor.stride()
        probe = tensor.detach()
        parts = {name: self.pack(getattr(tensor, name)) for name in names}
        for name in names:
            setattr(probe, name, getattr(probe, name).new_empty(0))  # the version counter is all that it is for

        def rebuild(parts: dict[str, Tensor]) -> Tensor:
            return kind.__tensor_unflatten__(parts, context, size, stride)

        return Flattened(parts, rebuild, probe)

    def _stay(self, tensor: Tensor, reason: str) -> Kept:
        self._ledger.stays(reason)
        return Kept(tensor)

    def _find_several_streams(self) -> None:
        if not self._has_several_streams:
            # Memory that another stream allocated might be used again there before a copy out of it has ended.
            self._has_several_streams = True
            torch.accelerator.synchronize(self.device)
            self._guard.say(
                "Offload: the forward pass computes on several streams of the device. Their memory cannot be given up "
                "early without making them wait for each other, so activations stay on the device from now on."
            )

    # ---------------------------------------------------------------- backward

    def unpack(self, handle: Moved) -> Tensor:
        """The tensor that `handle` stands for, on the device."""
        record = handle.holder.record
        with self._guard as entered:
            if not entered:
                raise RuntimeError(
                    "A finalizer (`__del__`) runs a backward while activations are being moved. Run it outside of the "
                    "finalizer, or keep the object alive until the training step is over."
                )
            self._reap()
            if handle.is_changed:
                raise changed_in_place(handle.dtype, handle.size, handle.probe._version, handle.version)
            task = current_backward()
            if task != -1:
                if task not in self._inbound.tasks:
                    self._backward_begins(task, handle.group)
                self._inbound.enter(handle.group)
            if record.source is not None:
                return restore(handle, record.source, 0)
            if record.loaded is None:
                self._inbound.load([record], handle.group.stream)
            self._inbound.await_load(record)
            assert record.loaded is not None
            return restore(handle, record.loaded.untyped_storage(), record.start)

    def _backward_begins(self, task: int, group: Group) -> None:
        self._inbound.tasks.add(task)
        # Runs when this backward is over; never if it fails, and then the next step settles what is left.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ends(task))
        if self._outbound.run is not None:
            self._outbound.turn()
            if self._planner.timeline is not None:
                self._planner.timeline.turns(group)
        self._ledger.turn(self.host.booked_bytes, self.host.locked_bytes)

    def _backward_ends(self, task: int) -> None:
        with self._guard as entered:
            if not entered:
                return
            self._reap()
            self._inbound.tasks.discard(task)
            if not self._inbound.tasks:  # else it was one inside another
                self._planner.ends(self._inbound.group, self.device)
                self._settle()

    def _settle(self) -> None:
        self._outbound.settle()
        self._inbound.settle()

    # ---------------------------------------------------------------- the end of things

    def bury(self, record: Record) -> None:
        """A record has died: what it held is given back at the next opportunity."""
        self._dead.append(record)
        if self._guard.try_enter():  # else whoever is inside, perhaps this thread, does it later
            try:
                self._reap()
            finally:
                self._guard.leave()

    def _reap(self) -> None:
        if not self._dead:
            return
        while self._dead:
            record = self._dead.popleft()
            if record.loaded is not None:
                self._inbound.give_back(record)
            self._outbound.give_back(record)
        if current_backward() == -1:  # a graph was dropped: no backward will come by
            self._outbound.settle_abandoned()

    def step_done(self) -> None:
        """An optimizer step is over, so all memory of a step has been taken once."""
        self._ledger.steps += 1
        self._planner.watch_room(self.device)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._ledger.steps

    def describe(self) -> str:
        """What travels in a step and what stays, and why, in a sentence."""
        return self._ledger.describe()

    def take_statistics(self) -> StepStatistics:
        """What offload did since this was called last."""
        with self._guard:
            return self._ledger.take(self._planner.link)

    def note_waits(self) -> None:
        """Note when the device waits for copies, until `take_waits`."""
        self._ledger.noted_waits = []

    def take_waits(self) -> list[tuple[torch.Event, torch.Event]]:
        """The beginnings and ends of waits since `note_waits`."""
        with self._guard:
            waits, self._ledger.noted_waits = self._ledger.noted_waits or [], None
        return waits

    def learn(self, model: nn.Module | None) -> None:
        """Note what `model` keeps in memory anyway: its parameters and buffers never travel."""
        self._admission.learn(model)

    def close(self) -> None:
        """Stop: everything under way ends, nothing more is moved, host memory is given back.

        Graphs that still wait for their backward keep what they need.
        """
        if self._closed:
            return
        self.begin()
        with self._guard:
            self._closed = True
            self.host.close()


def _unpack(handle: Handle) -> Tensor:
    return handle.tensor()


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _bytes(value: int | str | None) -> int | None:
    return value if value is None else int(value)  # options hold integers once they are checked


def _host_memory(options: OffloadOptions, local_ranks: int, say: Callable[[str], None]) -> HostMemory:
    given = options.host_budget
    budget = default_host_budget(local_ranks) if given is None else int(given) // local_ranks
    return HostMemory(budget, slab_bytes(budget), on_pageable=say)
