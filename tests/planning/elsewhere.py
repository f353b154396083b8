"""Another file of a user's, which keeps state of its own."""

from typing import Any

import numpy
from torch import Tensor, nn

generator = numpy.random.default_rng(0)
calls = 0


def augment(x: Tensor) -> Tensor:
    """With random numbers."""
    return x * (1 + 0.1 * float(generator.random()))


def count() -> int:
    """How often it has been called."""
    global calls
    calls += 1
    return calls


class Meter:
    """All of them count together."""

    total = 0

    def __call__(self) -> int:
        Meter.total += 1
        return Meter.total


class Annealed(nn.Module):
    """A loss that becomes smaller from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor) -> Tensor:
        self.calls += 1
        return output.square().mean() / self.calls


criterion = Annealed()


def shrink(layer: nn.Module, gradients: Any, _: Any) -> Any:
    """A hook after backward, which counts its calls."""
    divisor = 1 + count()
    return tuple(each / divisor for each in gradients)


def state() -> Any:
    """All that can change."""
    return generator.bit_generator.state["state"], calls, Meter.total, criterion.calls


def reset() -> None:
    """As at the beginning."""
    global generator, calls
    generator = numpy.random.default_rng(0)
    calls = Meter.total = criterion.calls = 0
