"""Plans from a profile: within the budget, and honest about how fast they are."""

import pytest

from lightning_ckpt.planning.budget import BudgetError
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.profile import Cost, LayerProfile, Profile
from lightning_ckpt.planning.solver import Link
from lightning_ckpt.planning.treatment import Treatment

MIB = 2**20
LINK = Link(25e9, 300 * MIB, 300 * MIB, 10**12, 64 * MIB)


def profile(count: int) -> Profile:
    """Layers of which no two are alike."""
    layers = []
    for i in range(count):
        hidden = (20 + i * 37 % 41) * MIB
        forward_s = hidden / 2e10 * (95 + i * 29 % 11) / 100
        layers.append(
            LayerProfile(
                f"h.{i}",
                i,
                hidden,
                forward_s,
                {
                    Treatment.KEEP: Cost(16 * hidden, 18 * hidden),
                    Treatment.POLICY: Cost(7 * hidden, 19 * hidden, 0.35 * forward_s),
                    Treatment.RECOMPUTE: Cost(hidden, 21 * hidden, 0.97 * forward_s),
                    Treatment.OFFLOAD: Cost(2 * hidden, 18 * hidden, 0.0, 14 * hidden),
                    Treatment.RECOMPUTE_OFFLOAD: Cost(0, 21 * hidden, 0.98 * forward_s, hidden),
                },
            )
        )
    plain_s = 3 * sum(layer.forward_s for layer in layers)
    return Profile(tuple(layers), 1000 * MIB, 500 * MIB, 1500 * MIB, True, plain_s, {})


@pytest.mark.parametrize("link", [None, LINK], ids=["in place", "offload"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_plan_is_within_its_budget_and_says_what_a_faster_one_could_save(link, share):
    planner = Planner(profile(96), None, link)
    limit = int(planner.recomputed_bytes + share * (planner.kept_bytes - planner.recomputed_bytes))
    plan = planner.plan(limit)
    assert plan.peak_bytes == planner.peak_of(list(plan.assignment.values())) <= limit
    assert 0 <= plan.gap_s <= plan.extra_s
    moves = any(treatment.moves for treatment in plan.assignment.values())
    windows = (LINK.inflight_bytes, LINK.prefetch_bytes) if moves else (0, 0)  # those it holds with
    assert (plan.inflight_bytes, plan.prefetch_bytes) == windows
    if link is None:  # the solver is exact without copies, for 96 layers too
        assert plan.gap_s == 0
    assert ("more than the fastest plan" in str(plan)) is (plan.gap_s > 0)
    others = [planner.plan(limit - less * MIB).extra_s for less in (0, 64, 128, 256)]  # they fit, too
    assert min(others) >= plan.extra_s - plan.gap_s


def test_with_copies_there_may_be_a_faster_plan():
    planner = Planner(profile(96), None, LINK)
    assert planner.plan(planner.kept_bytes // 2).gap_s > 0


def test_what_needs_no_treatment_has_no_gap():
    planner = Planner(profile(96), None, LINK)
    plan = planner.plan(planner.kept_bytes)
    assert set(plan.assignment.values()) == {Treatment.KEEP}
    assert (plan.extra_s, plan.gap_s) == (0.0, 0.0)


def test_without_a_link_nothing_is_moved():
    planner = Planner(profile(12), None)
    plan = planner.plan(planner.recomputed_bytes)
    assert not any(treatment.moves for treatment in plan.assignment.values())
    with pytest.raises(BudgetError, match=r"is below the .* that the step needs whatever is recomputed"):
        planner.plan(planner.least(0).peak_bytes - 1)
