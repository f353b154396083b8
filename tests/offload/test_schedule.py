"""How many layers the link hides behind compute: stalls worked out by hand, and the choice checked by brute force."""

from collections.abc import Iterable
from itertools import chain, combinations, pairwise

import pytest

from lightning_ckpt.offload import schedule
from lightning_ckpt.offload.groups import Key
from lightning_ckpt.offload.schedule import GroupCost, Link

PLENTY = 10**12  # bytes of room


def cost(layer: int, nbytes: int = 100, forward: float = 1, backward: float = 2, movable: bool = True, part: int = 0):
    return GroupCost((f"layer {layer}", 0, part), nbytes, movable, forward, backward)


def layer_of(key: Key) -> int:
    return int(key[0].split()[1])


def stall(groups: list[GroupCost], layers: Iterable[int], link: Link) -> float:
    """The stall when all groups of these layers travel."""
    layers = set(layers)
    return schedule.stall(groups, {group.key for group in groups if layer_of(group.key) in layers}, link)


def choose_layers(groups: list[GroupCost], link: Link, room: int) -> set[int]:
    """Layers of the groups that are chosen, of which each is a layer of its own."""
    assert len({layer_of(group.key) for group in groups}) == len(groups)
    return {layer_of(key) for key in schedule.choose_groups(groups, link, room)}


def link(out: float, into: float | None = None, inflight: int = 200, prefetch: int = 200) -> Link:
    """A link that takes `out` and `into` seconds for 100 bytes."""
    return Link(100 / out, 100 / (out if into is None else into), inflight, prefetch)


def uniform(count: int) -> list[GroupCost]:
    """A chain of layers of which the last one stays: forward takes 1, backward 2."""
    return [cost(layer, movable=layer < count) for layer in range(1, count + 1)]


def compute(groups: Iterable[GroupCost]) -> float:
    return sum(group.forward_s + group.backward_s for group in groups)


# ---------------------------------------------------------------- stalls worked out by hand


@pytest.mark.parametrize(
    ("inflight", "seconds"),
    [
        (0, 10),  # out from 1 to 6, waited for at once; back from 6 to 11, waited for at once
        (99, 10),
        (100, 0),  # still under way when backward begins: used where it is
    ],
)
def test_a_single_layer(inflight, seconds):
    assert stall([cost(1)], {1}, link(5, inflight=inflight)) == seconds


THREE = [cost(1), cost(2), cost(3, movable=False)]


@pytest.mark.parametrize(
    ("out", "into", "inflight", "prefetch", "seconds"),
    [
        # Forward: 1 leaves from 1 to 3, so 2, which is done at 2, waits 1 second for it, and leaves from 3 to 5. 3 is
        # done at 4, and 2 is used where it is. Backward of 3 from 4 to 6, of 2 until 8; 1 arrives just then.
        (2, 2, 100, 0, 1),
        # 1 is asked for at 6, when backward of 2 begins, arrives at 11, and is needed at 8.
        (2, 5, 100, 0, 1 + 3),
        # It is asked for at 4, with 2, and arrives at 9.
        (2, 5, 100, 200, 1 + 1),
        (2, 5, 100, 199, 1 + 3),
        # Two may be under way, so nothing waits and nothing has to come back.
        (2, 5, 200, 0, 0),
        # 1 leaves from 1 to 6, when 2 has waited 4 seconds. It comes back, in 1 second, behind backward of 2.
        (5, 1, 100, 0, 4),
        # Nothing may be under way: 1 leaves until 3, 2 from 4 to 6; 3 is done at 7. Backward of 3 until 9 hides that 2
        # comes back, backward of 2 until 11 that 1 does.
        (2, 2, 0, 0, 2 + 2),
        # Into the device in 3: 2 arrives at 10, a second late, and 1 from 10 to 13, when 2 is through at 12.
        (2, 3, 0, 100, 2 + 2 + 1 + 1),
        # Both are asked for at 7: 2 arrives at 10 and 1 at 13, as before, since they share the link.
        (2, 3, 0, 200, 2 + 2 + 1 + 1),
    ],
)
def test_two_layers_that_travel_and_one_that_stays(out, into, inflight, prefetch, seconds):
    assert stall(THREE, {1, 2}, link(out, into, inflight, prefetch)) == seconds


@pytest.mark.parametrize(
    ("moved", "seconds"),
    [
        (set(), 0),
        ({3}, 0),  # it is not movable
        ({7}, 0),  # there is none
        ({1}, 2 + 0),  # waits from 1 to 3 in forward; back during backward of 3
        ({2}, 2 + 0),
    ],
)
def test_only_layers_that_travel_make_compute_wait(moved, seconds):
    assert stall(THREE, moved, link(2, inflight=0)) == seconds


