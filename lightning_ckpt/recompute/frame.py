"""One call of a recomputed layer: what autograd would save is left out, and regained by running the layer again."""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.recompute.ambient import Ambient
from lightning_ckpt.recompute.arguments import Arguments
from lightning_ckpt.recompute.fingerprint import Fingerprint, fingerprint, is_verified
from lightning_ckpt.recompute.host_random import HostStreams, Window
from lightning_ckpt.recompute.observers import Muted, Report, hook_tables, spied_on, unnoticed_in, without
from lightning_ckpt.recompute.private import get_running, set_running
from lightning_ckpt.recompute.results import Results, unnoticed
from lightning_ckpt.recompute.state import State, UnexpectedError
from lightning_ckpt.recompute.watch import announced_replay, watched
from lightning_ckpt.recompute.zero3 import balanced_module_stack

if TYPE_CHECKING:
    from lightning_ckpt.recompute.attach import Recompute

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")


class ReplayError(RuntimeError):
    """The replay of a layer cannot be exact; the message names the layer and says the cure."""


class _Stop(BaseException):
    """Ends a replay once the last tensor is regained. No `Exception`, so that a layer's own handlers do not see it."""


class _Local(threading.local):
    depth = 0
    replayed: "weakref.ref[Frame] | None" = None


_local = _Local()


def is_replaying() -> bool:
    """True while a layer runs for the second time, inside backward, in this thread.

    Example::

        def hook(module, args, output):
            if not is_replaying():
                counter.update(1)
    """
    return _local.depth > 0


class Slot:
    """Stands in the autograd graph for one saved tensor. Autograd owns it; the frame knows it only weakly."""

    __slots__ = ("__weakref__", "fingerprint", "frame", "used", "value", "version")

    def __init__(self, frame: "Frame", fingerprint: Fingerprint | None) -> None:
        self.frame = frame
        self.fingerprint = fingerprint
        self.value: Tensor | None = None
        self.version = -1
        self.used = False


