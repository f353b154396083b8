"""The arguments of a layer call, kept so that the replay gets them as they were passed."""

import collections
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_ckpt.recompute.reach import ENTRIES, is_array, is_opaque, slots_of
from lightning_ckpt.recompute.streams import Stream, stream_of
from lightning_ckpt.recompute.tensors import bitwise_equal, copy_exactly, regrow

_DEPTH = 6  # nesting of containers that is looked into; caches and batches need three
_SCALARS = (int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device)


class Handle(Protocol):
    """An activation in somebody else's care."""

    def tensor(self) -> Tensor:
        """The tensor, with the same values, strides and offset."""

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since it was handed over."""

    @property
    def on_device(self) -> list[Tensor]:
        """What it holds in memory of the device that computes."""


Keep = Callable[[Tensor], Handle]


class Arguments:
    """Positional and keyword arguments: tensors by reference with their versions, containers as copies.

    Lists, dicts, sets and plain objects (KV caches, batches, model outputs) may be changed by the layer itself or by
    its caller, so their structure is copied, tensors shared. The copies belong to the replay: what a replay does to
    them (append to a cache) is seen by nobody else. What the layer owns itself is not copied but looked after by
    `State`, so that it stays the same object.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        owned: whether the layer's state includes an object.
        copied: names of tensors that the layer is known to change in place, or True for all.

    Attributes:
        tensors: every tensor in the arguments.
        modules: every module in the arguments, by the name of the argument.
        functions: every function in the arguments.
        given_up: arguments that were too large to look into.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        owned: Callable[[Any], bool] = lambda value: False,
        copied: set[str] | bool = False,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.modules: dict[str, nn.Module] = {}
        self.functions: dict[str, Any] = {}
        self.given_up: list[str] = []
        self._owned = owned
        self._names: list[str] = []
        self._streams: list[tuple[Stream, Any]] = []
        self._has_copies = False
        self._own: set[int] = set()
        self._entries = 0
        seen: dict[int, Any] = {}
        self._args = tuple(self._keep(value, str(i), seen, _DEPTH) for i, value in enumerate(args))
        self._kwargs = {name: self._keep(value, name, seen, _DEPTH) for name, value in kwargs.items()}
        self._versions = [_version(tensor) for tensor in self.tensors]
        self._copies: dict[int, Tensor] = {}
        if copied:
            for name, tensor in zip(self._names, self.tensors, strict=True):
                if copied is True or name in copied:
                    self._copies[id(tensor)] = copy_exactly(tensor)
        self._missed: str | None = None
        self._handed_over: list[tuple[str, torch.Size, Handle]] = []

    def learn(self) -> set[str]:
        """Right after the call: the names of tensors that the layer changed in place; copies of others are dropped."""
        changed = set()
        for name, tensor, version in zip(self._names, self.tensors, self._versions, strict=True):
            kept = self._copies.get(id(tensor))
            if _version(tensor) != version or (kept is not None and not bitwise_equal(tensor.detach(), kept)):
                changed.add(name)
                if kept is None:
                    self._missed = name
            elif kept is not None:
                del self._copies[id(tensor)]
        if changed:  # the changed tensor hangs on this call's graph now: holding it would be a cycle
            self._let_go()
        return changed

    def _let_go(self) -> None:
        replaced = {ident: _Kept(kept, self._needs_gradient(ident)) for ident, kept in self._copies.items()}
        self._args, self._kwargs = self._rewritten(lambda value: replaced.get(id(value), value))
        pairs = [
            (name, tensor, version)
            for name, tensor, version in zip(self._names, self.tensors, self._versions, strict=True)
            if id(tensor) not in self._copies
        ]
        self._names = [name for name, _, _ in pairs]
        self.tensors = [tensor for _, tensor, _ in pairs]
        self._versions = [version for _, _, version in pairs]
        self._copies.clear()
        self._has_copies = True

    def _needs_gradient(self, ident: int) -> bool:
        return any(id(tensor) == ident and tensor.requires_grad for tensor in self.tensors)

    def hand_over(self, keep: Keep) -> None:
        """Let somebody else look after the activations until the replay: on the host, say."""
        handles: dict[int, _HandedOver] = {}
        rest = []
        for name, tensor, version in zip(self._names, self.tensors, self._versions, strict=True):
            if tensor.grad_fn is None:  # parameters, masks and the like, which others hold as well
                rest.append((name, tensor, version))
            elif id(tensor) not in handles:
                handle = keep(tensor)
                handles[id(tensor)] = _HandedOver(handle)
                self._handed_over.append((name, tensor.shape, handle))
        if handles:
            self._args, self._kwargs = self._rewritten(lambda value: handles.get(id(value), value))
            self._names = [name for name, _, _ in rest]
            self.tensors = [tensor for _, tensor, _ in rest]
            self._versions = [version for _, _, version in rest]
            self._has_copies = True

    def on_device(self) -> Iterator[Tensor]:
        """What is held in memory of the device that computes."""
        yield from self.tensors
        for _, _, handle in self._handed_over:
            yield from handle.on_device

    def objection(self) -> str | None:
        """Why a replay could not get the arguments as they were passed, if so."""
        if self._missed is not None:
            return (
                f"changed its argument `{self._missed}` in place for the first time in this call, of which no copy "
                "existed. Its next calls are exact."
            )
        changed = [
            (name, tensor.shape)
            for name, tensor, version in zip(self._names, self.tensors, self._versions, strict=True)
            if _version(tensor) != version
        ]
        changed += [(name, shape) for name, shape, handle in self._handed_over if handle.is_changed]
        if not changed:
            return None
        name, shape = changed[0]
        return (
            f"got argument `{name}` of shape {tuple(shape)}, which was modified by an inplace operation "
            "before backward. Pass a clone, or change it out of place (`x = x + y`, not `x += y`)."
        )

    def for_replay(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for one replay: fresh containers, since a replay may change them, and aliases of activations.

        An alias hangs on no graph, so that a gradient hook that the replay puts on it does not act on the caller's.
        """
        aliases: dict[int, Tensor] = {}

        def alias(value: Any) -> Any:
            if isinstance(value, (_Kept, _HandedOver)):
                if id(value) not in aliases:
                    aliases[id(value)] = value.grow()
                return aliases[id(value)]
            if isinstance(value, Tensor) and value.grad_fn is not None:
                if id(value) not in aliases:
                    aliases[id(value)] = value.detach().requires_grad_()
                return aliases[id(value)]
            return value

        again = Arguments(self._args, self._kwargs, self._owned) if self._has_copies else self
        return again._rewritten(alias)

    def streams(self) -> list[tuple[Stream, Any]]:
        """Random generators among the arguments, with the states they had."""
        return self._streams

    def _keep(self, value: Any, name: str, seen: dict[int, Any], depth: int) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self._names.append(name)
            return value
        if type(value) in _SCALARS or isinstance(value, (type, _Kept, _HandedOver)) or self._owned(value):
            return value
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, nn.Module):
            self.modules[f"argument {name}"] = value
        elif isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)):
            self.functions[f"argument {name}"] = value
        elif stream := stream_of(value):
            self._streams.append((stream, stream.read()))
        elif is_array(value):
            self._has_copies = True
            seen[id(value)] = value.copy()
            return seen[id(value)]
        elif isinstance(value, Iterator):  # what it has given cannot be put back
            self.given_up.append(f"argument {name} (an iterator)")
        elif depth == 0 or self._is_too_large(value):
            self.given_up.append(f"argument {name}")
        elif isinstance(value, tuple):
            items = [self._keep(item, f"{name}[{i}]", seen, depth - 1) for i, item in enumerate(value)]
            return tuple.__new__(type(value), items)
        elif isinstance(value, (list, dict, set, collections.deque)) or _is_plain_object(value):
            return self._keep_mutable(value, name, seen, depth - 1)
        return value

    def _is_too_large(self, value: Any) -> bool:
        if isinstance(value, (list, tuple, dict, set, collections.deque)):
            self._entries += len(value)
        return self._entries > ENTRIES

    def _keep_mutable(self, value: Any, name: str, seen: dict[int, Any], depth: int) -> Any:
        try:
            kept = copy.copy(value)
        except Exception:  # files and locks refuse to be copied, and so do objects that hold them
            self.given_up.append(f"argument {name} (it cannot be copied)")
            return value
        self._has_copies = True
        seen[id(value)] = kept
        self._own.add(id(kept))
        # The methods of the base class: subclasses (model outputs, batches) override theirs.
        if isinstance(kept, list):
            for i, item in enumerate(kept):
                list.__setitem__(kept, i, self._keep(item, f"{name}[{i}]", seen, depth))
        elif isinstance(kept, dict):
            for key, item in dict.items(kept):
                dict.__setitem__(kept, key, self._keep(item, f"{name}[{key!r}]", seen, depth))
        elif isinstance(kept, collections.deque):
            for i, item in enumerate(list(kept)):
                kept[i] = self._keep(item, f"{name}[{i}]", seen, depth)
        if hasattr(kept, "__dict__"):
            attributes = vars(kept)
            for attribute, item in attributes.items():
                attributes[attribute] = self._keep(item, f"{name}.{attribute}", seen, depth)
        for attribute in slots_of(kept.__class__):
            if hasattr(kept, attribute):
                item = getattr(kept, attribute)
                again = self._keep(item, f"{name}.{attribute}", seen, depth)
                if again is not item:
                    object.__setattr__(kept, attribute, again)
        return kept

    def _rewritten(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments after `change` of every value in them; only containers that are copies are entered."""
        done: set[int] = set()
        args = tuple(_rewrite(value, change, self._own, done) for value in self._args)
        return args, {name: _rewrite(value, change, self._own, done) for name, value in self._kwargs.items()}


def _rewrite(value: Any, change: Callable[[Any], Any], own: set[int], done: set[int]) -> Any:
    # No closure that calls itself: such a cycle would keep the tensors in it until the garbage collector comes by.
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple.__new__(type(value), [_rewrite(item, change, own, done) for item in value])
    if id(value) not in own or id(value) in done:
        return value
    done.add(id(value))
    if isinstance(value, list):
        for i, item in enumerate(value):
            list.__setitem__(value, i, _rewrite(item, change, own, done))
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            dict.__setitem__(value, key, _rewrite(item, change, own, done))
    if hasattr(value, "__dict__"):
        attributes = vars(value)
        for name, item in attributes.items():
            attributes[name] = _rewrite(item, change, own, done)
    for name in slots_of(value.__class__):
        if hasattr(value, name):
            item = _rewrite(getattr(value, name), change, own, done)
            if item is not getattr(value, name):
                object.__setattr__(value, name, item)
    return value


class _Kept:
    """Stands among the arguments for a tensor that the layer changed in place: its values as they were passed."""

    def __init__(self, values: Tensor, needs_gradient: bool) -> None:
        self.values = values
        self.needs_gradient = needs_gradient

    def grow(self) -> Tensor:
        values = self.values.clone()
        return regrow(values) if self.needs_gradient else values


class _HandedOver:
    """Stands among the arguments for an activation that somebody else looks after."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def grow(self) -> Tensor:
        return self._handle.tensor().detach().requires_grad_()


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (nn.Module, type, Tensor)) or is_opaque(value):
        return False
    return hasattr(value, "__dict__") or bool(slots_of(value.__class__))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
