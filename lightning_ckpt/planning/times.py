"""Times of layers, in forward and in their second runs, measured in real steps."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_ckpt.measure.clock import Clock
from lightning_ckpt.offload import OffloadEngine
from lightning_ckpt.recompute import Recompute

_Spans = dict[str, list[tuple[Any, Any]]]


class LayerTimes:
    """Measures layers from its making until `finish`, without the time in which they wait for copies.

    Args:
        recomputed: what is attached to the layers.
        clock: tells the time on their device.
        engine: whose copies the device may wait for; such waits belong to no layer. Default: none.
    """

    def __init__(self, recomputed: Sequence[Recompute], clock: Clock, engine: OffloadEngine | None = None) -> None:
        self._clock = clock
        self._engine = engine
        if engine is not None:
            engine.note_waits()
        self._forward: _Spans = defaultdict(list)
        self._again: _Spans = defaultdict(list)
        self._open: dict[str, Any] = {}
        self._handles: list[Any] = []
        self._timers: list[tuple[Recompute, Any]] = []
        self._start = clock.mark()
        for each in recomputed:
            self._handles.append(each.layer.register_forward_pre_hook(self._begins(each.name)))
            self._handles.append(each.layer.register_forward_hook(self._ends(each.name)))
            timer = self._timer(each.name)
            each.silencers.append(timer)
            self._timers.append((each, timer))

    def finish(self) -> tuple[dict[str, float], dict[str, float], float]:
        """Leave the layers alone; seconds of forward and of second runs, by layer, and of everything.

        A layer that is called several times has the sum of its calls.
        """
        end = self._clock.mark()
        for handle in self._handles:
            handle.remove()
        for recompute, timer in self._timers:
            recompute.silencers.remove(timer)
        self._clock.wait_for(end)
        pairs = [] if self._engine is None else self._engine.take_waits()
        waits = [(self._clock.seconds(self._start, since), self._clock.seconds(since, until)) for since, until in pairs]
        forward = {name: self._sum(spans, waits) for name, spans in self._forward.items()}
        again = {name: self._sum(spans, waits) for name, spans in self._again.items()}
        return forward, again, self._sum([(self._start, end)], waits)

    def _sum(self, spans: list[tuple[Any, Any]], waits: list[tuple[float, float]]) -> float:
        total = 0.0
        for start, end in spans:
            begin, seconds = self._clock.seconds(self._start, start), self._clock.seconds(start, end)
            total += seconds - sum(wait for at, wait in waits if begin <= at <= begin + seconds)
        return total

    def _begins(self, name: str) -> Callable[..., None]:
        def begins(layer: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._open[name] = self._clock.mark()

        return begins

    def _ends(self, name: str) -> Callable[..., None]:
        def ends(layer: nn.Module, args: Any, output: Any) -> None:
            start = self._open.pop(name, None)
            if start is not None:
                self._forward[name].append((start, self._clock.mark()))

        return ends

    def _timer(self, name: str) -> Any:
        @contextlib.contextmanager
        def timed() -> Iterator[None]:
            start = self._clock.mark()
            try:
                yield
            finally:
                self._again[name].append((start, self._clock.mark()))

        return timed
