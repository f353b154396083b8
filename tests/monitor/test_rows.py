"""Exactly one row per optimizer step, with the loss of that step in it, whatever the training loop does."""

from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, IterableDataset

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.monitor.support import (
    BACKWARD,
    METRICS,
    PEAK,
    AccumulatesByHand,
    After,
    Logged,
    TwoOptimizers,
    Validated,
    layout,
    lbfgs,
    monitored,
    quiet,
    read,
    rows_of,
    samples,
)
from tests.support import Block, batches, trainer

FULL = "epoch loss monitor"  # a row that the Trainer writes the loss in
ALONE = "monitor"  # one that it writes nothing in


def expected(steps, log_every):
    return [(step, ALONE if (step + 1) % log_every else FULL) for step in steps]


class Endless(IterableDataset):
    """Batches, without a length that is known beforehand."""

    def __init__(self, count=5):
        self.count = count

    def __iter__(self):
        return iter(torch.ones(self.count, 8))


# ---------------------------------------------------------------- plain, accumulated, by hand


@pytest.mark.parametrize("log_every", [1, 2, 50])
@pytest.mark.parametrize("make", [Logged, TwoOptimizers, AccumulatesByHand, lbfgs])
def test_each_step_has_one_row_at_the_step_of_its_loss(make, log_every, tmp_path):
    rows = rows_of(make(), tmp_path, log_every_n_steps=log_every)
    assert layout(rows) == expected(range(6), log_every)
    assert [samples(row) for row in rows] == [4] * 6


@pytest.mark.parametrize("log_every", [1, 2, 50])
@pytest.mark.parametrize(("accumulate", "groups"), [(2, [8, 8, 8, 4]), (3, [12, 12, 4])])
def test_accumulated_batches_have_one_row_together(accumulate, groups, log_every, tmp_path):
    settings = {"accumulate_grad_batches": accumulate, "log_every_n_steps": log_every, "max_epochs": 2}
    rows = rows_of(Logged(), tmp_path, data=batches(7), **settings)
    assert layout(rows) == expected(range(2 * len(groups)), log_every)
    assert [samples(row) for row in rows] == 2 * groups


def test_the_row_of_a_step_by_hand_without_optimizer_has_no_time_of_it(tmp_path):
    rows = rows_of(AccumulatesByHand(), tmp_path)
    assert [row["time/optimizer_ms"] > 0 for row in rows] == [False, True] * 3


def test_accumulation_that_changes_by_epoch_keeps_one_row_per_step(tmp_path):
    schedule = GradientAccumulationScheduler({0: 1, 1: 4, 2: 3})
    rows = rows_of(Logged(), tmp_path, [quiet(), schedule], log_every_n_steps=1, max_epochs=3)
    assert layout(rows) == expected(range(10), 1)
    assert [samples(row) for row in rows] == [4] * 6 + [16, 8] + [12, 12]


def test_recompute_fills_the_same_columns(tmp_path):
    rows = rows_of(Logged(), tmp_path, [ActivationCheckpointing()], log_every_n_steps=1)
    assert layout(rows) == expected(range(6), 1)
    assert all(row["time/recompute_ms"] > 0 and row["memory/avoided_MiB"] > 0 for row in rows)
    plain = rows_of(Logged(), tmp_path / "plain", log_every_n_steps=1)
    assert all(row["time/recompute_ms"] == row["memory/avoided_MiB"] == 0 for row in plain)


def test_the_loss_in_the_row_is_that_of_the_step(tmp_path):
    losses = []

    class Told(Logged):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    rows = rows_of(Told(), tmp_path, log_every_n_steps=1)
    assert [row["loss"] for row in rows] == losses


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize("log_every", [1, 2, 50])
def test_validation_inside_and_at_the_end_of_an_epoch_moves_no_row(log_every, tmp_path):
    data = {"train_dataloaders": batches(5), "val_dataloaders": batches(2)}
    for interval, validated in ((2, [1, 3, 6, 8]), (1.0, [4, 9]), (5, [4, 9])):
        logger = CSVLogger(tmp_path, version=str(interval))
        settings = {"log_every_n_steps": log_every, "max_epochs": 2, "val_check_interval": interval}
        trainer([quiet()], logger=logger, **settings).fit(Validated(), **data)
        steps = expected(range(10), log_every) + [(step, "epoch val") for step in validated]
        assert layout(read(logger)) == sorted(steps, key=lambda row: (row[0], "val" in row[1]))


