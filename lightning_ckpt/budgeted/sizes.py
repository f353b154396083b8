"""How large batches are: up to what size a plan holds, and when a batch shows whether it does."""

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor


class BatchSizes:
    """What a plan was made for, by bytes and shapes of batches.

    Args:
        tensors: those of the batch that the first plan is made from.

    Attributes:
        planned_for: bytes of the batch that the plan was made from.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.planned_for = self._largest = bytes_of(tensors)
        self._longest = _dimensions(tensors)
        self._unchecked: tuple[int, int] | None = None  # bytes of a batch, and the step to wait for

    def are_exceeded_by(self, tensors: Sequence[Tensor], by_shape: bool) -> bool:
        """Whether a batch is larger than all before.

        Args:
            tensors: those of the batch.
            by_shape: whether it is larger, too, if it is longer somewhere and has no more bytes.
        """
        longest = list(map(max, zip_longest(self._longest, _dimensions(tensors), fillvalue=0)))
        if bytes_of(tensors) <= self._largest and (longest == self._longest or not by_shape):
            return False
        self._longest = longest
        return True

    def grow(self, nbytes: int) -> float:
        """A plan holds for batches of so many bytes; how many times those of the largest until now that is."""
        before, self._largest = self._largest, max(nbytes, self._largest)
        return self._largest / max(1, before)

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
    """What tensors hold."""
    return sum(tensor.nbytes for tensor in tensors)


def _dimensions(tensors: Sequence[Tensor]) -> list[int]:
    return [length for tensor in tensors for length in tensor.shape]
