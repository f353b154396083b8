"""What Hugging Face's models ask of numbers that a rehearsal does not have."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Each row of a batch is taken for one sequence, not for several packed into one.

    Models look for packed ones in the numbers of `position_ids`, and make a mask of full size where they cannot tell.
    """
    masks = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    setattr(masks, "find_packed_sequence_indices", _none)
    try:
        yield
    finally:
        setattr(masks, "find_packed_sequence_indices", find)


def _none(position_ids: Any) -> None:
    """No sequences are packed."""