def test_validation_in_the_middle_of_a_group_of_batches_moves_no_row(tmp_path):
    logger = CSVLogger(tmp_path)
    settings = {"log_every_n_steps": 1, "accumulate_grad_batches": 2, "val_check_interval": 3}
    trainer([quiet()], logger=logger, **settings).fit(Validated(), batches(6), batches(1))
    rows = read(logger)
    assert layout(rows) == [(0, FULL), (1, "epoch val"), (1, FULL), (2, FULL), (2, "epoch val")]
    assert [samples(row) for row in monitored(rows)] == [8, 8, 8]


def test_metrics_of_an_epoch_have_a_row_of_their_own(tmp_path):
    class Epoch(Logged):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss, on_step=False, on_epoch=True)
            return loss

    for log_every in (1, 50):
        rows = rows_of(Epoch(), tmp_path / str(log_every), data=batches(3), log_every_n_steps=log_every, max_epochs=2)
        steps = expected(range(6), log_every)
        assert layout(rows) == [*steps[:3], (2, "epoch mean"), *steps[3:], (5, "epoch mean")]


# ---------------------------------------------------------------- every n-th step


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_nth_step_has_a_row_and_nothing_is_measured_in_the_others(every, accumulate, tmp_path):
    counted = []

    class Watched(Logged):
        def training_step(self, batch, batch_idx):
            counted.append(_get_current_dispatch_mode() is not None)
            return super().training_step(batch, batch_idx)

    settings = {"log_every_n_steps": 1, "accumulate_grad_batches": accumulate, "max_epochs": 2}
    rows = rows_of(Watched(), tmp_path, [quiet(every_n_steps=every)], batches(5 * accumulate), **settings)
    measured = [(step + 1) % every == 0 for step in range(10)]
    assert layout(rows) == [(step, FULL if measured[step] else "epoch loss") for step in range(10)]
    assert [samples(row) for row in monitored(rows)] == [4 * accumulate] * sum(measured)
    steps = [any(counted[step * accumulate : (step + 1) * accumulate]) for step in range(10)]
    assert [steps[step] for step in range(10) if measured[step]][:2] == [True, True]  # counted closely at first
    assert not any(steps[step] for step in range(10) if not measured[step])


def test_every_nth_step_and_the_trainers_own_rhythm_go_together(tmp_path):
    rows = rows_of(Logged(), tmp_path, [quiet(every_n_steps=2)], log_every_n_steps=3)
    assert layout(rows) == [(1, ALONE), (2, "epoch loss"), (3, ALONE), (5, FULL)]


def test_with_fewer_steps_than_n_there_is_no_row(tmp_path):
    rows = rows_of(Logged(), tmp_path, [quiet(every_n_steps=7)], log_every_n_steps=1)
    assert layout(rows) == [(step, "epoch loss") for step in range(6)]


# ---------------------------------------------------------------- steps that are not like the others


def test_a_step_without_loss_has_a_row_without_what_backward_tells(tmp_path):
    class Skips(Logged):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    rows = rows_of(Skips(), tmp_path, data=batches(3), log_every_n_steps=1)
    assert layout([rows[0], rows[2]]) == [(0, FULL), (2, FULL)]
    assert rows[1].keys() == METRICS - BACKWARD | {"epoch", "loss", "step"}
    assert rows[1]["step"] == 1
    assert rows[1]["time/backward_ms"] == 0


def test_a_batch_of_none_has_no_row_and_moves_no_other(tmp_path):
    class Holes(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(4, 8), None, torch.ones(4, 8), torch.ones(4, 8)])

        def __len__(self):
            return 4

    class Heard(Logged):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.logger.log_metrics({"mine": 1.0}, self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    logger = CSVLogger(tmp_path)
    data = DataLoader(Holes(), batch_size=None)
    trainer([quiet()], logger=logger, log_every_n_steps=1).fit(Heard(), data)
    rows = read(logger)
    assert [int(row["step"]) for row in monitored(rows)] == [0, 2, 3]
    assert [int(row["step"]) for row in rows if "mine" in row] == [0, 1, 2, 3]


def test_a_last_smaller_batch_is_told_in_its_own_row(tmp_path):
    data = DataLoader(torch.randn(10, 8), batch_size=4)
    rows = rows_of(Logged(), tmp_path, data=data, max_epochs=3, log_every_n_steps=1)
    assert [samples(row) for row in rows] == [4, 4, 2] * 3
    assert rows[8]["memory/saved_MiB"] == pytest.approx(rows[6]["memory/saved_MiB"] / 2, rel=0.02)
    assert rows[8]["memory/peak_MiB"] < rows[6]["memory/peak_MiB"]


def test_a_compiled_step_has_a_row_without_what_cannot_be_seen(tmp_path):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), *[torch.compile(Block(), backend="aot_eager") for _ in range(2)])
    rows = rows_of(Logged(model), tmp_path, data=batches(2), log_every_n_steps=1)
    assert [row.keys() for row in rows] == 2 * [METRICS - BACKWARD - PEAK | {"epoch", "loss", "step"}]


