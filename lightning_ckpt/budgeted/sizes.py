"""How large batches are: up to what size a plan holds, and when a batch shows whether it does."""

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from lightning_ckpt.measure.storage import storages


class BatchSizes:
    """What a plan was made for, by bytes and shapes of batches.

    Args:
        tensors: those of the batch that the first plan is made from.

    Attributes:
        planned_for: bytes of the batch that the plan was made from.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.planned_for = self._largest = bytes_of(tensors)
        self._shapes = [_dimensions(tensors)]  # that it holds for; none of them is within another one
        self._unchecked: tuple[int, int] | None = None  # bytes of a batch, and the step to wait for

    def are_exceeded_by(self, tensors: Sequence[Tensor], by_shape: bool) -> bool:
        """Whether a batch is larger than all before.

        Args:
            tensors: those of the batch.
            by_shape: whether it is larger, too, if it is longer somewhere and has no more bytes.
        """
        shape = _dimensions(tensors)
        is_within = any(_is_within(shape, other) for other in self._shapes)
        if not is_within:
            self._shapes = [other for other in self._shapes if not _is_within(other, shape)] + [shape]
        return bytes_of(tensors) > self._largest or (by_shape and not is_within)

    def grow(self, nbytes: int) -> float:
        """A plan holds for batches of so many bytes; how many times those of the largest until now that is."""
        before, self._largest = self._largest, max(nbytes, self._largest)
        return self._largest / max(1, before)

    def beyond(self, nbytes: int) -> float:
        """How many times the bytes of a batch the largest one has."""
        return max(1.0, self._largest / max(1, nbytes))

    def check_from(self, step: int, nbytes: int) -> None:
        """From an optimizer step on, the first batch of so many bytes shows whether the plan holds."""
        self._unchecked = nbytes, step

    def are_checked_by(self, tensors: Sequence[Tensor], step: int) -> bool:
        """Whether this is the batch that shows it."""
        if self._unchecked is None or bytes_of(tensors) < self._unchecked[0] or step < self._unchecked[1]:
            return False
        self._unchecked = None
        return True


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """What tensors hold, sparse and nested ones included."""
    return sum(storage.nbytes() for tensor in tensors for storage in storages(tensor))


def _dimensions(tensors: Sequence[Tensor]) -> list[int]:
    return [length for tensor in tensors for length in (tensor.values() if tensor.is_nested else tensor).shape]


def _is_within(shape: list[int], other: list[int]) -> bool:
    return all(length <= bound for length, bound in zip_longest(shape, other, fillvalue=0))
