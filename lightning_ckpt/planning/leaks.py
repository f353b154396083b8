"""What outlives a rehearsal: whoever went on to compute with a tensor that has no numbers would train nothing."""

import functools
import gc
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_ckpt.recompute.contents import cached_by

_DEPTH = 4  # containers in the cache of a function that are looked into
_STEPS = 32  # from a tensor to whatever can use it
_USERS = (types.ModuleType, types.FunctionType, types.MethodType, types.FrameType, type, nn.Module)

StorageReference = weakref.ref[torch.UntypedStorage]


class LeakError(RuntimeError):
    """Something outside of the model keeps a tensor of a rehearsal; the message says what, and what to do instead."""


def refuse_leaks(storages: Sequence[StorageReference]) -> None:
    """See to it that nobody can use these storages of a rehearsal. What functions have cached is made anew.

    Raises:
        LeakError: somebody can, and only he knows what was there before.
    """
    if not _fakes(storages):
        return
    for each in _objects(functools._lru_cache_wrapper):
        if any(_keeps_fake(value, _DEPTH) for value in cached_by(each)):
            each.cache_clear()
    left = _fakes(storages)
    if left and _can_be_used(left):
        raise LeakError(
            f"a rehearsal of the training step has left a tensor of shape {tuple(left[0].shape)} in "
            f"{_place_of(left[0])}. It is outside of the model, so that it cannot be taken away again, and has no "
            "numbers to train with. Keep it in the model, as a buffer or an attribute of a module, or have it made "
            "before training starts; or train by rules (`every_n_layers`), which need no rehearsal."
        )


def _fakes(storages: Sequence[StorageReference]) -> list[Any]:
    """The tensors that have one of these storages."""
    if not any(each() is not None for each in storages):
        return []
    gc.unfreeze()  # else nobody would find who keeps them among what `gc.freeze` has set aside
    gc.collect()
    alive = {storage._cdata for each in storages if (storage := each()) is not None}
    fakes = _objects(FakeTensor) if alive else []
    return [fake for fake in fakes if fake.untyped_storage()._cdata in alive]


def _objects(kind: type) -> list[Any]:
    # By `type`, since what objects give as their `__class__` may be code that warns.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _keeps_fake(value: object, depth: int) -> bool:
    """Whether a value, or a container in it, holds a tensor of a rehearsal."""
    if isinstance(value, FakeTensor):
        return True
    is_container = isinstance(value, (dict, list, tuple, set))
    return depth > 0 and is_container and any(_keeps_fake(each, depth - 1) for each in gc.get_referents(value))


def _can_be_used(fakes: list[Any]) -> bool:
    """Whether any code can come to them, unlike to what keeps itself alive: a function's context with its output."""
    known, holders = {id(fakes)}, fakes
    for _ in range(_STEPS):
        known |= {id(holders), *map(id, holders)}
        holders = [each for each in gc.get_referrers(*holders) if id(each) not in known and not _is_ours(each)]
        if any(issubclass(type(each), _USERS) or (type(each) is dict and "__builtins__" in each) for each in holders):
            return True
        if not holders:
            return False
    return True


def _is_ours(value: Any) -> bool:
    return type(value) is types.FrameType and value.f_code.co_filename == __file__


def _place_of(fake: Any) -> str:
    """Who holds a tensor, as far as that can be told."""
    holders = [each for each in gc.get_referrers(fake) if not _is_ours(each)]
    for holder in holders:
        owners = gc.get_referrers(holder) if type(holder) is dict else [holder]
        for owner in owners:
            attributes = getattr(owner, "__dict__", None)
            for name in [name for name, value in attributes.items() if value is fake] if attributes else ():
                if isinstance(owner, types.ModuleType):
                    return f"`{owner.__name__}.{name}`"
                return f"`{name}` of a `{type(owner).__name__}`"
    kinds = {type(holder).__name__ for holder in holders} - {"list_iterator"}
    return f"a {min(kinds)}" if kinds else "a place that has no name"