def test_the_rest_of_an_epoch_that_is_skipped_has_no_rows(tmp_path):
    class Skips(Logged):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    rows = rows_of(Skips(), tmp_path, data=batches(4), log_every_n_steps=1, max_epochs=2)
    assert layout(rows) == expected(range(6), 1)
    assert [samples(row) for row in rows] == [4] * 6
    assert all(row["time/step_ms"] >= row["time/data_ms"] + row["time/forward_ms"] for row in rows)


def test_batches_before_a_skipped_one_of_their_group_are_not_told_as_the_next_step(tmp_path):
    class Skips(Logged):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    settings = {"log_every_n_steps": 1, "accumulate_grad_batches": 2, "max_epochs": 2}
    rows = rows_of(Skips(), tmp_path, data=batches(4), **settings)
    assert layout(rows) == expected(range(3), 1)
    assert [samples(row) for row in rows] == [8, 8, 8]  # gradients of the third batch were zeroed, not stepped with


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("log_every", [1, 50])
def test_batches_that_are_fetched_ahead_keep_their_steps(log_every, tmp_path):
    data = DataLoader(Endless(10), batch_size=4)
    rows = rows_of(Logged(), tmp_path, data=data, log_every_n_steps=log_every, max_epochs=2)
    assert layout(rows) == expected(range(6), log_every)
    assert [samples(row) for row in rows] == [4, 4, 2] * 2


def test_batches_that_are_fetched_ahead_are_accumulated_until_the_last(tmp_path):
    data = DataLoader(Endless(10), batch_size=2)
    settings = {"log_every_n_steps": 1, "accumulate_grad_batches": 3, "max_epochs": 2}
    rows = rows_of(Logged(), tmp_path, [quiet(every_n_steps=2)], data, **settings)
    assert layout(rows) == [(0, "epoch loss"), (1, FULL), (2, "epoch loss"), (3, FULL)]
    assert [samples(row) for row in monitored(rows)] == [4, 4]


class TakesTheIterator(Logged):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(self.model, batch)
        self.log("loss", loss, batch_size=len(batch))
        return loss


def test_a_step_that_takes_its_batch_itself_has_a_row(tmp_path):
    rows = rows_of(TakesTheIterator(), tmp_path, data=batches(3), log_every_n_steps=1, max_epochs=2)
    assert [int(row["step"]) for row in rows] == list(range(6))
    assert all(row.keys() >= METRICS - {"time/samples_per_s"} | {"loss"} for row in rows)
    assert all(row["time/step_ms"] >= row["time/data_ms"] + row["time/forward_ms"] for row in rows)


def test_a_step_that_takes_its_batch_itself_is_told_with_that_batch_or_none(tmp_path):
    data = DataLoader(torch.randn(10, 8), batch_size=4)
    rows = rows_of(TakesTheIterator(), tmp_path, data=data, log_every_n_steps=1, max_epochs=2)
    told = [samples(row) if "time/samples_per_s" in row else None for row in rows]
    assert all(count in (None, true) for count, true in zip(told, [4, 4, 2] * 2, strict=True)), told


@pytest.mark.parametrize(("limit", "steps"), [(3, 3), (0.5, 3), (0, 0)])
def test_limited_epochs_have_rows_of_their_steps(limit, steps, tmp_path):
    logger = CSVLogger(tmp_path)
    settings = {"limit_train_batches": limit, "log_every_n_steps": 1, "max_epochs": 2}
    trainer([quiet()], logger=logger, **settings).fit(Logged(), batches(6))
    if steps:
        assert layout(read(logger)) == expected(range(2 * steps), 1)


