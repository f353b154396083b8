"""A fit beside other tools, plain and treated: what both came to, and how often layers really ran again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import is_replaying
from tests.support import Block, Run, assert_equal, batches, heard, trainer
from tests.treatments import TREATMENTS


class Recorder(Run):
    """A `Run` of any state: quantized weights are subclasses that cannot be compared, and their layers hold dtypes."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = {name: value.detach().clone() for name, value in values_of(pl_module).items()}
        self.random = torch.rand(()).item()


@dataclass
class Fitted:
    """A fit that is over.

    Attributes:
        module: what was trained.
        loop: the Trainer.
        run: what happened.
        ran: calls of the counted modules with gradients on.
        replayed: further calls of them in backward.
        said: everything that was logged or warned of.
    """

    module: Any
    loop: pl.Trainer
    run: Run = field(default_factory=Recorder)
    ran: int = 0
    replayed: int = 0
    said: str = ""

    def callback(self, kind: type[pl.Callback]) -> Any:
        """The first callback of this kind."""
        return next(callback for callback in self.loop.callbacks if isinstance(callback, kind))


def fitted(
    make: Callable[[], pl.LightningModule],
    treatment: str | None = None,
    callbacks: Callable[[], list[pl.Callback]] = list,
    data: Any = None,
    *,
    counted: type[nn.Module] | None = Block,
    ours_last: bool = False,
    own_data: bool = False,
    validation: Any = None,
    ckpt_path: Any = None,
    **settings: Any,
) -> Fitted:
    """Build the module and fit it, from fixed seeds.

    Args:
        make: builds the module.
        treatment: one of the `TREATMENTS`; None for the plain run.
        callbacks: makes the other callbacks.
        data: training data. Default: small batches.
        counted: a class of modules that is counted: the layers, or modules inside them, early in their forward.
        ours_last: put the callback behind the others instead of before them.
        own_data: the module has its own training data.
        validation: validation data.
        ckpt_path: a checkpoint to go on from.
        settings: arguments of the Trainer.
    """
    torch.manual_seed(0)
    module = make()
    others, ours = callbacks(), []
    if treatment is not None:
        options, more = TREATMENTS[treatment]
        ours, settings = [ActivationCheckpointing(**options)], {**settings, **more}
    run = Recorder()
    together = [*others, *ours] if ours_last else [*ours, *others]
    torch.manual_seed(1)
    result = Fitted(module, trainer([*together, run], **settings), run)
    data = batches() if data is None and not own_data else data
    lines: list[str] = []
    with _counting(counted, result), heard(lines):
        result.loop.fit(
            module, data, validation, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else False
        )
    result.said = "\n".join(lines)
    return result


def assert_same(
    make: Callable[[], pl.LightningModule],
    treatment: str,
    *args: Any,
    ours_last: bool = False,
    replays: float = 1,
    **settings: Any,
) -> tuple[Fitted, Fitted]:
    """Fit treated and plainly: equal bit for bit, the module afterwards included.

    `replays` says which part of the layers' calls ran again in backward: all of them, if nothing else is said.
    """
    plain = fitted(make, None, *args, **settings)
    got = fitted(make, treatment, *args, ours_last=ours_last, **settings)
    assert plain.replayed == 0 < got.ran == plain.ran
    assert got.replayed == replays * got.ran, f"{got.replayed} of {got.ran} calls ran again"
    assert_equal(got.run, plain.run)
    assert_same_values(got.module, plain.module)
    return got, plain


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors in a module's state; those inside of it for a tensor subclass."""
    values = {}
    for name, value in module.state_dict().items():
        if hasattr(type(value), "__tensor_flatten__"):
            values |= {f"{name}.{inner}": getattr(value, inner) for inner in value.__tensor_flatten__()[0]}
        elif isinstance(value, Tensor):
            values[name] = value
    return values


def assert_same_values(one: nn.Module, other: nn.Module) -> None:
    """Both hold the same tensors under the same names, bit for bit."""
    a, b = values_of(one), values_of(other)
    assert list(a) == list(b)
    for name, value in b.items():
        assert torch.equal(a[name], value), name


def leftovers(module: nn.Module) -> list[str]:
    """Names of modules that a treatment has left something on."""
    return [name for name, part in module.named_modules() if "forward" in vars(part) or part._forward_hooks]


@contextmanager
def _counting(cls: type[nn.Module] | None, result: Fitted) -> Iterator[None]:
    if cls is None:
        yield
        return
    forward = cls.forward

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_replaying():
            result.replayed += 1
        elif torch.is_grad_enabled():
            result.ran += 1
        return forward(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "forward", counted)
        yield
