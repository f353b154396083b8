"""What a call of a layer can see and change: everything mutable that is reached from some roots, bounded."""

import array
import collections
import contextlib
import enum
import functools
import logging
import queue
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from lightning_ckpt.recompute.contents import (
    ArrayContent,
    CacheContent,
    CellContent,
    ClassAttributes,
    Content,
    Holder,
    ModuleAttributes,
    SlotAttributes,
    ThreadLocalContent,
    cached_by,
    is_parameter_view,
    read_content,
)
from lightning_ckpt.recompute.streams import Stream, stream_of

DEPTH = 8  # nesting of containers and objects that is looked into
ENTRIES = 10_000  # entries of one container, and of everything under one root
_THOROUGH_DEPTH = 40
_THOROUGH_ENTRIES = 100_000

_ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented)),
        *(types.ModuleType, types.MappingProxyType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type(threading.Lock())),
    }
)
# Objects of libraries that training steps change.
_STEPPED = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    weakref.WeakKeyDictionary,
    weakref.WeakSet,
    weakref.WeakValueDictionary,
)
_OPAQUE_PACKAGES = {
    "builtins",
    "deepspeed",
    "lightning",
    "lightning_ckpt",
    "logging",
    "pytorch_lightning",
    "re",
    "threading",
    "torch",
    "weakref",
}
# Tables of `nn.Module` that are looked after elsewhere: parameters by their flags and versions, hooks by `observers`.
_MODULE_TABLES = frozenset(nn.Module().__dict__) - {"training", "_buffers"} | {"forward", "_buffers"}


#: Tables of forward hooks that act on all modules.
GLOBAL_HOOKS: list[dict[int, Any]] = [
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
]


class Place(NamedTuple):
    """Where a tensor was found: the root, and a path that is the same at every call."""

    root: str
    path: str

    def __str__(self) -> str:
        return self.root + self.path


class Detached(NamedTuple):
    """Stands in a content for a tensor that hangs on a graph: holding the graph would chain the frames of all steps."""

    data: Tensor
    ident: int


