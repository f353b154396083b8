"""Budgets with offload: what cannot be rehearsed, batches that grow, copies that were not under way, slow links."""

import lightning.pytorch as pl
import pytest
import torch
from test_budget import DEEP, MIB, MOVING, STEPS, assert_same, budgeted, clean, train, treatments

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.treatment import Treatment
from tests.planning.models import Trained, vectors

pytestmark = pytest.mark.usefixtures("sim")

MEASURED = 2  # the third step shows what memory is really taken
LAYERS = 12


@pytest.fixture
def expected(sim):
    """The plain run."""
    return train(DEEP)


def moves(plan):
    return any(layer.treatment.moves for layer in plan.layers)


def assert_nothing_is_held(sim):
    torch.accelerator.synchronize()
    assert sim.pinned_bytes()[0] == 0


# ---------------------------------------------------------------- steps that cannot be rehearsed


class Reads(Trained):
    """Reads its loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        assert loss.item() > 0
        return loss


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_a_step_that_reads_numbers_may_move(sim, expected, share):
    torch.manual_seed(0)
    limit = int(share * max(expected.peaks))
    run = budgeted(DEEP, limit, MOVING, module=Reads(DEEP.model()))
    assert_same(run, expected)
    assert not run.plans[-1].rehearsed
    assert max(run.peaks) <= limit
    assert moves(run.plans[-1]) is (share == 0.3)  # else recompute alone is enough, and faster
    assert_nothing_is_held(sim)


# ---------------------------------------------------------------- batches that grow


LEAST = "Training goes on with the least memory that can be had"


def test_batches_that_grow_row_by_row_until_nothing_fits(sim, recwarn):
    sizes = [4096] * 6 + [5100, 5500, 5900, 6300, 6700, 7100]
    torch.manual_seed(1)
    batches = [vectors(rows) for rows in sizes]
    plain = train(DEEP, batches=batches)
    clean()
    limit = torch.accelerator.memory_allocated() + int(10.4 * MIB)  # also for what others have left there
    run = budgeted(DEEP, limit, MOVING, batches=batches)
    assert_same(run, plain)
    assert all(map(moves, run.plans))
    held = [plan.peak_bytes <= limit for plan in run.plans]
    least = held.index(False)
    assert not any(held[least:])
    assert sizes[least] >= 6300, "more would have fit"
    assert max(run.peaks[:least]) <= limit
    assert max(run.peaks) <= run.plans[-1].peak_bytes
    said = [str(each.message) for each in recwarn if LEAST in str(each.message)]
    assert len(said) == 1
    assert_nothing_is_held(sim)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("share", [0.269, 0.277, 0.285])
def test_copies_that_were_not_under_way_make_no_room(sim, expected, share):
    limit = int(share * max(expected.peaks))
    run = budgeted(DEEP, limit, MOVING)
    assert_same(run, expected)
    assert moves(run.plans[0])
    assert max(run.peaks[MEASURED:]) <= limit
    assert run.plans[-1].peak_bytes <= limit
    assert_nothing_is_held(sim)


class Seconds(pl.Callback):
    """What every step takes on the device's clock."""

    def __init__(self, clock):
        self.clock = clock
        self.steps = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch.accelerator.synchronize()
        self.start = self.clock.now()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        torch.accelerator.synchronize()
        self.steps.append(self.clock.now() - self.start)


@pytest.mark.parametrize("first", [LAYERS, LAYERS // 2], ids=["all move", "half of them move"])
def test_a_slow_link_is_left_alone_once_times_are_measured(sim, monkeypatch, first):
    plan = Planner.plan

    def begin(planner, limit):
        if planner._measured:
            return plan(planner, limit)
        kept = [Treatment.KEEP] * (LAYERS - first)
        return planner.describe([Treatment.OFFLOAD] * first + kept, limit)

    def timed(*callbacks):
        clean()
        rate = 5e7  # a layer's copy takes ten times as long as its forward
        sim.clock.configure(out_bytes_per_s=rate, in_bytes_per_s=rate, memory_bytes_per_s=1e9)
        seconds = Seconds(sim.clock)
        run = train(DEEP, [*callbacks, seconds], DEEP.batches(STEPS + 2))
        return run, seconds.steps

    plain, seconds = timed()
    monkeypatch.setattr(Planner, "plan", begin)
    clean()
    limit = torch.accelerator.memory_allocated() + 26 * MIB  # also for what others have left there
    run, budgeted_seconds = timed(ActivationCheckpointing(memory_budget=limit, offload=MOVING))
    assert_same(run, plain)
    assert treatments(run.plans[0]) == ["offload"] * first + ["keep"] * (LAYERS - first)
    final = run.plans[-1]
    assert final.measured
    assert not moves(final)
    assert max(run.peaks[-2:]) <= limit
    assert final.step_s == pytest.approx(seconds[-1], rel=0.02), "waits were taken for work"
    assert final.extra_s == pytest.approx(budgeted_seconds[-1] - seconds[-1], rel=0.1)
    assert_nothing_is_held(sim)
