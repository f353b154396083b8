"""What stands in the autograd graph for a saved tensor, and what is known about the memory behind it.

A handle is owned by autograd alone, a record by its handles, host memory by its record: whatever way a graph ends
(backward, an exception, a loss that is dropped), everything is given back by reference counting. No table of ids has to
be kept true.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ckpt.offload.host_memory import Region

if TYPE_CHECKING:
    from lightning_ckpt.offload.engine import OffloadEngine
    from lightning_ckpt.offload.groups import Group
    from lightning_ckpt.offload.transfers import Load

_SPARSE = 8  # times the bytes of the tensors that look at it
_ALIGNMENT = 512  # bytes; what an accelerator's allocator aligns to, so that kernels find the alignment they had


class Record:
    """One storage: where its bytes are, on the device or on the host.

    Args:
        engine: whom to tell when nothing needs it any more.
        storage: the storage.
        probe: has the version counter of the tensor that was saved first.
        group: number of the group that saves it first, the last one to need it in backward.
        may_be_blank: whether the operator that saves it may yet have to fill it, as it does with random noise; never
            so for what depends on something that requires gradients.

    Attributes:
        identity: what identifies the storage; as long as the record exists, no other storage gets it.
        source: the storage itself while it is on the device: before its copy out has ended, or for good.
        start: first byte that saved tensors look at.
        end: the byte after the last one.
        viewed: bytes of the saved tensors, each view counted.
        region: host memory for the bytes from `start` to `end`, once their copy is under way.
        loaded: the bytes back on the device.
        load: the copy that brings them.
        used: whether it was unpacked since it was brought back.
        spent: whether it was used in this backward and given up again.
        stays: whether it was decided to leave it where it is.
        first_group: number of the first group that saved it.
        last_group: number of the last one.
        holder: weak reference to what its handles own.
    """

    __slots__ = (
        "_probe",
        "_reference",
        "_version",
        "end",
        "engine",
        "first_group",
        "holder",
        "identity",
        "last_group",
        "load",
        "loaded",
        "may_be_blank",
        "nbytes",
        "region",
        "source",
        "spent",
        "start",
        "stays",
        "used",
        "viewed",
    )

    def __init__(
        self, engine: "OffloadEngine", storage: torch.UntypedStorage, probe: Tensor, group: int, may_be_blank: bool
    ) -> None:
        self.engine = engine
        self.may_be_blank = may_be_blank
        self._reference = StorageWeakRef(storage)
        self._probe = probe
        self._version = probe._version
        self.identity: int = storage._cdata
        self.source: torch.UntypedStorage | None = storage
        self.nbytes = storage.nbytes()
        self.start = self.nbytes
        self.end = 0
        self.viewed = 0
        self.region: Region | None = None
        self.loaded: Tensor | None = None
        self.load: Load | None = None
        self.used = False
        self.spent = False
        self.stays = False
        self.first_group = group
        self.last_group = group
        self.holder: Callable[[], Holder | None] = _nobody

    def serves(self, storage: torch.UntypedStorage, probe: Tensor, start: int, end: int) -> bool:
        """Whether another tensor on the same storage may share this record: its bytes are the same, and all there."""
        return (
            self._probe._version == self._version == probe._version
            and self.nbytes == storage.nbytes()
            and (self.region is None or (self.start <= start and end <= self.end))
            # Without any change in place, it does not matter whose count it is.
            and (self._version == 0 or _share_version_counter(self._probe, probe))
        )

    def include(self, start: int, end: int, nbytes: int) -> None:
        """Add a tensor that looks at `nbytes` between `start` and `end`."""
        self.viewed += nbytes
        if self.region is None:
            if start < self.start:
                self.start = start // _ALIGNMENT * _ALIGNMENT
            if end > self.end:
                self.end = end

    @property
    def waits_for_copy(self) -> bool:
        """Whether nothing has been decided about it, and its bytes are still those that were saved."""
        return (
            self.region is None
            and not self.stays
            and self._probe._version == self._version
            and self.source is not None
            and self.source.nbytes() == self.nbytes  # whoever frees a storage in between means to fill it again
        )

    @property
    def is_sparse(self) -> bool:
        """Whether the storage is far larger than what was saved of it: it belongs to somebody who keeps it anyway."""
        return self.end - self.start > _SPARSE * self.viewed

    @property
    def is_away(self) -> bool:
        """Whether it has to be brought back before its first use in this backward."""
        return self.source is None and self.loaded is None and not self.spent


class Holder:
    """Owned by the handles of one storage together: when it dies, so has the last of them.

    The engine is told by a weak reference's callback, in any thread, at any moment, perhaps amid its own work. By then
    nobody can get hold of the record any more, which `__del__` would not guarantee.
    """

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        record.holder = weakref.ref(self, partial(_tell_engine, record))


def _tell_engine(record: Record, reference: Any) -> None:
    record.holder = _nobody  # else the record would hold itself
    record.engine.bury(record)


def _nobody() -> None:
    return None


class Moved:
    """A saved tensor whose storage may travel."""

    __slots__ = ("dtype", "group", "holder", "offset", "probe", "size", "stride", "version")

    def __init__(self, tensor: Tensor, probe: Tensor, holder: Holder, group: "Group") -> None:
        self.holder = holder
        self.group = group
        self.probe = probe  # has the version counter of the tensor, but not its memory
        self.version = probe._version
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def tensor(self) -> Tensor:
        """The tensor as it was saved."""
        return self.holder.record.engine.unpack(self)

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since."""
        return self.probe._version != self.version

    @property
    def on_device(self) -> list[Tensor]:
        """What it keeps in the device's memory."""
        source = self.holder.record.source
        return [] if source is None else [restore(self, source, 0)]


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("value", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a graph that holds its own output through a hook is a cycle that is never collected. A parameter
        # hangs on no graph, and whoever takes its memory away before backward gives other memory to the parameter.
        self.value = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        self.version = tensor._version

    def tensor(self) -> Tensor:
        """The tensor itself."""
        if self.is_changed:
            raise changed_in_place(self.value.dtype, self.value.shape, self.value._version, self.version)
        return self.value

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since."""
        return self.value._version != self.version

    @property
    def on_device(self) -> list[Tensor]:
        """What it keeps in the device's memory."""
        return [self.value]


class Flattened:
    """A saved tensor subclass: its inner tensors, each saved on its own.

    Args:
        parts: handles of the inner tensors by name.
        rebuild: makes the subclass of its inner tensors.
        probe: has the version counter of the subclass; changes in place count there, not on the inner tensors.
    """

    __slots__ = ("parts", "probe", "rebuild", "version")

    def __init__(
        self, parts: "dict[str, Handle]", rebuild: Callable[[dict[str, Tensor]], Tensor], probe: Tensor
    ) -> None:
        self.parts = parts
        self.rebuild = rebuild
        self.probe = probe
        self.version = probe._version

    def tensor(self) -> Tensor:
        """The subclass, rebuilt around its inner tensors."""
        if self.probe._version != self.version:
            raise changed_in_place(self.probe.dtype, self.probe.shape, self.probe._version, self.version)
        return self.rebuild({name: part.tensor() for name, part in self.parts.items()})

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since."""
        return self.probe._version != self.version or any(part.is_changed for part in self.parts.values())

    @property
    def on_device(self) -> list[Tensor]:
        """What it keeps in the device's memory."""
        return [tensor for part in self.parts.values() for tensor in part.on_device]


Handle = Moved | Kept | Flattened


def restore(handle: Moved, storage: torch.UntypedStorage, start: int) -> Tensor:
    """The tensor of `handle` on `storage`, whose first byte was byte `start` of the storage that was saved.

    It counts changes together with the tensor that was saved, as what autograd saves itself does.
    """
    restored = _blank(handle.dtype, storage.device)
    offset = handle.offset - start // restored.element_size() if start else handle.offset
    restored.set_(storage, offset, handle.size, handle.stride)
    tensor = handle.probe.detach()
    tensor.data = restored
    return tensor


_blanks: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _blank(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new empty tensor, at half the cost of `torch.empty`."""
    blank = _blanks.get((dtype, device))
    if blank is None:
        blank = _blanks[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return blank.new()


def flat_bytes(storage: torch.UntypedStorage, start: int, end: int) -> Tensor:
    """The bytes of a storage from `start` to `end`."""
    return _blank(torch.uint8, storage.device).set_(storage, start, (end - start,), (1,))


def _share_version_counter(one: Tensor, other: Tensor) -> bool:
    """Whether a change of one of two tensors, which now have the same version, would count for both."""
    version = one._version
    torch._C._autograd._unsafe_set_version_counter((other,), (version + 1,))
    shared = one._version != version
    torch._C._autograd._unsafe_set_version_counter((other,), (version,))
    return shared


def extent(tensor: Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """First byte of its storage that a strided tensor looks at, and the byte after the last one."""
    nbytes = tensor.nbytes
    if nbytes == storage.nbytes() and tensor.is_contiguous():
        return 0, nbytes
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + reach + 1) * size


def changed_in_place(dtype: torch.dtype, shape: Any, version: int, expected: int) -> RuntimeError:
    """Autograd's own kind of error, which hooks on saved tensors switch off."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {tuple(shape)}] is at version {version}; expected version {expected} instead. Change it out of "
        "place (`x = x + y`, not `x += y`), or change a clone of it."
    )
