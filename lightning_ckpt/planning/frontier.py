"""Time against peak memory: the best plans for all budgets, and the uniform rules beside them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """What one way to treat the layers costs.

    Attributes:
        name: what it is called.
        peak_bytes: the most memory in use at once in a step.
        extra_s: seconds of a step beyond the plain run.
    """

    name: str
    peak_bytes: int
    extra_s: float


@dataclass(frozen=True)
class Frontier:
    """Time against peak memory.

    Attributes:
        plans: the cheapest plan for each of a series of budgets, from the least peak to the most.
        rules: uniform rules: every n-th layer recomputed, an operator policy on all, all kept.
        step_s: seconds of forward and backward of the plain run.
    """

    plans: tuple[Point, ...]
    rules: tuple[Point, ...]
    step_s: float