def test_nothing_to_move():
    assert stall([], {1}, link(1)) == 0
    assert stall([cost(1, nbytes=0), cost(2, nbytes=0)], {1, 2}, link(1000, inflight=0)) == 0


def test_layers_of_different_sizes():
    groups = [
        cost(1),
        cost(2, nbytes=300, forward=3, backward=6),
        cost(3),
        cost(4, movable=False),
    ]
    # Forward: 1 leaves from 1 to 2, 2 from 4 to 7, 3 from 7 to 8. Layer 3 is done at 5, with 400 bytes under way, and
    # waits until 7 for layer 2. Layer 4 is done at 8.
    # Backward: 3 is used where it is, and 2 does not fit beside it, so it is asked for at 10 and arrives at 13, when
    # backward of 3 has been over for 1 second. 1 does not fit either; it is asked for at 13, long before it is needed.
    assert stall(groups, {1, 2, 3}, link(1, inflight=300, prefetch=300)) == 2 + 1
    # With 400 ahead, 2 is asked for at 8 and arrives at 11; it is needed at 12.
    assert stall(groups, {1, 2, 3}, link(1, inflight=300, prefetch=400)) == 2
    # Without layer 2, there is time enough.
    assert stall(groups, {1, 3}, link(1, inflight=300, prefetch=300)) == 0


def test_a_layer_larger_than_what_may_be_under_way_is_waited_for():
    groups = [cost(1, nbytes=500), cost(2, movable=False)]
    # Out from 1 to 6, waited for at once. Back from 7, as backward begins, to 12; it is needed at 9.
    assert stall(groups, {1}, link(1, inflight=400, prefetch=0)) == 5 + 3


def test_a_large_layer_waits_for_several_small_ones_before_it():
    groups = [cost(1), cost(2), cost(3, nbytes=300), cost(4, movable=False)]
    # 1 leaves from 1 to 3, 2 from 3 to 5. When 3 is done, at 3, compute waits until both have left.
    assert stall(groups, {1, 2, 3}, link(2, into=0.25, inflight=300)) == 2


def test_a_layer_of_several_groups_travels_as_a_whole():
    groups = [cost(1, backward=1), cost(1, backward=1, part=1), cost(2, backward=1, movable=False)]
    # Forward: the first is done at 1 and waited for until 3, the second at 4 and until 6, layer 2 at 7. Backward: the
    # second comes back from 7 to 9 and is needed at 8; the first until 11, and is needed at 10.
    assert stall(groups, {1}, link(2, inflight=0, prefetch=0)) == 2 + 2 + 1 + 1


def test_a_part_of_a_layer_that_may_not_move_stays():
    groups = [cost(1), cost(1, movable=False, part=1), cost(2, movable=False)]
    assert stall(groups, {1}, link(2, inflight=0)) == 2


# ---------------------------------------------------------------- uniform chains

TIMES = (0.25, 0.5, 1, 1.5, 2, 4)  # seconds for one layer, each way, when its forward takes 1 and its backward 2
STAY = {  # layers that stay, for each of these times; the last layer always does
    8: (1, 1, 1, 3, 4, 5),
    12: (1, 1, 1, 4, 6, 8),
    16: (1, 1, 1, 6, 8, 11),
    24: (1, 1, 1, 7, 12, 17),
    32: (1, 1, 1, 11, 16, 23),
    48: (1, 1, 1, 15, 23, 35),
}
UNIFORM = [(count, time, stay) for count, all_stay in STAY.items() for time, stay in zip(TIMES, all_stay, strict=True)]


@pytest.mark.parametrize(("count", "time", "stay"), UNIFORM)
def test_with_plenty_of_room_as_many_layers_move_as_the_link_hides(count, time, stay):
    groups = uniform(count)
    moved = choose_layers(groups, link(time), PLENTY)
    assert count - len(moved) == stay
    assert stall(groups, moved, link(time)) <= 0.01 * compute(groups)
    # The part of them that forward is too short for, and the last one; but two need not have left when backward begins.
    assert -2 <= stay - (count * (1 - 1 / max(time, 1)) + 1) <= 0


@pytest.mark.parametrize("count", STAY)
@pytest.mark.parametrize("time", TIMES)
def test_moving_everything_takes_as_long_as_compute_or_the_link(count, time):
    groups = uniform(count)
    seconds = compute(groups) + stall(groups, range(1, count), link(time))
    slower = count * (max(1, time) + max(2, time))
    # The layer that stays, and those that are still on the device when backward begins, need no copies back.
    assert slower - 6 * max(0, time - 1) <= seconds <= slower


