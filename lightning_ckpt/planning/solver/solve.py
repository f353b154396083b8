"""The cheapest plan of a chain of layers under a memory limit."""

from dataclasses import dataclass, replace
from typing import Generic

from lightning_ckpt.planning.solver.chain import Chain, K, cost, peak
from lightning_ckpt.planning.solver.problem import problem_of
from lightning_ckpt.planning.solver.search import NEVER, Found, search


@dataclass(frozen=True)
class Solution(Generic[K]):
    """A plan for a chain.

    Attributes:
        plan: the treatment of each layer, in the order of forward.
        cost_ns: extra time of a step.
        peak: the most bytes on the device at once.
        bound_ns: what every plan within the limit costs at least, as far as that is known.
        exact: whether it is known that no plan within the limit costs less. On large chains it may not be.
    """

    plan: tuple[K, ...]
    cost_ns: int
    peak: int
    bound_ns: int
    exact: bool


def solve(chain: Chain[K], limit: int) -> Solution[K] | None:
    """The cheapest plan whose peak is within a limit, None where there is none.

    Of plans that cost the same, the one with the lower peak is taken. If that is the same too, layers are treated early
    and kept late: from the last layer to the first, the cheaper choice is taken, then the one that comes first.

    Args:
        chain: the layers.
        limit: bytes that may be on the device at once.
    """
    found = search(problem_of(chain), limit)
    if found.plan is not None:
        return _solution(chain, found, found.bound[0])
    if found.bound == NEVER:
        return None
    least = _least(chain)  # there were too many labels to keep one that fits
    if least.worth[1] <= limit:
        return _solution(chain, least, 0)
    cheapest = solve(chain, least.worth[1])  # whose peak may happen to be lower
    return cheapest if cheapest is not None and cheapest.peak <= limit else None


def lowest(chain: Chain[K]) -> Solution[K]:
    """The plan with the least peak, and of several the cheapest: below that peak, nothing fits.

    Not exact where, on a large chain, a lower peak may be possible.

    Args:
        chain: the layers.
    """
    least = _least(chain)
    solution = solve(chain, least.worth[1])
    assert solution is not None
    return solution if least.bound >= least.worth else replace(solution, exact=False)


def _least(chain: Chain[K]) -> Found:
    return search(problem_of(chain, is_free=True), NEVER[1])


def _solution(chain: Chain[K], found: Found, bound_ns: int) -> Solution[K]:
    assert found.plan is not None  # a chain has a plan that keeps within host memory
    plan = tuple(list(choices)[place] for choices, place in zip(chain.layers, found.plan, strict=True))
    cost_ns = cost(chain, plan)
    return Solution(plan, cost_ns, peak(chain, plan), min(bound_ns, cost_ns), exact=bound_ns >= cost_ns)
