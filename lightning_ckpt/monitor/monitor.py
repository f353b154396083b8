"""StepMonitor: memory and time of every optimizer step, through whatever loggers the Trainer has."""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_ckpt.measure.clock import make_clock
from lightning_ckpt.measure.peak import make_peak_meter
from lightning_ckpt.measure.phases import Phases
from lightning_ckpt.measure.saved import SavedBytes, saved_bytes
from lightning_ckpt.offload import OffloadEngine
from lightning_ckpt.offload.statistics import StepStatistics
from lightning_ckpt.recompute.watch import unwatch, watch

_MIB = 2**20
_CHARTS = {
    "lightning_ckpt": {
        # More lines than two per run are hard to tell apart.
        "memory (MiB)": ["Multiline", [r"memory/(saved|peak)_MiB"]],
        "time (ms)": ["Multiline", [r"time/(step|recompute)_ms"]],
    }
}


@dataclass
class _Row:
    """What is known about one optimizer step: sums over its micro-batches for times, maxima for memory."""

    phases: Phases
    saved: list[SavedBytes] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)
    offload: StepStatistics | None = None
    step: int = 0
    end: Any = None

    def metrics(self) -> dict[str, float]:
        seconds = self.phases.seconds()
        metrics = {
            f"time/{name}_ms": seconds.get(name, 0.0) * 1e3 for name in ("step", "forward", "backward", "recompute")
        }
        if self.saved and all(item.complete for item in self.saved):
            metrics["memory/saved_MiB"] = max(item.saved for item in self.saved) / _MIB
            metrics["memory/avoided_MiB"] = max(item.avoided for item in self.saved) / _MIB
        known = [peak for peak in self.peaks if peak is not None]
        if known and len(known) == len(self.peaks):
            metrics["memory/peak_MiB"] = max(known) / _MIB
        if self.offload is not None:
            metrics |= self.offload.metrics()
        return metrics


