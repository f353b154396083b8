"""Ranks that train together must treat the same layers in the same way; what differs is named at the start."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed

from lightning_ckpt.selection.summary import shorten_names

Settings = Mapping[str, str | tuple[str, ...]]

_FAILED = "failed with"


def agree(trainer: pl.Trainer, who: str, find_settings: Callable[[], Settings]) -> None:
    """Compare settings over all ranks: a collective call.

    Args:
        trainer: whose ranks are meant.
        who: whose settings they are.
        find_settings: returns this rank's settings by name, each a text or several names. Where it raises, the other
            ranks stop as well instead of waiting for this one.

    Raises:
        MisconfigurationException: on every rank: which setting differs, and on which ranks.
    """
    try:
        settings = find_settings()
    except Exception as error:
        _gather(trainer, {_FAILED: f"{type(error).__name__}: {error}"})
        raise
    everybody = _gather(trainer, settings)
    for rank, theirs in enumerate(everybody):
        if _FAILED in theirs:
            raise MisconfigurationException(f"{who} cannot start, since rank {rank} {_FAILED} {theirs[_FAILED]}")
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        values = [theirs.get(name, "missing") for theirs in everybody]
        if any(value != values[0] for value in values):
            raise MisconfigurationException(
                f"{who} must be the same on all ranks, but {_difference(name, values)}. Give every rank the same "
                "arguments, and build the same model there."
            )


def _gather(trainer: pl.Trainer, settings: Settings) -> list[Settings]:
    if trainer.world_size == 1 or not (distributed.is_available() and distributed.is_initialized()):
        return [settings]
    everybody: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, settings)
    return everybody


def _difference(name: str, values: list[str | tuple[str, ...]]) -> str:
    first = values[0]
    other = next(value for value in values if value != first)
    same, different = (_ranks(rank for rank, value in enumerate(values) if value == one) for one in (first, other))
    if isinstance(first, tuple) and isinstance(other, tuple):
        only = [item for item in first if item not in other]
        if only or set(first) != set(other):
            here, there = (same, different) if only else (different, same)
            items = only or [item for item in other if item not in first]
            return f"its {name} include {shorten_names(items)} on {here} and not on {there}"
        return f"its {name} come in another order on {different} than on {same}"
    return f"`{name}` is {first} on {same} and {other} on {different}"


def _ranks(ranks: Any) -> str:
    listed = list(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))}"
