"""What comes with Lightning, used beside the callback as its users do: the same results as without it."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from tests.compositions import assert_same, assert_same_values, fitted, leftovers
from tests.support import Block, Training, assert_equal, batches, trainer
from tests.treatments import TREATMENTS

EVERY = pytest.mark.parametrize("treatment", TREATMENTS)
TWO = pytest.mark.parametrize("treatment", ["recompute", "matmul"])


class Logged(Training):
    """Logs its losses, and has settings to tune and moments to restore."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, 2

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Validated(Logged):
    def validation_step(self, batch, batch_idx):
        self.log("worth", self.model(batch).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(batch)


class Loads(Logged):
    def train_dataloader(self):
        return DataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(7)), batch_size=self.batch_size)


# ---------------------------------------------------------------- tuning


@TWO
def test_the_size_of_batches_that_is_found_is_the_same_and_the_model_is_put_back(treatment, tmp_path):
    def finders():
        return [BatchSizeFinder(steps_per_trial=2, max_trials=3, init_val=4)]

    settings = {"limit_train_batches": 2, "default_root_dir": tmp_path}
    got, plain = (tuned(how, finders, settings) for how in (treatment, None))
    assert got.module.batch_size == plain.module.batch_size == 16
    assert_equal(got.run, plain.run)
    assert_same_values(got.module, plain.module)


@TWO
def test_the_learning_rate_that_is_suggested_is_the_same_and_the_model_is_put_back(treatment, tmp_path):
    def finders():
        return [LearningRateFinder(num_training_steps=20, early_stop_threshold=None)]

    settings = {"limit_train_batches": 20, "default_root_dir": tmp_path}
    got, plain = (tuned(how, finders, settings) for how in (treatment, None))
    found, expected = (run.callback(LearningRateFinder).optimal_lr for run in (got, plain))
    assert found.results == expected.results
    assert len(set(found.results["loss"])) > 10
    assert got.module.lr == plain.module.lr
    assert_equal(got.run, plain.run)
    assert_same_values(got.module, plain.module)


def tuned(treatment, callbacks, settings):
    """A fit on the module's own data, every step of which is recomputed, trials included."""
    result = fitted(Loads, treatment, callbacks, own_data=True, **settings)
    assert result.replayed == (result.ran if treatment else 0)
    assert result.ran > 4 * settings["limit_train_batches"]  # layers
    return result


def test_a_tuner_finds_the_same(tmp_path):
    found, states = [], []
    for options in (None, {}):
        torch.manual_seed(0)
        module = Loads()
        callbacks = [] if options is None else [ActivationCheckpointing(**options)]
        loop = trainer(callbacks, default_root_dir=tmp_path, limit_train_batches=20)
        tuner = Tuner(loop)
        size = tuner.scale_batch_size(module, max_trials=2, steps_per_trial=2)
        finder = tuner.lr_find(module, num_training=20, early_stop_threshold=None)
        loop.fit(module)
        found.append((size, finder.results, module.lr))
        states.append(module)
        assert leftovers(module) == []
    assert found[0] == found[1]
    assert_same_values(*states)


# ---------------------------------------------------------------- checkpoints, and when to stop


@pytest.mark.parametrize(
    ("saved_with", "resumed_with"), [(None, "recompute"), ("recompute", None), ("recompute", "matmul"), (None, None)]
)
def test_training_goes_on_from_the_middle_of_an_epoch_with_and_without_the_callback(saved_with, resumed_with, tmp_path):
    def train(treatment, folder, **settings):
        def callbacks():
            return [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")]

        return fitted(Validated, treatment, callbacks, batches(4), enable_checkpointing=True, **settings)

    train(saved_with, tmp_path / "first", max_steps=2)
    checkpoint = tmp_path / "first" / "step=2.ckpt"
    saved = torch.load(checkpoint, weights_only=False)
    assert [key for key in saved["callbacks"] if "Checkpoint" not in key] == []
    got = train(resumed_with, tmp_path / "rest", max_epochs=2, ckpt_path=checkpoint)
    plain = train(None, tmp_path / "plain", max_epochs=2, ckpt_path=checkpoint)
    assert got.loop.global_step == 8
    assert got.replayed == (got.ran if resumed_with else 0)
    assert_equal(got.run, plain.run)


@TWO
def test_training_stops_at_the_same_step_with_the_same_checkpoints(treatment, tmp_path):
    def callbacks():
        return [
            EarlyStopping("loss_epoch", patience=0, mode="max"),
            ModelCheckpoint(monitor="worth", filename="{epoch}-{worth:.8f}", save_top_k=2),
            GradientAccumulationScheduler({0: 1, 1: 2}),
            LambdaCallback(on_train_batch_end=lambda trainer, *rest: seen.append(trainer.global_step)),
            Timer("00:01:00:00"),
        ]

    seen: list[int] = []
    settings = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 5}
    got, plain = assert_same(Validated, treatment, callbacks, batches(4), validation=batches(2), **settings)
    assert got.loop.current_epoch == plain.loop.current_epoch < 5
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    names = [
        sorted(path.rpartition("/")[2] for path in run.callback(ModelCheckpoint).best_k_models) for run in (got, plain)
    ]
    assert [re.sub("-v1", "", name) for name in names[0]] == [re.sub("-v1", "", name) for name in names[1]]
    assert len(names[0]) == 2