class StepMonitor(pl.Callback):
    r"""Log memory and time of every optimizer step through the Trainer's loggers.

    One point per optimizer step, whatever ``Trainer(log_every_n_steps=...)`` says, at the same step as the loss.
    With accumulation, times are sums and memory is the maximum over the micro-batches of the step. Figures are those
    of rank 0. TensorBoard also gets one chart that overlays saved and peak memory and one that overlays step and
    recompute time (tab "Custom Scalars"). ``ActivationCheckpointing`` brings a monitor along; alone it shows a plain
    run, to compare with.

    Logged metrics:

    - ``memory/peak_MiB``: the most memory in use at once during the step, in MiB. On an accelerator: bytes allocated
      for tensors, from ``torch.accelerator``; the device's peak counter is reset at every batch. On the CPU: bytes of
      all live tensors (parameters, gradients, optimizer state, batch, activations), counted exactly as PyTorch's
      operators return them, without workspaces inside an operator. Counting costs time, so the first batches and the
      first of each shape are counted and later ones of that shape take the figure; it is missing where that is not
      possible.
    - ``memory/saved_MiB``: activations kept for backward when it starts, in MiB: each storage once, parameters and
      buffers excluded, the inputs of recomputed layers included, what is on the host excluded.
    - ``memory/avoided_MiB``: activations that would be kept in addition if no layer were recomputed, in MiB. Saved and
      avoided together are what the plain run saves, and inputs of recomputed layers that it would not.
    - ``time/step_ms``: the whole step, from the start of its batch to its end, in ms; waiting for data excluded.
    - ``time/forward_ms``: ``training_step`` without backward and optimizer, in ms.
    - ``time/backward_ms``: backward, recompute included, in ms.
    - ``time/recompute_ms``: the part of backward in which layers run again, in ms.

    With offload also, summed over the micro-batches of the step or, for memory, the most of them:

    - ``offload/out_MiB``, ``offload/in_MiB``: bytes copied to the host and back, in MiB.
    - ``offload/resident_MiB``: saved activations still on the device when backward begins, in MiB: the last layers,
      those that the link cannot hide, and what is under way. Tensors too small to travel are not counted.
    - ``offload/stayed_last_MiB``, ``offload/stayed_unhidden_MiB``, ``offload/stayed_budget_MiB``: what was to stay, in
      MiB: the last layers, what the link cannot hide, and what the host has no room for.
    - ``offload/forward_wait_ms``, ``offload/backward_wait_ms``: time for which the device waited for copies, in ms.
    - ``offload/host_MiB``: activations in host memory when backward begins, in MiB.
    - ``offload/host_locked_MiB``: host memory set aside for them, in MiB.
    - ``offload/late_allocations``: times that host memory had to be set aside after the first steps; 0 is right.

    On an accelerator, times are measured by events on the device, without making the host wait, and a row is logged
    when the device has passed it. Steps with compiled parts have no ``memory/saved_MiB`` and ``memory/avoided_MiB``,
    and on the CPU no ``memory/peak_MiB``: what compiled code keeps cannot be seen from outside.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lightning_ckpt import StepMonitor
        >>> trainer = Trainer(callbacks=[StepMonitor()])
    """

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._pending: deque[_Row] = deque()
        self._row: _Row | None = None
        self._layout_done = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.loggers:
            rank_zero_info("StepMonitor: the Trainer has no logger, so memory and time of the steps are not logged.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()  # a trial of BatchSizeFinder that ran out of memory ends without telling
        first = next(callback for callback in callbacks_of(trainer) if isinstance(callback, StepMonitor))
        if first is not self:
            rank_zero_warn("The Trainer has several StepMonitors; only the first one logs.")
            return
        if not trainer.loggers:
            return
        device = trainer.strategy.root_device
        self._clock = make_clock(device)
        self._peak = make_peak_meter(device)
        self._replay_since: list[Any] = []
        for name, wrapper in (
            ("training_step", self._training_step),
            ("backward", self._backward),
            ("optimizer_step", self._optimizer_step),
        ):
            self._wrap(trainer.strategy, name, wrapper)
        watch(self)

    def _wrap(self, strategy: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._wrapped.append((strategy, name, strategy.__dict__.get(name)))
        setattr(strategy, name, functools.partial(wrapper, getattr(strategy, name)))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._wrapped:
            return
        if self._row is None:
            self._row = _Row(Phases(self._clock))
        self._parameters = list(chain(pl_module.parameters(), pl_module.buffers()))
        self._batch_saved: list[SavedBytes] = []
        if self._peak is not None:
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            kind = (shapes, trainer.fit_loop._should_accumulate())
            self._peak.begin(kind, lambda: _present(trainer, pl_module, batch))
        self._batch_since = self._clock.mark()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = self._row
        if row is None:
            return
        row.end = self._clock.mark()
        row.phases.add("step", self._batch_since, row.end)
        row.saved += self._batch_saved
        if self._peak is not None:
            row.peaks.append(self._peak.end(self._batch_saved))
        if not trainer.fit_loop._should_accumulate():
            engine = offload_engine_of(trainer)
            row.offload = None if engine is None else engine.take_statistics()
            row.step = trainer.fit_loop.epoch_loop._batches_that_stepped
            self._pending.append(row)
            self._row = None
        self._log_passed(trainer)

    def _training_step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._row is None:
            return inner(*args, **kwargs)
        with self._row.phases.phase("forward"), self._counting():
            return inner(*args, **kwargs)

    def _backward(self, inner: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._row is None:
            return inner(loss, *args, **kwargs)
        with self._row.phases.phase("monitor"):
            self._batch_saved.append(saved_bytes([loss], self._parameters))
        with self._row.phases.phase("backward"), self._counting():
            return inner(loss, *args, **kwargs)

    def _optimizer_step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._row is None:
            return inner(*args, **kwargs)
        with self._row.phases.phase("optimizer"), self._counting():
            return inner(*args, **kwargs)

    def _counting(self) -> Any:
        return self._peak.counting() if self._peak is not None else contextlib.nullcontext()

    def replay_begins(self) -> None:
        """Told by a recomputed layer when it runs again."""
        self._replay_since.append(self._clock.mark())

    def replay_ends(self) -> None:
        """Told by a recomputed layer when its second run is over."""
        since = self._replay_since.pop()
        if not self._replay_since and self._row is not None:  # one inside another counts once
            self._row.phases.add("recompute", since, self._clock.mark())

    def _log_passed(self, trainer: pl.Trainer) -> None:
        while self._pending and self._clock.has_passed(self._pending[0].end):
            row = self._pending.popleft()
            metrics = row.metrics()
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger) and not self._layout_done and trainer.is_global_zero:
                    logger.experiment.add_custom_scalars(_CHARTS)
                logger.log_metrics(metrics, step=row.step)
            self._layout_done = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._pending:
            self._clock.wait()
            self._log_passed(trainer)
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        for strategy, name, replaced in reversed(self._wrapped):
            del strategy.__dict__[name]
            if replaced is not None:
                setattr(strategy, name, replaced)
        self._wrapped.clear()
        self._pending.clear()
        self._row = None
        unwatch(self)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's own list of callbacks (an attribute it sets without declaring it)."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def offload_engine_of(trainer: pl.Trainer) -> OffloadEngine | None:
    """The engine that moves activations in this training, of the strategy or of a callback."""
    owners = [trainer.strategy, *callbacks_of(trainer)]
    engines = (getattr(owner, "offload_engine", None) for owner in owners)
    return next((engine for engine in engines if engine is not None), None)


def _present(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    yield from (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    yield from (leaf for leaf in tree_leaves([states, batch]) if isinstance(leaf, Tensor))
