"""Hooks that only watch run once per forward of the user; hooks that act run in the replay too."""

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_ckpt.recompute.contents import read_content, same_content

Table = MutableMapping[int, Any]
Muted = list[tuple[Table, int]]

_GLOBAL_TABLES: list[Table] = [
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
]


def hook_tables(modules: Iterable[nn.Module]) -> list[Table]:
    """The tables of forward hooks of modules inside a layer, and the global ones."""
    inside = chain.from_iterable((module._forward_hooks, module._forward_pre_hooks) for module in modules)
    return [*inside, *_GLOBAL_TABLES]


class _Spy:
    """Runs a hook and notes whether it only watched: returned None, changed no tensor it saw, nothing of its module.

    (Some hooks act without returning anything: the one of the old `spectral_norm` sets the weight.)
    """

    def __init__(self, hook: Any, muted: Muted, entry: tuple[Table, int]) -> None:
        self._hook = hook
        self._muted = muted
        self._entry = entry

    def __call__(self, module: nn.Module, *rest: Any, **kwargs: Any) -> Any:
        values = chain.from_iterable(item if isinstance(item, tuple) else (item,) for item in rest)
        tensors = [value for value in values if isinstance(value, Tensor)]
        attributes, versions = read_content(module.__dict__), [tensor._version for tensor in tensors]
        output = self._hook(module, *rest, **kwargs)
        untouched = same_content(attributes, module.__dict__) and versions == [t._version for t in tensors]
        if output is None and untouched:
            self._muted.append(self._entry)
        return output


@contextlib.contextmanager
def _replaced(entries: list[tuple[Table, int, Any, Any]]) -> Iterator[None]:
    # In place, so that the order of hooks and what is noted beside their keys stays.
    for table, key, _, new in entries:
        table[key] = new
    try:
        yield
    finally:
        for table, key, old, _ in entries:
            if key in table:
                table[key] = old


def spied_on(tables: list[Table], muted: Muted) -> contextlib.AbstractContextManager[None]:
    """Note in `muted` which hooks only watch while a layer runs."""
    if not any(tables):
        return contextlib.nullcontext()
    entries = [
        (table, key, hook, _Spy(hook, muted, (table, key))) for table in tables for key, hook in list(table.items())
    ]
    return _replaced(entries)


def without(muted: Muted) -> contextlib.AbstractContextManager[None]:
    """Keep the hooks in `muted` from running."""
    if not muted:
        return contextlib.nullcontext()
    unique = {(id(table), key): (table, key) for table, key in muted}.values()
    return _replaced([(table, key, table[key], _do_nothing) for table, key in unique if key in table])


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """A hook that only watches, while nobody wants it to."""
