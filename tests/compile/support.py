"""Compiled runs under every treatment: what they trained, compiled, saved and computed twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from tests.support import Block, Run, assert_equal, batches, fit

#: Arguments of the callback.
TREATMENTS: dict[str, dict[str, Any]] = {"recompute": {}, "matmul": {"policy": "matmul"}}

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Backend:
    """Runs graphs as `aot_eager` does, and counts them and the matrix products in their backwards.

    Attributes:
        graphs: graphs compiled.
        products: matrix products in all backward graphs.
    """

    def __init__(self) -> None:
        self.graphs = self.products = 0
        self._compile = aot_autograd(
            fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
            bw_compiler=self._backward,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs)

    def _backward(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.products += sum(node.target in PRODUCTS for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Bytes of the storages that autograd saves, parameters excluded; in the list at the end."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice
    result: list[int] = []

    @torch.compiler.disable  # it runs inside of compiled code's calls, which `fullgraph` makes a part of the graph
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield result
    result.append(sum(storage.nbytes() for storage in kept.values()))


@dataclass
class Watch(pl.Callback):
    """What every batch saved for its first backward, and how many graphs there were after it."""

    backend: Backend
    saved: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    _forward: Any = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._forward = saved_bytes(pl_module)
        self._saved = self._forward.__enter__()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._forward is not None:
            self._forward.__exit__(None, None, None)
            self._forward = None
            self.saved += self._saved

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.graphs.append(self.backend.graphs)


@dataclass
class Compiled:
    """A compiled run.

    Attributes:
        run: what was trained.
        saved: bytes saved by every batch.
        graphs: graphs compiled until the end of every batch.
        breaks: graph breaks.
        products: matrix products in backward graphs.
    """

    run: Run
    saved: list[int]
    graphs: list[int]
    breaks: int
    products: int


def train(
    make: Callable[[Any], pl.LightningModule], callbacks: list[pl.Callback], data: Any = None, **kwargs: Any
) -> Compiled:
    """Fit what `make` builds with a fresh compiler."""
    torch._dynamo.reset()
    counters.clear()
    backend = Backend()
    watch = Watch(backend)
    run = fit(lambda: make(backend), rows() if data is None else data, [*callbacks, watch], **kwargs)
    return Compiled(run, watch.saved, watch.graphs, sum(counters["graph_break"].values()), backend.products)


def assert_exact(
    make: Callable[[Any], pl.LightningModule],
    data: Any = None,
    more_graphs: int = 0,
    callback: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Compiled]:
    """All treatments equal the compiled plain run, compile as often, save less and compute what they should twice.

    Args:
        make: from a backend to what is trained.
        data: the batches. Default: `rows()`.
        more_graphs: graphs that treated runs compile in addition.
        callback: more arguments of the callback.
        kwargs: those of the Trainer.

    Returns:
        The runs, the plain one by the name `plain`.
    """
    plain = train(make, [], data, **kwargs)
    assert plain.graphs[-1] > 0
    assert plain.products > 0
    runs = {"plain": plain}
    for name, treatment in TREATMENTS.items():
        got = runs[name] = train(make, [ActivationCheckpointing(**treatment, **(callback or {}))], data, **kwargs)
        assert_equal(got.run, plain.run)
        assert got.breaks == plain.breaks, f"{name}: graph breaks"
        assert got.graphs == [count + more_graphs for count in plain.graphs], f"{name}: graphs after each batch"
    recompute, matmul = runs["recompute"], runs["matmul"]
    assert sum(recompute.saved) < sum(matmul.saved) < sum(plain.saved)
    assert recompute.products > matmul.products
    return runs


def rows(count: int = 3, size: int = 256) -> DataLoader:
    """Batches that are large beside the states of random generators, which compiled graphs save."""
    return batches(count, size=size, width=16)


def blocks(count: int = 2, dropout: float = 0.1) -> nn.Sequential:
    """A stem and `count` blocks, all 16 wide."""
    return nn.Sequential(nn.Linear(16, 16), *[Block(16, dropout) for _ in range(count)])


def compile_each(layers: Any, backend: Any, **options: Any) -> None:
    """Compile layers one by one, in place."""
    for layer in layers:
        layer.compile(backend=backend, **options)
