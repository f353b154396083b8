"""What many tests need: small blocks, a LightningModule around any model, runs, and their exact comparison."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


def blocks(count: int = 4, width: int = 8) -> nn.Sequential:
    """A stem and `count` blocks."""
    return nn.Sequential(nn.Linear(width, width), *[Block(width) for _ in range(count)])


class Training(pl.LightningModule):
    """Trains `model` on whatever `loss` makes of it and a batch.

    Args:
        model: any module.
        loss: function of model and batch; default: mean square of the model's output.
        optimizer: from parameters to an optimizer; default: SGD.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.model = blocks() if model is None else model
        self.loss = loss or (lambda model, batch: model(batch).square().mean())
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def batches(count: int = 3, size: int = 4, width: int = 8) -> DataLoader:
    """`count` batches of random rows."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader(torch.randn(count * size, width, generator=generator), batch_size=size)


def trainer(callbacks: Iterable[pl.Callback] = (), **kwargs: Any) -> pl.Trainer:
    """A Trainer on the CPU that writes nothing unless told to."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**settings, **kwargs})


@dataclass
class Run(pl.Callback):
    """Records losses, gradients of every optimizer step, and the final state of a fit."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    random: float = 0.0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.gradients.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(outputs["loss"].detach().clone())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        self.random = torch.rand(()).item()


def fit(
    make_module: Callable[[], pl.LightningModule],
    data: DataLoader | None = None,
    callbacks: Iterable[pl.Callback] = (),
    **trainer_kwargs: Any,
) -> Run:
    """Build the module and fit it from a fixed seed; what happened."""
    torch.manual_seed(0)
    module = make_module()
    run = Run()
    torch.manual_seed(1)
    trainer([*callbacks, run], **trainer_kwargs).fit(module, batches() if data is None else data)
    return run


def assert_equal(got: Run, plain: Run) -> None:
    """Losses, every gradient, the final state and the random stream are equal bit for bit."""
    assert len(got.losses) == len(plain.losses)
    for step, (a, b) in enumerate(zip(got.losses, plain.losses, strict=True)):
        assert torch.equal(a, b), f"loss at step {step}: {a} instead of {b}"
    assert len(got.gradients) == len(plain.gradients) > 0
    for step, (a, b) in enumerate(zip(got.gradients, plain.gradients, strict=True)):
        assert a.keys() == b.keys(), f"gradients at step {step}"
        for name in b:
            assert torch.equal(a[name], b[name]), f"gradient of {name} at step {step}"
    assert got.state.keys() == plain.state.keys()
    for name, value in plain.state.items():
        assert torch.equal(got.state[name], value), f"{name} after training"
    assert got.random == plain.random, "random stream after training"


@contextlib.contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Add what Lightning logs, then what is warned of, to `said`."""
    listener = logging.Handler(logging.INFO)
    setattr(listener, "emit", lambda record: said.append(record.getMessage()))
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(listener)
        logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(listener)
            logger.setLevel(level)
        said += [str(warning.message) for warning in warned]


class Calls:
    """Counts forward calls of modules, replays included, by patching their classes' `forward`.

    Hooks would not do: a replay may rightly keep hooks that only watch from firing again.
    """

    def __init__(self, monkeypatch: Any, model: nn.Module) -> None:
        self.counts: dict[str, int] = {}
        names = {id(module): name for name, module in model.named_modules()}
        for cls in {type(module) for module in model.modules()}:
            # Hugging Face layers compare their class's `forward` with the one they have wrapped themselves.
            if "forward" in vars(cls) and not hasattr(cls.forward, "__wrapped__"):
                monkeypatch.setattr(cls, "forward", self._counted(cls.forward, names))

    def _counted(self, forward: Callable[..., Any], names: dict[int, str]) -> Callable[..., Any]:
        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is not None:
                self.counts[name] = self.counts.get(name, 0) + 1
            return forward(module, *args, **kwargs)

        return counted
