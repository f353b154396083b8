"""Label setting: the best plan of a chain within a limit.

A label stands for a plan of the first layers. A label that another equals or beats in everything that matters to the
layers to come is dropped, and so is one that cannot end better than the best plan known. Where too many are left, only
the most promising go on: what is found is still a plan that fits, and the best of those that were left behind tells
how much better another may be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_ckpt.planning.solver.bounds import Bounds
from lightning_ckpt.planning.solver.ending import Ending
from lightning_ckpt.planning.solver.pareto import Ints, nondominated
from lightning_ckpt.planning.solver.problem import Option, Problem

# How many labels go on from a layer: this bounds the time that a search takes.
_FEWEST, _MOST = 64, 1_000  # in the first pass, and in the second at most
_EFFORT = 1_600_000  # in the second, times the square of the number of layers
_PLAIN_EFFORT = 200_000  # in the second where only bytes and cost tell labels apart, times the number of layers

Worth = tuple[int, int]  # cost and peak of a plan, or what they are at least: less is better
NEVER: Worth = (2**62, 2**62)

# Rows of labels: bytes that stay on the device, moved bytes, both as far as they are on the device, time that copies
# still take, cost until now, peak at least until the end, cost at least until the end, and whether the peak is past.
_HELD, _MOVED, _DEVICE, _QUEUE, _COST, _PEAK, _BOUND, _IS_PAST = range(8)


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        plan: the place of each layer's option, None where no plan was found.
        worth: the plan's cost and peak.
        bound: what plans come to at least that were left behind.
    """

    plan: tuple[int, ...] | None
    worth: Worth
    bound: Worth


