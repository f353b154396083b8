"""Ranks that train together must treat the same layers in the same way; what differs is named at the start."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.distributed_c10d import _get_default_store

from lightning_ckpt.selection.summary import shorten_names

Setting = str | list[str]
Settings = Mapping[str, Setting]

#: How long ranks wait for each other; they have just met at a barrier, but some may take long to build the model.
PATIENCE = timedelta(minutes=10)

_FAILED = "failed with"
_calls = itertools.count()


def agree(trainer: pl.Trainer, who: str, find_settings: Callable[[], Settings]) -> None:
    """Compare settings over all ranks: every rank has to call this in the same order.

    Args:
        trainer: whose ranks are meant.
        who: whose settings they are.
        find_settings: returns this rank's settings, each a text or several names, by what they are called in a
            sentence. Where it raises, the other ranks stop as well instead of waiting for this one.

    Raises:
        MisconfigurationException: on every rank: which setting differs, and on which ranks.
    """
    try:
        settings = find_settings()
    except Exception as error:
        gather(trainer, who, {_FAILED: f"{type(error).__name__}: {error}"})
        raise
    everybody = gather(trainer, who, settings)
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


def as_text(value: Any) -> str:
    """A setting as text that does not differ between processes: nothing with an address in it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_text, value))}]"
    if callable(value) and not isinstance(value, (OpOverload, OpOverloadPacket)):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return str(value)


def gather(trainer: pl.Trainer, who: str, settings: Settings) -> list[Settings]:
    """The settings of all ranks, in their order: every rank has to call this in the same order.

    By the store in which ranks have found each other: a rank that asks for nothing would leave the others waiting in a
    collective call, or answer it with one of its own.
    """
    if trainer.world_size == 1 or not (distributed.is_available() and distributed.is_initialized()):
        return [settings]
    store, rank, key = _get_default_store(), distributed.get_rank(), f"lightning_ckpt/{next(_calls)}"
    store.set(f"{key}/{rank}", json.dumps(settings))
    everybody = []
    for other in range(distributed.get_world_size()):
        try:
            store.wait([f"{key}/{other}"], PATIENCE)
        except distributed.DistStoreError:
            raise MisconfigurationException(
                f"{who} is not there on rank {other}, or has not started within {PATIENCE} after rank {rank}. Give "
                "every rank the same callbacks and the same strategy."
            ) from None
        everybody.append(json.loads(store.get(f"{key}/{other}")))
    return everybody


def _difference(name: str, values: list[Setting]) -> str:
    first = values[0]
    other = next(value for value in values if value != first)
    same, different = (_ranks(rank for rank, value in enumerate(values) if value == one) for one in (first, other))
    if isinstance(first, list) and isinstance(other, list):
        only = [item for item in first if item not in other]
        if only or set(first) != set(other):
            here, there = (same, different) if only else (different, same)
            items = only or [item for item in other if item not in first]
            return f"{name} include {shorten_names(items)} on {here} and not on {there}"
        return f"{name} come in another order on {different} than on {same}"
    return f"{name} is {first} on {same} and {other} on {different}"


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))}"