def test_loaders_that_are_made_anew_in_every_epoch_keep_steps(tmp_path):
    settings = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "log_every_n_steps": 1}
    assert layout(rows_of(Logged(), tmp_path, data=batches(2), **settings)) == expected(range(6), 1)


# ---------------------------------------------------------------- short, stopped, repeated, resumed


def test_a_fast_dev_run_trains_and_is_summed_up_without_files(tmp_path):
    monitor = quiet()
    loop = trainer([monitor], logger=CSVLogger(tmp_path), fast_dev_run=2)
    loop.fit(Logged(), batches(6))
    assert loop.global_step == monitor.summary().steps == 2
    assert list(tmp_path.rglob("*.csv")) == []


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"max_steps": 4, "max_epochs": 2}, 4), ({"max_time": timedelta(milliseconds=1)}, 1)],
    ids=["max_steps", "max_time"],
)
def test_a_run_that_ends_inside_an_epoch_has_all_its_rows(settings, steps, tmp_path):
    assert [step for step, _ in layout(rows_of(Logged(), tmp_path, **settings))] == list(range(steps))


def test_a_run_that_is_stopped_early_has_all_its_rows(tmp_path):
    logger = CSVLogger(tmp_path)
    stop = EarlyStopping("val", patience=1, mode="max", min_delta=1e9)
    loop = trainer([quiet(), stop], logger=logger, max_epochs=9, log_every_n_steps=1, val_check_interval=2)
    loop.fit(Validated(), batches(4), batches(1))
    assert layout(read(logger)) == [(0, FULL), (1, FULL), (1, "epoch val"), (2, FULL), (3, FULL), (3, "epoch val")]


@pytest.mark.parametrize("log_every", [1, 50])
def test_a_second_fit_of_the_same_trainer_goes_on_with_the_steps(log_every, tmp_path):
    monitor, logger, module = quiet(), CSVLogger(tmp_path), Logged()
    loop = trainer([monitor], logger=logger, log_every_n_steps=log_every)
    loop.fit(module, batches(3))
    loop.fit_loop.max_epochs = 2
    loop.fit(module, batches(3))
    assert layout(read(logger)) == expected(range(6), log_every)
    assert monitor.summary().steps == 3


def test_a_monitor_can_be_passed_from_one_trainer_to_the_next(tmp_path):
    monitor, module = quiet(), Logged()
    for run in ("first", "second"):
        assert layout(rows_of(module, tmp_path / run, [monitor], log_every_n_steps=1)) == expected(range(6), 1)
        assert monitor.summary().steps == 6


