"""The groups of saved tensors: their keys, and the order in which backward is expected to ask for them."""

import weakref
from itertools import islice, pairwise

import pytest
import torch

from lightning_ckpt.offload.groups import Group, Order, Run
from lightning_ckpt.offload.records import Holder, Record

STREAM = torch.Stream(device="cpu")


def opened(run: Run, *names: str) -> list[Group]:
    """Groups of a run; a name that starts with `after` starts no layer."""
    return [run.open(name, not name.startswith("after"), STREAM) for name in names]


def backward(order: Order, *groups: Group) -> None:
    """Let `order` see a backward that needs `groups` in this order."""
    for earlier, later in pairwise(groups):
        order.learn_backward(earlier, later)


def after(order: Order, group: Group) -> list[Group]:
    """What is expected after `group`; cut off in case it does not end."""
    return list(islice(order.following(group), 20))


def following(order: Order, group: Group) -> list[tuple[str, int]]:
    return [found.layer_key for found in after(order, group)]


# ---------------------------------------------------------------- one run


def test_groups_count_layers_and_places():
    run = Order().new_run()
    groups = opened(run, "before all", "a", "after a", "b", "after b")
    assert [group.layer for group in groups] == [1, 2, 2, 3, 3]
    assert [group.index for group in groups] == [0, 1, 2, 3, 4]
    assert run.layers == 3
    assert all(group.run is run and group.stream == STREAM for group in groups)


def test_what_is_saved_before_the_first_layer_belongs_to_no_layer():
    assert Order().new_run().open("", False, STREAM).layer == 0


def test_a_name_that_comes_again_has_another_key():
    run = Order().new_run()
    groups = opened(run, "a", "after a", "a", "after a", "b", "a")
    keys = [("a", 0), ("after a", 0), ("a", 1), ("after a", 1), ("b", 0), ("a", 2)]
    assert [group.layer_key for group in groups] == keys
    assert [group.key for group in groups] == [(*key, 0) for key in keys]
    assert run.get(("a", 1, 0)) is groups[2]
    assert run.get(("a", 3, 0)) is None


def test_a_part_belongs_to_the_call_of_its_layer():
    run = Order().new_run()
    (first,) = opened(run, "a")
    second = run.open_part(first)
    third = run.open_part(second)
    (again,) = opened(run, "a")
    parts = [first, second, third, again, run.open_part(again)]
    assert [group.key for group in parts] == [("a", 0, 0), ("a", 0, 1), ("a", 0, 2), ("a", 1, 0), ("a", 1, 1)]
    assert [group.layer_key for group in parts] == [("a", 0)] * 3 + [("a", 1)] * 2
    assert [group.layer for group in parts] == [1, 1, 1, 2, 2]
    assert [group.index for group in parts] == [0, 1, 2, 3, 4]
    assert run.layers == 2
    assert all(group.run is run and group.stream == STREAM for group in parts)
    assert run.get(("a", 0, 2)) is third
    assert run.before(third.key) == second.key
    assert run.before(again.key) == third.key


def test_keys_begin_anew_in_every_run():
    order = Order()
    keys = [[group.key for group in opened(order.new_run(), "a", "a", "b")] for _ in range(2)]
    assert keys[0] == keys[1]


def test_runs_are_numbered():
    order = Order()
    assert [order.new_run().number for _ in range(3)] == [1, 2, 3]


def test_the_key_before():
    run = Order().new_run()
    groups = opened(run, "a", "b", "a")
    assert [run.before(group.key) for group in groups] == [None, ("a", 0, 0), ("b", 0, 0)]
    assert run.before(("c", 0, 0)) is None


def test_a_run_keeps_no_group_alive():
    run = Order().new_run()
    first, second, third = opened(run, "a", "b", "c")
    assert run.groups() == [first, second, third]
    del second
    assert run.groups() == [first, third]
    assert run.get(("b", 0, 0)) is None
    assert run.get(("c", 0, 0)) is third
    assert run.before(third.key) == ("b", 0, 0)


def test_a_run_lives_as_long_as_one_of_its_groups():
    order = Order()
    run = order.new_run()
    reference = weakref.ref(run)
    (group,) = opened(run, "a")
    del run
    assert reference() is group.run
    del group
    assert reference() is None


# ---------------------------------------------------------------- the records of a group


class NoEngine:
    """In the place of an engine, which needs an accelerator: it is told when a record dies."""

    def bury(self, record: Record) -> None:
        """Nothing to give back."""


