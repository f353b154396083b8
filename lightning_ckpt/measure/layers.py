"""Which layer keeps how much for backward, told at any moment, at next to no cost before."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_ckpt.measure.boundaries import Boundaries
from lightning_ckpt.measure.graph import graph_nodes
from lightning_ckpt.measure.saved import kept_tensors
from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.recompute.frame import replayed_layer

_DEPTH = 3  # how deep tensors are looked for in the variables of a function


class LayerTrace:
    """Notes which operations belong to which layer, by autograd's own numbering of them.

    Autograd numbers the operations that it records, in order. A layer is the range of numbers between its start and
    its end, so nothing of the graph has to be held, and what is found of it later can be told apart.

    Args:
        model: the model, whose parameters and buffers are in memory anyway.
        layers: its layers by qualified name. Layers inside compiled code are not seen.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self._model: nn.Module | None = model
        self._starts: list[int] = []
        self._names: list[str] = []
        self._boundaries = Boundaries(model, layers, self)

    def boundary(self, name: str, starts_layer: bool) -> None:
        """A layer begins or ends."""
        # Copies of the model share the hooks, and layers may run again in backward.
        if self._model is None or torch._C._current_graph_task_id() != -1:
            return
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._names.append(name if starts_layer else "")

    def clear(self) -> None:
        """Forget the operations so far: their graphs are gone, or belong to another batch."""
        self._starts.clear()
        self._names.clear()

    def remove(self) -> None:
        """Leave the layers as they were."""
        self.clear()
        self._boundaries.remove()
        self._model = None

    def saved_bytes(self, roots: Iterable[Tensor]) -> dict[str, int]:
        """Bytes kept for the backward of `roots`, by layer, the most first; what belongs to none has the name ``""``.

        Each storage counts once, for the first layer that keeps it. Parameters and buffers do not count.
        """
        present = StorageSizes()
        if self._model is not None:
            present.add_all((*self._model.parameters(), *self._model.buffers()))
        counted = StorageSizes()
        saved: dict[str, int] = {}
        for node in sorted(graph_nodes(roots), key=_number):
            sizes = StorageSizes()
            sizes.add_all(kept_tensors(node))
            name = self._layer_of(node)
            saved[name] = saved.get(name, 0) + sizes.bytes_without(present, counted)
            counted.update(sizes)
        return dict(sorted(((name, size) for name, size in saved.items() if size), key=lambda item: -item[1]))

    def _layer_of(self, node: Node) -> str:
        index = bisect_right(self._starts, _number(node)) - 1
        return self._names[index] if index >= 0 else ""


def _number(node: Node) -> int:
    return int(node._sequence_nr())


def frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    """The calls that an error has ended, the outermost first.

    Calls that still run are left out: a look at their variables, the error among them, would keep them all alive.
    """
    running = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    while traceback is not None:
        if id(traceback.tb_frame) not in running:
            yield traceback.tb_frame
        traceback = traceback.tb_next


def tensors_in_frames(traceback: TracebackType | None) -> Iterator[Tensor]:
    """Tensors that the functions of a traceback hold in their variables: what was alive when it was raised.

    What a layer holds that runs for the second time is left out: its frame knows what it has regained.
    """
    for frame in frames_of(traceback):
        if replayed_layer(frame) is not None:
            return
        yield from tensors_in(frame.f_locals)


def tensors_in(variables: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors in variables, and in the containers that these hold."""
    for value in variables.values():
        yield from _tensors_in(value, _DEPTH)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, depth - 1)
