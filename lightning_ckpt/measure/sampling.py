"""Measure some batches closely and let the others take over what batches of their kind have shown."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from lightning_ckpt.measure.saved import SavedBytes

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Sample(Generic[T]):
    """What was measured in some batches, for all batches of the same kind.

    For figures that follow from the shapes of a batch but are dear to measure. The first `WARM_UP` batches are
    measured for themselves, since they do things that later ones do not. After them the first of every kind is, the
    next of a kind that brought a surprise, and one in `REPEAT_EVERY`. If there is too much that is new, at most one
    batch in `BUDGET` is measured beside the first `BURST`.
    """

    WARM_UP = 4
    BURST = 16
    BUDGET = 10
    REPEAT_EVERY = 200
    KINDS = 1000  # remembered at once

    def __init__(self) -> None:
        self._figures: dict[tuple[Hashable, Hashable], T] = {}
        self._settled: dict[Hashable, bool] = {}  # whether the last batch of a kind had a figure
        self._kind: Hashable = None
        self._batches = self._measured = self._last_measured = 0

    def begin(self, kind: Hashable) -> bool:
        """A batch begins, of a kind that can be told beforehand; whether it should be measured."""
        self._kind = kind
        self._batches += 1
        if self._batches == self.WARM_UP + 1:
            self._figures.clear()
            self._settled.clear()
        wanted = (
            self._batches <= self.WARM_UP
            or not self._settled.get(kind, False)
            or self._batches - self._last_measured >= self.REPEAT_EVERY
        )
        chosen = wanted and self._measured < self.BURST + self._batches // self.BUDGET
        if chosen:
            self._measured += 1
            self._last_measured = self._batches
        return chosen

    def end(self, saved: tuple[SavedBytes, ...], measured: T | None) -> T | None:
        """The batch is over.

        Args:
            saved: its saved activations, which tell batches of a kind apart.
            measured: its figure, if it was measured.

        Returns:
            Its figure, or None where no batch like it was measured, or where that cannot be told.
        """
        if not all(item.complete for item in saved):  # compiled code does unseen things
            return None
        if measured is not None:
            self.learn(saved, measured)
        elif not saved:  # without backward there is too little to tell batches apart by
            return None
        return self.recall(saved)

    def learn(self, seen: Hashable, figure: T) -> None:
        """The batch was measured. `seen` is what can be told about it afterwards."""
        _remember(self._figures, (self._kind, seen), figure)

    def recall(self, seen: Hashable) -> T | None:
        """The figure for this batch, or None where no batch of its kind with the same `seen` was measured."""
        figure = self._figures.get((self._kind, seen))
        _remember(self._settled, self._kind, figure is not None)
        return figure


def _remember(memory: dict[K, T], key: K, value: T) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > Sample.KINDS:
        del memory[next(iter(memory))]
