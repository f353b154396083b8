"""Floating-point operations of a batch, counted by PyTorch's formulas as its operators run."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_ckpt.measure.sampling import Sample
from lightning_ckpt.measure.saved import SavedBytes
from lightning_ckpt.measure.watching import watching


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # PyTorch has formulas for the attention kernels of accelerators only.
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one batch; a multiplication and an addition are two.

    Attributes:
        model: those of forward, backward and optimizer, as the plain run needs them.
        recompute: those of layers that ran again.
    """

    model: int
    recompute: int


def operator_flops(operator: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Floating-point operations of one call of an operator, 0 where PyTorch has no formula."""
    formula = _FORMULAS.get(getattr(operator, "_overloadpacket", None))
    return 0 if formula is None else formula(*args, **kwargs, out_val=output)


class _Count(TorchDispatchMode):
    """Adds up the operations of everything that runs inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.total += operator_flops(func, args, kwargs, output)
        return output


class FlopMeter:
    """Counts a sample of the batches: operations follow from the shapes of a batch."""

    def __init__(self) -> None:
        self._sample: Sample[Flops] = Sample()
        self._count: _Count | None = None
        self._entered = False

    def begin(self, kind: Hashable) -> None:
        """A batch begins; `kind` tells batches apart."""
        self._count = _Count() if self._sample.begin(kind) else None
        self._recompute = 0
        self._replay_since = 0

    @property
    def counts(self) -> bool:
        """Whether there is something to enter around what computes."""
        return self._count is not None and not self._entered

    @contextlib.contextmanager
    def _counting_once(self, count: _Count) -> Iterator[None]:
        self._entered = True
        try:
            with watching(count, self._give_up):
                yield
        finally:
            self._entered = False

    def counting(self) -> AbstractContextManager[object]:
        """Entered around everything that computes; may be entered inside itself."""
        if self._count is None or self._entered:
            return contextlib.nullcontext()
        return self._counting_once(self._count)

    def replay_begins(self) -> None:
        """What follows is computed for the second time."""
        self._replay_since = 0 if self._count is None else self._count.total

    def replay_ends(self) -> None:
        """It is over."""
        if self._count is not None:
            self._recompute += self._count.total - self._replay_since

    def _give_up(self) -> None:
        self._count = None

    def end(self, saved: tuple[SavedBytes, ...]) -> Flops | None:
        """Operations of the batch, or None if they are not known. `saved` are its saved activations."""
        count, self._count = self._count, None
        flops = None if count is None else Flops(count.total - self._recompute, self._recompute)
        return self._sample.end(saved, flops)
