"""A model that calls a checkpoint function around its layers, DeepSpeed's or another: they are left to it, aloud."""

import itertools
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_ckpt import ActivationCheckpointing
from tests.deepspeed.support import count
from tests.support import Block, Training, assert_equal, fit

Run = Callable[..., Any]
BATCHES = 3


class OwnCheckpoint(torch.autograd.Function):
    """The reentrant kind, as Megatron-LM and others have it: forward without gradients, and again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: Tensor) -> Tensor:
        ctx.run, ctx.random = run, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            output = ctx.run(x)
        torch.autograd.backward(output, gradients)
        return None, x.grad


def own_hooks(run: Run, x: Tensor) -> Tensor:
    """The kind that recomputes when the first saved tensor is asked for, with hooks that nobody knows."""
    random, again = torch.get_rng_state(), list[Tensor]()
    packed = itertools.count()

    def unpack(index: int) -> Tensor:
        if not again:
            hooks = saved_tensors_hooks(lambda tensor: again.append(tensor.detach()), lambda nothing: nothing)
            with torch.random.fork_rng(), torch.enable_grad(), hooks:
                torch.set_rng_state(random)
                run(x.detach().requires_grad_())
        return again[index]

    with saved_tensors_hooks(lambda tensor: next(packed), unpack):
        return run(x)


CHECKPOINTS: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "deepspeed": lambda run, x: deepspeed.checkpointing.checkpoint(run, x),
    "deepspeed_non_reentrant": lambda run, x: deepspeed.checkpointing.non_reentrant_checkpoint(run, x),
    "torch_reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "torch_non_reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "own": OwnCheckpoint.apply,
}

#: Kinds that leave nothing in the graph by which they could be told.
NAMELESS = {"deepspeed_non_reentrant", "own"}


class Checkpointed(nn.Module):
    """Calls `around` around its first two blocks, or around more than a block, and the third one directly."""

    def __init__(self, around: Callable[[Run, Tensor], Tensor], larger: bool = False) -> None:
        super().__init__()
        self.around, self.larger = around, larger
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = self.stem(x)
        if self.larger:
            x = self.around(lambda x: torch.tanh(second(first(x).exp())), x)
        else:
            x = self.around(second, self.around(first, x))
        return third(x)


class Counter:
    calls = 0


def fit_counted(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], callbacks: list[Any]) -> Any:
    counter = Counter()
    with monkeypatch.context() as patch:
        count(patch, Block, "forward", counter, "calls")
        run = fit(lambda: Training(make()), callbacks=callbacks)
    return run, counter.calls


@pytest.mark.parametrize("larger", [False, True], ids=["around_each_layer", "around_more"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_that_the_model_checkpoints_itself_are_left_to_it(monkeypatch, recwarn, name, larger):
    def make():
        return Checkpointed(CHECKPOINTS[name], larger)

    plain, plain_calls = fit_counted(monkeypatch, make, [])
    recwarn.clear()
    got, calls = fit_counted(monkeypatch, make, [ActivationCheckpointing(monitor=False)])
    assert_equal(got, plain)
    assert plain_calls == BATCHES * (2 + 2 + 1)
    assert calls == BATCHES * (2 + 2 + 2)  # only the third is recomputed here
    said = [str(warning.message) for warning in recwarn if "are checkpointed already" in str(warning.message)]
    assert len(said) == 1
    assert "2 of 3 layers" in said[0]
    assert "model.blocks.{0, 1}" in said[0]


@pytest.mark.parametrize("larger", [False, True], ids=["around_each_layer", "around_more"])
def test_a_checkpoint_that_nobody_knows_stays_exact(monkeypatch, larger):
    def make():
        return Checkpointed(own_hooks, larger)

    plain, plain_calls = fit_counted(monkeypatch, make, [])
    got, calls = fit_counted(monkeypatch, make, [ActivationCheckpointing(monitor=False)])
    assert_equal(got, plain)
    assert calls > plain_calls


class ChecksPartOfItself(nn.Module):
    """A layer that calls `around` inside."""

    def __init__(self, around: Callable[[Run, Tensor], Tensor]) -> None:
        super().__init__()
        self.around = around
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.second, self.first(x))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_that_checkpoint_a_part_of_themselves_are_named(monkeypatch, recwarn, name):
    def make():
        return nn.Sequential(nn.Linear(8, 8), *[ChecksPartOfItself(CHECKPOINTS[name]) for _ in range(2)])

    plain, _ = fit_counted(monkeypatch, make, [])
    recwarn.clear()
    callback = ActivationCheckpointing(layers=ChecksPartOfItself, monitor=False)
    got, calls = fit_counted(monkeypatch, make, [callback])
    assert_equal(got, plain)
    assert calls >= BATCHES * 2 * (2 + 2)
    said = [str(warning.message) for warning in recwarn if "checkpoint a part of themselves" in str(warning.message)]
    if name in NAMELESS:
        assert said == []
    else:
        assert len(said) == 1
        assert "model.{1, 2}" in said[0]
