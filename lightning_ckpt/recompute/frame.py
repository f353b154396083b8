"""One call of a recomputed layer: what autograd would save is left out, and regained by running the layer again."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.recompute.ambient import Ambient
from lightning_ckpt.recompute.arguments import Arguments
from lightning_ckpt.recompute.watch import announced_replay, watched


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

    __slots__ = ("__weakref__", "frame", "used", "value", "version")

    def __init__(self, frame: "Frame") -> None:
        self.frame = frame
        self.value: Tensor | None = None
        self.version = -1
        self.used = False


class Frame:
    """One forward call of a layer, and its replay.

    Args:
        name: the layer's qualified name, for messages.
        run: the layer's own forward.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        device: where the layer's parameters are, if it has any.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device | None = None,
    ) -> None:
        self._name = name
        self._run = run
        self.arguments = Arguments(args, kwargs)
        devices = {tensor.device: None for tensor in self.arguments.tensors}
        if device is not None:
            devices[device] = None
        self._ambient = Ambient(devices)
        self._slots: list[weakref.ref[Slot]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._filled = 0
        self._lock = threading.RLock()
        # Storages that autograd would have kept; noted only while somebody watches.
        self.unsaved = StorageSizes() if watched() else None

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the layer while everything autograd saves is replaced by empty slots."""
        with self._explained(), saved_tensors_hooks(self._pack, self._unpack):
            return self._run(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Slot:
        slot = Slot(self)
        self._slots.append(weakref.ref(slot))
        self._kinds.append((tensor.shape, tensor.dtype))
        if self.unsaved is not None:
            self.unsaved.add(tensor)
        return slot

    def _unpack(self, slot: Slot) -> Tensor:
        if slot.value is None:
            with self._lock:
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
        changed = self.arguments.changed_tensor()
        if changed is not None:
            name, tensor = changed
            raise self._error(
                f"got argument `{name}` of shape {tuple(tensor.shape)}, which was modified by an inplace operation "
                "before backward. Pass a clone, or change it out of place (`x = x + y`, not `x += y`)."
            )
        self._release_previous()
        self._filled = 0
        args, kwargs = self.arguments.for_replay()
        with (
            announced_replay(),
            _deeper(),
            self._ambient.restored(),
            torch.enable_grad(),
            contextlib.suppress(_Stop),
            saved_tensors_hooks(self._fill, _as_it_is),
        ):
            self._run(*args, **kwargs)

    def _fill(self, tensor: Tensor) -> Tensor:
        index, tensor = self._filled, tensor.detach()
        self._filled += 1
        if index >= len(self._slots):  # only when something swallowed the stop
            return tensor
        slot = self._slots[index]()
        if slot is not None:
            self._check_kind(index, tensor)
            slot.value = tensor
            slot.version = -1 if tensor.is_inference() else tensor._version
        if index == len(self._slots) - 1:
            raise _Stop
        return tensor

    def _check_kind(self, index: int, tensor: Tensor) -> None:
        shape, dtype = self._kinds[index]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise self._error(
                f"saved tensor {index} as {dtype} of shape {tuple(shape)} in forward but as {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} in the replay, so it did not do the same thing twice. "
                "Leave it out with `layers=` or `check_fn=`."
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
        return ReplayError(f"Recomputed layer {self._name!r} {text}")


@contextlib.contextmanager
def _deeper() -> Iterator[None]:
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
