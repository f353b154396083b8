"""What the rest of a chain comes to at least, in bytes and in time: bounds for every label of the search.

Two things are relaxed for time. A layer may mix its options in any proportion; the cheapest mix for a number of free
bytes then takes the steps between options in the order of what a byte buys. And a copy has a price instead of a place
in the queue: up to 1 ns for each ns that it takes, less what the link carries for nothing. Every price gives a bound.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_ckpt.planning.solver.pareto import Ints
from lightning_ckpt.planning.solver.problem import Problem

_PRICES = (0.0, 1 / 16, 1 / 4, 1.0)

Floats = NDArray[np.float64]
Point = tuple[int, float]  # bytes held, and cost
Curve = tuple[Floats, Floats]  # free bytes, and the least cost there


class Bounds:
    """What a layer and all after it come to at least.

    What is moved is on the device until it fills the window. Either it does so before the last layer, and then a full
    window is on the device there; or until then it takes as much of the device as if it stayed.

    Args:
        problem: the chain.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        layers, head = problem.layers, problem.head
        total = sum(max(option.cost_ns + option.copy_ns for option in options) for options in layers)
        self._slack = 1e-6 + 1e-11 * total  # more than what floats get wrong
        self._prices = _PRICES if problem.copies else (0.0,)
        stays = [[o.resident for o in options] for options in layers]
        takes = [[o.resident + o.moved for o in options] for options in layers[:-1]] + stays[-1:]
        needs = [[o.transient for o in options] for options in layers]
        at_last = [[0] * len(options) for options in layers[:-1]] + needs[-1:]
        cases = [(stays, needs)]  # whatever is moved
        if problem.window:
            cases += [(stays, at_last), (takes, needs)]  # the window is full before the last layer, or it is not
        self._bytes = [_least_bytes(*case, head) for case in cases]
        costs = [[[o.cost_ns + price * o.copy_ns for o in each] for each in layers] for price in self._prices]
        self._curves = [[_curves(resident, each, transient, head) for each in costs] for resident, transient in cases]
        self._amid_ns = [max(option.copy_ns - option.last_ns for option in options) for options in layers]
        self._later_ns = np.append(np.cumsum(problem.forward_ns[:0:-1], dtype=np.int64)[::-1], 0)

    def needed(self, i: int, held: Ints, moved: Ints) -> Ints:
        """Bytes on the device that labels need at least, once, if layer `i` is the next.

        Args:
            i: the layer's index, or the number of layers.
            held: bytes that stay on the device.
            moved: bytes that were moved.
        """
        on_device = held + np.minimum(moved, self._problem.window)
        needed: Ints = on_device + self._bytes[0][i]
        is_open = moved < self._problem.window
        if is_open.any():
            full, not_full = held + self._problem.window + self._bytes[1][i], on_device + self._bytes[2][i]
            needed = np.where(is_open, np.maximum(needed, np.minimum(full, not_full)), needed)
        return needed

    def cost(self, i: int, limit: int, held: Ints, moved: Ints, queue: Ints) -> Ints:
        """The time that labels still cost at least, if layer `i` is the next.

        Args:
            i: the layer's index, or the number of layers.
            limit: bytes that may be on the device.
            held: bytes that stay there.
            moved: bytes that were moved.
            queue: the time that copies on their way still take.
        """
        free = limit - held - np.minimum(moved, self._problem.window)
        given = self._given_ns(i, moved, queue)
        cost = self._highest(0, i, free, given)
        is_open = moved < self._problem.window
        if is_open.any():
            full = self._highest(1, i, limit - held - self._problem.window, given)
            not_full = self._highest(2, i, free, given)
            cost = np.where(is_open, np.maximum(cost, np.minimum(full, not_full)), cost)
        return np.maximum(np.ceil(cost - self._slack), 0).astype(np.int64)

    def _highest(self, case: int, i: int, free: Ints, given_ns: Floats) -> Floats:
        highest: Floats = np.full(len(free), -np.inf)
        for price, curves in zip(self._prices, self._curves[case], strict=True):
            highest = np.maximum(highest, np.interp(free, *curves[i]) - price * given_ns)
        return highest

    def _given_ns(self, i: int, moved: Ints, queue: Ints) -> Floats:
        """The time of copies that costs nothing."""
        problem, layers = self._problem, len(self._problem.layers)
        if i == layers or len(self._prices) == 1:
            return np.zeros(len(queue))
        waiting = np.maximum(queue - problem.forward_ns[i], -self._amid_ns[i])  # copies behind it start amid the layer
        given: Floats = (problem.inflight_ns - waiting + self._later_ns[i]).astype(np.float64)
        if problem.host is not None:
            given = np.minimum(given, (problem.host - moved) * problem.byte_ns + (layers - i))
        return given


def _least_bytes(resident: Sequence[Sequence[int]], transient: Sequence[Sequence[int]], head: int) -> list[int]:
    """For each layer and for the end: what it and all after it need at least, beyond what is held before it."""
    least = [head]
    for stays, needs in zip(reversed(resident), reversed(transient), strict=True):
        least.append(min(max(need, stay + least[-1]) for stay, need in zip(stays, needs, strict=True)))
    return least[::-1]


def _curves(
    resident: Sequence[Sequence[int]], cost: Sequence[Sequence[float]], transient: Sequence[Sequence[int]], head: int
) -> list[Curve]:
    """For each layer and for the end: what it and all after it cost at least, by the bytes that are free before it."""
    hulls = [_hull(zip(*both, strict=True)) for both in zip(resident, cost, strict=True)]
    slopes = sorted({_slope(a, b) for hull in hulls for a, b in pairwise(hull)}, reverse=True)
    place = {slope: k for k, slope in enumerate(slopes)}
    saves = np.array(slopes)
    left = np.zeros(len(slopes))  # for each slope: bytes that may still be bought
    start, least = float(head), 0.0
    curves = [(np.array([start]), np.array([least]))]
    for hull, needs in zip(reversed(hulls), reversed(transient), strict=True):
        start, least = start + hull[0][0], least + hull[0][1]
        for a, b in pairwise(hull):
            left[place[_slope(a, b)]] += b[0] - a[0]
        if start < min(needs):  # so many bytes are free in any case
            bought = np.clip(min(needs) - start - (np.cumsum(left) - left), 0, left)
            start, least = float(min(needs)), least - float(np.sum(bought * saves))
            left -= bought
        free, costs = np.full(len(left) + 1, start), np.full(len(left) + 1, least)
        free[1:] += np.cumsum(left)
        costs[1:] -= np.cumsum(left * saves)
        curves.append((free, costs))
    return curves[::-1]


def _hull(points: Iterable[Point]) -> list[Point]:
    """The points that are cheapest for some price of a byte, in the order of bytes held."""
    hull: list[Point] = []
    for held, cost in sorted(points):
        if hull and cost >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (held, cost)):
            hull.pop()
        hull.append((held, cost))
    return hull


def _slope(a: Point, b: Point) -> float:
    return (a[1] - b[1]) / (b[0] - a[0])