def saved(group: Group, nbytes: int) -> Holder:
    """What handles of a storage own that `group` saves."""
    storage = torch.empty(nbytes, dtype=torch.uint8)
    return Holder(Record(NoEngine(), storage.untyped_storage(), storage.detach(), group.number, may_be_blank=False))


def test_the_first_group_to_save_a_storage_counts_its_bytes():
    first, second = opened(Order().new_run(), "a", "b")
    holders = [saved(first, nbytes) for nbytes in (100, 20)]
    for holder in holders:
        first.add(holder.record, is_new=True)
    second.add(holders[0].record, is_new=False)
    assert (first.nbytes, second.nbytes) == (120, 0)
    assert first.records() == [holder.record for holder in holders]
    assert second.records() == [holders[0].record]


def test_what_no_handle_needs_any_more_is_none_of_the_groups():
    (group,) = opened(Order().new_run(), "a")
    holders = [saved(group, nbytes) for nbytes in (100, 20)]
    for holder in holders:
        group.add(holder.record, is_new=True)
    del holder, holders[0]
    assert group.records() == [holders[0].record]
    holders.clear()
    assert group.records() == []


def test_no_two_groups_have_one_number():
    order = Order()
    groups = [group for _ in range(2) for group in opened(order.new_run(), "a", "b")]
    assert len({group.number for group in groups}) == 4


# ---------------------------------------------------------------- how near the end


def test_how_many_layers_come_after_a_group_is_known_once_a_backward_has_begun():
    order = Order()
    run = order.new_run()
    groups = opened(run, "a", "after a", "b", "c", "after c")
    assert [order.layers_after(group) for group in groups] == [None] * 5
    order.learn_forward(run)
    assert [order.layers_after(group) for group in groups] == [2, 2, 1, 0, 0]
    again = opened(order.new_run(), "a", "after a", "b", "c", "after c", "d")
    assert [order.layers_after(group) for group in again] == [2, 2, 1, 0, 0, None]


def test_the_number_of_layers_after_a_group_is_that_of_the_last_step():
    order = Order()
    for names in (["a", "b", "c"], ["a", "b"]):
        run = order.new_run()
        groups = opened(run, *names)
        order.learn_forward(run)
    assert [order.layers_after(group) for group in groups] == [1, 0]


def test_each_call_of_a_layer_is_as_near_the_end_as_it_is():
    order = Order()
    run = order.new_run()
    groups = opened(run, "a", "a", "b", "a")
    order.learn_forward(run)
    assert [order.layers_after(group) for group in groups] == [3, 2, 1, 0]


def test_a_part_is_as_near_the_end_as_its_layer_however_many_there_were():
    order = Order()
    run = order.new_run()
    groups = opened(run, "a", "b")
    order.learn_forward(run)
    first, last = opened(order.new_run(), "a", "b")
    assert [order.layers_after(group.run.open_part(group)) for group in (first, last)] == [1, 0]
    assert [order.layers_after(group) for group in groups] == [1, 0]


# ---------------------------------------------------------------- what backward needs next


def test_without_knowledge_backward_is_the_reverse_of_forward():
    order = Order()
    groups = opened(order.new_run(), "a", "b", "c", "d")
    assert following(order, groups[3]) == [("c", 0), ("b", 0), ("a", 0)]
    assert following(order, groups[1]) == [("a", 0)]
    assert following(order, groups[0]) == []


def test_the_reverse_tells_calls_of_one_layer_apart():
    order = Order()
    groups = opened(order.new_run(), "a", "a", "b", "a")
    assert following(order, groups[-1]) == [("b", 0), ("a", 1), ("a", 0)]


def test_an_order_that_was_seen_is_expected_again():
    order = Order()
    a, b, c, d = opened(order.new_run(), "a", "b", "c", "d")
    backward(order, d, b, c, a)
    a, b, c, d = opened(order.new_run(), "a", "b", "c", "d")
    assert after(order, d) == [b, c, a]
    assert after(order, b) == [c, a]
    assert after(order, a) == []


def test_the_last_order_counts():
    order = Order()
    a, b, c = opened(order.new_run(), "a", "b", "c")
    backward(order, c, a, b)
    backward(order, c, b, a)
    assert after(order, c) == [b, a]


def test_what_was_not_seen_goes_on_in_reverse():
    order = Order()
    _, _, c, d = opened(order.new_run(), "a", "b", "c", "d")
    backward(order, d, c)
    groups = opened(order.new_run(), "a", "b", "c", "new", "d")
    assert following(order, groups[-1]) == [("c", 0), ("b", 0), ("a", 0)]
    assert following(order, groups[3]) == [("c", 0), ("b", 0), ("a", 0)]


