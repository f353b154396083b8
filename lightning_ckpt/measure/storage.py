"""Count storages, each once, however many tensors look at them."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold the data of `tensor`: several for sparse tensors and tensor subclasses."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # functional tensors have no storage
            yield tensor.untyped_storage()
        return
    for part in parts:
        yield from storages(part)


class StorageSizes:
    """A set of storages with their sizes in bytes.

    It holds them weakly: their memory is not kept, but their identity is, so that a later storage at the same address
    is not taken for an earlier one.
    """

    def __init__(self) -> None:
        self._sizes: dict[StorageWeakRef, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Add the storages of `tensor`."""
        for storage in storages(tensor):
            self._sizes[StorageWeakRef(storage)] = storage.nbytes()

    def update(self, other: "StorageSizes") -> None:
        """Add the storages of another set."""
        self._sizes.update(other._sizes)

    def bytes_without(self, *others: "StorageSizes") -> int:
        """Bytes of the storages that are in none of the `others`."""
        return sum(size for ref, size in self._sizes.items() if not any(ref in other._sizes for other in others))
