"""Module-level state that a layer's own methods name: trackers, counters, caches, switches."""

import collections
import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_ckpt.recompute.contents import SlotAttributes

# Libraries keep what they keep in globals for reasons of their own.
_LIBRARIES = {"torch", "builtins", "transformers", "torchmetrics", "lightning", "pytorch_lightning", "numpy", "timm"}


@functools.cache
def _named_globals(cls: type) -> tuple[tuple[str, str], ...]:
    """Module and name of every global that methods of `cls`, and functions they call in their module, refer to."""
    found: dict[tuple[str, str], None] = {}
    seen: set[types.CodeType] = set()

    def scan(code: types.CodeType, space: dict[str, Any]) -> None:
        if code in seen:
            return
        seen.add(code)
        home = space.get("__name__", "")
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                scan(inner, space)
        for name in code.co_names:
            value = space.get(name)
            if isinstance(value, types.FunctionType) and value.__module__ == home:
                scan(value.__code__, value.__globals__)
            elif name in space:
                found[home, name] = None

    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for member in vars(base).values():
            # Not what another module has patched in.
            if isinstance(member, types.FunctionType) and member.__globals__.get("__name__") == base.__module__:
                scan(member.__code__, member.__globals__)
    return tuple(found)


def mutable_globals(cls: type) -> Iterator[tuple[str, Any]]:
    """State outside of its instances that methods of `cls` name, each with a name for it.

    Global containers and objects are given as they are; plain values, which are assigned anew, as the `SlotAttributes`
    of their module; the same for the class's own attributes.
    """
    plain: dict[str, list[str]] = {}
    for home, name in _named_globals(cls):
        value = getattr(sys.modules.get(home), name, None)
        if type(value) in _PLAIN:
            plain.setdefault(home, []).append(name)
        elif _is_state(value, home):
            yield f"{home}.{name}", value
    for home, names in plain.items():
        yield f"{home}.({', '.join(names)})", SlotAttributes(sys.modules[home], names)
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            names = []
            for name, value in vars(base).items():
                if name.startswith("__"):
                    continue
                if type(value) in _PLAIN:
                    names.append(name)
                elif isinstance(value, _CONTAINERS):
                    yield f"{base.__qualname__}.{name}", value
                elif isinstance(value, types.FunctionType):
                    for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                        if isinstance(default, _CONTAINERS):
                            yield f"{base.__qualname__}.{name} (a default)", default
            if names:
                yield f"{base.__qualname__}.({', '.join(names)})", SlotAttributes(base, names)


_CONTAINERS = (dict, list, set, collections.deque)
_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


def _is_state(value: Any, home: str) -> bool:
    if isinstance(value, (*_CONTAINERS, threading.local)):
        return True
    if isinstance(value, (type, nn.Module, types.FunctionType, types.ModuleType)) or value is None:
        return False
    return type(value).__module__ == home and hasattr(value, "__dict__")
