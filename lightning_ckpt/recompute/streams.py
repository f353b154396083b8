"""Random generators that a layer holds or is given: how to read and to set their states."""

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Stream(NamedTuple):
    """A generator of random numbers: how to read and to set its state."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def stream_of(value: Any) -> Stream | None:
    """How to read and set the state of a random generator, or None if `value` is none."""
    if isinstance(value, torch.Generator):
        return Stream(value.get_state, lambda state: (value.set_state(state), None)[1])
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Stream(value.getstate, value.setstate)
    if isinstance(value, torch.quasirandom.SobolEngine):
        return Stream(
            lambda: (value.num_generated, value.quasi.clone()),
            lambda state: value.__dict__.update(num_generated=state[0], quasi=state[1].clone()),
        )
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        if isinstance(value, numpy.RandomState):
            return Stream(value.get_state, value.set_state)
        if isinstance(value, numpy.Generator):
            bits = value.bit_generator
            return Stream(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None
