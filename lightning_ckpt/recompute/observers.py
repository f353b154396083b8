"""Hooks that only watch run once per forward of the user; hooks that act run in the replay too."""

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import chain
from typing import Any

from torch import nn

from lightning_ckpt.recompute.contents import Content, read_content, same_content, values_of
from lightning_ckpt.recompute.inventory import is_outer, versions
from lightning_ckpt.recompute.reach import GLOBAL_HOOKS, Detached, Reached, cut_graphs

Table = MutableMapping[int, Any]
Muted = list[tuple[Table, int]]


def hook_tables(modules: Iterable[nn.Module]) -> list[Table]:
    """The tables of forward hooks of modules inside a layer, and the global ones."""
    inside = chain.from_iterable((module._forward_hooks, module._forward_pre_hooks) for module in modules)
    return [*inside, *GLOBAL_HOOKS]


class _Spy:
    """Runs a hook and notes whether it only watched.

    A hook acts if it returns something, changes a tensor or a container it is given, an attribute of its module, or
    anything it holds itself (the layer may read that): then it runs in the replay too, and what it changes of what can
    be reached is put back there. (The hook of the old `spectral_norm` returns nothing, but sets the weight.)
    """

    def __init__(self, hook: Any, acted: dict[tuple[int, int], bool], entry: tuple[int, int]) -> None:
        self.hook = hook
        self._acted = acted
        self._entry = entry

    def __call__(self, module: nn.Module, *rest: Any, **kwargs: Any) -> Any:
        seen = Reached()
        seen.add("given", [*rest, kwargs])
        seen.add("hook", self.hook)
        for name, part in list(seen.modules.values()):  # a method of the layer, as a rule
            if not is_outer(part):
                seen.add_module(name, part)
        before = versions(seen.tensors)
        attributes = read_content(module.__dict__)
        output = self.hook(module, *rest, **kwargs)
        acted = (
            output is not None
            or not same_content(attributes, read_content(module.__dict__))
            or before != versions(seen.tensors)
            or any(_changed(holder, content) for holder, content in zip(seen.holders, seen.contents, strict=True))
        )
        self._acted[self._entry] = self._acted.get(self._entry, False) or acted
        return output


def _changed(holder: Any, content: Content) -> bool:
    now = read_content(holder)
    cut_graphs(now)
    return len(now) != len(content) or any(
        not _same(one, other) for one, other in zip(values_of(now), values_of(content), strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    if type(one) is Detached and type(other) is Detached:
        return one.ident == other.ident and one.data.data_ptr() == other.data.data_ptr()
    return one is other or (type(one) is bytes and one == other) or (type(one) is tuple and type(other) is tuple)


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


@contextlib.contextmanager
def spied_on(tables: list[Table], muted: Muted) -> Iterator[None]:
    """Note in `muted` which hooks only watch while a layer runs."""
    if not any(tables):
        yield
        return
    acted: dict[tuple[int, int], bool] = {}
    entries = []
    for table in tables:
        for key, hook in list(table.items()):
            hook = hook.hook if isinstance(hook, _Spy) else hook  # the spy of a call in another thread
            entries.append((table, key, hook, _Spy(hook, acted, (id(table), key))))
    with _replaced(entries):
        yield
    muted += [(table, key) for table, key, *_ in entries if acted.get((id(table), key)) is False]


def without(muted: Muted) -> contextlib.AbstractContextManager[None]:
    """Keep the hooks in `muted` from running."""
    if not muted:
        return contextlib.nullcontext()
    unique = {(id(table), key): (table, key) for table, key in muted}.values()
    return _replaced([(table, key, table[key], _do_nothing) for table, key in unique if key in table])


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """A hook that only watches, while nobody wants it to."""
