"""Small transformers that are trained on several processes, divided among them in all the ways there are."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.distributed.two_processes import TwoParts

WIDTH, TOKENS, ROWS, STEPS = 8, 4, 12, 3


class Attention(nn.Module):
    """Two heads, or those of them that are here."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = functional.scaled_dot_product_attention(*parts, dropout_p=0.1)
        return self.out(x.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(functional.gelu(self.up(x))))


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp, self.dropout = nn.LayerNorm(WIDTH), MLP(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class LayerWithStatistics(TwoParts):
    """One with buffers that change in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, (-1, TOKENS))


class Trained(pl.LightningModule):
    """A stem, layers and a head, trained on random rows. Can be pickled."""

    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        rows = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))
        replicas = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
        return DataLoader(rows.to(self.head.weight.dtype), batch_size=ROWS // (STEPS * replicas))


class Unused(Trained):
    """Has parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class Shared(Trained):
    """Uses one layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return self.head(first(second(first(self.stem(x)))))


class TwoOptimizers(Trained):
    """Manual optimization, each optimizer in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        first, second = self.layers
        halves = nn.ModuleList([self.stem, first]), nn.ModuleList([second, self.head])
        return [torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in halves]


class FullySharded(Trained):
    """`fully_shard` by the user in `configure_model`.

    Args:
        nested: whether attention and MLP are sharded on their own inside the layers.
        reshard: whether parameters are dropped after forward and gathered again for backward.
        policy: in which precisions.
    """

    def __init__(
        self,
        nested: bool = False,
        reshard: bool = True,
        policy: MixedPrecisionPolicy | None = None,
        layer: type[nn.Module] = Layer,
    ) -> None:
        super().__init__(layer)
        self.nested, self.reshard, self.policy = nested, reshard, policy or MixedPrecisionPolicy()

    def configure_model(self) -> None:
        for layer in self.layers:
            for part in (layer.attention, layer.mlp) if self.nested else ():
                self._shard(part)
            self._shard(layer)
        self._shard(self.stem)
        self._shard(self.head)

    def _shard(self, part: nn.Module) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(part, mesh=mesh, reshard_after_forward=self.reshard, mp_policy=self.policy)


def _tensor_parallel() -> dict[str, Any]:
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    return {name: ColwiseParallel() for name in columns} | {
        name: RowwiseParallel() for name in ("attention.out", "mlp.down")
    }


def _sequence_parallel() -> dict[str, Any]:
    gathered = {
        name: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for name in ("attention", "mlp")
    }
    rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
    norms = {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
    return {**_tensor_parallel(), **gathered, **rows, **norms}


class TensorParallel(Trained):
    """Layers whose matrices are divided among the processes."""

    plan: Callable[[], dict[str, Any]] = staticmethod(_tensor_parallel)

    def configure_model(self) -> None:
        for layer in self.layers:
            parallelize_module(layer, self.device_mesh["tensor_parallel"], self.plan())


class SequenceParallelToo(TensorParallel):
    """Between its matrices, each process has a part of the tokens."""

    plan = staticmethod(_sequence_parallel)

    def configure_model(self) -> None:
        super().configure_model()
        ends = {
            "stem": ColwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(self, self.device_mesh["tensor_parallel"], ends)
