"""One way to read, compare and write back the content of anything that can change."""

import collections
import gc
import threading
import types
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor, nn


class SlotAttributes:
    """The `__slots__` of an object, seen as a dictionary."""

    def __init__(self, target: Any, names: list[str]) -> None:
        self.target = target
        self.names = names

    def read(self) -> dict[Any, Any]:
        return {name: getattr(self.target, name) for name in self.names if hasattr(self.target, name)}

    def write(self, content: dict[Any, Any]) -> None:
        for name in self.names:
            if name in content:
                setattr(self.target, name, content[name])
            elif hasattr(self.target, name):
                delattr(self.target, name)


class ClassAttributes:
    """Some attributes of a class itself, seen as a dictionary; inherited ones are not its own."""

    def __init__(self, target: type, names: list[str]) -> None:
        self.target = target
        self.names = names

    def read(self) -> dict[Any, Any]:
        own = vars(self.target)
        return {name: own[name] for name in self.names if name in own}

    def write(self, content: dict[Any, Any]) -> None:
        for name in self.names:
            if name in content:
                setattr(self.target, name, content[name])
            elif name in vars(self.target):
                delattr(self.target, name)


class ThreadLocalContent:
    """What a `threading.local` holds in the thread that asks: a replay may run in another one than forward did."""

    def __init__(self, target: threading.local) -> None:
        self.target = target

    def read(self) -> dict[Any, Any]:
        return self.target.__dict__.copy()

    def write(self, content: dict[Any, Any]) -> None:
        self.target.__dict__.clear()
        self.target.__dict__.update(content)


class CellContent:
    """What a closure's cell holds, seen as a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        self.target = cell

    def read(self) -> dict[Any, Any]:
        try:
            return {"cell_contents": self.target.cell_contents}
        except ValueError:  # empty
            return {}

    def write(self, content: dict[Any, Any]) -> None:
        if content:
            self.target.cell_contents = content["cell_contents"]
        elif self.read():
            del self.target.cell_contents


class ArrayContent:
    """The values of a NumPy array, seen as a dictionary of one value."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def read(self) -> dict[Any, Any]:
        return {"values": self.target.tobytes()}

    def write(self, content: dict[Any, Any]) -> None:
        import numpy as np

        values = np.frombuffer(content["values"], self.target.dtype)
        self.target[...] = values.reshape(self.target.shape)


def is_parameter_view(value: Any) -> bool:
    """True for a view of a parameter: FSDP1 keeps the weights of a module as such attributes and renews them itself."""
    return isinstance(value, Tensor) and isinstance(value._base, nn.Parameter)


class ModuleAttributes:
    """The attributes of a module, without weights that a strategy keeps there as views of a flat parameter."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.target = attributes

    def read(self) -> dict[Any, Any]:
        content = self.target.copy()
        for key in [key for key, value in content.items() if is_parameter_view(value)]:
            del content[key]
        return content

    def write(self, content: dict[Any, Any]) -> None:
        weights = {key: value for key, value in self.target.items() if is_parameter_view(value)}
        made = self.target["_parameters"]  # since, in the place of an attribute, which would hide the weight
        self.target.clear()
        self.target.update({key: value for key, value in content.items() if key not in made} | weights)


class CacheContent:
    """How much a function has cached. What it has cached since cannot be told apart, so all of it is made anew."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def read(self) -> dict[Any, Any]:
        return {"size": self._function.cache_info().currsize}

    def write(self, content: dict[Any, Any]) -> None:
        self._function.cache_clear()


def cached_by(function: Any) -> list[Any]:
    """What a function has cached, and for which arguments."""
    tables = [each for each in gc.get_referents(function) if type(each) is dict and each is not vars(function)]
    cached = []
    for entry in gc.get_referents(*tables):
        is_link = type(entry).__name__ == "_lru_list_elem"  # of caches with a size
        cached += gc.get_referents(entry) if is_link else [entry]
    return cached


#: What `read_content` takes: containers of the language, `vars(object)`, and the classes above.
Holder = Any
Content = dict[Any, Any] | list[Any] | set[Any]


def _dict_type(holder: dict[Any, Any]) -> type[dict[Any, Any]]:
    # The methods of the base class: subclasses (model outputs, batches) override theirs. An `OrderedDict` keeps an
    # order of its own.
    return collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict


def read_content(holder: Holder) -> Content:
    """A shallow copy of what `holder` holds."""
    if type(holder) is dict:
        return holder.copy()
    if isinstance(holder, dict):
        base = _dict_type(holder)
        return dict(zip(base.keys(holder), base.values(holder), strict=True))
    if isinstance(holder, (list, collections.deque)):
        return list(holder)
    if isinstance(holder, set):
        return set(holder)
    content: Content = holder.read()
    return content


def write_content(holder: Holder, content: Content) -> None:
    """Make `holder` hold exactly `content`, in place."""
    if isinstance(holder, dict):
        base = _dict_type(holder)
        base.clear(holder)
        for key, value in content.items():  # type: ignore[union-attr]
            base.__setitem__(holder, key, value)
    elif isinstance(holder, list):
        holder[:] = content
    elif isinstance(holder, collections.deque):
        holder.clear()
        holder.extend(content)
    elif isinstance(holder, set):
        holder.clear()
        holder.update(content)
    else:
        holder.write(content)


def same_content(a: Content, b: Content) -> bool:
    """True if both hold the same objects under the same keys, in the same order."""
    if isinstance(a, set):
        return a == b
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return all(map(_same_value, a.values(), b.values())) and list(a) == list(b)
    return all(map(is_, a, b))


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is bytes and a == b)


def values_of(content: Content) -> Iterable[Any]:
    """The values in a content, without their keys."""
    return content.values() if isinstance(content, dict) else content
