"""The end of a plan, put together from its last layer on, and whether a label may go on with it."""

import numpy as np
from numpy.typing import NDArray

from lightning_ckpt.planning.solver.pareto import Ints
from lightning_ckpt.planning.solver.problem import Option, Problem


class Ending:
    """What the last layers of a plan come to, for whatever state they begin in.

    Copies that are on their way then make compute wait as far as they exceed the room that the layers have for them.

    Args:
        problem: the chain.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # For each of the layers and what follows the last: bytes needed there, and moved until then, since the first.
        self._needed = np.array([problem.head], dtype=np.int64)
        self._moved = np.array([0], dtype=np.int64)
        self._all_moved = 0
        self._cost_ns = 0
        self._room_ns = problem.inflight_ns

    def after(self, option: Option, forward_ns: int) -> "Ending":
        """The ending with one more layer before it."""
        ending = Ending(self._problem)
        ending._needed = np.append(self._needed + option.resident, option.transient)
        ending._moved = np.append(self._moved + option.moved, 0)
        ending._all_moved = self._all_moved + option.moved
        amid_ns = option.copy_ns - option.last_ns
        room_ns = max(0, self._room_ns - option.last_ns) + forward_ns - amid_ns
        waits_ns = max(0, option.last_ns - self._room_ns) + max(0, -room_ns)  # whatever the layers begin with
        ending._cost_ns = self._cost_ns + option.cost_ns + waits_ns
        ending._room_ns = min(max(0, room_ns), self._problem.inflight_ns)
        return ending

    def suits(self, held: Ints, moved: Ints, queue: Ints, cost: Ints, worth: tuple[int, int]) -> NDArray[np.bool_]:
        """Which labels come to a cost and peak of `worth` at most when they go on with it."""
        suits = cost + self._cost_ns + np.maximum(queue - self._room_ns, 0) <= worth[0]
        if self._problem.host is not None:
            suits &= moved + self._all_moved <= self._problem.host
        on_device = np.minimum(moved[suits, None] + self._moved, self._problem.window) + self._needed
        suits[suits] = held[suits] + on_device.max(axis=1) <= worth[1]
        return suits
