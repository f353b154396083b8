"""What a process notes of a training, and how two trainings are compared."""

import contextlib
import functools
import os
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ckpt.strategies import local_ranks
from tests.distributed.monitored import collectives
from tests.support import heard

RANKS = (0, 1)
MATMULS = ("aten.mm", "aten.addmm", "aten.bmm")


class Bits(NamedTuple):
    """A tensor laid open, so that NaN equals itself and 0.0 is not -0.0."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> "Bits":
        tensor = getattr(tensor, "_local_tensor", tensor).detach()  # the part that is here
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), data)

    def tensor(self) -> Tensor:
        flat = torch.frombuffer(bytearray(self.data), dtype=self.dtype) if self.data else torch.empty(0)
        return flat.view(self.shape)


@dataclass
class Record:
    """One process's view of a training.

    Attributes:
        tensors: by step and name, bit for bit what must be equal: losses, gradients, and at the end weights, buffers,
            the optimizers' states and random streams.
        forwards: how often the layers ran, replays included.
        operators: how often collectives and matrix products ran in the steps, by name.
        collectives: how many of them there were, in all threads and groups.
        said: what was printed and warned of.
        strategy: class of the strategy, and how many processes it knows of on this machine.
        moves: whether something is moved to the host.
        error: what ended it.
    """

    tensors: dict[str, Bits] = field(default_factory=dict)
    forwards: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    collectives: int = 0
    said: list[str] = field(default_factory=list)
    strategy: tuple[str, int] = ("", 0)
    moves: bool = False
    error: str | None = None

    @property
    def communication(self) -> dict[str, int]:
        """How often each kind of collective ran."""
        return {name: count for name, count in self.operators.items() if name not in MATMULS}

    @property
    def matmuls(self) -> int:
        return sum(self.operators[name] for name in MATMULS)


class Operators(TorchDispatchMode):
    """Counts collectives and matrix products, whoever calls them."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become what is done with its local tensors first
        name = str(func.overloadpacket)
        if name in MATMULS or "c10d" in func.namespace:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Recorder(pl.Callback):
    """Notes a training on every process, in `PATH.RANK`; the first callback, before any that says something.

    Args:
        path: where.
        layer: the class whose calls are counted.
        since: the first step of interest.
        operators: whether they are counted: a mode is around every step then.
    """

    def __init__(self, path: Path, layer: type[nn.Module], since: int = 0, operators: bool = True) -> None:
        self.path, self.layer, self.since, self.count_operators = path, layer, since, operators
        self.record = Record()
        self._open = contextlib.ExitStack()
        self._step = contextlib.ExitStack()
        self._collectives = self._current = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        seed(0)  # Python gives a forked process a new stream
        self._open.enter_context(heard(self.record.said))
        self._open.enter_context(self._forwards_counted())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.record.strategy = type(trainer.strategy).__name__, local_ranks(trainer)
        self._note_random("before")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, index: int) -> None:
        if index == 0:
            self._seed(trainer)
        self._current = trainer.global_step
        self._collectives = collectives()
        if self.count_operators:
            self._step.enter_context(Operators(self.record.operators))

    def _seed(self, trainer: pl.Trainer) -> None:
        """The same in a training that is resumed; other streams where there is other data."""
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0}
        seed(10 * trainer.current_epoch + sampler["rank"])

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                self._note(trainer.global_step, f"gradient of {name}", parameter.grad)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._step.close()
        self.record.collectives += collectives() - self._collectives
        self._note(self._current, f"loss of batch {trainer.fit_loop.total_batch_idx}", outputs["loss"])
        engines = [getattr(owner, "offload_engine", None) for owner in (trainer.strategy, *trainer.callbacks)]
        self.record.moves |= any(engine is not None for engine in engines)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, value in (*pl_module.named_parameters(), *pl_module.named_buffers()):
            self._note("end", name, value)
        for index, optimizer in enumerate(trainer.optimizers):
            for number, state in enumerate(optimizer.state.values()):
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        self._note("end", f"state {name} of parameter {number} in optimizer {index}", value)
        self._note_random("end")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._open.close()
        save(self.record, self.path, rank_of(trainer))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._step.close()
        self._open.close()

    def _note(self, step: int | str, name: str, value: Tensor) -> None:
        if isinstance(step, str) or step >= self.since:
            self.record.tensors[f"{name}, step {step}"] = Bits.of(value)

    def _note_random(self, step: str) -> None:
        drawn = {"random": random.random(), "numpy": np.random.random_sample(), "torch": torch.rand(()).item()}
        for name, value in drawn.items():
            self._note(step, f"stream of {name}", torch.tensor(value))

    @contextlib.contextmanager
    def _forwards_counted(self) -> Iterator[None]:
        forward, record = self.layer.forward, self.record

        def counted(*args: Any, **kwargs: Any) -> Any:
            record.forwards += 1
            return forward(*args, **kwargs)

        self.layer.forward = counted
        try:
            yield
        finally:
            self.layer.forward = forward


def seed(number: int) -> None:
    """Begin all random streams anew."""
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(number)


def rank_of(trainer: pl.Trainer | None = None) -> int:
    """This process's; a strategy for a single device does not know that there are others."""
    return max(0 if trainer is None else trainer.global_rank, int(os.environ.get("LOCAL_RANK", 0)))


def save(record: Record, path: Path, rank: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.{rank}").write_bytes(pickle.dumps(record))


@functools.cache
def load(path: Path, rank: int) -> Record:
    return pickle.loads(Path(f"{path}.{rank}").read_bytes())


def differences(got: Path, want: Path) -> list[str]:
    """In what two trainings differ, rank by rank; nothing if they are equal bit for bit."""
    return [
        f"rank {rank}: {difference}" for rank in RANKS for difference in _differences(load(got, rank), load(want, rank))
    ]


def _differences(got: Record, want: Record) -> Iterator[str]:
    if got.error != want.error:
        yield f"error {got.error!r} instead of {want.error!r}"
    for name in got.tensors.keys() ^ want.tensors.keys():
        yield f"{name}: {'only' if name in got.tensors else 'not'} with the treatment"
    for name in want.tensors.keys() & got.tensors.keys():
        if got.tensors[name] != want.tensors[name]:
            yield f"{name}: {got.tensors[name].tensor()} instead of {want.tensors[name].tensor()}"
