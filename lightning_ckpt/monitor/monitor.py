"""StepMonitor: memory and time of every optimizer step, through whatever loggers the Trainer has."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_ckpt.measure.step import StepMeter
from lightning_ckpt.measure.work import count_work, shapes_of, tensors_of
from lightning_ckpt.monitor.out_of_memory import ELSEWHERE, OutOfMemoryReporter
from lightning_ckpt.monitor.patches import Patches
from lightning_ckpt.monitor.publisher import Publisher
from lightning_ckpt.monitor.summary import History, Summary, show
from lightning_ckpt.monitor.trainer import (
    callbacks_of,
    hands_out_iterator,
    model_tensors,
    offload_engine_of,
    optimizer_tensors,
    planned_bytes_of,
    stage_of_plan,
    step_of,
    tell_peak,
    treatments_of,
)
from lightning_ckpt.offload import OffloadEngine
from lightning_ckpt.recompute.watch import unwatch, watch

_FETCH = "[_TrainingEpochLoop].train_dataloader_next"  # what Lightning's profilers call waiting for a batch
_BAR = ("memory/peak_MiB", "time/step_ms")


class StepMonitor(pl.Callback):
    r"""Log memory and time of every optimizer step through the Trainer's loggers, and sum them up at the end of fit.

    One point per optimizer step, whatever ``Trainer(log_every_n_steps=...)`` says, at the same step as the loss and in
    the same row of a table. With accumulation, times are sums and memory is the maximum over the micro-batches of the
    step. TensorBoard also gets one chart that overlays saved and peak memory and one that overlays step and recompute
    time (tab "Custom Scalars"). ``ActivationCheckpointing`` brings a monitor along; alone it shows a plain run, to
    compare with. When memory runs out, the monitor prints what the layers kept and what would help, before the error.

    Logged metrics, memory in MiB:

    - ``memory/peak_MiB``: the most memory in use at once during the step. On an accelerator: bytes allocated for
      tensors. On the CPU: bytes of all live tensors (parameters, gradients, optimizer state, batch, activations),
      counted exactly as PyTorch's operators return them, without workspaces inside an operator. Counting costs time, so
      the first batches and the first of each kind (shapes, saved bytes) are counted and later ones of that kind take
      the figure; where kinds are too many, it is missing.
    - ``memory/planned_MiB``: what the peak was planned to be. Only with ``ActivationCheckpointing(memory_budget=...)``.
    - ``memory/peak_phase``: where in the step that was: 1 forward, 2 backward, 3 optimizer, 0 elsewhere.
    - ``memory/after_forward_MiB``: memory in use when backward begins, told like the peak.
    - ``memory/saved_MiB``: activations kept for backward when it begins: each storage once, parameters and buffers
      excluded, inputs of recomputed layers included, what is on the host excluded.
    - ``memory/avoided_MiB``: activations that would be kept in addition if no layer were recomputed.
    - ``memory/offloaded_MiB``: activations in host memory when backward begins. Only with offload.
    - ``memory/reserved_MiB``: the most memory that the allocator held at once, in use or not. Only on an accelerator.
    - ``memory/alloc_retries``: how often, since the last row, the allocator had to give its cache back to the device to
      find memory; anything but 0 is a run at the edge. Only on an accelerator.
    - ``memory/process_MiB``: memory that the process has from the operating system at the end of the step. Only on the
      CPU. It hardly ever falls, since freed memory is kept for reuse: look at the peak for what a step needs.

    Times in ms; on an accelerator they are the device's own, measured by events without making the host wait:

    - ``time/step_ms``: the whole step: waiting for data, and from ``training_step`` to the end of the optimizer's step.
      What happens around that (hooks at the start and end of a batch, validation, checkpoints, logging) is not in it.
    - ``time/data_ms``: waiting for data, moving it to the device included.
    - ``time/forward_ms``: ``training_step`` without backward and optimizer.
    - ``time/backward_ms``: backward, recompute included.
    - ``time/recompute_ms``: the part of backward in which layers run again.
    - ``time/optimizer_ms``: the optimizer's step, clipping and zeroing of gradients included.
    - ``time/copy_wait_ms``: the part of forward and backward in which the device waited for copies. Only with offload.
    - ``time/tokens_per_s`` or ``time/samples_per_s``: tokens (``batch["input_ids"]``, or a table of integers) or rows
      of the batches by the time of the step, of all ranks together.

    With ``flops``: ``flops/model_TFLOP_per_s``, the floating-point operations of the plain run by the time of the step,
    in 10^12 per second and rank, and ``flops/hardware_TFLOP_per_s``, those of the recompute added.

    On several ranks, memory is the largest of all ranks (``memory/peak_phase`` that of the rank with the largest peak),
    times are their means, and ``time_max/step_ms`` and so on their maxima.

    Steps with compiled parts have no ``memory/saved_MiB`` and ``memory/avoided_MiB``, and on the CPU no
    ``memory/peak_MiB``: what compiled code keeps cannot be seen from outside.

    Args:
        every_n_steps: Measure and log one optimizer step in so many, the n-th first, as ``log_every_n_steps`` counts.
            The others cost nothing.
        per_rank: On several ranks, also log every metric of each, as ``memory/peak_MiB/rank1``.
        progress_bar: Show peak memory and time of the step on the progress bar, too.
        flops: Count floating-point operations, by PyTorch's formulas, in the first batches of each kind.
        table: Print the summary at the end of ``fit``.
        memory_snapshot: Folder for PyTorch's memory snapshots: the recent history of allocations is recorded, and
            written there when memory runs out. Only for accelerators that can record it.

    Raises:
        MisconfigurationException: ``every_n_steps`` is no integer of at least 1.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lightning_ckpt import StepMonitor
        >>> trainer = Trainer(callbacks=[StepMonitor(every_n_steps=10, progress_bar=True)])
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        per_rank: bool = False,
        progress_bar: bool = False,
        flops: bool = False,
        table: bool = True,
        memory_snapshot: str | Path | None = None,
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise MisconfigurationException(f"`every_n_steps={every_n_steps!r}` must be an integer of at least 1.")
        self.every_n_steps = every_n_steps
        self.per_rank = per_rank
        self.progress_bar = progress_bar
        self.flops = flops
        self.table = table
        self.memory_snapshot = memory_snapshot
        self._patches = Patches()
        self._history = History()
        self._treatments: list[str] | None = None
        self._planned_bytes: int | None = None
        self._engine: OffloadEngine | None = None
        self._meter: StepMeter | None = None
        self._publisher: Publisher | None = None
        self._out_of_memory: OutOfMemoryReporter | None = None

    def summary(self) -> Summary:
        """Memory and time so far, at any time during or after ``fit``: an object that prints as a table.

        A launcher that starts processes of its own (``ddp_spawn``, ``ddp_fork``, a notebook) leaves the monitors there;
        the one in the main process has measured nothing.

        Example::

            trainer.fit(model)
            print(monitor.summary())
            print(monitor.summary().peak_bytes)
        """
        return self._history.summary(self._treatments or [])

    # ---------------------------------------------------------------- begin and end

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not self._logs(trainer):
            why = "`barebones=True`" if trainer.barebones else "the Trainer has no logger"
            rank_zero_info(f"StepMonitor: {why}, so memory and time of the steps are not measured.")

    def _logs(self, trainer: pl.Trainer) -> bool:
        return not trainer.barebones and (bool(trainer.loggers) or self.progress_bar)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()  # a trial of BatchSizeFinder that ran out of memory ends without telling
        first = next(callback for callback in callbacks_of(trainer) if isinstance(callback, StepMonitor))
        if first is not self:
            rank_zero_warn("The Trainer has several StepMonitors; only the first one logs.")
            return
        if trainer.barebones:
            return
        self._out_of_memory = OutOfMemoryReporter(trainer, pl_module, self.memory_snapshot)
        for name, phase in (("training_step", "forward"), ("backward", "backward"), ("optimizer_step", "optimizer")):
            self._patches.wrap(trainer.strategy, name, self._in_phase(trainer, phase))
        # All ranks or none: each row takes a collective.
        if trainer.strategy.reduce_boolean_decision(self._logs(trainer), all=False):
            self._history, self._treatments, self._planned_bytes = History(), None, None
            self._meter = StepMeter(trainer.strategy.root_device, self.flops)
            self._publisher = Publisher(trainer, self._meter.clock, self.per_rank, self._history)
            profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
            self._patches.wrap(profiler, "start", self._fetching(trainer, StepMeter.fetch_begins))
            self._patches.wrap(profiler, "stop", self._fetching(trainer, StepMeter.fetch_ends))
            self._patches.wrap(trainer.strategy, "batch_to_device", self._transferring(trainer))
            watch(self._meter)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._publisher is not None:
            self._publisher.finish()
            summary = self.summary()
            if self.table and trainer.is_global_zero and summary.steps:
                show(summary)
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._out_of_memory is not None:
            self._out_of_memory.report(exception, ELSEWHERE)
        try:
            self._stop()
        except Exception as failure:  # of a logger; it must not take the place of the user's own error
            rank_zero_warn(f"StepMonitor could not log its last rows: {failure!r}")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._patches.restore()
        meter, publisher = self._meter, self._publisher
        with contextlib.ExitStack() as stack:  # last in, first out; a logger may fail
            for part in (publisher, self._out_of_memory, meter):
                if part is not None:
                    stack.callback(part.close)
            self._meter = self._publisher = self._out_of_memory = self._engine = None
            if meter is not None:
                unwatch(meter)

    # ---------------------------------------------------------------- steps

    def _is_on(self, trainer: pl.Trainer) -> bool:
        """False in trials that a tuner makes within training: it takes the Trainer's callbacks away for them."""
        return self in callbacks_of(trainer)

    def _fetching(self, trainer: pl.Trainer, tell: Callable[[StepMeter], None]) -> Callable[..., Any]:
        def around(inner: Callable[..., Any], action_name: str) -> Any:
            if action_name == _FETCH and self._meter is not None and self._is_on(trainer):
                self._begin_step(trainer)
                tell(self._meter)
            return inner(action_name)

        return around

    def _transferring(self, trainer: pl.Trainer) -> Callable[..., Any]:
        def transfer(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            batch = inner(*args, **kwargs)
            if self._meter is not None and trainer.training and self._is_on(trainer):
                self._meter.data_ends()
            return batch

        return transfer

    def _begin_step(self, trainer: pl.Trainer) -> None:
        meter = self._meter
        if meter is None or meter.is_measuring or (step_of(trainer) + 1) % self.every_n_steps:
            return
        if self._engine is not None:
            self._engine.take_statistics()  # of steps that were not measured
        meter.begin()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._out_of_memory is not None:
            self._out_of_memory.batch_begins()
        if self._publisher is not None:
            self._publisher.flush()
        if self._treatments is None:  # everything has been set up
            self._treatments = treatments_of(trainer)
            self._engine = offload_engine_of(trainer)
        self._begin_step(trainer)
        if self._meter is not None and self._meter.is_measuring:
            tensors = [] if hands_out_iterator(trainer) else tensors_of(batch)
            parameters = model_tensors(pl_module)
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._meter.batch_begins(
                (shapes_of(tensors), trainer.fit_loop._should_accumulate(), stage_of_plan(trainer)),
                parameters,
                lambda: chain(parameters, gradients, optimizer_tensors(trainer), tensors),
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is None or self._publisher is None or not self._meter.is_measuring:
            return
        self._meter.batch_ends(count_work(batch))
        if not trainer.fit_loop._should_accumulate():
            record = self._meter.step_ends()
            if record is not None:
                record.planned_bytes = planned_bytes_of(trainer)
                tell_peak(trainer, record.peak_bytes)
                if record.planned_bytes != self._planned_bytes:
                    self._planned_bytes = record.planned_bytes
                    self._treatments = treatments_of(trainer)
                offload = None if self._engine is None else self._engine.take_statistics()
                self._publisher.add(step_of(trainer), record, offload)
        if self.progress_bar:
            shown = {name: value for name, value in self._publisher.latest.items() if name in _BAR}
            pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._publisher is not None:
            self._publisher.flush()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._publisher is not None:
            self._publisher.flush()
        if self._meter is not None:
            self._meter.drop()  # a step that `on_train_batch_start` has broken off

    def _in_phase(self, trainer: pl.Trainer, phase: str) -> Callable[..., Any]:
        def run(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._is_on(trainer):
                return inner(*args, **kwargs)
            try:
                if phase == "backward" and self._meter is not None and isinstance(args[0], Tensor):
                    self._meter.backward_begins(args[0])
                with self._measured(phase):
                    return inner(*args, **kwargs)
            except Exception as error:
                if self._out_of_memory is not None:
                    self._out_of_memory.report(error, phase, args)
                raise

        return run

    def _measured(self, phase: str) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._meter is None else self._meter.phase(phase)
