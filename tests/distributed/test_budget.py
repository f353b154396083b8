"""A memory budget on two real processes: the same training bit for bit, one plan on both, and nobody waits in vain."""

import pytest

from tests.distributed.budgeted import APART, BATCHES, CASES, LATER, LONGER, MEASURED, REFUSED, REHEARSED, seen
from tests.distributed.launch import shared
from tests.distributed.record import differences

pytestmark = pytest.mark.slow

TRAINED = [(case, title) for case in CASES if case not in REFUSED for title in CASES[case].budgets]
ALIKE = [(case, title) for case, title in TRAINED if case in {**REHEARSED, **MEASURED}]
# Where layers do not communicate, a rank with a longer batch need not wait for the others: the batch in question.
ALONE = {case: LATER for case in {**LONGER, **APART} if "fsdp" not in case and "later" in case}
ALONE["longer on one before the final plan"] = 3


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return shared(tmp_path_factory, "budgeted", ["-m", "tests.distributed.budgeted", "OUT"], 500).out


@pytest.fixture
def ranks(out, case, title):
    """What both have seen of a training that came to its end."""
    both = seen(out, case, title)
    assert [each.came for each in both] == ["trained", "trained"]
    return both


@pytest.mark.parametrize(("case", "title"), TRAINED)
def test_training_is_exact(out, ranks, case, title):
    assert differences(out / case / title, out / case / "plain") == []
    assert all(len(each.treatments) >= BATCHES for each in ranks)


@pytest.mark.parametrize(("case", "title"), TRAINED)
def test_both_ranks_have_one_plan(ranks, case, title):
    pairs = enumerate(zip(*(each.treatments for each in ranks), strict=True))
    apart = [index for index, (first, second) in pairs if first != second]
    if case == "one skips a layer":  # and learns later what it takes: its new plan is that of all one step later
        assert len(apart) <= 2
        assert not any(index + 1 in apart for index in apart)
    else:
        assert apart in ([], [ALONE.get(case)])
    assert ranks[0].stages == ranks[1].stages


@pytest.mark.parametrize(("case", "title"), ALIKE)
def test_the_budget_is_kept_and_used(ranks, case, title):
    # When what is sent leaves memory depends on the other rank: here, that is a gradient of one layer.
    more = 1.02 if case in MEASURED else 1.0
    for rank, each in enumerate(ranks):
        peaks = [row[f"memory/peak_MiB/rank{rank}"] * 2**20 for row in ranks[0].rows[-2:]]
        assert all(0 < peak <= each.budget * more for peak in peaks)
        kinds = set(each.treatments[-1])
        assert ("keep" in kinds) == (title != "0.0")


@pytest.mark.parametrize("case", MEASURED)
def test_a_step_of_sharded_weights_is_measured(out, case):
    for each in seen(out, case, "0.5"):
        assert each.planned[:3] == [None] * 3
        assert set(each.treatments[0]) == {"recompute"}
        assert each.stages[3].startswith("PROBE")
        assert set(each.treatments[3]) != {"recompute"}
        assert each.planned[-1] is not None


@pytest.mark.parametrize("case", REHEARSED)
def test_a_step_of_whole_weights_is_rehearsed(out, case):
    for each in seen(out, case, "0.5"):
        assert each.planned[0] is not None
        assert not any(stage.startswith("PROBE") for stage in each.stages)
        assert each.stages[-1] == "SETTLED"


# ---------------------------------------------------------------- ranks that need different amounts


@pytest.mark.parametrize(("case", "since"), [("longer on one", 2), ("longer on one, fsdp2", 3)])
def test_the_plan_is_that_of_the_rank_that_needs_most(out, case, since):
    """Not of the one that fills its budget best: that one may keep everything."""
    ranks = seen(out, case, "bytes")
    for rank, each in enumerate(ranks):
        peaks = [row.get(f"memory/peak_MiB/rank{rank}", 0) * 2**20 for row in ranks[0].rows[since:]]
        assert max(peaks) > 0
        assert max(peaks) <= each.budget == CASES[case].budgets["bytes"]["memory_budget"]


def test_a_longer_batch_on_one_rank_gives_all_a_new_plan_one_batch_later(out):
    ranks = seen(out, "longer on one later", "bytes")
    for each in ranks:
        assert set(each.treatments[LATER - 1]) == {"keep"}
        assert "recompute" in each.treatments[LATER + 1] or "policy" in each.treatments[LATER + 1]
        assert each.treatments[LATER + 1] == each.treatments[-1]
    # Nothing in these layers communicates, so that its own batch is within the budget, too.
    assert ranks[0].rows[LATER]["memory/peak_MiB/rank1"] * 2**20 <= 150_000


def test_the_plan_holds_for_the_longest_of_two_longer_batches(out):
    for each in seen(out, "longer on both later", "bytes"):
        assert "keep" in each.treatments[LATER - 1]
        assert each.planned[-1] <= each.budget == 130_000


def test_a_second_training_knows_nothing_of_what_the_first_one_needed(out):
    first, second = (seen(out, "longer on one later, two trainings", title) for title in ("first", "second"))
    for before, after in zip(first, second, strict=True):
        assert set(before.treatments[-1]) != {"keep"}
        assert {kind for treatments in after.treatments[:LATER] for kind in treatments} == {"keep"}


# ---------------------------------------------------------------- ranks of which different things are known


def test_a_step_that_one_rank_cannot_rehearse_is_measured_on_all(out):
    for each in seen(out, "one reads", "0.5"):
        assert each.planned[0] is None
        assert any(stage.startswith("PROBE") for stage in each.stages)


def test_layers_are_recomputed_on_all_ranks_if_one_cannot_be_watched(out):
    for each in seen(out, "one cannot be watched", "0.5"):
        assert {kind for treatments in each.treatments for kind in treatments} == {"recompute"}


# ---------------------------------------------------------------- refused


def test_other_budgets_are_refused_by_name(out):
    for each in seen(out, "other budgets", "other"):
        assert "`memory_budget` is 0.5 on rank 0 and 0.25 on rank 1" in each.came
        assert each.treatments == []


@pytest.mark.parametrize("case", ["too little on one", "too little on one, fsdp2"])
def test_too_small_a_budget_for_one_rank_stops_all_with_its_reason(out, case):
    for each in seen(out, case, "bytes"):
        assert each.came.startswith("BudgetError: `memory_budget=60000`: the budget of 58.6 KiB is below the ")
