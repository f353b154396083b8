"""Hooks that only watch run once per forward of the user; hooks that act run in the replay too."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import chain
from typing import Any

from torch import nn

from lightning_ckpt.recompute.contents import Content, read_content, same_content, values_of
from lightning_ckpt.recompute.inventory import is_outer, versions
from lightning_ckpt.recompute.reach import GLOBAL_HOOKS, Detached, Reached, cut_graphs
from lightning_ckpt.recompute.results import unnoticed
from lightning_ckpt.recompute.zero3 import gathers_weights

Table = MutableMapping[int, Any]
Muted = list[tuple[Table, int]]
Entry = tuple[int, int]


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

    def __init__(self, hook: Any, entry: Entry, report: "Report") -> None:
        self.hook = hook
        self._entry = entry
        self._report = report

    def __call__(self, module: nn.Module, *rest: Any, **kwargs: Any) -> Any:
        saved = self._report.saved()
        try:
            with unnoticed():
                return self._watch(module, *rest, **kwargs)
        finally:
            self._report.spans[self._entry].append(range(saved, self._report.saved()))

    def _watch(self, module: nn.Module, *rest: Any, **kwargs: Any) -> Any:
        if gathers_weights(self.hook):
            self._report.acted[self._entry] = True
            return self.hook(module, *rest, **kwargs)
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
        self._report.acted[self._entry] = self._report.acted.get(self._entry, False) or acted
        return output


class Report:
    """What spies have seen in one call of a layer.

    Args:
        saved: how many tensors autograd has saved so far in this call.

    Attributes:
        acted: whether the hook at an entry did more than watch, in any of its calls.
        spans: which tensors were saved while it ran.
        muted: hooks that only watched, once the call is over.
    """

    def __init__(self, saved: Callable[[], int]) -> None:
        self.saved = saved
        self.acted: dict[Entry, bool] = {}
        self.spans: dict[Entry, list[range]] = defaultdict(list)
        self.muted: Muted = []

    def saved_by_muted(self) -> set[int]:
        """Positions of the tensors that were saved in hooks which will not run again."""
        entries = [(id(table), key) for table, key in self.muted]
        return {position for entry in entries for span in self.spans[entry] for position in span}


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
def spied_on(tables: list[Table], report: Report) -> Iterator[None]:
    """Note in `report` which hooks only watch while a layer runs."""
    if not any(tables):
        yield
        return
    entries = []
    for table in tables:
        for key, hook in list(table.items()):
            hook = hook.hook if isinstance(hook, _Spy) else hook  # the spy of a call in another thread
            entries.append((table, key, hook, _Spy(hook, (id(table), key), report)))
    with _replaced(entries):
        yield
    report.muted = [(table, key) for table, key, *_ in entries if report.acted.get((id(table), key)) is False]


def without(muted: Muted) -> contextlib.AbstractContextManager[None]:
    """Keep the hooks in `muted` from running."""
    if not muted:
        return contextlib.nullcontext()
    unique = {(id(table), key): (table, key) for table, key in muted}.values()
    return _replaced([(table, key, table[key], _do_nothing) for table, key in unique if key in table])


def unnoticed_in(tables: list[Table]) -> contextlib.AbstractContextManager[None]:
    """Keep operators of hooks from being taken for the layer's own: in forward, the spies do that."""
    entries = [(table, key, hook, _Unnoticed(hook)) for table in tables for key, hook in list(table.items())]
    return _replaced(entries)


class _Unnoticed:
    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with unnoticed():
            return self._hook(*args, **kwargs)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """A hook that only watches, while nobody wants it to."""
