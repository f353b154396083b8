"""The arguments of a layer call, kept so that the replay gets them as they were passed."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 6  # nesting of containers that is looked into; caches and batches need three
_OPAQUE_PACKAGES = {"torch", "numpy", "lightning", "pytorch_lightning", "builtins", "functools", "types"}


class Arguments:
    """Positional and keyword arguments: tensors by reference with their versions, containers as copies.

    Lists, dicts, sets and plain objects (KV caches, batches, model outputs) may be changed by the layer itself or by
    its caller, so their structure is copied, tensors shared. The copies belong to the replay: what a replay does to
    them (append to a cache) is seen by nobody else.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._names: list[str] = []
        self._copied = False
        seen: dict[int, Any] = {}
        self._args = tuple(self._keep(value, str(i), seen, _DEPTH) for i, value in enumerate(args))
        self._kwargs = {name: self._keep(value, name, seen, _DEPTH) for name, value in kwargs.items()}
        self._versions = [_version(tensor) for tensor in self.tensors]

    def changed_tensor(self) -> tuple[str, Tensor] | None:
        """Name and tensor of an argument that was changed in place since it was passed, if there is one."""
        for name, tensor, version in zip(self._names, self.tensors, self._versions, strict=True):
            if _version(tensor) != version:
                return name, tensor
        return None

    def for_replay(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for one replay; containers are fresh for each, since a replay may change them."""
        if not self._copied:
            return self._args, self._kwargs
        again = Arguments(self._args, self._kwargs)
        return again._args, again._kwargs

    def _keep(self, value: Any, name: str, seen: dict[int, Any], depth: int) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self._names.append(name)
            return value
        kind = type(value)
        if depth == 0 or kind in (int, float, bool, str, type(None)):
            return value
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, tuple):
            items = [self._keep(item, f"{name}[{i}]", seen, depth - 1) for i, item in enumerate(value)]
            return value._make(items) if hasattr(value, "_make") else tuple(items)
        if isinstance(value, (list, dict, set)) or _is_plain_object(value):
            return self._keep_mutable(value, name, seen, depth - 1)
        return value

    def _keep_mutable(self, value: Any, name: str, seen: dict[int, Any], depth: int) -> Any:
        self._copied = True
        seen[id(value)] = kept = copy.copy(value)
        # The methods of the base class: subclasses (model outputs, batches) override theirs.
        if isinstance(kept, list):
            for i, item in enumerate(kept):
                list.__setitem__(kept, i, self._keep(item, f"{name}[{i}]", seen, depth))
        elif isinstance(kept, dict):
            for key, item in dict.items(kept):
                dict.__setitem__(kept, key, self._keep(item, f"{name}[{key!r}]", seen, depth))
        if hasattr(kept, "__dict__"):
            attributes = vars(kept)
            for attribute, item in attributes.items():
                attributes[attribute] = self._keep(item, f"{name}.{attribute}", seen, depth)
        return kept


def _is_plain_object(value: Any) -> bool:
    if not hasattr(value, "__dict__") or isinstance(value, (nn.Module, torch.Generator, type)) or callable(value):
        return False
    return type(value).__module__.partition(".")[0] not in _OPAQUE_PACKAGES


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
