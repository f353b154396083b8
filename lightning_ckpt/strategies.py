"""Strategies that move what a training step saves for backward to host memory, and their names in the registry."""

from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_ckpt.agreement import agree
from lightning_ckpt.offload import Boundaries, OffloadEngine, OffloadOptions, find_compiled_whole, why_not
from lightning_ckpt.selection.detect import find_layers
from lightning_ckpt.selection.modules import outermost
from lightning_ckpt.selection.summary import shorten_names

_DESCRIBED_STEP = 3  # the first one in which everything is as it will be, but for what the link cannot hide
_STATELESS_STEPS = 10  # after so many, an optimizer without a state has none


class OffloadMixin:
    """Put before a strategy among the bases: what autograd saves in ``training_step`` goes to pinned host memory.

    It is copied there while the device computes, and back ahead of its use in backward; parameters stay. Results equal
    those of the plain strategy bit for bit. Groups of tensors follow the layers of the model, which are found as
    ``ActivationCheckpointing`` finds them; nothing has to be named. Without an accelerator, or where it shares its
    memory with the host, nothing is moved and training is the plain one.

    Together with ``ActivationCheckpointing``, recomputed layers are left to it; with its ``offload=True`` their inputs
    travel with everything else. A ``StepMonitor`` logs ``memory/offloaded_MiB`` and ``time/copy_wait_ms``.

    Args:
        args: Those of the strategy.
        move: ``hidden``: as much as the link to the host can move while the device computes, measured in the
            first steps, and more where the device's memory demands it. ``all``: everything, for the least memory.
        min_bytes: Tensors below this size in bytes stay on the device. Sizes may be text: ``"1MiB"``.
        keep_last: Layers at the end of the model that stay on the device: backward needs them at once.
        max_inflight_bytes: Bytes that may be on their way to the host before the device waits for them. Default: twice
            the largest group, which is a layer, or a part of one of a 64th of what a step saves.
        prefetch_bytes: Bytes that are brought back ahead of their use. Default: twice the largest group.
        host_budget: Host memory that may be locked on this machine, shared by its ranks. Default: half of what is
            available when training starts, limits of the container included.
        kwargs: Those of the strategy.

    Raises:
        OffloadError: A ``ValueError``: an option has no meaning.

    Example::

        class OffloadMyStrategy(OffloadMixin, MyStrategy):
            pass
    """

    def __init__(
        self,
        *args: Any,
        move: Literal["hidden", "all"] = "hidden",
        min_bytes: int | str = 256 * 2**10,
        keep_last: int = 1,
        max_inflight_bytes: int | str | None = None,
        prefetch_bytes: int | str | None = None,
        host_budget: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        self.offload_options = OffloadOptions(
            move, min_bytes, keep_last, max_inflight_bytes, prefetch_bytes, host_budget
        )
        #: What moves the activations, while ``fit`` runs on a device where that makes sense.
        self.offload_engine: OffloadEngine | None = None
        #: The layers that groups follow, by qualified name.
        self.offloaded_layers: Mapping[str, nn.Module] = {}
        self._boundaries: Boundaries | None = None
        super().__init__(*args, **kwargs)

    def setup(self, trainer: pl.Trainer) -> None:
        """Set the strategy up, then the engine."""
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == TrainerFn.FITTING:
            self._start(trainer)

    def _start(self, trainer: pl.Trainer) -> None:
        self._stop()
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        name = type(self).__name__
        agree(trainer, name, lambda: {f"`{key}`": str(value) for key, value in vars(self.offload_options).items()})
        reason = why_not(device)
        if reason is not None:
            rank_zero_info(f"{name}: nothing is moved: {reason}. Training is the plain one.")
            return
        model = trainer.lightning_module
        layers = self.offloaded_layers = outermost(find_layers(model).items())
        warn_if_compiled_whole(name, model, layers)
        self.offload_engine = OffloadEngine(
            device, self.offload_options, local_ranks=local_ranks(trainer), say=rank_zero_warn
        )
        self.offload_engine.learn(model)
        self._boundaries = Boundaries(model, layers, self.offload_engine)
        where = f"layer by layer ({shorten_names(list(layers))})" if layers else "in parts: the model has no layers"
        rank_zero_info(f"{name}: saved activations travel to host memory, {where}.")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The model's training step; what it saves goes through the engine."""
        if self.offload_engine is None:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        with self.offload_engine.forward():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step."""
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        if self.offload_engine is not None and has_stepped(self.lightning_module.trainer):  # type: ignore[attr-defined]
            note_step(type(self).__name__, self.offload_engine)
        return result

    def treatments(self) -> list[str]:
        """What is moved while ``fit`` runs, in a line."""
        if self.offload_engine is None:
            return []
        where = f" of {shorten_names(list(self.offloaded_layers))}" if self.offloaded_layers else ""
        return [f"offloaded: saved activations{where}"]

    def spare_more(self, device: torch.device) -> str | None:
        """The setting that would make the same model need less memory, or None where there is none left."""
        if self.offload_engine is not None and self.offload_options.move == "hidden":
            return f"`{type(self).__name__}(move='all')`, which moves more than the link to the host can hide."
        return None

    def teardown(self) -> None:
        """Stop the engine, then tear the strategy down."""
        self._stop()
        super().teardown()  # type: ignore[misc]

    def _stop(self) -> None:
        if self._boundaries is not None:
            self._boundaries.remove()
            self._boundaries = None
        if self.offload_engine is not None:
            self.offload_engine.close()
            self.offload_engine = None
        self.offloaded_layers = {}


class OffloadStrategy(OffloadMixin, SingleDeviceStrategy):
    """One device, saved activations in host memory: ``Trainer(strategy="ckpt_offload")``.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lightning_ckpt import OffloadStrategy
        >>> trainer = Trainer(strategy=OffloadStrategy(keep_last=2), devices=1)
    """

    strategy_name = "ckpt_offload"

    def __init__(self, device: torch.device | str | int | None = None, **kwargs: Any) -> None:
        self._parallel_devices: list[torch.device] | None = None
        self._device_given = device is not None
        super().__init__(device="cpu" if device is None else device, **kwargs)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device that the Trainer has chosen: it tells a strategy with a name only this way."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise MisconfigurationException(
                f"`strategy={self.strategy_name!r}` trains on one device, but the Trainer has {len(devices)}. Write "
                "`devices=1`, or `strategy='ckpt_offload_ddp'`."
            )
        self._parallel_devices = devices
        if devices and not self._device_given:
            self._root_device = torch.device(devices[0])


class OffloadDDPStrategy(OffloadMixin, DDPStrategy):
    """``DDPStrategy`` with saved activations in host memory: ``Trainer(strategy="ckpt_offload_ddp")``."""

    strategy_name = "ckpt_offload_ddp"


class OffloadFSDPStrategy(OffloadMixin, FSDPStrategy):
    """``FSDPStrategy`` with saved activations in host memory: ``Trainer(strategy="ckpt_offload_fsdp")``."""

    strategy_name = "ckpt_offload_fsdp"


class OffloadModelParallelStrategy(OffloadMixin, ModelParallelStrategy):
    """``ModelParallelStrategy`` with saved activations in host memory: ``strategy="ckpt_offload_model_parallel"``."""

    strategy_name = "ckpt_offload_model_parallel"


class OffloadDeepSpeedStrategy(OffloadMixin, DeepSpeedStrategy):
    """``DeepSpeedStrategy`` with saved activations in host memory: ``Trainer(strategy="ckpt_offload_deepspeed")``."""

    strategy_name = "ckpt_offload_deepspeed"


def local_ranks(trainer: pl.Trainer) -> int:
    """Processes of this training on this machine."""
    return max(1, int(getattr(trainer.strategy, "num_processes", 1)))


def note_step(name: str, engine: OffloadEngine) -> None:
    """Count an optimizer step, and say once what offload does."""
    engine.step_done()
    if engine.steps == _DESCRIBED_STEP:
        rank_zero_info(f"{name}: in a step, {engine.describe()}.")


def has_stepped(trainer: pl.Trainer) -> bool:
    """Whether the optimizers hold all they will: steps that gradient scaling skips leave them without a state."""
    return trainer.global_step >= _STATELESS_STEPS or any(optimizer.state for optimizer in trainer.optimizers)


def warn_if_compiled_whole(name: str, model: pl.LightningModule, layers: Mapping[str, nn.Module]) -> None:
    """Say that a model compiled as one piece brings everything back before its backward starts."""
    compiled = find_compiled_whole(model, layers.values())
    if compiled is None and getattr(model, "_compiler_ctx", None) is not None:
        compiled = type(model).__name__
    if compiled is not None:
        rank_zero_warn(
            f"{name}: {compiled!r} is compiled as one piece, so its backward brings everything back at once and "
            "offload saves nothing there. Compile the layers one by one: `for layer in layers: layer.compile()`."
        )


for _strategy in (
    OffloadStrategy,
    OffloadDDPStrategy,
    OffloadFSDPStrategy,
    OffloadModelParallelStrategy,
    OffloadDeepSpeedStrategy,
):
    StrategyRegistry.register(
        _strategy.strategy_name, _strategy, description=(_strategy.__doc__ or "").splitlines()[0], override=True
    )
