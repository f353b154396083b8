"""One training under every treatment of its layers: equal to the plain one bit for bit, layers run as often as said."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import ReplayError
from tests.support import Run, assert_equal, fit

#: Arguments of the callback, and of the Trainer, for every way to treat layers.
TREATMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recompute": ({}, {}),
    "matmul": ({"policy": "matmul"}, {}),
    "offloaded": ({"offload": True}, {"strategy": "ckpt_offload"}),  # by both doors; nothing moves on the CPU
}

Layers = type[nn.Module] | tuple[type[nn.Module], ...]


@contextlib.contextmanager
def counted_calls(classes: tuple[type[nn.Module], ...]) -> Iterator[dict[int, int]]:
    """How often the forward of every module of these classes runs, replays included, in order of the first call."""
    counts: dict[int, int] = {}

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            counts[id(module)] = counts.get(id(module), 0) + 1
            return forward(module, *args, **kwargs)

        return count_and_run

    with pytest.MonkeyPatch.context() as patch:
        for cls in classes:
            patch.setattr(cls, "forward", counted(cls.forward))
        yield counts


@dataclass
class Trained:
    """A finished fit.

    Attributes:
        run: what happened in it.
        calls: how often each of the layers ran, in order of their first calls.
        module: what was trained.
    """

    run: Run
    calls: list[int]
    module: pl.LightningModule


def train(
    make_module: Callable[[], pl.LightningModule],
    layers: Layers,
    treatment: str | None = None,
    settings: Callable[[], dict[str, Any]] = dict,
    data: DataLoader | None = None,
    **options: Any,
) -> Trained:
    """Fit from fixed seeds; plainly, or with one of the `TREATMENTS` of all modules of the classes `layers`.

    Args:
        make_module: makes what is trained.
        layers: classes of the layers.
        treatment: how they are treated; None for the plain run.
        settings: makes arguments of the Trainer, for those that cannot be used twice.
        data: the batches. Default: those of `fit`.
        options: more arguments of the callback.
    """
    classes = layers if isinstance(layers, tuple) else (layers,)
    made: list[pl.LightningModule] = []
    trainer_arguments = settings()
    callbacks: list[Any] = trainer_arguments.pop("callbacks", [])
    if treatment is not None:
        arguments, more = TREATMENTS[treatment]
        callbacks = [ActivationCheckpointing(layers=list(classes), monitor=False, **arguments, **options), *callbacks]
        trainer_arguments.update(more)
    with counted_calls(classes) as counts:
        run = fit(lambda: made.append(make_module()) or made[0], data, callbacks, **trainer_arguments)
    return Trained(run, list(counts.values()), made[0])


def assert_exact(
    make_module: Callable[[], pl.LightningModule],
    layers: Layers,
    treatments: Iterable[str] = TREATMENTS,
    times: int | Fraction | None = 2,
    settings: Callable[[], dict[str, Any]] = dict,
    data: DataLoader | None = None,
    **options: Any,
) -> list[Trained]:
    """All runs, the plain one first: equal bit for bit, and layers ran `times` as often as in the plain run.

    Without `times` they ran at least twice as often.
    """
    plain = train(make_module, layers, None, settings, data)
    assert plain.calls, "no layer ran"
    runs = [plain]
    for treatment in treatments:
        got = train(make_module, layers, treatment, settings, data, **options)
        try:
            if times is None:
                assert all(count >= 2 * plainly for count, plainly in zip(got.calls, plain.calls, strict=True))
            else:
                assert got.calls == [times * count for count in plain.calls], f"runs of layers, plainly {plain.calls}"
            assert_same_run(got, plain)
        except AssertionError as error:
            raise AssertionError(f"{treatment}: {error}") from error
        runs.append(got)
    return runs


def assert_exact_or_refused(
    make_module: Callable[[], pl.LightningModule], layers: Layers, treatment: str, words: str, **options: Any
) -> None:
    """The treated run equals the plain one, or ends with an error that begins with `words`."""
    refusal = None
    try:
        assert_exact(make_module, layers, [treatment], **options)
    except ReplayError as error:
        refusal = str(error)
    assert refusal is None or refusal.startswith(words)


def assert_same_run(got: Trained, plain: Trained) -> None:
    """Losses, gradients, final state and random streams are equal bit for bit."""
    assert_equal(in_bits(got.run), in_bits(plain.run))


def note_gradients(module: pl.LightningModule, optimizer: Any) -> None:
    """Record gradients where the Trainer does not know of the optimizer's step."""
    for callback in module.trainer.callbacks:
        if isinstance(callback, Run):
            callback.on_before_optimizer_step(module.trainer, module, optimizer)


def in_bits(run: Run) -> Run:
    """The run with all tensors as their bytes: gradients that are not a number are equal to themselves."""
    return replace(
        run,
        losses=[bits(loss) for loss in run.losses],
        gradients=[{name: bits(gradient) for name, gradient in step.items()} for step in run.gradients],
        state={name: bits(value) for name, value in run.state.items()},
    )


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)
