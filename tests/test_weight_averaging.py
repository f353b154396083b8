"""Averages of weights, made by Lightning or by hand: copies of a model whose layers are recomputed, and swaps of it."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.compositions import assert_same, assert_same_values, fitted, leftovers
from tests.support import Training, batches, blocks
from tests.treatments import TREATMENTS


class Validated(Training):
    """Has statistics to update, and notes what it is worth in every validation."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(blocks(3), nn.BatchNorm1d(8), nn.Linear(8, 8)))
        self.worth: list[Any] = []

    def validation_step(self, batch, batch_idx):
        self.worth.append(self.model(batch).square().mean())


class EveryStep(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None


AVERAGES = {
    # Its last epoch runs the layers forward only, for the statistics of the average.
    "stochastic": (lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1), 3 / 4),
    "every step": (EveryStep, 1),
    "every epoch": (WeightAveraging, 1),
    "exponential": (lambda: EMAWeightAveraging(decay=0.5), 1),
    "exponential from a step on": (lambda: EMAWeightAveraging(decay=0.5, update_starting_at_step=4), 1),
    "without statistics": (lambda: EMAWeightAveraging(use_buffers=False), 1),
}


def assert_same_average(name: str, treatment: str, ours_last: bool = False) -> None:
    __tracebackhide__ = True
    make, replays = AVERAGES[name]
    settings = {"validation": batches(2), "max_epochs": 3}
    got, plain = assert_same(Validated, treatment, lambda: [make()], ours_last=ours_last, replays=replays, **settings)
    assert len(got.module.worth) == len(plain.module.worth) >= 6
    assert all(map(torch.equal, got.module.worth, plain.module.worth))
    averages = got.callback((StochasticWeightAveraging, WeightAveraging))
    assert leftovers(got.module) == leftovers(averages._average_model) == []
    assert getattr(averages, "n_averaged", None) or averages._average_model.n_averaged > 0


@pytest.mark.parametrize(("treatment", "ours_last"), [("recompute", False), ("recompute", True), ("matmul", False)])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_and_what_they_are_worth_are_those_of_the_plain_run(name, treatment, ours_last):
    assert_same_average(name, treatment, ours_last)


@pytest.mark.parametrize("treatment", sorted(TREATMENTS.keys() - {"recompute", "matmul"}))
@pytest.mark.parametrize("name", ["stochastic", "exponential"])
def test_averages_are_those_of_the_plain_run_with_the_other_treatments(name, treatment):
    assert_same_average(name, treatment)


@pytest.mark.parametrize("resumed_with", [None, "recompute"])
@pytest.mark.parametrize("saved_with", [None, "recompute"])
def test_an_average_goes_on_from_a_checkpoint_with_and_without_the_callback(saved_with, resumed_with, tmp_path):
    def train(treatment, folder, **settings):
        def callbacks():
            return [EMAWeightAveraging(decay=0.5), ModelCheckpoint(folder, filename="saved", save_last=True)]

        return fitted(Validated, treatment, callbacks, enable_checkpointing=True, **settings)

    whole = train(None, tmp_path / "whole", max_epochs=2)
    train(saved_with, tmp_path / "half", max_epochs=1)
    got = train(resumed_with, tmp_path / "rest", max_epochs=2, ckpt_path=tmp_path / "half" / "last.ckpt")
    plain = train(None, tmp_path / "plain", max_epochs=2, ckpt_path=tmp_path / "half" / "last.ckpt")
    assert got.replayed == (got.ran if resumed_with else 0)
    assert_same_values(got.module, plain.module)
    assert got.module.state_dict().keys() == whole.module.state_dict().keys()
    saved, want = (torch.load(tmp_path / name / "last.ckpt", weights_only=False) for name in ("rest", "plain"))
    assert saved["averaging_state"] == want["averaging_state"]
    for part in ("state_dict", "current_model_state"):
        assert list(saved[part]) == list(want[part])
        assert all(torch.equal(saved[part][name], value) for name, value in want[part].items())


class AveragesByHand(Validated):
    """Copies itself when training starts, averages after every step, and is validated on the average."""

    average: AveragedModel

    def on_train_start(self):
        average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        object.__setattr__(self, "average", average)  # no submodule: its parameters are nobody's business

    def on_train_batch_end(self, *args):
        self.average.update_parameters(self.model)

    def validation_step(self, batch, batch_idx):
        self.worth.append(self.average(batch).square().mean())

    def on_train_end(self):
        update_bn([torch.ones(4, 8) * i for i in range(3)], self.average)


@pytest.mark.parametrize("treatment", ["recompute", "matmul"])
def test_an_average_by_hand_of_layers_that_are_recomputed_is_exact(treatment):
    got, plain = assert_same(AveragesByHand, treatment, validation=batches(2), max_epochs=2)
    assert all(map(torch.equal, got.module.worth, plain.module.worth))
    assert_same_values(got.module.average, plain.module.average)
    copied, original = got.module.average.module, got.module.model
    assert not torch.equal(copied[0][1].linear.weight, original[0][1].linear.weight)
    x = torch.ones(4, 8)
    assert torch.equal(copied.eval()(x), plain.module.average.module.eval()(x))


class Teaches(Training):
    """Learns from an average of itself, which is a submodule: half of the blocks have no gradients, ever."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = AveragedModel(self.model)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch + 1)
        return (self.model(batch) - target).square().mean()

    def on_train_batch_end(self, *args):
        self.teacher.update_parameters(self.model)


def test_a_teacher_that_is_an_average_is_exact_and_said_to_save_nothing():
    got, _ = assert_same(Teaches, "recompute")
    assert "4 of 8 layers were not called with gradients" in got.said
    assert "teacher.module.{1, 2, 3, 4}" in got.said


class SwapsByHand(Validated):
    """Is validated with other weights in the place of its own, and goes on with its own."""

    def on_validation_start(self):
        self.own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict({name: value * 0.5 for name, value in self.own.items()})

    def on_validation_end(self):
        self.model.load_state_dict(self.own)


def test_weights_that_are_swapped_for_validation_between_accumulated_batches_are_exact():
    got, plain = assert_same(
        SwapsByHand,
        "recompute",
        data=batches(6),
        validation=batches(1),
        val_check_interval=1,
        accumulate_grad_batches=3,
    )
    assert len(got.module.worth) == 6
    assert all(map(torch.equal, got.module.worth, plain.module.worth))