def search(problem: Problem, limit: int) -> Found:
    """The best plan whose peak is within a limit: the least cost, then the least peak.

    Of several the one whose last layer costs less is taken, or has its option first; then the layer before, and so on.
    """
    layers = max(1, len(problem.layers))
    passes = _Passes(problem, min(limit, NEVER[1]))
    fronts, worth, bound = passes.run(_FEWEST, _FEWEST, NEVER)
    if bound <= worth and bound != NEVER:
        labels = min(max(_EFFORT // layers**2, _FEWEST), _MOST)
        again = passes.run(max(_PLAIN_EFFORT // layers, _FEWEST), labels, worth)
        if again[1] <= worth:
            fronts, worth = again[:2]
        bound = max(bound, again[2])
    return Found(None if worth == NEVER else _plan(problem, fronts, worth), worth, bound)


class _Passes:
    """Passes over a chain from its first layer to its last."""

    def __init__(self, problem: Problem, limit: int) -> None:
        self._problem = problem
        self._limit = limit
        self._bounds = Bounds(problem)
        self._must_move = [0]
        for options in reversed(problem.layers):
            self._must_move.insert(0, self._must_move[0] + min(option.moved for option in options))
        copying = [i for i, options in enumerate(problem.layers) if any(option.copy_ns for option in options)]
        self._last_copy = max(copying, default=-1)

    def run(self, plain_labels: int, labels: int, worst: Worth) -> tuple[list[Ints], Worth, Worth]:
        """One pass: labels that come to each layer, the best plan's cost and peak, and what was left behind.

        Args:
            plain_labels: labels that go on from a layer at most where only bytes and cost tell them apart.
            labels: labels that go on from any other layer at most.
            worst: plans that are worse are not wanted.
        """
        front = np.zeros((8, 1), dtype=np.int64)
        front[[_HELD, _DEVICE]] = self._problem.base
        front[_PEAK] = np.maximum(self._problem.floor, self._bounds.needed(0, front[_HELD], front[_MOVED]))
        fronts, bound = [front], NEVER
        for i, options in enumerate(self._problem.layers):
            front = np.concatenate([self._extended(front, i, option) for option in options], axis=1)
            front = self._promising(front, i + 1, worst)
            if not front.size:
                return fronts, NEVER, bound
            most = plain_labels if len(self._columns(front)) == 2 else labels
            front, left_behind = _fewer(front, most * 3 // 2)
            front = front[:, nondominated(self._columns(front))]
            front, left_behind_too = _fewer(front, most)
            bound = min(bound, left_behind, left_behind_too)
            fronts.append(front)
        fits = front[:, front[_PEAK] <= self._limit]
        worths = zip(fits[_COST].tolist(), fits[_PEAK].tolist(), strict=True)
        return fronts, min(worths, default=NEVER), bound

    def _extended(self, labels: Ints, i: int, option: Option) -> Ints:
        """Labels of the layers up to `i`, from those of the layers before."""
        problem = self._problem
        held, moved, device, queue, cost, peak, *_ = labels
        longer = np.empty_like(labels)
        amid_ns = option.copy_ns - option.last_ns
        waiting = np.maximum(queue + amid_ns - problem.forward_ns[i], 0) + option.last_ns
        longer[_HELD] = held + option.resident
        longer[_MOVED] = moved + option.moved
        if problem.host is None:
            longer[_MOVED] = np.minimum(longer[_MOVED], problem.window)
        longer[_DEVICE] = longer[_HELD] + np.minimum(longer[_MOVED], problem.window)
        longer[_QUEUE] = np.minimum(waiting, problem.inflight_ns) if i < self._last_copy else 0
        longer[_COST] = cost + option.cost_ns + np.maximum(waiting - problem.inflight_ns, 0)
        longer[_PEAK] = np.maximum(peak, device + option.transient)
        return longer

    def _promising(self, labels: Ints, i: int, worst: Worth) -> Ints:
        """The labels that may come to a plan that fits and is wanted, with what they come to at least."""
        needed = self._bounds.needed(i, labels[_HELD], labels[_MOVED])
        labels[_IS_PAST] = labels[_PEAK] > needed
        labels[_PEAK] = np.maximum(labels[_PEAK], needed)
        fits = labels[_PEAK] <= self._limit
        if self._problem.host is not None:
            fits &= labels[_MOVED] + self._must_move[i] <= self._problem.host
        labels = labels[:, fits]
        rest = self._bounds.cost(i, self._limit, labels[_HELD], labels[_MOVED], labels[_QUEUE])
        labels[_BOUND] = labels[_COST] + rest
        equal = (labels[_BOUND] == worst[0]) & (labels[_PEAK] <= worst[1])
        return labels[:, equal | (labels[_BOUND] < worst[0])]

    def _columns(self, labels: Ints) -> list[Ints]:
        """What the layers to come depend on, as far as labels differ there."""
        columns = [labels[_COST], labels[_HELD]]
        if (labels[_MOVED] < self._problem.window).any():
            columns.append(labels[_DEVICE])
        if self._problem.host is not None:
            columns.append(labels[_MOVED])
        if labels[_QUEUE].any():
            columns.append(labels[_QUEUE])
        if labels[_IS_PAST].any() and labels[_PEAK].min() < labels[_PEAK].max():
            columns.append(labels[_PEAK])
        return columns


def _plan(problem: Problem, fronts: Sequence[Ints], worth: Worth) -> tuple[int, ...]:
    """The plan of that worth, from its last layer to its first."""
    plan: list[int] = []
    ending = Ending(problem)
    for i in reversed(range(len(problem.layers))):
        held, moved, queue, cost = fronts[i][:, fronts[i][_PEAK] <= worth[1]][[_HELD, _MOVED, _QUEUE, _COST]]
        options = problem.layers[i]
        for place in sorted(range(len(options)), key=[option.cost_ns for option in options].__getitem__):
            longer = ending.after(options[place], problem.forward_ns[i])
            if longer.suits(held, moved, queue, cost, worth).any():
                break
        else:
            raise AssertionError("no label goes on to the plan that was found")
        plan.append(place)
        ending = longer
    return tuple(reversed(plan))


def _fewer(labels: Ints, most: int) -> tuple[Ints, Worth]:
    """The most promising labels, and what the best of the others come to at least.

    Those with the lowest bounds go on, and the best of each of many ranges of bytes: bounds may be wrong about them.
    """
    if labels.shape[1] <= most:
        return labels, NEVER
    order = np.lexsort((labels[_PEAK], labels[_BOUND]))
    labels = labels[:, order]
    above = labels[_DEVICE] - labels[_DEVICE].min()
    ranges = above // (above.max() // (most // 2) + 1)
    goes_on = np.zeros(len(order), dtype=bool)
    goes_on[np.unique(ranges, return_index=True)[1]] = True
    goes_on[np.flatnonzero(~goes_on)[: most - goes_on.sum()]] = True
    first = int(np.argmin(goes_on))
    return labels[:, goes_on], (int(labels[_BOUND, first]), int(labels[_PEAK, first]))