class Reached:
    """Holders with a shallow copy of their contents, tensors with their places, and random streams.

    Args:
        thorough: whether to look further than there is time for at every call of a layer, and into objects of PyTorch
            that hold what training steps change.

    Attributes:
        holders: everything that holds references and can change.
        roots: the root under which each of them was found.
        contents: what each of them holds; tensors with a graph are `Detached`.
        tensors: tensors that are no parameters, without their graphs.
        idents: `id` of each of these tensors.
        fixed: those of them that sit where nothing can be put in their place.
        places: where each of them was found.
        streams: random generators.
        modules: modules that were found outside of module tables, for example hidden in a list.
        given_up: places that were too large to look into.
        lost: what gives away something that nobody can put back, by place, if the walk is thorough.
        code: functions, and classes of objects, that were found, if the walk is thorough.
        quick: whether the holders are dictionaries and lists without graphs, which one identity pass can check.
    """

    def __init__(self, thorough: bool = False) -> None:
        self._thorough = thorough
        self._depth, self._limit = (_THOROUGH_DEPTH, _THOROUGH_ENTRIES) if thorough else (DEPTH, ENTRIES)
        self.holders: list[Holder] = []
        self.roots: list[str] = []
        self.contents: list[Content] = []
        self.tensors: list[Tensor] = []
        self.idents: list[int] = []
        self.fixed: set[int] = set()
        self.places: list[Place] = []
        self.streams: list[Stream] = []
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self.given_up: list[str] = []
        self.lost: dict[str, str] = {}
        self.code: dict[Any, None] = {}
        self.quick = True
        self._seen: dict[int, Any] = {}  # while walking; also keeps ids from being given to other objects meanwhile
        self._owned: dict[int, Any] = {}
        self._root = ""
        self._in_fixed = False
        self._entries = 0

    def add_module(self, name: str, module: nn.Module) -> None:
        """Everything a module holds, but for its parameters, its hooks and its submodules."""
        self._root, self._entries = name, 0
        self._seen[id(module)] = module
        self._note_code(type(module))
        self._look_into_slots(module, "", self._depth)
        content = self._hold(ModuleAttributes(module.__dict__))
        if len(content) < len(module.__dict__):  # a strategy renews weights in there
            self.quick = False
        self._hold(module._modules, look=False)
        for table in hook_tables_of(module):
            if table:
                self._hold(table)
                self._look_into(list(table.values()), ".hooks", self._depth)
        self._hold(module._buffers)
        for key, buffer in module._buffers.items():
            self._look(buffer, f".{key}", self._depth)
        for key, value in list(module.__dict__.items()):
            if key not in _MODULE_TABLES and type(value) not in _ATOMS:
                self._look(value, f".{key}", self._depth)

    def extend(self, other: "Reached") -> None:
        """Take in what another walk has reached: holders and what they hold."""
        self.holders += other.holders
        self.roots += other.roots
        self.contents += other.contents
        self._owned |= other._owned

    def finish(self) -> None:
        """The walk is over: let go of tensors and tuples that were met, which may hang on graphs."""
        self._seen.clear()

    def owns(self, value: Any) -> bool:
        """True if `value` is a container or an object that was reached."""
        return id(value) in self._owned

    def add(self, name: str, value: Any) -> None:
        """Everything that is reached from `value`."""
        self._root, self._entries = name, 0
        self._look(value, "", self._depth)

    def _hold(self, holder: Holder, look: bool = True) -> Content:
        content = read_content(holder)
        if look and cut_graphs(content):
            self.quick = False
        if type(holder) not in (dict, list, collections.OrderedDict, ModuleAttributes):
            self.quick = False
        self.holders.append(holder)
        self.roots.append(self._root)
        self.contents.append(content)
        self._entries += len(content)
        return content

    def _look(self, value: Any, path: str, depth: int) -> None:
        kind = type(value)
        if kind in _ATOMS or id(value) in self._seen or isinstance(value, (type, types.GenericAlias, enum.Enum)):
            return
        if isinstance(value, UninitializedTensorMixin):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._add_tensor(value, path)
        elif self._thorough and (lost := _lost(value)):
            self.lost[f"{self._root}{path}"] = lost
        elif depth == 0 or self._entries > self._limit or (hasattr(value, "__len__") and _length(value) > self._limit):
            if self._thorough and isinstance(value, (dict, list, set, collections.deque)):
                self._hold(value)
            self._give_up(path)
        elif self._thorough and isinstance(value, contextlib._GeneratorContextManager):
            pass  # it is open, and stays so
        elif isinstance(value, nn.Module):
            self.modules.setdefault(id(value), (f"{self._root}{path}", value))
        elif stream := stream_of(value):
            self.streams.append(stream)
        elif isinstance(value, (tuple, frozenset)):
            self._look_into(value, path, depth)
        elif isinstance(value, weakref.ref):
            self._look(value(), path, depth - 1)
        elif isinstance(value, (dict, list, set, collections.deque)):
            self._owned[id(value)] = value
            content = self._hold(value)
            self._look_into_content(value, content, path, depth)
            self._look_into_slots(value, path, depth)
            if hasattr(value, "__dict__"):
                self._look_into_attributes(value, path, depth)
        elif is_array(value):
            if value.flags.writeable and not value.dtype.hasobject:
                self._hold(ArrayContent(value))
        elif kind is types.FunctionType:
            self._note_code(value)
            self._look_into_function(value, path, depth)
        elif self._thorough and isinstance(value, functools._lru_cache_wrapper):
            self._hold(CacheContent(value))
            self._look(getattr(value, "__wrapped__", None), path, depth - 1)
            self._look_into(cached_by(value), path, depth)
        elif isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
            self._look(value.__self__, path, depth - 1)
            if isinstance(value, types.MethodType):
                self._look(value.__func__, path, depth - 1)
        elif isinstance(value, functools.partial):
            self._look(value.func, path, depth - 1)
            self._look_into_fixed(value.args, path, depth)
            self._look(value.keywords, path, depth - 1)
        elif isinstance(value, threading.local):
            content = self._hold(ThreadLocalContent(value))
            self._look_into(list(content.values()), path, depth)  # type: ignore[union-attr]
        elif isinstance(value, Iterator):  # what it has given cannot be put back
            self._give_up(f"{path} (an iterator)")
        elif isinstance(value, (SlotAttributes, ClassAttributes)):
            self._look_into_content(value.read(), self._hold(value), path, depth)
        elif not is_opaque(value) or (self._thorough and isinstance(value, _STEPPED)):
            self._owned[id(value)] = value
            self._note_code(kind)
            self._look_into_slots(value, path, depth)
            if hasattr(value, "__dict__"):
                self._look_into_attributes(value, path, depth)

    def _note_code(self, code: Any) -> None:
        if self._thorough:
            self.code[code] = None

    def _add_tensor(self, tensor: Tensor, path: str) -> None:
        if isinstance(tensor, nn.Parameter) or is_parameter_view(tensor):
            return
        self.tensors.append(tensor.detach() if tensor.grad_fn is not None else tensor)
        self.idents.append(id(tensor))
        if self._in_fixed:
            self.fixed.add(id(tensor))
        self.places.append(Place(self._root, path))

    def _give_up(self, path: str) -> None:
        self.given_up.append(f"{self._root}{path}")

    def _look_into(self, values: Any, path: str, depth: int) -> None:
        for i, value in enumerate(values):
            self._look(value, f"{path}[{i}]", depth - 1)

    def _look_into_fixed(self, values: Any, path: str, depth: int) -> None:
        before, self._in_fixed = self._in_fixed, True
        for i, value in enumerate(values):
            if isinstance(value, (Tensor, tuple)):
                self._look(value, f"{path}[{i}]", depth - 1)
        self._in_fixed = before
        self._look_into([value for value in values if not isinstance(value, (Tensor, tuple))], path, depth)

    def _look_into_content(self, holder: Holder, content: Content, path: str, depth: int) -> None:
        # From the holder itself, since contents may hold stand-ins for tensors with graphs.
        if isinstance(content, dict):
            for key in content:
                self._look(dict.__getitem__(holder, key), f"{path}[{key!r}]", depth - 1)
        else:
            self._look_into(list(holder), path, depth)

    def _look_into_attributes(self, value: Any, path: str, depth: int) -> None:
        attributes = vars(value)
        self._hold(attributes)
        for name, item in list(attributes.items()):
            if type(item) not in _ATOMS:
                self._look(item, f"{path}.{name}", depth - 1)

    def _look_into_slots(self, value: Any, path: str, depth: int) -> None:
        names = slots_of(type(value))  # type: ignore[arg-type]
        if names:
            content = self._hold(SlotAttributes(value, names))
            for name in content:
                self._look(getattr(value, name), f"{path}.{name}", depth - 1)

    def _look_into_function(self, function: types.FunctionType, path: str, depth: int) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            content = self._hold(CellContent(cell))  # `nonlocal` can set it anew
            if content:
                self._look(cell.cell_contents, f"{path}.{name}", depth - 1)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._look_into_fixed(defaults, f"{path} defaults", depth)
        if function.__dict__:
            self._look_into_attributes(function, path, depth)


