"""The memory of one optimizer step, as it really is."""

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_ckpt.measure.counters import PeakCounter
from lightning_ckpt.measure.watching import watching
from lightning_ckpt.planning.rates import rates_of
from lightning_ckpt.planning.trace import StepRecorder, StepTrace
from lightning_ckpt.recompute.watch import unwatch, watch


class StepWatch:
    """Watches micro-batches until `close`; may slow them down, but never changes what they compute.

    Args:
        device: where the model trains.
        layers: its layers by qualified name.
        traces: whether layers are told apart. Default: no.

    Attributes:
        peak: the most bytes in use at once so far; None where that cannot be told.
        trace: the micro-batch that has needed most; None unless layers are told apart.
    """

    def __init__(self, device: torch.device, layers: Mapping[str, nn.Module], traces: bool = False) -> None:
        self.peak: int | None = 0
        self.trace: StepTrace | None = None
        self._device = device
        self._layers = layers
        self._traces = traces
        self._counter = None if device.type == "cpu" else PeakCounter(device)
        self._recorder: StepRecorder | None = None
        self._entered = contextlib.ExitStack()
        if traces:
            watch(self)  # so that layers note what they leave unsaved

    def begin(self, present: Iterable[Tensor]) -> None:
        """A micro-batch begins; `present` is in memory already."""
        if self._counter is not None:
            self._counter.take()
        if self._counter is None or self._traces:
            self._recorder = StepRecorder(self._layers, rates_of(self._device) if self._traces else None)
            self._recorder.adopt(present)
            self._entered.enter_context(watching(self._recorder, self._give_up))

    def optimizer_begins(self) -> None:
        """What follows is the optimizer's step."""
        if self._recorder is not None:
            self._recorder.optimizer_begins()

    def end(self) -> None:
        """The micro-batch is over."""
        self._entered.close()
        recorder, self._recorder = self._recorder, None
        trace = None if recorder is None else recorder.finish()
        if self.peak is None:
            return
        if trace is not None and (self.trace is None or trace.peak > self.trace.peak):
            self.trace = trace
        if self._counter is not None:
            self.peak = max(self.peak, self._counter.take().peak_allocated)
        elif trace is not None:
            self.peak = max(self.peak, trace.peak)

    def drop(self) -> None:
        """Forget a micro-batch that has begun and does not end."""
        self._entered.close()
        if self._recorder is not None:
            self._recorder.finish()
            self._recorder = None

    def close(self) -> None:
        """Watch no more."""
        self.drop()
        unwatch(self)
        if self._counter is not None:
            self._counter.close()

    def replay_begins(self) -> None:
        """Nothing to note."""

    def replay_ends(self) -> None:
        """Nothing to note."""

    def _give_up(self) -> None:
        if self._counter is None:
            self.peak = None
        self.trace = None
        self._traces = False
