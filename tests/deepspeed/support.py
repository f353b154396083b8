"""Lightning's DeepSpeed strategy on CPU processes, for tests."""

from typing import Any

import deepspeed
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lightning_ckpt import OffloadDeepSpeedStrategy

# Collectives go through gloo; DeepSpeed's own, through shared memory, would be compiled first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class OnCPU:
    """Put before a DeepSpeed strategy among the bases: lifts what insists on CUDA."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed asks for an index

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # type: ignore[arg-type]

    def setup_distributed(self) -> None:
        self.set_world_ranks()  # type: ignore[attr-defined]
        self._init_deepspeed_distributed()  # type: ignore[attr-defined]


class CPUDeepSpeedStrategy(OnCPU, DeepSpeedStrategy):
    pass


class CPUOffloadDeepSpeedStrategy(OnCPU, OffloadDeepSpeedStrategy):
    pass


def config(stage: int, **zero: Any) -> dict[str, Any]:
    """A configuration with buffers as small as the models of these tests."""
    buckets = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    if stage == 3:
        buckets |= {"stage3_prefetch_bucket_size": 100, "stage3_param_persistence_threshold": 0}
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its optimizer would be compiled first
        "zero_optimization": {"stage": stage, **buckets, **zero},
    }


def count(patch: pytest.MonkeyPatch, cls: type, method: str, counter: Any, name: str) -> None:
    """Count calls of a method in an attribute of `counter`.

    Not from the module of the class: what its methods name there is put back after a replay.
    """
    original = getattr(cls, method)

    def counted(*args: Any, **kwargs: Any) -> Any:
        setattr(counter, name, getattr(counter, name) + 1)
        return original(*args, **kwargs)

    patch.setattr(cls, method, counted)
