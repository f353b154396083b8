"""Exact live and peak bytes of tensors on a machine whose allocator does not tell: the CPU."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ckpt.measure.storage import storages


class LiveBytes(TorchDispatchMode):
    """Counts storages while it is entered: born when an operator returns them, dead with their last owner.

    What an operator allocates and frees inside itself is not seen, nor is what compiled code does. A storage that was
    there before is counted once it is passed to `adopt`. It may be entered several times; storages born in between
    are not counted, deaths are.

    Attributes:
        current: bytes alive now.
        peak: the most bytes that were alive at once, since the last `take_peak`.
    """

    # Else a higher-order operator (flex_attention, what compiled code wraps) would raise under the mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else `torch.compile` would run eagerly under the mode: other kernels, other bits.
        return True

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that are there already: parameters, gradients, optimizer state, the batch."""
        for tensor in tensors:
            for storage in storages(tensor):
                self._born(storage)

    def alive(self) -> list[weakref.ref[torch.UntypedStorage]]:
        """The storages that are alive now."""
        return list(self._alive.values())

    def take_peak(self) -> int:
        """The most bytes alive at once since the last call."""
        taken, self.peak = self.peak, self.current
        return taken

    def _born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size == 0 or key in self._alive:
            return

        def died(_: Any) -> None:
            del self._alive[key]
            self.current -= size

        self._alive[key] = weakref.ref(storage, died)
        self.current += size
        self.peak = max(self.peak, self.current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and count what it returns.

        Subclasses do more here: PyTorch puts a detour around every `__torch_dispatch__`.
        """
        output = func(*args, **kwargs)
        present: set[int] | None = None
        for tensor in tensors_among((output,)):
            for storage in storages(tensor):
                if storage._cdata in self._alive:
                    continue
                if present is None:
                    # What `torch.tensor` makes of numbers is first seen as the argument of this operator.
                    given = () if func is torch.ops.aten.lift_fresh.default else (*args, *kwargs.values())
                    present = {s._cdata for t in tensors_among(given) for s in storages(t)}
                if storage._cdata not in present:  # else a view, or the same storage changed in place
                    self._born(storage)
        return output


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among an operator's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)
        elif isinstance(value, dict):
            yield from tensors_among(value.values())