class Frame:
    """One forward call of a layer, and its replay.

    Args:
        owner: what is attached to the layer.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Attributes:
        arguments: what the call was given.
        results: what the call keeps of its operators; None without an operator policy.
        verified: whether the replay is compared with this call by fingerprints.
        unsaved: storages that autograd would have kept; None while nobody watches.
    """

    def __init__(self, owner: "Recompute", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._owner = owner
        self._state = State(owner.inventory)
        learned = self._state.learned
        copied = True if learned.learning else learned.arguments
        self.arguments = Arguments(args, kwargs, self._state.owns, copied)
        self._state.add(self.arguments.modules | self.arguments.functions)
        devices = {tensor.device: None for tensor in self.arguments.tensors}
        if owner.inventory.parameters:
            devices[owner.inventory.parameters[0].device] = None
        self._ambient = Ambient(devices)
        self.results = Results(owner.policy, self._ambient.photograph_streams) if owner.policy else None
        self._window = Window.current()
        self._host = HostStreams() if learned.learning or learned.draws else None
        unseen = learned.learning or bool(owner.given_up)
        self.verified = is_verified(owner.verify, learned.calls, unseen) and not owner.fills_late
        self._muted: Muted = []
        self._slots: list[weakref.ref[Slot]] = []
        self._kinds: list[tuple[torch.Size | None, torch.dtype]] = []
        self._positions: list[int] = []  # in the sequence of operators of the policy
        self._filled = 0
        self._running = False
        self._written = False
        self.unsaved = StorageSizes(outlives=True) if watched() else None

    @property
    def given_up(self) -> list[str]:
        """What the call could reach that cannot be photographed."""
        return self._state.given_up + self.arguments.given_up

    @property
    def saves(self) -> bool:
        """Whether autograd would have kept anything: not if the layer is frozen and its inputs ask for no gradients."""
        return bool(self._slots)

    @property
    def is_learning(self) -> bool:
        """Whether this is one of the layer's first calls in its mode."""
        return self._state.learned.learning

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the layer while everything autograd saves is replaced by empty slots."""
        tables = hook_tables(self._owner.inventory.inner_modules)
        outer = get_running()
        set_running(outer | {id(self._owner)})
        self._running = True
        try:
            keeping = contextlib.nullcontext() if self.results is None else self.results.keeping(self._owner.keep)
            hooks = saved_tensors_hooks(*self._unheard(self._pack, self._unpack))
            report = Report(lambda: len(self._slots))
            with self._explained(), spied_on(tables, report), hooks, keeping:
                output = self._owner.run(*args, **kwargs)
        finally:
            set_running(outer)
            self._running = False
        self._muted = report.muted
        unneeded = report.saved_by_muted()
        if unneeded:
            self._slots = [slot for i, slot in enumerate(self._slots) if i not in unneeded]
            self._kinds = [kind for i, kind in enumerate(self._kinds) if i not in unneeded]
            self._positions = [position for i, position in enumerate(self._positions) if i not in unneeded]
        return output

    def _unheard(self, *functions: Callable[..., Any]) -> list[Callable[..., Any]]:
        """Functions that the compiler does not listen to, as it does while a compiled part runs; 1 us a call."""
        heard = self._owner.inventory.has_compiled_parts
        return list(map(torch.compiler.disable, functions)) if heard else list(functions)

    def learn(self) -> None:
        """Right after forward: see what the layer changed, and drop copies that are not needed."""
        learned = self._state.learned
        if self._host is not None and not learned.draws:
            learned.draws = HostStreams() != self._host
            if not learned.draws:
                self._host = None
        learned.arguments |= self.arguments.learn()
        self._state.learn()

    def on_device(self) -> Iterator[Tensor]:
        """What is kept for the replay in memory of the device that computes."""
        yield from self.arguments.on_device()
        if self.results is not None:
            yield from self.results.on_device()

    def unsaved_bytes(self) -> int:
        """Bytes that autograd would keep in addition; 0 if nobody watched the call."""
        if self.unsaved is None:
            return 0
        present = StorageSizes()
        present.add_all((*self._owner.inventory.parameters, *self.on_device()))
        return self.unsaved.bytes_without(present)

    def forget_fingerprints(self) -> None:
        """Do not verify this call: its tensors were fingerprinted before they were filled."""
        for slot in (ref() for ref in self._slots):
            if slot is not None:
                slot.fingerprint = None

    def _pack(self, tensor: Tensor) -> Slot:
        if self.results is not None:
            self._positions.append(self.results.note_saved())
        slot = Slot(self, _fingerprint(tensor) if self.verified else None)
        self._slots.append(weakref.ref(slot))
        self._kinds.append((None if _has_no_shape(tensor) else tensor.shape, tensor.dtype))
        if self.unsaved is not None:
            self.unsaved.add(tensor)
        return slot

    def _unpack(self, slot: Slot) -> Tensor:
        if slot.value is None:
            # A layer that takes gradients in its forward waits for this thread: it must not wait for the layer.
            waits_for_us = self._running or id(self._owner) in get_running()
            with contextlib.nullcontext() if waits_for_us else self._owner.lock:
                if slot.value is None:
                    self._replay()
        if slot.value is None:
            raise self._error(
                f"saved {len(self._slots)} tensors in forward but {self._filled} in the replay, so it did not do the "
                "same thing twice. Leave it out with `layers=` or `check_fn=`."
            )
        if slot.version >= 0 and slot.value._version != slot.version:
            raise self._error(
                "has changed a tensor in place that its gradient needs: one of the variables needed for gradient "
                f"computation has been modified by an inplace operation, of shape {tuple(slot.value.shape)}."
            )
        slot.used = True
        return slot.value

    def _replay(self) -> None:
        objection = _compiled_autograd() or self.arguments.objection() or self._state.objection()
        if objection is not None:
            raise self._error(objection)
        self._release_previous()
        self._filled = 0
        self._written = self._state.writes_parameters
        try:
            state = self._state.installed(self.arguments.streams())
            with announced_replay(), _deeper(), unnoticed(), self._host_streams(), state:
                self._ambient.run(self._run_again)
        except UnexpectedError as error:
            raise self._error(str(error)) from None

    def _run_again(self) -> None:
        with contextlib.ExitStack() as stack:
            for silencer in self._owner.silencers:
                stack.enter_context(silencer())
            args, kwargs = self.arguments.for_replay()
            stack.enter_context(balanced_module_stack())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(without(self._muted))
            if self.results is not None:
                stack.enter_context(unnoticed_in(hook_tables(self._owner.inventory.inner_modules)))
            stack.enter_context(saved_tensors_hooks(*self._unheard(self._fill, _as_it_is)))
            if self.results is not None:
                stack.enter_context(self.results.reusing())
            try:
                self._owner.run(*args, **kwargs)
            except _Stop:
                pass
            except Exception as error:
                if isinstance(error, (ReplayError, UnexpectedError)) or is_out_of_memory(error):
                    raise
                if self._filled < len(self._slots):  # else it comes of the stop, which the layer has caught
                    raise self._error(
                        f"raised {type(error).__name__}({error}) in the replay but not in forward, so something that "
                        "it reads has changed in between. Leave it out with `layers=` or `check_fn=`."
                    ) from error

    @contextlib.contextmanager
    def _host_streams(self) -> Iterator[None]:
        """`random` and `numpy.random` as they were, or the certainty that the layer does not draw from them."""
        if self._host is None and self._window.nobody_drew():
            yield
            return
        now = HostStreams()
        if self._host is not None:
            self._host.restore()
        drew = False
        try:
            yield
            drew = self._host is None and HostStreams() != now
        finally:
            if self._host is not None or drew:
                now.restore()
        if drew:
            self._state.learned.draws = True
            raise UnexpectedError(
                "drew from `random` or `numpy.random` for the first time in this call, of whose streams no state was "
                "kept. Its next calls are exact."
            )

    def _fill(self, tensor: Tensor) -> Tensor:
        index = self._filled
        # Where the layer writes the parameter, its version goes back after the replay; the alias needs one of its own.
        value = tensor.data if self._written and self._state.writes(tensor) else tensor.detach()
        self._filled += 1
        if index >= len(self._slots):  # only when something swallowed the stop
            return value
        if self.results is not None:
            self.results.check_saved(self._positions[index])
        slot = self._slots[index]()
        if slot is not None:
            self._check(index, slot, tensor)
            slot.value = value
            slot.version = -1 if value.is_inference() else value._version
        if index == len(self._slots) - 1 and not self._owner.fills_late:
            raise _Stop
        return value

    def _check(self, index: int, slot: Slot, tensor: Tensor) -> None:
        shape, dtype = self._kinds[index]
        if (shape is not None and tensor.shape != shape) or tensor.dtype != dtype:
            raise self._error(
                f"saved tensor {index} as {dtype} of shape {tuple(shape or ())} in forward but as {tensor.dtype} of "
                f"shape {tuple(tensor.shape)} in the replay, so it did not do the same thing twice. "
                "Leave it out with `layers=` or `check_fn=`."
            )
        if slot.fingerprint is not None:
            again = _fingerprint(tensor)
            if again is None or not slot.fingerprint.matches(again):
                raise self._error(
                    f"saved tensor {index} of shape {tuple(tensor.shape)} with other values in the replay than in "
                    "forward. Something that it reads has changed in between and was not seen: a file, an iterator, a "
                    "thread, a hook, another module, `.data` of a tensor, a view of one. Pass it as an argument, or "
                    "leave the layer out with `layers=` or `check_fn=`."
                )

    def _release_previous(self) -> None:
        # Under `retain_graph` slots outlive their use. Only one frame's values are held at a time.
        previous = _local.replayed() if _local.replayed is not None else None
        if previous is not None and previous is not self:
            for slot in (ref() for ref in previous._slots):
                if slot is not None and slot.used:
                    slot.value, slot.used = None, False
        _local.replayed = weakref.ref(self)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise self._error(
                "calls a `torch.func` transform, which cannot run inside a recomputed layer. "
                "Leave the layer out with `layers=` or `check_fn=`, or use `torch.autograd.grad` in it."
            ) from error

    def _error(self, text: str) -> ReplayError:
        return ReplayError(f"Recomputed layer {self._owner.name!r} {text}")


def _fingerprint(tensor: Tensor) -> Fingerprint | None:
    with unnoticed():
        return fingerprint(tensor)


def _has_no_shape(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided


def _compiled_autograd() -> str | None:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None or not module.in_compiled_autograd_region:
        return None
    return (
        "would be recomputed while compiled autograd traces backward, which cannot be exact. Switch compiled autograd "
        "off (`torch._dynamo.config.compiled_autograd = False`), or compile the layer itself: `layer.compile()`."
    )


@contextlib.contextmanager
def _deeper() -> Iterator[None]:
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: of an accelerator, its libraries or the host, which have no class of their own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)
    )


def replayed_layer(frame: FrameType) -> str | None:
    """Name of the layer that runs for the second time in this frame of a traceback, or None if none does."""
    if frame.f_code is Frame._run_again.__code__:
        name: str = frame.f_locals["self"]._owner.name
        return name
    return None