@pytest.mark.parametrize("count", STAY)
@pytest.mark.parametrize("time", [0.25, 0.5, 1])
def test_a_link_as_fast_as_forward_moves_everything(count, time):
    assert choose_layers(uniform(count), link(time), PLENTY) == set(range(1, count))


@pytest.mark.parametrize(("count", "time", "stay"), UNIFORM)
def test_without_room_everything_moves(count, time, stay):
    groups = uniform(count)
    assert choose_layers(groups, link(time), 0) == set(range(1, count))
    assert choose_layers(groups, link(time), 99) == set(range(1, count))


@pytest.mark.parametrize("time", [1.5, 2, 4, 50])
@pytest.mark.parametrize("count", [8, 24, 48])
def test_with_some_room_just_enough_layers_move(count, time):
    groups = uniform(count)
    hidden = len(choose_layers(groups, link(time), PLENTY))
    for fit in range(count):  # layers beside the one that stays anyway
        for room in (100 * fit, 100 * fit + 99):
            assert len(choose_layers(groups, link(time), room)) == max(hidden, count - 1 - fit)


@pytest.mark.parametrize("count", [2, 8, 24])
def test_a_link_that_hides_nothing_is_not_used_while_there_is_room(count):
    groups = uniform(count)
    hopeless = link(10**6, inflight=0)
    assert choose_layers(groups, hopeless, PLENTY) == set()
    assert choose_layers(groups, hopeless, 100 * (count - 1)) == set()
    assert len(choose_layers(groups, hopeless, 100 * (count - 1) - 1)) == 1


def test_a_stall_of_a_hundredth_is_too_short_to_be_measured():
    groups = [cost(1), cost(2, forward=95, movable=False)]  # 100 seconds
    limits = {"inflight": 0, "prefetch": 0}
    assert stall(groups, {1}, link(1, **limits)) == 1
    assert choose_layers(groups, link(1, **limits), PLENTY) == {1}
    assert stall(groups, {1}, link(1.125, **limits)) == 1.125
    assert choose_layers(groups, link(1.125, **limits), PLENTY) == set()


# ---------------------------------------------------------------- which layers


def is_spread(moved: Iterable[int], layers: list[int]) -> bool:
    """Whether the moved ones of `layers` are spread evenly, and the last ones, needed first, are none of them."""
    places = [*sorted(layers.index(layer) for layer in moved), len(layers)]
    steps = [after - before for before, after in pairwise(places)]
    return max(steps) - min(steps) <= 1 and steps[-1] == max(steps) > places[0]


@pytest.mark.parametrize("count", [2, 3, 8, 13, 48])
def test_chosen_layers_are_spread_evenly(count):
    groups = uniform(count)
    layers = list(range(1, count))
    seen = set()
    for fit in range(count - 1):
        moved = choose_layers(groups, link(10**6, inflight=0), 100 * fit)
        seen.add(len(moved))
        assert is_spread(moved, layers)
    assert seen == set(layers), "every number of layers was seen"


def test_a_spread_in_numbers():
    groups = uniform(13)
    hopeless = link(10**6, inflight=0)
    moved = [choose_layers(groups, hopeless, 100 * (12 - count)) for count in (1, 2, 3, 5, 11)]
    assert moved == [{1}, {1, 7}, {1, 5, 9}, {1, 3, 5, 8, 10}, {*range(1, 12)}]


@pytest.mark.parametrize("time", [0.5, 1, 1.25, 1.5, 2, 3, 4])
@pytest.mark.parametrize("count", range(2, 11))
def test_no_other_choice_moves_more_without_a_stall(count, time):
    groups = uniform(count)
    layers = list(range(1, count))
    moved = choose_layers(groups, link(time), PLENTY)
    larger = chain.from_iterable(combinations(layers, size) for size in range(len(moved) + 1, count))
    hidden = [set(other) for other in larger if stall(groups, other, link(time)) <= 0.01 * compute(groups)]
    # Layers anywhere hide one more at best: near the end, where it is still on the device when backward begins.
    assert max((len(other) for other in hidden), default=0) <= len(moved) + 1
    assert not [other for other in hidden if is_spread(other, layers)]
    assert not [other for other in hidden if other > moved]


# ---------------------------------------------------------------- links and layers of other kinds