class Breaks(Validated):
    """Fails at its seventh batch."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 2:
            raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("saving", "resumes_at"),
    [
        ({"every_n_train_steps": 6}, 6),  # after the second batch of the second epoch
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, 4),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, 4),  # at the end of validation
    ],
    ids=["inside of an epoch", "at its end", "after validation"],
)
@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_goes_on_with_the_steps(saving, resumes_at, every, tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="saved", save_top_k=-1, **saving)
    settings = {"max_epochs": 3, "log_every_n_steps": 1, "enable_checkpointing": True}
    loop = trainer([quiet(every_n_steps=every), saver], logger=CSVLogger(tmp_path, version="first"), **settings)
    with pytest.raises(RuntimeError, match="broken"):
        loop.fit(Breaks(), batches(4), batches(1))
    first = monitored(read(loop.logger))
    assert [int(row["step"]) for row in first] == list(range(every - 1, 6, every))

    second = CSVLogger(tmp_path, version="second")
    loop = trainer([quiet(every_n_steps=every)], logger=second, **settings)
    loop.fit(Validated(), batches(4), batches(1), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    rows = read(second)
    losses = [int(row["step"]) for row in rows if "loss" in row]
    assert losses == list(range(resumes_at, 12))
    assert [int(row["step"]) for row in monitored(rows)] == [step for step in losses if (step + 1) % every == 0]
    assert all("loss" in row for row in monitored(rows))


def test_a_run_resumed_inside_a_group_of_batches_tells_what_it_has_done_itself(tmp_path):
    settings = {"log_every_n_steps": 1, "accumulate_grad_batches": 2, "max_epochs": 1}

    def save(loop, module, batch_idx):
        if batch_idx == 2:
            loop.save_checkpoint(tmp_path / "saved.ckpt")

    trainer([After(save)], **settings).fit(Logged(), batches(6))
    logger = CSVLogger(tmp_path)
    trainer([quiet()], logger=logger, **settings).fit(Logged(), batches(6), ckpt_path=tmp_path / "saved.ckpt")
    rows = read(logger)
    assert layout(rows) == expected([1, 2], 1)
    assert [samples(row) for row in rows] == [4, 8]


# ---------------------------------------------------------------- others who log


def test_several_monitors_log_once_and_say_so(tmp_path):
    with pytest.warns(UserWarning, match="several StepMonitors"):
        rows = rows_of(Logged(), tmp_path, [quiet(), quiet()], log_every_n_steps=1)
    assert layout(rows) == expected(range(6), 1)


def test_a_monitor_of_ones_own_is_the_only_one_beside_activation_checkpointing(tmp_path):
    for callbacks in ([quiet(), ActivationCheckpointing()], [ActivationCheckpointing(), quiet()]):
        rows = rows_of(Logged(), tmp_path, callbacks, log_every_n_steps=1)
        assert layout(rows) == expected(range(6), 1)


def test_what_the_user_logs_himself_in_a_step_stays_as_it_is(tmp_path):
    class Writes(Logged):
        def training_step(self, batch, batch_idx):
            self.logger.log_metrics({"mine": float(batch_idx)}, step=self.global_step)
            return super().training_step(batch, batch_idx)

    for log_every in (1, 50):
        rows = rows_of(Writes(), tmp_path / str(log_every), log_every_n_steps=log_every)
        steps = [row for step in range(6) for row in [(step, "mine"), *expected([step], log_every)]]
        assert layout(rows) == steps
        assert [row["mine"] for row in rows if "mine" in row] == list(range(6))


def test_what_the_user_logs_himself_at_the_end_of_a_step_does_not_take_the_row_of_the_loss(tmp_path):
    class Writes(Logged):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.logger.log_metrics({"mine": 1.0}, step=self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    rows = rows_of(Writes(), tmp_path, log_every_n_steps=1)
    assert layout(rows) == [row for step in range(6) for row in [(step, "mine"), (step, FULL)]]


@pytest.mark.parametrize("order", [1, -1], ids=["before", "after"])
def test_other_callbacks_that_log_at_a_step_do_not_take_the_row_of_the_loss(order, tmp_path):
    class Scheduled(Logged):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "interval": "step"}]

    def log(loop, module, batch_idx):  # as `DeviceStatsMonitor` does
        loop.logger.log_metrics({"device": 1.0}, step=loop.fit_loop.epoch_loop._batches_that_stepped)

    callbacks = [quiet(), LearningRateMonitor(), After(log)][::order]
    rows = rows_of(Scheduled(), tmp_path, callbacks, log_every_n_steps=1)
    assert layout(rows) == [row for step in range(6) for row in [(step, "lr-SGD"), (step, "device"), (step, FULL)]]


def test_metrics_without_a_step_are_left_alone(tmp_path):
    class Writes(Logged):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.logger.log_metrics({"mine": 1.0})

    rows = rows_of(Writes(), tmp_path, data=batches(2), log_every_n_steps=1)
    assert [names for _, names in layout(rows)] == ["mine", FULL, "mine", FULL]


def test_a_step_of_the_users_own_choice_moves_the_loss_but_no_row(tmp_path):
    class Epochs(Logged):
        def training_step(self, batch, batch_idx):
            self.log("step", float(self.current_epoch + 100))
            return super().training_step(batch, batch_idx)

    rows = rows_of(Epochs(), tmp_path, data=batches(3), log_every_n_steps=1)
    assert layout(rows) == [row for step in range(3) for row in [(100, "loss"), (step, ALONE)]]


def test_the_callbacks_of_one_trainer_may_log_with_the_names_of_the_trainer(tmp_path):
    class Own(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.log("own", float(batch_idx))

    for callbacks in ([quiet(), Own()], [Own(), quiet()]):
        rows = rows_of(Logged(), tmp_path, callbacks, log_every_n_steps=1)
        assert layout(rows) == [(step, "epoch loss monitor own") for step in range(6)]


def test_n_must_be_a_number_of_steps():
    for wrong in (0, -1, True, 1.0, "2", None):
        with pytest.raises(Exception, match="every_n_steps"):
            StepMonitor(every_n_steps=wrong)
