"""What is run on two processes, plainly and with every treatment."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from lightning_ckpt import OffloadDDPStrategy, OffloadFSDPStrategy, OffloadModelParallelStrategy
from lightning_ckpt.recompute import is_replaying
from tests.distributed import models
from tests.distributed.models import MLP, Attention, FullySharded, Layer, LayerWithStatistics, Trained
from tests.distributed.two_processes import CPUFSDPStrategy

PATIENCE = timedelta(seconds=60)  # processes that wait for each other in vain shall not do so for long


@dataclass(frozen=True)
class Treatment:
    """How a run differs from the plain one.

    Attributes:
        callback: arguments of `ActivationCheckpointing`, None without it.
        offload: whether the strategy is the one that offloads.
        counted: whether operators are counted in it.
        callbacks: make what else is added.
    """

    callback: dict[str, Any] | None = None
    offload: bool = False
    counted: bool = False
    callbacks: Callable[[], list[pl.Callback]] = list


PLAIN = Treatment(counted=True)
TREATMENTS = {
    "recompute": Treatment({}, counted=True),
    "policy": Treatment({"policy": "matmul"}, counted=True),
    "offload inputs": Treatment({"offload": True}),
    "offload strategy": Treatment(offload=True),
    "both": Treatment({"offload": True}, offload=True),
}


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        strategy: makes the Trainer's strategy, told whether it is the one that offloads.
        module: makes what is trained.
        layers: the class of the layers that are recomputed.
        settings: arguments of the Trainer.
        callbacks: make what is there in the plain run, too.
        layers_communicate: whether a part of a layer's forward is communication, which its recompute repeats.
        frozen_at_times: whether some layers' calls need no gradients, so that they need not run again.
        in_threads: whether communication goes on in threads of its own, where it is not counted one by one.
    """

    strategy: Callable[[bool], Strategy | str]
    module: Callable[[], pl.LightningModule] = Trained
    layers: str = "Layer"
    settings: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    layers_communicate: bool = False
    frozen_at_times: bool = False
    in_threads: bool = False


class CPUOffloadFSDPStrategy(OffloadFSDPStrategy, CPUFSDPStrategy):
    """FSDP on CPU processes, with offload."""


Make = Callable[[bool], Strategy]


def _make(plain: type[Strategy], offload: type[Strategy], **kwargs: Any) -> Make:
    settings = {"process_group_backend": "gloo", "timeout": PATIENCE, **kwargs}
    return lambda with_offload: (offload if with_offload else plain)(**settings)


def ddp(**kwargs: Any) -> Make:
    return _make(DDPStrategy, OffloadDDPStrategy, **kwargs)


def fsdp(*wrapped: type[torch.nn.Module], **kwargs: Any) -> Make:
    return _make(CPUFSDPStrategy, CPUOffloadFSDPStrategy, auto_wrap_policy=set(wrapped), **kwargs)


def fsdp2(**kwargs: Any) -> Make:
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return _make(ModelParallelStrategy, OffloadModelParallelStrategy, **sizes, **kwargs)


def tensor_parallel() -> Make:
    return _make(ModelParallelStrategy, OffloadModelParallelStrategy, data_parallel_size=1, tensor_parallel_size=2)


class CommunicationHook(pl.Callback):
    """Compresses DDP's gradients. The strategy's own `ddp_comm_hook` is for accelerators only."""

    def __init__(self, hook: Callable[..., Any], state: Any = None) -> None:
        self.hook, self.state = hook, state

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.model.register_comm_hook(self.state, self.hook)


class DisturbsRankOne(pl.Callback):
    """Changes a little in the replays of one process only."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        disturbed = int(os.environ["LOCAL_RANK"]) == 1  # also where the strategy knows of one only
        for layer in pl_module.layers:
            layer.mlp.up.register_forward_hook(lambda *args: args[-1] + 1e-7 * (disturbed and is_replaying()))


class PyTorchCheckpoint(pl.Callback):
    """PyTorch's own checkpoint at the same place, inside the hooks of the layer: how often must it communicate?"""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for layer in pl_module.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


#: Not ours.
REFERENCE = Treatment(counted=True, callbacks=lambda: [PyTorchCheckpoint()])


def power_sgd() -> list[pl.Callback]:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    return [CommunicationHook(powerSGD_hook, state)]


CASES = {
    "ddp": Case(ddp(), lambda: Trained(LayerWithStatistics), "LayerWithStatistics"),
    "ddp find_unused_parameters": Case(ddp(find_unused_parameters=True), models.Unused),
    "ddp static_graph": Case(ddp(static_graph=True)),
    "ddp gradient_as_bucket_view": Case(ddp(gradient_as_bucket_view=True)),
    "ddp manual optimization": Case(ddp(find_unused_parameters=True), models.TwoOptimizers, frozen_at_times=True),
    "ddp shared layer, static_graph": Case(ddp(static_graph=True), models.Shared),
    "ddp shared layer, find_unused_parameters": Case(ddp(find_unused_parameters=True), models.Shared),
    "ddp fp16_compress_hook": Case(ddp(), callbacks=lambda: [CommunicationHook(fp16_compress_hook)]),
    "ddp powerSGD_hook": Case(ddp(), callbacks=power_sgd, in_threads=True),
    "ddp accumulate_grad_batches": Case(ddp(), settings={"accumulate_grad_batches": 2}),
    "fsdp": Case(fsdp(Layer)),
    "fsdp with statistics": Case(
        fsdp(LayerWithStatistics), lambda: Trained(LayerWithStatistics), "LayerWithStatistics"
    ),
    "fsdp use_orig_params=False": Case(fsdp(Layer, use_orig_params=False)),
    "fsdp nested": Case(fsdp(Layer, Attention, MLP), layers_communicate=True),
    "fsdp SHARD_GRAD_OP": Case(fsdp(Layer, sharding_strategy="SHARD_GRAD_OP")),
    "fsdp accumulate_grad_batches": Case(fsdp(Layer), settings={"accumulate_grad_batches": 2}),
    "fsdp2": Case(fsdp2(), FullySharded),
    "fsdp2 with statistics": Case(fsdp2(), lambda: FullySharded(layer=LayerWithStatistics), "LayerWithStatistics"),
    "fsdp2 reshard_after_forward=False": Case(fsdp2(), lambda: FullySharded(reshard=False)),
    "fsdp2 nested": Case(fsdp2(), lambda: FullySharded(nested=True)),
    "fsdp2 nested reshard_after_forward=False": Case(fsdp2(), lambda: FullySharded(nested=True, reshard=False)),
    "fsdp2 mixed precision": Case(
        fsdp2(), lambda: FullySharded(nested=True, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ),
    "fsdp2 accumulate_grad_batches": Case(fsdp2(), FullySharded, settings={"accumulate_grad_batches": 2}),
    "tensor parallel": Case(tensor_parallel(), models.TensorParallel, layers_communicate=True),
    "sequence parallel": Case(tensor_parallel(), models.SequenceParallelToo, layers_communicate=True),
}

#: One process goes wrong: by itself, and in company.
DISTURBED = {
    "disturbed alone": Case(lambda offload: "auto", settings={"devices": 1}, callbacks=lambda: [DisturbsRankOne()]),
    "disturbed ddp": Case(ddp(), callbacks=lambda: [DisturbsRankOne()]),
}

#: Processes that the strategy starts itself.
STARTED = {
    "ddp_fork": Case(lambda offload: OffloadDDPStrategy(start_method="fork") if offload else "ddp_fork"),
    "ddp_spawn": Case(lambda offload: OffloadDDPStrategy(start_method="spawn") if offload else "ddp_spawn"),
}
