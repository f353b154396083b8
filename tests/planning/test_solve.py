"""The solver against every plan there is, and against a mixed-integer program; ties; chains too large to be exact."""

import math
import zlib

import highspy
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from lightning_ckpt.planning.solver import Chain, Choice, Link, binding, cost, lowest, peak, search, solve

# ---------------------------------------------------------------- what a plan comes to, by hand


def two_layers(floor=0, head=3, inflight=4, prefetch=2, host=100, bytes_per_s=1e9, part=9) -> Chain[str]:
    """With 1e9 bytes per second, a byte takes a nanosecond."""
    layer = {"keep": Choice(10, 12, 0), "recompute": Choice(2, 15, 7), "offload": Choice(1, 13, 0, moved=9)}
    return Chain(100, [layer, layer], [5, 5], head, floor, Link(bytes_per_s, inflight, prefetch, host, part))


@pytest.mark.parametrize(
    ("plan", "floor", "head", "bytes_needed", "where"),
    [
        (("keep", "keep"), 0, 3, 123, "head"),
        (("keep", "keep"), 0, 2, 122, 1),  # the first of two places
        (("recompute", "keep"), 0, 3, 115, 0),
        (("keep", "recompute"), 0, 3, 125, 1),
        (("offload", "keep"), 0, 3, 120, "head"),  # 4 bytes on their way out, 2 on their way back
        (("offload", "keep"), 130, 3, 130, "floor"),
    ],
)
def test_the_peak_and_where_it_is(plan, floor, head, bytes_needed, where):
    chain = two_layers(floor, head)
    assert (peak(chain, plan), binding(chain, plan)) == (bytes_needed, where)


@pytest.mark.parametrize(
    ("plan", "inflight", "bytes_per_s", "part", "extra_ns"),
    [
        (("recompute", "recompute"), 4, 1e9, 9, 14),
        (("offload", "keep"), 4, 1e9, 9, 9 - 4),
        (("offload", "keep"), 9, 1e9, 9, 0),
        (("offload", "offload"), 9, 1e9, 9, 9 - 5 + 9 - 9),
        (("offload", "offload"), 0, 1e9, 9, 9 + 9),
        (("offload", "offload"), 4, 2e9, 9, 5 - 2 + 5 - 2),  # 9 bytes take 4.5 ns, rounded up
        (("offload", "offload"), 0, 1e9, 100, 9 + 9),  # a layer that is smaller than a part
        (("offload", "offload"), 0, 1e9, 3, 2 * (6 - 5 + 3)),  # of 9 bytes, 6 leave while the layer computes
        (("offload", "offload"), 4, 1e9, 3, 4 + 6 - 5 + 3 - 4),
        (("offload", "offload"), 4, 1e9, 0, 4 + 9 - 5 - 4),
        (("offload", "keep"), 4, 1e9, 3, 0),
        (("offload", "offload"), 4, 2e9, 3, 0),
    ],
)
def test_the_cost_has_the_waits_for_copies_in_it(plan, inflight, bytes_per_s, part, extra_ns):
    assert cost(two_layers(inflight=inflight, bytes_per_s=bytes_per_s, part=part), plan) == extra_ns


# ---------------------------------------------------------------- against every plan


