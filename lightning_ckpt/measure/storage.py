"""Count storages, each once, however many tensors look at them."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

PLAIN = (Tensor, nn.Parameter)  # no subclasses


def storages(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    """The storages that hold the data of `tensor`: several for sparse tensors and tensor subclasses."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:  # nearly all of them
        try:
            return (tensor.untyped_storage(),)
        except (NotImplementedError, RuntimeError):  # functional tensors have no storage
            return ()
    return _storages_of_parts(tensor)


def _storages_of_parts(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if isinstance(tensor, UninitializedTensorMixin):  # a lazy module that was not called yet
        return
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        parts = [part for part in inner if isinstance(part, Tensor)]  # a DTensor also lists its mesh
    else:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            yield tensor.untyped_storage()
        return
    for part in parts:
        yield from storages(part)


class StorageSizes:
    """A set of storages with their sizes in bytes; their memory is not kept.

    Args:
        outlives: whether the set outlives the storages. Then it holds their identity, so that a later storage at the
            same address is not taken for an earlier one. Default: no, which is faster.
    """

    def __init__(self, outlives: bool = False) -> None:
        self._sizes: dict[int, int] = {}
        self._references: list[StorageWeakRef] | None = [] if outlives else None

    def add(self, tensor: Tensor) -> None:
        """Add the storages of `tensor`."""
        for storage in storages(tensor):
            key: int = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                if self._references is not None:
                    self._references.append(StorageWeakRef(storage))

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Add the storages of all `tensors`."""
        for tensor in tensors:
            self.add(tensor)

    def add_storage(self, identity: int, nbytes: int) -> None:
        """Add a storage whose identity is taken, though it may be gone."""
        self._sizes[identity] = nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order in which the storages were added."""
        return tuple(self._sizes.values())

    def update(self, other: "StorageSizes") -> None:
        """Add the storages of another set."""
        self._sizes.update(other._sizes)

    def bytes_without(self, *others: "StorageSizes") -> int:
        """Bytes of the storages that are in none of the `others`."""
        sizes = self._sizes
        for other in others:
            known = other._sizes
            sizes = {identity: size for identity, size in sizes.items() if identity not in known}
        return sum(sizes.values())
