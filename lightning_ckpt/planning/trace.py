"""One training step, cut at the boundaries of its layers: bytes alive, peaks, times by formula."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from lightning_ckpt.measure.live import LiveBytes
from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.planning.rates import Rates
from lightning_ckpt.recompute import attached, is_replaying

_ITEM = torch.ops.aten._local_scalar_dense.default


@dataclass
class Stretch:
    """A part of a step.

    Attributes:
        peak: the most bytes alive at once; 0 if it was never entered.
        seconds: its time by formula, replays excluded; 0.0 without rates.
        replay_s: that of replays.
    """

    peak: int = 0
    seconds: float = 0.0
    replay_s: float = 0.0


@dataclass
class Call:
    """One call of a layer, and its backward.

    Attributes:
        name: the layer's qualified name.
        before: bytes alive when it begins.
        input_bytes: bytes of the activations that it is given.
        after: bytes alive when it ends.
        unsaved_bytes: bytes that it would keep for backward in addition if it were not recomputed; 0 unless watched.
        forward: from its beginning to its end.
        between: from its end to the beginning of the next call, or, after the last one, of the first backward.
        backward: from the first gradient of what it returned to that of what another call returned.
    """

    name: str
    before: int
    input_bytes: int
    after: int = 0
    unsaved_bytes: int = 0
    forward: Stretch = field(default_factory=Stretch)
    between: Stretch = field(default_factory=Stretch)
    backward: Stretch = field(default_factory=Stretch)


@dataclass(frozen=True)
class StepTrace:
    """What a step needs, in bytes alive at once.

    Attributes:
        calls: the calls of layers, in the order of forward.
        rest: what belongs to no layer: before the first one, and between micro-batches.
        optimizer: the optimizer's step.
        peak: the most of all.
    """

    calls: tuple[Call, ...]
    rest: Stretch
    optimizer: Stretch

    @property
    def peak(self) -> int:
        parts = [self.rest, self.optimizer]
        for call in self.calls:
            parts += [call.forward, call.between, call.backward]
        return max(part.peak for part in parts)


class StepRecorder(LiveBytes):
    """Records a step that runs while it is entered, on real or on fake tensors.

    Args:
        layers: the layers by qualified name, none inside another one.
        rates: give times by formula. Default: no times.
    """

    def __init__(self, layers: Mapping[str, nn.Module], rates: Rates | None = None) -> None:
        super().__init__()
        self._rates = rates
        self._calls: list[Call] = []
        self._open: Call | None = None
        self._rest = Stretch()
        self._optimizer = Stretch()
        self._current = self._rest
        self._handles: list[Any] = []
        for name, layer in layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._begins(name), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._ends))

    def optimizer_begins(self) -> None:
        """From here on it is the optimizer's step."""
        self._switch(self._optimizer)

    def optimizer_ends(self) -> None:
        """The optimizer's step is over."""
        self._switch(self._rest)

    def close(self) -> None:
        """Leave the layers alone."""
        for handle in self._handles:
            handle.remove()

    def finish(self) -> StepTrace:
        """Leave the layers alone; what was recorded."""
        self._switch(self._rest)
        self.close()
        return StepTrace(tuple(self._calls), self._rest, self._optimizer)

    def _switch(self, to: Stretch) -> None:
        self._current.peak = max(self._current.peak, self.take_peak())
        self._current = to

    def _begins(self, name: str) -> Any:
        def begins(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_forward():
                return
            given = StorageSizes()
            given.add_all(leaf for leaf in tree_leaves((args, kwargs)) if _is_activation(leaf))
            self._open = Call(name, self.current, given.bytes_without())
            self._calls.append(self._open)
            self._switch(self._open.forward)

        return begins

    def _ends(self, layer: nn.Module, args: Any, output: Any) -> None:
        call, self._open = self._open, None
        if call is None or not self._is_forward():
            return
        call.after = self.current
        recompute = attached(layer)
        if recompute is not None:
            call.unsaved_bytes = recompute.unsaved_bytes
        self._switch(call.between)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda gradient: self._switch(call.backward))

    def _is_forward(self) -> bool:
        return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; count what it returns, and how long it takes by formula."""
        if func is _ITEM and self._current is self._optimizer and is_fake(args[0]):
            return 1  # on fake tensors an optimizer cannot read how many steps it has made
        output = super().call(func, args, kwargs)
        if self._rates is not None:
            seconds = self._rates.seconds(func, args, kwargs, output)
            if is_replaying():
                self._current.replay_s += seconds
            else:
                self._current.seconds += seconds
        return output


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_floating_point()
