"""Models and strategies for trainings on two CPU processes."""

from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard

from tests.support import Block, Training


class TwoParts(nn.Module):
    """A layer of two parts, which may be sharded on their own, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x)))


def layers_of_parts() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *[TwoParts() for _ in range(3)])


class FullyShard(Training):
    """`fully_shard` by the user in `configure_model`, of the layers and of their parts."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model[1:]:
            fully_shard(layer.first, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP on CPU processes, for tests."""

    def _setup_model(self, model: nn.Module) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._state_dict_type != "full":
            return super().lightning_module_state_dict()
        # The strategy would have weights moved to the CPU, and PyTorch would free what it has not copied.
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config):
            return self.model.state_dict()


def fsdp(**kwargs: Any) -> FSDPStrategy:
    return CPUFSDPStrategy(process_group_backend="gloo", **kwargs)
