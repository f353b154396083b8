"""Fits under DeepSpeed on two CPU processes: python -m tests.deepspeed.runs OUT CASE..."""

import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from tests.deepspeed.support import CPUDeepSpeedStrategy, CPUOffloadDeepSpeedStrategy, config, count
from tests.support import Block, Training, trainer


class TwoParts(nn.Module):
    """A layer of parts, with a weight of its own, a frozen one and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.second, self.norm = Block(), Block(), nn.BatchNorm1d(8)
        self.second.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.scale * self.second(self.first(x)))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *[TwoParts() for _ in range(3)], nn.Linear(8, 8))


class BuiltLate(Training):
    """Layers built in `configure_model`: under ZeRO-3 they are partitioned from the start."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            self.model = layers()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


#: Configuration of DeepSpeed, arguments of the Trainer, and how the module is made.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "zero1": (config(1), {"gradient_clip_val": 0.1}, Training),
    # A section on checkpointing is what a model may call for; alone it means nothing.
    "zero2": (
        config(2) | {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
        {"accumulate_grad_batches": 2},
        Training,
    ),
    "zero2_offload_optimizer": (config(2, offload_optimizer={"device": "cpu"}), {}, Training),
    "zero3": (config(3), {"accumulate_grad_batches": 2}, Training),
    "zero3_persistent": (config(3, stage3_param_persistence_threshold=20), {}, Training),
    "zero3_released_at_once": (config(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0), {}, Training),
    "zero3_built_late": (
        config(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        {"gradient_clip_val": 0.1},
        lambda model, optimizer: BuiltLate(),
    ),
}

#: Arguments of the callback, or None without it; and the strategy.
TREATMENTS: dict[str, tuple[dict[str, Any] | None, type[CPUDeepSpeedStrategy | CPUOffloadDeepSpeedStrategy]]] = {
    "plain": (None, CPUDeepSpeedStrategy),
    "recompute": ({"verify": "always", "offload": True}, CPUDeepSpeedStrategy),
    "policy": ({"policy": "matmul", "every_n_layers": 2}, CPUDeepSpeedStrategy),
    "offload_strategy": ({}, CPUOffloadDeepSpeedStrategy),
}


def treatments(case: str) -> list[str]:
    """What a case is fitted with: the strategy that offloads, only where the others are plain."""
    return [name for name in TREATMENTS if name != "offload_strategy" or case in ("zero2", "zero3")]


class Save(pl.Callback):
    """Writes each rank's losses, gradients, weights and random stream, and what DeepSpeed has counted."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = self.gathers = 0
        self.tensors: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.strategy.deepspeed_engine.is_gradient_accumulation_boundary():
            for name, parameter in pl_module.named_parameters():
                gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
                if gradient is not None:
                    self.tensors[f"gradient {name} {trainer.global_step}"] = gradient.clone()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tensors[f"loss {batch_idx}"] = outputs["loss"].detach().clone()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                self.tensors[f"weight {name}"] = safe_get_full_fp32_param(parameter).clone()
        self.tensors |= {f"buffer {name}": value.clone() for name, value in pl_module.named_buffers()}
        self.tensors["random"] = torch.rand(4)
        counters = {
            f"{name}.{counter}": getattr(module, counter)
            for name, module in pl_module.named_modules()
            for counter in ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
            if hasattr(module, counter)
        }
        gathered = [name for name, p in pl_module.named_parameters() if hasattr(p, "ds_id") and p.numel()]
        stack = len(parameter_offload.FWD_MODULE_STACK)
        about = {"calls": self.calls, "gathers": self.gathers, "counters": counters, "gathered": gathered}
        torch.save((self.tensors, {**about, "stack": stack}), f"{self.path}.{trainer.global_rank}")


def run(case: str, treatment: str, out: str) -> None:
    deepspeed_config, arguments, make = CASES[case]
    given, strategy = TREATMENTS[treatment]
    torch.manual_seed(0)
    module = make(model=layers(), optimizer=adamw)
    with pytest.MonkeyPatch.context() as patch:
        save = Save(f"{out}/{case}.{treatment}")
        count(patch, TwoParts, "forward", save, "calls")
        count(patch, TorchBackend, "all_gather_into_tensor", save, "gathers")
        parameter_offload.FWD_MODULE_STACK.clear()  # DeepSpeed leaves the models of earlier fits in it
        callbacks = [] if given is None else [ActivationCheckpointing(layers="TwoParts", monitor=False, **given)]
        loop = trainer([*callbacks, save], strategy=strategy(config=_copy(deepspeed_config)), devices=2, **arguments)
        torch.manual_seed(1)
        loop.fit(module, DataLoader(torch.randn(24, 8), batch_size=3))


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def main(out: str, *cases: str) -> None:
    torch.set_num_threads(1)
    for case in cases:
        for treatment in treatments(case):
            run(case, treatment, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
