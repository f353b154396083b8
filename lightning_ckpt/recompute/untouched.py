"""Run a module for a look at it, and leave everything it can reach as it was."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_ckpt.recompute.contents import read_content, same_content, write_content
from lightning_ckpt.recompute.globals import named_state
from lightning_ckpt.recompute.host_random import HostStreams
from lightning_ckpt.recompute.inventory import Inventory, with_hidden_modules
from lightning_ckpt.recompute.streams import Stream, stream_of

_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_GLOBAL_BACKWARD_HOOKS: list[dict[int, Any]] = [
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
]


class UntouchableError(RuntimeError):
    """Something can be reached that could not be put back; the message names it."""


@contextlib.contextmanager
def untouched(module: nn.Module, around: Mapping[str, Any] | None = None) -> Iterator[None]:
    """What runs inside may assign attributes, fill containers, draw random numbers: afterwards nothing has happened.

    Tensors keep their numbers only if what runs inside does not write to real ones, apart from weights that are given
    other ones (`weight.data = ...`) or gradients.

    Args:
        module: whatever can be reached from it holds afterwards what it holds now.
        around: other objects, by name, of which the same is true. Default: none.

    Raises:
        UntouchableError: there is an iterator or a queue in one of them.
    """
    roots = with_hidden_modules({**Inventory(module).roots, **(around or {})})
    hooks = [hook for root in roots.values() if isinstance(root, nn.Module) for hook in _hooks_in(root)]
    roots["hooks"] = hooks + [list(table.values()) for table in _GLOBAL_BACKWARD_HOOKS]
    known: set[Any] = set()
    while True:
        reached = Inventory.reach(roots, thorough=True)
        new = [code for code in (*map(type, roots.values()), *reached.code) if code not in known]
        if not new:
            break
        known.update(new)
        for code in new:  # what it names may hold other code
            for name, value in named_state(code, across_files=True):
                roots[name if roots.get(name, value) is value else f"{name} of {code.__qualname__}"] = value
        roots = with_hidden_modules(roots)
    modules = [root for root in roots.values() if isinstance(root, nn.Module)]
    tables = [table for part in modules for table in vars(part).values() if isinstance(table, (dict, set))]
    for place, lost in reached.lost.items():
        verb = "advance" if lost == "an iterator" else "change"
        raise UntouchableError(f"it may {verb} `{_name_of(place)}`, {lost}")
    holders = [*tables, *reached.holders]  # attributes know by these which names belong to weights
    contents = [read_content(holder) for holder in holders]
    host = HostStreams()
    streams = [(stream, stream.read()) for stream in (*reached.streams, *_default_streams())]
    weights = [_Weight(weight) for part in modules for weight in part.parameters(recurse=False)]
    try:
        yield
    finally:
        for holder, content in zip(holders, contents, strict=True):
            if not same_content(content, read_content(holder)):
                write_content(holder, content)
        host.restore()
        for stream, state in streams:
            stream.write(state)
        for weight in weights:
            weight.put_back()


class _Weight:
    """A weight's memory, gradient and hooks."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._data = weight.data
        self._gradient = weight.grad
        self._hooks = {name: getattr(weight, name) for name in _HOOKS_OF_TENSORS}
        self._contents = {name: None if hooks is None else read_content(hooks) for name, hooks in self._hooks.items()}

    def put_back(self) -> None:
        weight, data = self._weight, self._data
        if weight.device != data.device or weight.data_ptr() != data.data_ptr():
            weight.data = data
        if weight.grad is not self._gradient:
            weight.grad = self._gradient
        for name, hooks in self._hooks.items():
            if getattr(weight, name) is not hooks:
                setattr(weight, name, hooks)
            content = self._contents[name]
            if content is not None and not same_content(content, read_content(hooks)):
                write_content(hooks, content)


def _name_of(place: str) -> str:
    """A place as users write it: those of a `LightningModule` are entries of its attributes."""
    return re.sub(r"^\.?\['(\w+)'\]", r"\1", place).lstrip(".")


def _hooks_in(module: nn.Module) -> list[Any]:
    tables = [table for name, table in vars(module).items() if name.endswith("hooks") and isinstance(table, dict)]
    return [hook for table in tables for hook in table.values()]


def _default_streams() -> list[Stream]:
    accelerator = torch.accelerator.current_accelerator()
    found = [torch.default_generator]
    if accelerator is not None:
        found += getattr(torch.get_device_module(accelerator), "default_generators", ())
    return [stream for stream in map(stream_of, found) if stream is not None]