def _lost(value: Any) -> str | None:
    """What an object is that gives away what nobody can put back; None for all others."""
    if isinstance(value, Iterator):
        return "an iterator"
    if isinstance(value, (queue.Queue, queue.SimpleQueue)):
        return "a queue"
    if isinstance(value, (array.array, bytearray)):
        return "an array"
    home = type(value).__module__.lstrip("_")
    is_shared = home.partition(".")[0] in ("multiprocessing", "ctypes") and "synchronize" not in home
    return "an object of multiprocessing or ctypes" if is_shared else None


def hook_tables_of(module: nn.Module) -> list[dict[int, Any]]:
    """The tables of a module's forward hooks, and what is noted beside their keys."""
    return [
        module._forward_hooks,
        module._forward_pre_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]


def is_array(value: Any) -> bool:
    """True for NumPy arrays, subclasses included."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def cut_graphs(content: Content) -> bool:
    """Put stand-ins in place of tensors that hang on a graph; whether there were any."""
    if isinstance(content, set):
        return False
    cut = False
    for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
        if isinstance(value, (Tensor, tuple)):
            without = _without_graph(value)
            if without is not value:
                content[key] = without
                cut = True
    return cut


def _without_graph(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else Detached(value.detach(), id(value))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [_without_graph(item) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return tuple.__new__(type(value), items)
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (dict, list, set, tuple, frozenset, collections.deque)) else 0


@functools.cache
def slots_of(cls: type) -> list[str]:
    """Names of the `__slots__` of a class and its bases, as `getattr` takes them."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else list(slots):
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def is_opaque(value: Any) -> bool:
    """True for objects of libraries that are never looked into."""
    if isinstance(value, (enum.Enum, weakref.ref, logging.Logger, type, types.FunctionType, types.MethodType)):
        return True
    return type(value).__module__.partition(".")[0] in _OPAQUE_PACKAGES