class EveryPlan:
    """All plans of a chain, the best first."""

    def __init__(self, chain: Chain[str]) -> None:
        counts = [len(choices) for choices in chain.layers]
        self._places = np.indices(counts).reshape(len(counts), -1)
        self._chain = chain
        link = chain.link or Link(1, 0, 0, 0, 0)
        inflight_ns = int(link.inflight_bytes / link.bytes_per_s * 1e9)
        window = link.inflight_bytes + link.prefetch_bytes
        held, moved, queue, self.cost = chain.base, 0, 0, 0
        self.peak = np.full(self._places.shape[1], chain.floor)
        ranks = []
        for places, choices, forward_ns in zip(self._places, chain.layers, chain.forward_ns, strict=True):
            every = list(choices.values())
            resident, transient, cost_ns, nbytes = np.array(
                [(c.resident, c.transient, c.cost_ns, c.moved) for c in every]
            )[places].T
            copy_ns = np.ceil(nbytes / link.bytes_per_s * 1e9).astype(int)
            last_ns = np.ceil(np.minimum(nbytes, link.part_bytes) / link.bytes_per_s * 1e9).astype(int)
            self.peak = np.maximum(self.peak, held + np.minimum(moved, window) + transient)
            queue = np.maximum(queue + copy_ns - forward_ns, last_ns)
            self.cost = self.cost + cost_ns + np.maximum(queue - inflight_ns, 0)
            queue = np.minimum(queue, inflight_ns)
            held, moved = held + resident, moved + nbytes
            cheapest_first = sorted(range(len(every)), key=lambda place: (every[place].cost_ns, place))
            ranks.append(np.argsort(cheapest_first)[places])
        self.peak = np.maximum(self.peak, held + np.minimum(moved, window) + chain.head)
        order = np.lexsort((*ranks, self.peak, self.cost))  # what counts most comes last
        self.order = order[(moved <= link.host_bytes)[order]]

    def within(self, limit: int) -> tuple[tuple[str, ...], int, int] | None:
        """The best plan within a limit, its cost and its peak."""
        for index in self.order[self.peak[self.order] <= limit][:1]:
            plan = tuple(
                list(choices)[k] for choices, k in zip(self._chain.layers, self._places[:, index], strict=True)
            )
            return plan, int(self.cost[index]), int(self.peak[index])
        return None