@pytest.mark.parametrize(
    ("out", "into", "stay"),
    [
        (1, 1, 1),
        (1, 2, 1),  # backward takes twice as long as forward
        (1, 2.5, 5),
        (1, 4, 12),
        (2, 0.25, 12),
        (2, 2, 12),
        (2, 4, 12),
        (4, 0.25, 17),
        (0.25, 4, 12),
        (0.25, 8, 17),
    ],
)
def test_the_slower_way_decides(out, into, stay):
    groups = uniform(24)
    moved = choose_layers(groups, link(out, into), PLENTY)
    assert 24 - len(moved) == stay


def test_more_layers_move_the_faster_the_link_and_the_more_may_be_under_way():
    groups = uniform(24)
    counts = [len(choose_layers(groups, link(time), PLENTY)) for time in (8, 4, 3, 2, 1.5, 1.25, 1)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 23
    limits = [len(choose_layers(groups, link(1.5, inflight=limit), PLENTY)) for limit in (0, 100, 200, 400, 800)]
    assert limits == sorted(limits)
    assert limits[0] < limits[-1]


def test_large_layers_among_small_ones_all_move_where_the_link_hides_them():
    # Every third layer is four times as large, and takes four times as long.
    groups = [
        cost(layer, 400 if layer % 3 == 0 else 100, *((4, 8) if layer % 3 == 0 else (1, 2)), movable=layer < 12)
        for layer in range(1, 13)
    ]
    moved = choose_layers(groups, link(1, inflight=800, prefetch=800), PLENTY)
    assert moved == set(range(1, 12))


@pytest.mark.parametrize("time", [1.5, 2, 3, 6])
def test_what_is_small_enough_fills_the_gaps_between_large_layers(time):
    groups = [cost(layer, 400 if layer % 4 == 2 else 50, movable=layer < 16) for layer in range(1, 17)]
    limits = {"inflight": 500, "prefetch": 500}
    moved = choose_layers(groups, link(time, **limits), PLENTY)
    assert stall(groups, moved, link(time, **limits)) <= 0.01 * compute(groups)
    for layer in set(range(1, 16)) - moved:
        assert stall(groups, moved | {layer}, link(time, **limits)) > 0.01 * compute(groups)
    assert 0 < len(moved) < 15


def test_room_is_counted_in_bytes_not_in_layers():
    groups = [cost(1, 1000), cost(2), cost(3), cost(4), cost(5, movable=False)]
    hopeless = link(10**6, inflight=0)
    assert choose_layers(groups, hopeless, 1300) == set()
    # From the end, 2 is due with a third of the bytes, 3 and 2 with two thirds, and 1 with 45 of 48.
    assert choose_layers(groups, hopeless, 1299) == choose_layers(groups, hopeless, 1200) == {2}
    assert choose_layers(groups, hopeless, 1199) == choose_layers(groups, hopeless, 1100) == {2, 3}
    assert choose_layers(groups, hopeless, 1099) == choose_layers(groups, hopeless, 100) == {1, 2, 3}
    assert choose_layers(groups, hopeless, 99) == {1, 2, 3, 4}


def test_what_cannot_move_takes_no_room():
    groups = [cost(1), cost(2), cost(2, nbytes=10**6, movable=False, part=1), cost(3, nbytes=10**6, movable=False)]
    hopeless = link(10**6, inflight=0)
    assert schedule.choose_groups(groups, hopeless, 200) == set()
    assert schedule.choose_groups(groups, hopeless, 100) == {groups[0].key}
    assert schedule.choose_groups(groups, hopeless, 99) == {groups[0].key, groups[1].key}


def test_parts_of_layers_are_spread_like_layers():
    groups = [cost(layer, 50, 0.5, 1, layer < 24, part) for layer in range(1, 25) for part in (0, 1)]
    for time, stay in zip(TIMES, STAY[24], strict=True):
        moved = schedule.choose_groups(groups, link(time), PLENTY)
        assert abs(48 - len(moved) - 2 * stay) <= 2
    moved = schedule.choose_groups(groups, link(10**6, inflight=0), 2000)
    assert len(moved) == 6
    assert is_spread([place for place, group in enumerate(groups) if group.key in moved], list(range(46)))


def test_numbers_of_layers_may_have_gaps():
    layers = [2, 5, 6, 11, 40, 41]
    groups = [*(cost(layer) for layer in layers), cost(50, movable=False)]
    assert choose_layers(groups, link(0.5), PLENTY) == set(layers)
    assert choose_layers(groups, link(10**6, inflight=0), 400) == {2, 11}


def test_no_layer_may_move():
    assert choose_layers([], link(1), PLENTY) == set()
    assert choose_layers([cost(1, movable=False)], link(1), 0) == set()
