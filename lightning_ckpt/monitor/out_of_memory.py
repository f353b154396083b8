"""What to say when memory runs out: where it stood, in which phase, and what would help most."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_ckpt.measure.boundaries import find_compiled_whole
from lightning_ckpt.measure.layers import LayerTrace, frames_of, tensors_in, tensors_in_frames
from lightning_ckpt.monitor.allocations import AllocationHistory
from lightning_ckpt.monitor.trainer import step_of, treating
from lightning_ckpt.recompute.frame import is_out_of_memory, replayed_layer
from lightning_ckpt.selection.detect import find_layers
from lightning_ckpt.selection.modules import outermost

_MIB = 2**20
_TOP = 5
_SMALL_SHARE = 0.1  # of the allocated bytes; below it, saved activations are not what fills the memory
_LARGE_SHARE = 0.8  # of the device's memory; above it, whatever else is there is
_log = logging.getLogger(__name__)
ELSEWHERE = "what is outside of the training step"


@dataclass(frozen=True)
class OutOfMemory:
    """Where memory stood when it ran out.

    Attributes:
        phase: ``forward``, ``backward``, ``optimizer``, or where else.
        layer: the layer that was running, and whether for the second time; None outside of layers.
        saved: bytes kept for backward, by layer, the most first; what belongs to no layer has the name ``""``.
        allocated: bytes that tensors held on the device, None on the CPU.
        cure: the one change most likely to help.
    """

    phase: str
    layer: str | None
    saved: Mapping[str, int]
    allocated: int | None
    cure: str

    def __str__(self) -> str:
        """A few lines for the terminal."""
        layers = {name: size for name, size in self.saved.items() if name}
        top = list(layers.items())[:_TOP]
        rest = sum(layers.values()) - sum(size for _, size in top)
        sizes = [(size, repr(name)) for name, size in top]
        if rest:
            others = len(layers) - len(top)
            sizes.append((rest, f"{others} other layer{'' if others == 1 else 's'}"))
        if "" in self.saved:
            sizes.append((self.saved[""], "outside of the layers"))
        where = self.phase if self.layer is None else f"{self.phase}, {self.layer}"
        lines = [f"Out of memory in {where}. {self._totals()}"]
        lines += [f"  {size / _MIB:>10,.2f} MiB  {name}" for size, name in sizes]
        return "\n".join([*lines, f"Most likely to help: {self.cure}"])

    def _totals(self) -> str:
        saved = f"{sum(self.saved.values()) / _MIB:,.2f} MiB were kept for backward"
        end = ":" if self.saved else "."
        if self.allocated is None:
            return saved + end
        return f"{saved}, of {self.allocated / _MIB:,.2f} MiB that tensors held on the device{end}"


class OutOfMemoryReporter:
    """Follows a model's layers, and says where memory stood when it runs out. It costs two hooks per layer call.

    Args:
        trainer: the Trainer.
        model: the model it trains.
        snapshots: folder for PyTorch's memory snapshots, or None.
    """

    def __init__(self, trainer: pl.Trainer, model: pl.LightningModule, snapshots: str | Path | None) -> None:
        self._trainer = trainer
        self._layers = _layers_of(model)
        self._trace = LayerTrace(model, self._layers)
        self._reported: BaseException | None = None
        self._allocations: AllocationHistory | None = None
        if snapshots is not None:
            self._record(snapshots)

    def _record(self, snapshots: str | Path) -> None:
        trainer, device = self._trainer, self._trainer.strategy.root_device
        if not AllocationHistory.can_record(device):
            rank_zero_warn(
                f"`StepMonitor(memory_snapshot={str(snapshots)!r})` has no effect: {device} cannot record its "
                "allocations."
            )
            return
        self._allocations = AllocationHistory(
            device, lambda: Path(snapshots) / f"out_of_memory_rank{trainer.global_rank}_step{step_of(trainer)}.pickle"
        )

    def batch_begins(self) -> None:
        """What the layers did before is over."""
        self._trace.clear()

    def report(self, error: BaseException, phase: str, given: Sequence[Any] = ()) -> None:
        """Print what there is to say about an error, unless that was done or memory has not run out.

        Args:
            error: the error, which goes on afterwards.
            phase: where it was raised.
            given: what the phase was given, such as the loss.
        """
        if error is self._reported or not (is_out_of_memory(error) or is_oom_error(error)):
            return
        self._reported = error
        try:
            lines = [str(self._explain(error, phase, given))]
        except Exception as failure:  # whatever happens here, the user's own error goes on
            lines = [f"Out of memory in {phase}. Where memory stood cannot be told: {failure!r}"]
        if self._allocations is not None:
            lines.append(f"Memory snapshot: {self._allocations.after_error()}")
        text = f"Step {step_of(self._trainer)}: " + "\n".join(lines)
        if self._trainer.is_global_zero:
            rank_zero_info(text)
        else:
            _log.warning("Rank %d, %s", self._trainer.global_rank, text.splitlines()[0])

    def _explain(self, error: BaseException, phase: str, given: Sequence[Any]) -> OutOfMemory:
        device = self._trainer.strategy.root_device
        roots = [*tensors_in({"given": given}), *tensors_in_frames(error.__traceback__)]
        saved = self._trace.saved_bytes(roots)
        allocated = None if device.type == "cpu" else torch.accelerator.memory_allocated(device)
        cure = _cure(self._trainer, phase, sum(saved.values()), allocated)
        return OutOfMemory(phase, self._running_layer(error.__traceback__), saved, allocated, cure)

    def _running_layer(self, traceback: TracebackType | None) -> str | None:
        names = {id(layer): name for name, layer in self._layers.items()}
        for frame in frames_of(traceback):
            again = replayed_layer(frame)
            if again is not None:
                return f"while layer {again!r} ran again"
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return f"in layer {name!r}"
        return None

    def close(self) -> None:
        """Leave the layers as they were, and record no more."""
        self._trace.remove()
        self._reported = None
        if self._allocations is not None:
            self._allocations.close()


def _layers_of(model: pl.LightningModule) -> dict[str, nn.Module]:
    layers = outermost(find_layers(model).items())
    if getattr(model, "_compiler_ctx", None) is not None or find_compiled_whole(model, layers.values()):
        return {}  # nothing can be told of what runs inside compiled code
    return layers or _first_branching(model)


def _first_branching(model: nn.Module) -> dict[str, nn.Module]:
    children = dict(model.named_children())
    if len(children) != 1:
        return children
    [(name, child)] = children.items()
    inner = {f"{name}.{inner}": part for inner, part in _first_branching(child).items()}
    return inner or children


def _cure(trainer: pl.Trainer, phase: str, saved: int, allocated: int | None) -> str:
    if phase == ELSEWHERE:
        return "a smaller batch there: nothing is kept for backward outside of the training step."
    if allocated is not None and _is_full_of_others(phase, saved, allocated):
        if phase == "optimizer":
            return (
                "a strategy that shards parameters and optimizer state, such as `strategy='fsdp'`, or an optimizer "
                "with less state: activations are not what fills the memory here."
            )
        return (
            "a smaller batch with `Trainer(accumulate_grad_batches=...)`, or a strategy that shards parameters and "
            "optimizer state, such as `strategy='fsdp'`: activations kept for backward are not what fills the memory "
            "here."
        )
    owners = treating(trainer)
    if not any(isinstance(owner, pl.Callback) for owner in owners):
        return (
            "`Trainer(callbacks=[ActivationCheckpointing()])`, which recomputes layers instead of keeping them, or "
            "`ActivationCheckpointing(memory_budget='auto')`, which recomputes as many as it takes."
        )
    cures = (owner.spare_more(trainer.strategy.root_device) for owner in owners)
    smaller = "a smaller batch with `Trainer(accumulate_grad_batches=...)`: the layers keep as little as they can."
    return next((cure for cure in cures if cure is not None), smaller)


def _is_full_of_others(phase: str, saved: int, allocated: int) -> bool:
    if phase == "forward":  # which has not kept all that it will
        _, total = torch.accelerator.get_memory_info()
        return allocated - saved > _LARGE_SHARE * total
    return saved < _SMALL_SHARE * allocated
