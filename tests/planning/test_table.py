"""Tables of plans and frontiers: every layer by its name, right sums, rules beside the plan they compete with."""

import dataclasses
import re

import pytest

from lightning_ckpt.planning.frontier import Frontier, Point
from lightning_ckpt.planning.plan import LayerPlan, Plan
from lightning_ckpt.planning.table import frontier_table, plan_table
from lightning_ckpt.planning.treatment import Treatment

MIB = 2**20
KEPT = (Treatment.KEEP, 24 * MIB, 2 * MIB, 0, 0.01, 0.0)
RECOMPUTED = (Treatment.RECOMPUTE, 2 * MIB, 2 * MIB, 0, 0.01, 0.0095)
MOVED = (Treatment.RECOMPUTE_OFFLOAD, 0, 2 * MIB, 2 * MIB, 0.01, 0.0095)


def plan(gap_s=0.0, **layers):
    """A plan with these layers; `__` in a name stands for a dot."""
    return Plan(
        tuple(LayerPlan(name.replace("__", "."), *figures) for name, figures in layers.items()),
        budget_bytes=200 * MIB,
        peak_bytes=150 * MIB,
        binds="layer h.3",
        extra_s=0.019,
        step_s=0.19,
        gap_s=gap_s,
        kept_bytes=250 * MIB,
        recomputed_bytes=50 * MIB,
    )


def cells(table):
    """The cells of a table, by line."""
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]


def names(table):
    """The names of the layers in a table."""
    rows = cells(table)
    return [row[0] for row in rows[1 : next(i for i, row in enumerate(rows) if row[0].startswith("---"))]]


def test_rows_totals_and_what_the_plan_says():
    shown = plan(h__0=RECOMPUTED, h__1=RECOMPUTED, h__2=RECOMPUTED, h__3=KEPT, h__4=KEPT, head=RECOMPUTED)
    assert cells(plan_table(shown)) == [
        ["layer", "treatment", "saved MiB", "input MiB", "forward ms", "recompute ms"],
        ["h.{0 ... 2}", "recompute", "2.00", "2.00", "10.00", "9.50"],
        ["h.{3 ... 4}", "keep", "24.00", "2.00", "10.00", "0.00"],
        ["head", "recompute", "2.00", "2.00", "10.00", "9.50"],
        ["-" * 76],
        ["total of 6 layers", "56.00", "60.00", "38.00"],
        ["Where layers share a row, its figures are those of each of them."],
        [""],
        ["peak memory 150.0 MiB of 200.0 MiB, in layer h.3"],
        ["(all layers recomputed: 50.0 MiB, all kept: 250.0 MiB)"],
        ["extra time 19.0 ms a step (by formula, 10% of forward and backward)"],
    ]


def test_a_plan_that_may_not_be_the_fastest_says_by_how_much():
    said = plan(gap_s=0.0004, h__0=RECOMPUTED).totals()[-1]
    assert said == (
        "extra time 19.0 ms a step (by formula, 10% of forward and backward), at most 0.4 ms more than the fastest plan"
    )


def test_host_memory_is_shown_if_anything_moves():
    table = plan_table(plan(h__0=MOVED, h__1=MOVED, h__2=KEPT))
    assert cells(table)[0] == [
        "layer", "treatment", "saved MiB", "input MiB", "host MiB", "forward ms", "recompute ms",
    ]  # fmt: skip
    assert cells(table)[1] == ["h.{0 ... 1}", "recompute + offload", "0.00", "2.00", "2.00", "10.00", "9.50"]
    assert cells(table)[4] == ["total of 3 layers", "24.00", "4.00", "30.00", "19.00"]


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        (["h.0", "h.1", "h.2"], ["h.{0 ... 2}"]),
        (["h.0.mlp", "h.1.mlp"], ["h.{0 ... 1}.mlp"]),
        (["h.8", "h.9", "h.10"], ["h.{8 ... 10}"]),
        (["0", "1"], ["{0 ... 1}"]),
        (["h.0", "h.2", "h.4"], ["h.0", "h.2", "h.4"]),  # those between are others
        (["h.1", "h.0"], ["h.1", "h.0"]),
        (["h.0", "k.1"], ["h.0", "k.1"]),
        (["h.0", "h.1.mlp"], ["h.0", "h.1.mlp"]),
        (["h.07", "h.08"], ["h.07", "h.08"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.1", "a.2.b.1"], ["a.0.b.{0 ... 1}", "a.{1 ... 2}.b.1"]),
        (["a.0.b.0", "a.1.b.1"], ["a.0.b.0", "a.1.b.1"]),
        (["block0", "block1"], ["block0", "block1"]),
    ],
)
def test_layers_share_a_row_only_if_its_name_says_which(layers, shown):
    assert names(plan_table(plan(**dict.fromkeys(layers, KEPT)))) == shown