def test_two_calls_of_one_layer_are_learned_apart():
    order = Order()
    first, second, b = opened(order.new_run(), "a", "a", "b")
    backward(order, b, first, second)
    first, second, b = opened(order.new_run(), "a", "a", "b")
    assert after(order, b) == [first, second]


def test_parts_are_expected_in_reverse_and_learned_apart():
    order = Order()
    for step in range(2):
        run = order.new_run()
        (a,) = opened(run, "a")
        a_rest = run.open_part(a)
        (b,) = opened(run, "b")
        if step == 0:
            assert after(order, b) == [a_rest, a]
            backward(order, b, a, a_rest)
    assert after(order, b) == [a, a_rest]


def test_the_nearest_comes_first_and_nothing_is_looked_at_in_advance():
    order = Order()
    groups = opened(order.new_run(), *"abcd")
    ahead = order.following(groups[3])
    assert next(ahead) is groups[2]
    backward(order, groups[2], groups[0])
    assert next(ahead) is groups[0]


# ---------------------------------------------------------------- several runs


def test_a_backward_through_several_runs_is_expected_in_the_runs_of_the_next_step():
    order = Order()
    for step in range(2):
        first = opened(order.new_run(), "a", "b")
        second = opened(order.new_run(), "a", "b")
        in_backward = [second[1], second[0], first[1], first[0]]
        if step == 0:
            assert after(order, second[1]) == [second[0]], "a run knows nothing of the one before"
            backward(order, *in_backward)
            del first, second, in_backward
    assert after(order, in_backward[0]) == in_backward[1:]
    assert after(order, in_backward[2]) == in_backward[3:]


def test_the_step_from_one_run_to_the_one_before_is_learned():
    order = Order()
    for step in range(3):
        (a,) = opened(order.new_run(), "a")
        (b,) = opened(order.new_run(), "b")
        if step == 0:
            assert after(order, b) == []
            backward(order, b, a)
        else:
            assert after(order, b) == [a]


def test_the_step_to_a_later_run_is_learned_too():
    order = Order()
    for step in range(2):
        (a,) = opened(order.new_run(), "a")
        (b,) = opened(order.new_run(), "b")
        if step == 0:
            backward(order, a, b)
    assert after(order, a) == [b]


def test_no_group_of_an_earlier_step_is_taken_for_one_of_this():
    order = Order()
    old = opened(order.new_run(), "a", "b", "c")
    backward(order, *reversed(old))
    new = opened(order.new_run(), "a", "b", "c")
    assert [found.run is new[0].run for found in after(order, new[2])] == [True, True]
    assert after(order, old[2]) == [old[1], old[0]]


def test_a_run_that_is_gone_ends_what_follows():
    order = Order()
    (a,) = opened(order.new_run(), "a")
    (b,) = opened(order.new_run(), "b")
    backward(order, b, a)
    del a
    assert after(order, b) == []


# ---------------------------------------------------------------- groups that are gone, and cycles


def test_dead_groups_are_skipped_in_reverse():
    order = Order()
    groups = opened(order.new_run(), "a", "after a", "b", "after b", "c")
    del groups[3], groups[1]
    assert following(order, groups[-1]) == [("b", 0), ("a", 0)]


def test_dead_groups_are_skipped_in_an_order_that_was_learned():
    order = Order()
    a, b, c, d = opened(order.new_run(), "a", "b", "c", "d")
    backward(order, d, b, c, a)
    groups = opened(order.new_run(), "a", "b", "c", "d")
    del groups[1]
    assert following(order, groups[-1]) == [("c", 0), ("a", 0)]


@pytest.mark.parametrize("cycle", ["aa", "aba", "abca"])
def test_a_cycle_in_what_was_learned_ends(cycle):
    order = Order()
    groups = dict(zip("abc", opened(order.new_run(), *"abc"), strict=True))
    backward(order, *(groups[name] for name in cycle))
    assert following(order, groups["a"]) == [(name, 0) for name in cycle[1:-1]]


def test_a_cycle_that_is_entered_from_outside_ends():
    order = Order()
    a, b, c = opened(order.new_run(), "a", "b", "c")
    backward(order, c, b, a, b)
    assert following(order, c) == [("b", 0), ("a", 0)]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_cycle_of_groups_that_are_gone_ends(dead):
    order = Order()
    groups = opened(order.new_run(), "a", "b", "c")
    backward(order, groups[2], groups[1], groups[0], groups[1])
    del groups[dead]
    assert len(following(order, groups[-1])) <= 1
    del groups[0]
    assert following(order, groups[-1]) == []
