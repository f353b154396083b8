"""State outside of its instances that a layer's own methods name: trackers, counters, caches, switches."""

import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lightning_ckpt.recompute.contents import ClassAttributes, SlotAttributes

# Libraries keep what they keep in globals for reasons of their own.
_LIBRARIES = {
    "torch",
    "builtins",
    "lightning_ckpt",
    "transformers",
    "torchmetrics",
    "lightning",
    "pytorch_lightning",
    "numpy",
    "timm",
}
_LIBRARIES |= {*sys.stdlib_module_names, "_pytest"}
_INSTALLED = {"site-packages", "dist-packages"}
_NO_STATE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


@dataclass
class _Named:
    """What code refers to: names in modules, classes, and functions that carry state of their own.

    Attributes:
        across_files: whether functions, classes and objects of other files of the user's are followed.
    """

    across_files: bool = False
    names: dict[str, dict[str, None]] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    functions: dict[types.FunctionType, None] = field(default_factory=dict)
    _seen: set[types.CodeType] = field(default_factory=set)

    def add_class(self, cls: type) -> None:
        """A class of the user's: its own attributes, and what its methods refer to."""
        for base in cls.__mro__:
            if _is_library(base.__module__) or base in self.classes:
                continue
            self.classes[base] = None
            for member in vars(base).values():
                for function in _functions_of(member):
                    # Not what another module has patched in.
                    if function.__globals__.get("__name__") == base.__module__:
                        self.add_function(function)

    def add_function(self, function: types.FunctionType) -> None:
        """What a function refers to, and the functions it calls."""
        if function.__code__ in self._seen or _is_library(function.__module__):
            return
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
            self.functions[function] = None
        self._scan(function.__code__, function.__globals__)
        for wrapped in _functions_of(function)[1:]:
            self.add_function(wrapped)

    def _scan(self, code: types.CodeType, space: dict[str, Any]) -> None:
        self._seen.add(code)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType) and inner not in self._seen:
                self._scan(inner, space)
        home = space.get("__name__", "")
        for name in code.co_names:
            if name in space:
                self._add(home, name, space[name])
                value = space[name]
                if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                    for attribute in code.co_names:
                        if attribute in vars(value):
                            self._add(value.__name__, attribute, vars(value)[attribute])

    def _add(self, home: str, name: str, value: Any) -> None:
        # At every call there is no time for what functions and classes of other modules do to their own globals.
        if isinstance(value, types.FunctionType):
            if value.__module__ == home or self._follows(value):
                self.add_function(value)
        elif isinstance(value, type):
            if self._follows(value) or (value.__module__ == home and not issubclass(value, nn.Module)):
                self.add_class(value)
        elif not isinstance(value, _NO_STATE) and not name.startswith("__"):
            if self.across_files or not isinstance(value, nn.Module):
                self.names.setdefault(home, {})[name] = None
            if self._follows(type(value)):
                self.add_class(type(value))

    def _follows(self, code: Any) -> bool:
        return self.across_files and not _is_installed(code.__module__)


def _is_library(module: str | None) -> bool:
    return module is None or (module.partition(".")[0] in _LIBRARIES and module != "__main__")


def _is_installed(module: str | None) -> bool:
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return _is_library(module) or not _INSTALLED.isdisjoint(Path(file).parts)


def _functions_of(member: Any) -> list[types.FunctionType]:
    """The plain functions in a member of a class: itself, behind descriptors, and what decorators have wrapped."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        return [function for part in (member.fget, member.fset) if part for function in _functions_of(part)]
    if not isinstance(member, types.FunctionType):
        return []
    found = [member]
    for cell in member.__closure__ or ():
        if cell != types.CellType() and isinstance(cell.cell_contents, types.FunctionType):
            found.append(cell.cell_contents)
    wrapped = getattr(member, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType) and wrapped not in found:
        found.append(wrapped)
    return found


@functools.cache
def _named_by_class(cls: type, across_files: bool) -> _Named:
    named = _Named(across_files)
    named.add_class(cls)
    return named


def _named_by_function(function: types.FunctionType, across_files: bool) -> _Named:
    named = _Named(across_files)  # not cached, since a function may close over anything
    named.add_function(function)
    return named


def named_state(code: type | types.FunctionType, across_files: bool = False) -> Iterator[tuple[str, Any]]:
    """Roots of state that a function, or methods of a class, name, each with a name for it.

    Globals are given as attributes of their modules, since they may be assigned anew; so are attributes of classes;
    functions that close over something, have defaults or attributes are given as they are.
    """
    named = _named_by_class(code, across_files) if isinstance(code, type) else _named_by_function(code, across_files)
    for home, names in named.names.items():
        if home in sys.modules:
            yield f"global {home}.({', '.join(names)})", SlotAttributes(sys.modules[home], list(names))
    attributes = {
        name: None
        for base in named.classes
        for name, value in vars(base).items()
        if not name.startswith("__") and not _is_code(value)
    }
    for base in named.classes:
        if attributes:
            name = f"global {base.__module__}.{base.__qualname__}.({', '.join(attributes)})"
            yield name, ClassAttributes(base, list(attributes))
    for function in named.functions:
        yield f"global {function.__module__}.{function.__qualname__}()", function


def _is_code(value: Any) -> bool:
    return isinstance(value, (*_NO_STATE, staticmethod, classmethod, property)) or hasattr(value, "__get__")


def names_late_operator(cls: type) -> bool:
    """True if a method of `cls` or of its bases names `rrelu`, which fills its noise after autograd has saved it."""
    codes = [
        function.__code__
        for base in cls.__mro__
        if base is not nn.Module
        for member in vars(base).values()
        for function in _functions_of(member)
    ]
    return any("rrelu" in name.lower() for code in codes for name in code.co_names)