def test_layers_share_a_row_only_if_they_are_shown_alike():
    slower = (*KEPT[:4], 0.0101, 0.0)
    as_shown = (*KEPT[:4], 0.0100000001, 0.0)
    assert names(plan_table(plan(h__0=KEPT, h__1=slower))) == ["h.0", "h.1"]
    assert names(plan_table(plan(h__0=KEPT, h__1=as_shown))) == ["h.{0 ... 1}"]
    assert names(plan_table(plan(h__0=KEPT, h__1=RECOMPUTED))) == ["h.0", "h.1"]


def test_small_models_have_more_decimals():
    tiny = (Treatment.KEEP, 3000, 1500, 0, 0.00001234, 0.0)
    assert cells(plan_table(plan(h=tiny)))[1] == ["h", "keep", "0.002861", "0.001431", "0.01234", "0.00000"]


def test_a_large_plan_fits_into_a_terminal():
    layers = {
        f"model.language_model.layers.{i}": (each, 3 * 2**30, 2**29, 2**30, 0.1, 0.09)
        for i, each in enumerate(list(Treatment) * 20)
    }
    table = plan_table(dataclasses.replace(plan(**layers), binds="what follows the last layer, " * 4))
    assert len(names(table)) == 100
    assert max(map(len, table.splitlines())) <= 120


PLANS = (Point("plan", 100 * MIB, 0.04), Point("plan", 200 * MIB, 0.02), Point("plan", 2048 * MIB, 0.0))
RULES = (
    Point("all kept", 2048 * MIB, 0.0),
    Point("every_n_layers=1", 90 * MIB, 0.05),
    Point("every_n_layers=2", 250 * MIB, 0.025),
)
NEARLY = Point("nearly", 210 * MIB, 0.02 - 1e-9)


def test_rules_stand_beside_the_plan_that_needs_no_more_memory():
    table = cells(frontier_table(Frontier(PLANS, (*RULES, NEARLY), step_s=0.2)))
    assert table == [
        ["peak", "extra ms", "of the step", "plan's extra ms", "rule slower by"],
        ["every_n_layers=1", "90.0 MiB", "50.00", "25.0%", "-", "-"],
        ["plan", "100.0 MiB", "40.00", "20.0%"],
        ["plan", "200.0 MiB", "20.00", "10.0%"],
        ["nearly", "210.0 MiB", "20.00", "10.0%", "20.00", "0.00 ms (0.0%)"],
        ["every_n_layers=2", "250.0 MiB", "25.00", "12.5%", "20.00", "5.00 ms (2.5%)"],
        ["plan", "2.00 GiB", "0.00", "0.0%"],
        ["all kept", "2.00 GiB", "0.00", "0.0%", "0.00", "0.00 ms (0.0%)"],
        ["The plain step takes 200.0 ms. Beside a rule stands the best of these plans that"],
        ["needs no more memory."],
    ]


def test_without_a_time_of_the_step_there_are_no_shares():
    table = cells(frontier_table(Frontier(PLANS, RULES, step_s=0.0)))
    assert table[4] == ["every_n_layers=2", "250.0 MiB", "25.00", "-", "20.00", "5.00 ms (-)"]
