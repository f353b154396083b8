"""Which of many labels are worth keeping: those that no other equals or beats in everything that counts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_BLOCK = 128  # labels that are compared with all others at once


def nondominated(columns: Sequence[Ints]) -> Ints:
    """Places of the labels that no other equals or beats in every column; of several equals, one.

    Args:
        columns: two or more, each with a number for every label, one at least: less is better.
    """
    order: Ints = np.lexsort(tuple(reversed(columns)))
    ordered = np.stack(columns)[:, order]
    if len(columns) == 2:
        best = np.minimum.accumulate(ordered[1])
        improving: Ints = order[np.append(True, best[1:] < best[:-1])]
        return improving
    front, kept = ordered[:, :0], []
    for start in range(0, len(order), _BLOCK):  # only what comes before can equal or beat a label
        block, places = ordered[:, start : start + _BLOCK], order[start : start + _BLOCK]
        alive = ~_beats(front, block).any(axis=0)
        block, places = block[:, alive], places[alive]
        alive = ~np.triu(_beats(block, block), 1).any(axis=0)
        front = np.concatenate([front, block[:, alive]], axis=1)
        kept.append(places[alive])
    return np.concatenate(kept)


def _beats(some: Ints, others: Ints) -> NDArray[np.bool_]:
    """Which of `some` (rows) equal or beat which of the `others` (columns) everywhere."""
    beats = np.ones((some.shape[1], others.shape[1]), dtype=bool)
    for one, other in zip(some, others, strict=True):
        beats &= one[:, None] <= other
    return beats