# ---------------------------------------------------------------- evaluation before and after


class Writes(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, *rest):
        self.written.append(prediction)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written += predictions


@EVERY
def test_evaluation_before_and_after_two_fits_is_the_same(treatment):
    def evaluate(options, more):
        torch.manual_seed(0)
        module, writes, values = Validated(), Writes(), []
        loop = trainer([*options, writes], **more)
        for epochs in (1, 2, None):
            values += [loop.validate(module, batches(2), verbose=False), loop.test(module, batches(2), verbose=False)]
            loop.predict(module, batches(2), return_predictions=False)
            assert leftovers(module) == []
            if epochs is not None:
                loop.fit_loop.max_epochs = epochs
                loop.fit(module, batches(2), batches(1))
        return values, writes.written, module

    arguments, more = TREATMENTS[treatment]
    values, written, module = evaluate([ActivationCheckpointing(**arguments)], more)
    expected = evaluate([], {})
    assert values == expected[0]
    assert len({str(value) for value in values[::2]}) == 3
    assert len(written) == len(expected[1]) == 3 * 4
    assert all(map(torch.equal, written, expected[1]))
    assert_same_values(module, expected[2])


# ---------------------------------------------------------------- summaries, profilers, statistics


@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_the_summary_of_the_model_is_the_same(summary, capsys, caplog):
    said = []
    for treatment in (None, "recompute"):
        fitted(Validated, treatment, lambda: [summary(max_depth=-1)], enable_model_summary=True)
        table = pl.utilities.model_summary.summarize(Validated(), max_depth=-1)
        said.append(capsys.readouterr().out + str(table))
    assert "linear" in said[0]
    assert "Recompute" not in said[1]
    if summary is RichModelSummary:
        assert [line for line in said[1].splitlines() if "model" in line] == [
            line for line in said[0].splitlines() if "model" in line
        ]


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_profilers_work(profiler, tmp_path):
    got, _ = assert_same(
        Validated, "recompute", profiler=profiler, default_root_dir=tmp_path, logger=CSVLogger(tmp_path)
    )
    assert got.loop.profiler.summary().startswith("FIT Profiler Report")


@TWO
def test_monitors_of_the_device_and_of_learning_rates_log_the_same_metrics(treatment, tmp_path):
    pytest.importorskip("psutil")
    logged = {}
    for how in (None, treatment):
        folder = tmp_path / str(how)
        logger = CSVLogger(folder, version="")
        callbacks = [DeviceStatsMonitor(cpu_stats=True), LearningRateMonitor()]
        run = fitted(Validated, how, lambda callbacks=callbacks: callbacks, logger=logger, log_every_n_steps=1)
        header = (folder / "lightning_logs" / "metrics.csv").read_text().splitlines()[0].split(",")
        logged[how] = {name for name in header if not name.startswith(("memory/", "time/"))}, run
    assert logged[None][0] == logged[treatment][0]
    assert any("DeviceStatsMonitor" in name for name in logged[None][0])
    assert_equal(logged[treatment][1].run, logged[None][1].run)


# ---------------------------------------------------------------- pruning


@pytest.mark.parametrize(
    ("treatment", "lottery"), [*((treatment, False) for treatment in TREATMENTS), ("recompute", True)]
)
def test_pruned_layers_are_exact(lottery, treatment):
    def callbacks():
        return [
            ModelPruning(
                "l1_unstructured",
                parameters_to_prune=None,
                amount=0.3,
                use_lottery_ticket_hypothesis=lottery,
                verbose=0,
            )
        ]

    got, plain = assert_same(Validated, treatment, callbacks, max_epochs=3)
    weight = got.module.model[1].linear.weight
    assert 0 < (weight == 0).sum() < weight.numel()
    assert not hasattr(got.module.model[1].linear, "weight_orig")
    assert "model.1.linear.weight_orig" in got.run.gradients[-1]
    assert torch.equal(weight, plain.module.model[1].linear.weight)


@TWO
def test_pruning_of_whole_rows_in_every_other_epoch_is_exact(treatment):
    def callbacks():
        rows = {"parameter_names": ["weight"], "use_global_unstructured": False, "pruning_dim": 0, "pruning_norm": 2}
        return [ModelPruning("ln_structured", amount=0.25, apply_pruning=lambda epoch: epoch % 2 == 0, **rows)]

    def make():
        model = nn.Sequential(*[Block() for _ in range(3)])
        for block in model:
            block.norm = nn.LayerNorm(8, elementwise_affine=False)  # it has no rows
        return Training(model)

    got, _ = assert_same(make, treatment, callbacks, max_epochs=3)
    assert (got.module.model[0].linear.weight == 0).all(1).any()