@strategies.composite
def chains(draw) -> Chain[str]:
    """Chains of 1 to 6 layers with 1 to 5 choices each; numbers are drawn in bulk, which is faster."""
    kinds = draw(strategies.lists(strategies.integers(1, 5), min_size=1, max_size=6))
    repeats = draw(strategies.lists(strategies.integers(0, len(kinds) - 1), max_size=6 - len(kinds)))
    most = draw(strategies.sampled_from([3, 12, 100]))  # few different numbers make many ties
    moves = draw(strategies.sampled_from([True, True, True, False]))
    random = np.random.default_rng(draw(strategies.integers(0, 2**32)))

    def numbers(count: int, zeros: float = 0) -> list[int]:
        return (random.integers(0, most + 1, count) * (random.random(count) >= zeros)).tolist()

    layers = []
    for count in kinds:
        resident, workspace = numbers(count), numbers(count)
        transient = [a + b for a, b in zip(resident, workspace, strict=True)]
        every = zip(resident, transient, numbers(count, zeros=0.3), numbers(count, 0.4 if moves else 1), strict=True)
        layers.append({name: Choice(*choice) for name, choice in zip("abcde", every, strict=False)})
    layers += [layers[i] for i in repeats]
    link = None
    if moves:
        least = sum(min(choice.moved for choice in choices.values()) for choices in layers)
        host = least + draw(strategies.sampled_from([0, most, 3 * most, 10**6]))
        bytes_per_s = draw(strategies.sampled_from([1e9, 3.7e8, 2**31, 10**10]))
        each_way = [draw(strategies.integers(0, 2 * most)) for _ in range(2)]
        part = draw(strategies.sampled_from([0, most // 3, 2 * most]))
        link = Link(bytes_per_s, *each_way, host, part)
    base, head, floor = numbers(3)
    return Chain(base, layers, numbers(len(layers)), head, draw(strategies.sampled_from([0, 3])) * floor, link)


@hypothesis.given(chains(), strategies.floats(0, 1), strategies.booleans())
@hypothesis.settings(derandomize=True, deadline=None, max_examples=500)
def test_no_plan_is_better(chain, where, exactly):
    every = EveryPlan(chain)
    peaks = np.unique(every.peak[every.order])
    limit = int(peaks[int(where * (len(peaks) - 1))]) - (not exactly)
    solution, best = solve(chain, limit), every.within(limit)
    if best is None:
        assert solution is None
    else:
        assert (solution.plan, solution.cost_ns, solution.peak) == best
        assert solution.exact
        assert solution.bound_ns == solution.cost_ns == cost(chain, solution.plan)
        assert solution.peak == peak(chain, solution.plan)
    with pytest.MonkeyPatch.context() as patch:  # the first pass leaves labels behind, so there is a second
        patch.setattr(search, "_FEWEST", 2)
        assert solve(chain, limit) == solution
    least = lowest(chain)
    assert (least.plan, least.cost_ns, least.peak) == every.within(int(peaks[0]))
    assert solve(chain, least.peak - 1) is None


@hypothesis.given(chains(), strategies.floats(0, 1))
@hypothesis.settings(derandomize=True, deadline=None, max_examples=150)
def test_where_labels_are_left_behind_plans_still_fit_and_bounds_hold(chain, where):
    every = EveryPlan(chain)
    peaks = np.unique(every.peak[every.order])
    limit = int(peaks[int(where * (len(peaks) - 1))])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FEWEST", "_MOST", "_PLAIN_EFFORT"):
            patch.setattr(search, name, 2)
        solution, least = solve(chain, limit), lowest(chain)
    _, cost_ns, _ = every.within(limit)
    if solution is None:
        assert limit < least.peak
        assert not least.exact
    else:
        assert solution.peak == peak(chain, solution.plan) <= limit
        assert solution.bound_ns <= cost_ns <= solution.cost_ns == cost(chain, solution.plan)
        assert solution.exact == (solution.bound_ns == solution.cost_ns)
    assert least.peak == peak(chain, least.plan) >= peaks[0]
    if least.exact:
        assert (least.cost_ns, least.peak) == every.within(int(peaks[0]))[1:]


def test_a_chain_without_layers_has_one_plan():
    chain: Chain[str] = Chain(5, [], [], head=3, floor=7)
    assert solve(chain, 8) == lowest(chain)
    assert lowest(chain).plan == ()
    assert solve(chain, 7) is None


# ---------------------------------------------------------------- ties


def alike(count: int, head: int = 0, **choices: Choice) -> Chain[str]:
    return Chain(0, [choices] * count, [1] * count, head, 0)


def test_layers_are_treated_early_and_kept_late():
    chain = alike(6, head=50, keep=Choice(10, 11, 0), recompute=Choice(1, 12, 5))
    assert solve(chain, 90).plan == ("recompute",) * 3 + ("keep",) * 3


def test_of_plans_that_cost_the_same_the_one_with_the_lower_peak_is_taken():
    chain = alike(3, keep=Choice(10, 11, 0), view=Choice(4, 11, 0), recompute=Choice(1, 12, 5))
    assert solve(chain, 1000).plan == ("view", "view", "keep")  # the last one does not raise the peak
    assert solve(chain, 1000).peak == peak(chain, ("view",) * 3)


def test_of_choices_that_are_worth_the_same_the_first_is_taken():
    assert solve(alike(3, b=Choice(4, 5, 1), a=Choice(4, 5, 1)), 100).plan == ("b",) * 3


def test_where_the_peak_is_elsewhere_nothing_is_moved_in_vain():
    layer = {"keep": Choice(10, 11, 0), "offload": Choice(0, 11, 0, moved=10)}
    chain = Chain(0, [layer] * 4, [100] * 4, 5, floor=80, link=Link(1e9, 20, 0, 1000, 10))
    assert solve(chain, 90).plan == ("keep",) * 4


# ---------------------------------------------------------------- against a mixed-integer program


def random_chain(seed: int, count: int, moves: bool) -> Chain[str]:
    """All layers different, in small numbers: a program's tolerances are far below a byte or a nanosecond then."""
    random = np.random.default_rng(seed)
    layers, forward_ns = [], []
    for _ in range(count):
        kept, ns = map(int, random.integers([100, 40], [1000, 400]))
        workspace, policy = kept * 6 // 5, int(kept * random.uniform(0.4, 0.7))
        choices = {
            "keep": Choice(kept, workspace, 0),
            "policy": Choice(policy, workspace + 50, ns // 3),
            "recompute": Choice(50, workspace + 50, ns),
        }
        if moves:
            choices["offload"] = Choice(2, workspace, 0, kept - 2)
            choices["recompute + offload"] = Choice(0, workspace + 50, ns, 50)
        layers.append(choices)
        forward_ns.append(ns)
    return Chain(500, layers, forward_ns, 700, 0, Link(1e9, 800, 400, 250 * count, 300) if moves else None)


def mixed_integer_cost(chain: Chain[str], limit: int) -> int:
    """The least cost by HiGHS; a byte takes a nanosecond."""
    program = highspy.Highs()
    program.silent()
    program.setOptionValue("mip_rel_gap", 0.0)
    program.setOptionValue("mip_abs_gap", 0.9)  # costs are whole numbers
    link = chain.link or Link(1e9, 0, 0, 0, 0)
    window = link.window_bytes
    held, moved, extra, queue = [], [], [], None
    most_moved = sum(max(choice.moved for choice in choices.values()) for choices in chain.layers)

    def total(terms):
        return sum(terms[1:], terms[0]) if terms else 0

    def needs(transient):
        on_device = transient + total(held) if held else transient
        if moved and window:  # what is moved is on the device until the window is full, and then the window is
            is_full = program.addBinary()
            on_its_way = program.addVariable(0, window)
            program.addConstr(on_its_way - window * is_full >= 0)
            program.addConstr(on_its_way - total(moved) + most_moved * is_full >= 0)
            on_device = on_device + on_its_way
        program.addConstr(on_device <= limit - chain.base)

    for choices, forward_ns in zip(chain.layers, chain.forward_ns, strict=True):
        taken = [(program.addBinary(), choice) for choice in choices.values()]
        program.addConstr(total([one for one, _ in taken]) == 1)
        needs(total([choice.transient * one for one, choice in taken]))
        held += [choice.resident * one for one, choice in taken]
        extra += [choice.cost_ns * one for one, choice in taken]
        if chain.link is not None:
            copies = [choice.moved * one for one, choice in taken if choice.moved]
            moved += copies
            wait, new_queue = program.addVariable(0, 10**6), program.addVariable(0, link.inflight_bytes)
            last = [min(choice.moved, link.part_bytes) * one for one, choice in taken if choice.moved]
            program.addConstr(new_queue + wait - total(last) >= 0)
            before = total(copies) if queue is None else total(copies) + queue
            program.addConstr(new_queue + wait - before >= -forward_ns)
            queue = new_queue
            extra.append(1 * wait)
    needs(chain.head + 0 * held[0])
    if moved:
        program.addConstr(total(moved) <= link.host_bytes)
    program.minimize(total(extra))
    assert program.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return round(program.getInfo().objective_function_value)


@pytest.mark.parametrize(("count", "moves"), [(20, False), (12, True)])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_integer_program_finds_nothing_cheaper(seed, count, moves):
    chain = random_chain(seed, count, moves)
    least, most = lowest(chain).peak, peak(chain, ["keep"] * count)
    for share in (0.2, 0.5):
        limit = int(least + share * (most - least))
        solution = solve(chain, limit)
        assert solution.exact
        assert solution.cost_ns == mixed_integer_cost(chain, limit)


# ---------------------------------------------------------------- chains of real size


def transformer(widths, moves=False, host_bytes=10**12) -> Chain[str]:
    """Layers of these widths on 8,192 tokens in 2 bytes, 150 TFLOP/s and 25 GB/s, with times as if measured."""
    layers, forward_ns = [], []
    for i, width in enumerate(widths):
        hidden = 8192 * width * 2
        ns = 8192 * 24 * width**2 // 150_000 * (95 + i * 29 % 11) // 100
        workspace = 20 * hidden + hidden // 3
        choices = {
            "keep": Choice(17 * hidden, workspace, 0),
            "policy": Choice(7 * hidden, workspace + hidden, ns * 35 // 100),
            "recompute": Choice(hidden, workspace + hidden, ns * 93 // 100),
        }
        if moves:
            choices["offload"] = Choice(4096, workspace, 0, 17 * hidden - 4096)
            choices["recompute + offload"] = Choice(0, workspace + hidden, ns * 93 // 100, hidden)
        layers.append(choices)
        forward_ns.append(ns)
    window = 34 * 8192 * max(widths) * 2
    link = Link(25e9, window // 2, window // 2, host_bytes, part_bytes=2**26) if moves else None
    return Chain(10**9, layers, forward_ns, 2 * 10**9, 0, link)


def different(count: int) -> list[int]:
    """Widths from 256 to 3072."""
    return [256 + 8 * (i * 37 % 353) for i in range(count)]


def limits(chain: Chain[str], count: int) -> list[int]:
    """From the least peak to that of all kept."""
    least, most = lowest(chain).peak, peak(chain, ["keep"] * len(chain.layers))
    return [least + (most - least) * i // (count - 1) for i in range(count)]


@pytest.mark.parametrize(
    "widths", [[1024] * 96, [256, 768, 3072] * 32, different(96)], ids=["alike", "three kinds", "different"]
)
def test_a_large_chain_is_exact_and_a_larger_limit_never_costs_more(widths):
    chain = transformer(widths)
    within = limits(chain, 6)
    solutions = [solve(chain, limit) for limit in within]
    assert all(solution.exact and solution.peak <= limit for solution, limit in zip(solutions, within, strict=True))
    costs = [solution.cost_ns for solution in solutions]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] == 0


def test_with_a_link_plans_are_cheaper_and_a_larger_limit_never_costs_more():
    widths = different(12)
    chain, plain = transformer(widths, moves=True), transformer(widths)
    within = limits(plain, 5)
    solutions = [solve(chain, limit) for limit in within]
    assert all(solution.exact for solution in solutions)
    costs = [solution.cost_ns for solution in solutions]
    assert costs == sorted(costs, reverse=True)
    without = [solve(plain, limit).cost_ns for limit in within]
    assert all(ours <= theirs for ours, theirs in zip(costs, without, strict=True))
    assert costs != without


def test_a_chain_that_is_too_large_to_be_exact_is_close_to_its_bound():
    sizes = [10**8 + pow(7, i + 9, 900_000_011) for i in range(96)]
    layers = [  # what a layer saves is what it costs: no bound tells plans apart
        {"keep": Choice(nbytes, nbytes, 0), "recompute": Choice(0, 0, nbytes)} for nbytes in sizes
    ]
    chain = Chain(0, layers, [1] * 96, 0, 0)
    for limit in (sum(sizes) // 3, sum(sizes) * 2 // 3):
        solution = solve(chain, limit)
        missing = sum(sizes) - limit
        assert not solution.exact
        assert solution.peak == peak(chain, solution.plan) <= limit
        assert missing <= solution.bound_ns <= solution.cost_ns <= missing * 1.001


@pytest.mark.parametrize("host_bytes", [10**12, 10**10])
def test_a_large_chain_with_a_link_has_plans_for_all_limits(host_bytes):
    chain = transformer(different(96), moves=True, host_bytes=host_bytes)
    least, *others, _ = limits(chain, 4)
    assert solve(chain, least).peak == least
    for limit in others:
        solution = solve(chain, limit)
        assert solution.peak == peak(chain, solution.plan) <= limit
        assert sum(choice.moved for choice in chain.choices(solution.plan)) <= host_bytes
        everything = cost(chain, ["recompute"] * 96)
        assert solution.bound_ns <= solution.cost_ns <= solution.bound_ns + everything // 6


def test_the_plan_is_the_same_on_every_machine():
    chain = transformer(different(96), moves=True)
    solution = solve(chain, 20 * 10**9)
    assert not solution.exact  # so labels were left behind
    assert (solution.cost_ns, zlib.crc32("".join(solution.plan).encode())) == (87901086, 3706503662)


# ---------------------------------------------------------------- what has no meaning


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward_ns": [1, 2]}, "2 entries for 1 layers: give one per layer"),
        ({"head": -3}, "head=-3"),
        ({"layers": [{}]}, r"layers\[0\]` has no treatment"),
        (
            {"layers": [{"keep": Choice(1, -2, 0)}]},
            r"layers\[0\]\['keep'\]=Choice\(resident=1, transient=-2.* 0 or more",
        ),
        ({"layers": [{"offload": Choice(1, 2, 0, 5)}]}, "'offload'.* moves bytes, but `link=None`: give a `Link`"),
        (
            {"layers": [{"offload": Choice(1, 2, 0, 5)}], "link": Link(1e9, 2, 2, 4, 5)},
            "host_bytes=4` is less than the 5 bytes",
        ),
        ({"layers": [{"keep": Choice(2**52, 1, 0)}]}, "look for a wrong unit"),
    ],
)
def test_chains_without_meaning_are_refused(arguments, message):
    with pytest.raises((ValueError, OverflowError), match=message):
        Chain(
            **{"base": 0, "layers": [{"keep": Choice(1, 2, 0)}], "forward_ns": [1], "head": 0, "floor": 0, **arguments}
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, 1, 1), "bytes_per_s=0"),
        ((math.nan, 1, 1, 1, 1), "bytes_per_s=nan"),
        ((1, -1, 1, 1, 1), "inflight_bytes=-1"),
        ((1, 1, -1, 1, 1), "prefetch_bytes=-1"),
        ((1, 1, 1, 1, -1), "part_bytes=-1"),
    ],
)
def test_links_without_meaning_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Link(*arguments)
