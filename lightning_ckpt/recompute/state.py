"""The state of a layer around one call: photographed before it, installed for a replay, put back afterwards."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ckpt.recompute.contents import Content, Holder, read_content, same_content, values_of, write_content
from lightning_ckpt.recompute.inventory import NOTHING, Inventory, parameter_flags, versions, with_hidden_modules
from lightning_ckpt.recompute.private import set_version
from lightning_ckpt.recompute.reach import Detached, Place, Reached
from lightning_ckpt.recompute.streams import Stream
from lightning_ckpt.recompute.swapped import Swapped
from lightning_ckpt.recompute.tensors import bitwise_equal, copy_exactly, regrow
from lightning_ckpt.recompute.zero3 import is_partitioned

SMALL = 4096  # elements; buffers up to this size are copied at every call


class UnexpectedError(RuntimeError):
    """A replay did what no call before it has done."""


class State:
    """A photograph of what a layer owns.

    Holders are photographed by a shallow copy of their content; tensors by their version, and by a copy of their
    values where the layer changes them in place (which its first calls show), or where nobody could tell (small
    buffers: batch norm does not bump the version of its statistics).
    """

    def __init__(self, inventory: Inventory) -> None:
        inventory.refresh()
        self._inventory = inventory
        self._quiet = inventory.quiet
        self._busy = inventory.look_at_busy_roots()
        self.learned = learned = inventory.learned
        self._swapped = Swapped(inventory.modules.values())
        self._parameters = inventory.parameters
        self._flags = parameter_flags(self._parameters)
        self._parameter_versions = versions(self._parameters)
        self._tensors: list[Tensor] = []
        self._idents: list[int] = []
        self._places: list[Place] = []
        self._versions: list[int] = []
        self._streams: list[tuple[Stream, Any]] = []
        self._copies: dict[int, Tensor] = {}
        self._missed: list[Place] = []
        self._look_after(self._quiet)
        self._look_after(self._busy)
        self.given_up = [*inventory.given_up, *self._busy.given_up]
        # Data-dependent initialisation happens in the first call.
        self._parameter_copies: dict[int, Tensor] = {}
        if learned.learning or learned.parameters:
            for i, parameter in enumerate(self._parameters):
                small = parameter.numel() <= SMALL and not is_partitioned(parameter)
                if i in learned.parameters or (learned.learning and small):
                    self._parameter_copies[id(parameter)] = parameter.detach().clone()
        self._gradients = _gradients(self._parameters) if learned.learning else None
        self._hook_tables = inventory.hook_tables

    def _look_after(self, reached: Reached) -> None:
        learned = self.learned
        self._tensors += reached.tensors
        self._idents += reached.idents
        self._places += reached.places
        self._versions += versions(reached.tensors)
        self._streams += [(stream, stream.read()) for stream in reached.streams]
        for tensor, ident, place in zip(reached.tensors, reached.idents, reached.places, strict=True):
            if ident in reached.fixed:
                continue
            new = learned.learning or place not in learned.seen
            if new or place in learned.changes or tensor.numel() <= SMALL:
                self._copies[ident] = copy_exactly(tensor)

    def add(self, roots: dict[str, Any]) -> None:
        """Photograph more roots for this call: modules and functions among the arguments, and modules behind them."""
        if not roots:
            return
        roots = with_hidden_modules(roots)
        more = Inventory.reach(roots)
        self._look_after(more)
        if self._busy is not NOTHING:
            more.extend(self._busy)
        self._busy = more
        modules = [root for root in roots.values() if isinstance(root, nn.Module)]
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        self._parameters = self._parameters + parameters
        self._flags += parameter_flags(parameters)
        self._parameter_versions += versions(parameters)

    def owns(self, value: Any) -> bool:
        """True if the photograph includes this object."""
        return self._quiet.owns(value) or self._busy.owns(value)

    @property
    def writes_parameters(self) -> bool:
        """Whether the layer writes any of its parameters itself."""
        return bool(self._parameter_copies)

    def writes(self, tensor: Tensor) -> bool:
        """True if `tensor` is a parameter, or a view of one, that the layer writes itself."""
        return id(tensor) in self._parameter_copies or id(tensor._base) in self._parameter_copies

    def learn(self) -> None:
        """Right after the call: see what the layer changed in place, remember it, and drop copies not needed."""
        learned = self.learned
        for tensor, ident, place, version in zip(
            self._tensors, self._idents, self._places, self._versions, strict=True
        ):
            copy = self._copies.get(ident)
            changed = not tensor.is_inference() and tensor._version != version
            if copy is not None and not changed and (learned.learning or place not in learned.seen):
                changed = not bitwise_equal(tensor, copy)
            if changed:
                learned.changes.add(place)
                if copy is None:
                    self._missed.append(place)
            elif copy is not None and place not in learned.changes and tensor.numel() > SMALL:
                del self._copies[ident]
            learned.seen.add(place)
        written = versions(self._parameters)
        for i, (parameter, before) in enumerate(zip(self._parameters, self._parameter_versions, strict=True)):
            copy = self._parameter_copies.get(id(parameter))
            if written[i] != before or (copy is not None and not bitwise_equal(parameter.detach(), copy)):
                learned.parameters.add(i)
                if copy is None:
                    self._missed.append(Place("", f"a parameter of shape {tuple(parameter.shape)}"))
            elif copy is not None:
                del self._parameter_copies[id(parameter)]
        if self._gradients is not None and _gradients(self._parameters) != self._gradients:
            learned.runs_backward = True
        self._gradients = None
        self._parameter_versions = written
        learned.calls += 1

    def objection(self) -> str | None:
        """Why a replay from this photograph could not be exact, if so."""
        if self._missed:
            return (
                f"changed {', '.join(map(str, self._missed))} in place for the first time in this call, of which no "
                "copy existed. Its next calls are exact."
            )
        for parameter, version in zip(self._parameters, self._parameter_versions, strict=True):
            if not parameter.is_inference() and parameter._version != version:
                return (
                    f"has a weight of shape {tuple(parameter.shape)} that was modified by an inplace operation between "
                    f"forward and backward (it is at version {parameter._version}; expected version {version}). Run "
                    "backward before the optimizer steps, or forward again after it. If the optimizer steps during "
                    "backward, do not let the layer end with that weight: leave it out with `layers=` or `check_fn=`."
                )
        shape = self._swapped.changed_shape()
        if shape is not None:
            return (
                f"ran with a weight of shape {shape} in the place of its own, which was modified by an inplace "
                "operation between forward and backward. Run backward before that."
            )
        for tensor, ident, place, version in zip(
            self._tensors, self._idents, self._places, self._versions, strict=True
        ):
            if ident not in self._copies and not tensor.is_inference() and tensor._version != version:
                return (
                    f"holds `{place}` of shape {tuple(tensor.shape)}, which was modified by an inplace operation "
                    "between forward and backward. Assign a new tensor instead, or change it after backward."
                )
        return None

    @contextlib.contextmanager
    def installed(self, streams: list[tuple[Stream, Any]]) -> Iterator[None]:
        """The layer owns what it owned before the call; afterwards it owns what it does now.

        Args:
            streams: more random generators with the states they had.
        """
        with contextlib.ExitStack() as undo:
            for stream, state in self._streams + streams:
                undo.callback(stream.write, stream.read())
                stream.write(state)
            for parameter, flag in zip(self._parameters, self._flags, strict=True):
                if parameter.requires_grad != flag:
                    undo.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(flag)
            for parameter in self._parameters:
                if id(parameter) in self._parameter_copies:
                    # The replay writes it again, which must not move the version that other graphs rely on.
                    undo.callback(set_version, parameter, parameter._version)
                    undo.callback(_put_data, parameter, parameter.data)
                    _put_data(parameter, self._parameter_copies[id(parameter)].clone())
            if self.learned.runs_backward:
                for parameter in self._parameters:
                    if parameter.is_leaf:
                        undo.callback(setattr, parameter, "grad", parameter.grad)
                        parameter.grad = None
            self._swapped.install(undo)
            self._take_out_new_hooks(undo)
            gradients, hooks = _gradients(self._parameters), _tensor_hooks(self._parameters)
            stand_ins = _StandIns(self._copies)
            undo.callback(self._put_back, *self._present())
            if self._copies or not self._inventory_is_current():
                _install(self._quiet.holders, self._quiet.contents, stand_ins)
            _install(self._busy.holders, self._busy.contents, stand_ins)
            yield
            _remove_tensor_hooks(self._parameters, hooks)
            if not self.learned.runs_backward and _gradients(self._parameters) != gradients:
                self.learned.runs_backward = True
                raise UnexpectedError(
                    "ran backward in its forward for the first time in this call, and has added to gradients twice. "
                    "Its next calls are exact."
                )

    def _take_out_new_hooks(self, undo: contextlib.ExitStack) -> None:
        """Hooks that were put on modules after the call, where there were none before."""
        if not any(self._hook_tables):
            return
        held = {id(holder) for holder in (*self._quiet.holders, *self._busy.holders)}
        for table in self._hook_tables:
            if table and id(table) not in held:
                undo.callback(table.update, dict(table))
                table.clear()

    def _inventory_is_current(self) -> bool:
        return self._inventory.quiet is self._quiet and self._inventory.unchanged()

    def _present(self) -> tuple[list[Content], list[Content]]:
        current = self._inventory_is_current()
        quiet = self._quiet.contents if current else [read_content(holder) for holder in self._quiet.holders]
        return quiet, [read_content(holder) for holder in self._busy.holders]

    def _put_back(self, quiet: list[Content], busy: list[Content]) -> None:
        if not (quiet is self._quiet.contents and self._inventory_is_current()):
            _install(self._quiet.holders, quiet)
        _install(self._busy.holders, busy)


class _StandIns:
    """What a replay finds in the place of tensors that were changed since, or that hung on a graph."""

    def __init__(self, copies: dict[int, Tensor]) -> None:
        self._changed = {ident: copy_exactly(copy) for ident, copy in copies.items()}
        self._grown: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if type(value) is Detached:
            if value.ident not in self._grown:
                self._grown[value.ident] = regrow(self._changed.get(value.ident, value.data))
            return self._grown[value.ident]
        if isinstance(value, Tensor):
            return self._changed.get(id(value), value)
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            items = [self(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return tuple.__new__(type(value), items)
        return value


def _install(holders: list[Holder], contents: list[Content], then: Callable[[Any], Any] | None = None) -> None:
    for holder, content in zip(holders, contents, strict=True):
        if then is not None and any(isinstance(value, (Tensor, tuple)) for value in values_of(content)):
            if isinstance(content, dict):
                content = {key: then(value) for key, value in content.items()}
            else:
                content = type(content)(map(then, content))
        if not same_content(content, read_content(holder)):
            write_content(holder, content)


def _gradients(parameters: list[nn.Parameter]) -> list[tuple[int, int] | None]:
    # Of an FSDP unit's views of its flat parameter none has a gradient, and asking for it would warn.
    return [(id(p.grad), p.grad._version) if p.is_leaf and p.grad is not None else None for p in parameters]


def _tensor_hooks(parameters: list[nn.Parameter]) -> list[int]:
    return [len(parameter._backward_hooks or ()) for parameter in parameters]


def _remove_tensor_hooks(parameters: list[nn.Parameter], before: list[int]) -> None:
    """Remove gradient hooks that the replay has put on parameters once more."""
    for parameter, count in zip(parameters, before, strict=True):
        hooks = parameter._backward_hooks
        while hooks is not None and len(hooks) > count:
            hooks.popitem()


def _put_data(parameter: Tensor, data: Tensor) -> None:
    # Not `copy_`: that would bump the version, and break other graphs that hold the parameter.
    parameter.data = data
