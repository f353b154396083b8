"""StepMonitor in real Trainer runs: one true row per optimizer step, and training as without it."""

import csv
import logging
import time

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.support import Block, Training, assert_equal, batches, blocks, fit, trainer
from tests.test_callback import TwoOptimizers

MEMORY = {"memory/peak_MiB", "memory/saved_MiB", "memory/avoided_MiB"}
TIME = {"time/step_ms", "time/forward_ms", "time/backward_ms", "time/recompute_ms"}


class Logged(Training):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def rows_of(module, tmp_path, callbacks=None, data=None, **settings):
    """The rows of the CSV logger that hold our metrics, and those that hold the loss, each with its step."""
    logger = CSVLogger(tmp_path, name="run")
    loop = trainer(callbacks or [ActivationCheckpointing()], logger=logger, **settings)
    torch.manual_seed(0)
    loop.fit(module, data if data is not None else batches(6))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in table if "time/step_ms" in row], [row for row in table if "loss" in row]


def test_one_row_per_optimizer_step_at_the_step_of_the_loss(tmp_path):
    rows, losses = rows_of(Logged(), tmp_path, log_every_n_steps=1)
    assert [row["step"] for row in rows] == [row["step"] for row in losses] == list(range(6))
    assert all(row.keys() == MEMORY | TIME | {"step"} for row in rows)


def test_every_step_is_logged_whatever_the_trainer_logs(tmp_path):
    rows, losses = rows_of(Logged(), tmp_path)  # log_every_n_steps is 50
    assert len(rows) == 6
    assert losses == []


def test_a_plain_run_is_shown_by_the_monitor_alone(tmp_path):
    rows, _ = rows_of(Logged(), tmp_path, [StepMonitor()])
    assert len(rows) == 6
    assert all(row["memory/avoided_MiB"] == row["time/recompute_ms"] == 0 for row in rows)


def test_saved_and_avoided_bytes_are_those_of_the_formula_at_every_step(tmp_path):
    class Exp(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            return (-x).exp().sin().neg()  # saves exp's output for exp and sin: one storage

    def make():
        model = nn.Sequential(nn.Linear(8, 8), *[Exp() for _ in range(4)])
        return Training(model, loss=lambda model, batch: model(batch).sum())

    plain, _ = rows_of(make(), tmp_path / "plain", [StepMonitor()])
    recomputed, _ = rows_of(make(), tmp_path / "recomputed")
    row = 4 * 8 * 4 / 2**20  # one activation: 4 rows of width 8 in fp32
    rest = row + 8 / 2**20  # the batch, saved by the linear layer, and the number that Lightning divides the loss by
    assert {r["memory/saved_MiB"] for r in plain} == {4 * row + rest}
    assert {r["memory/saved_MiB"] for r in recomputed} == {4 * row + rest}  # 4 inputs instead of 4 values
    assert {r["memory/avoided_MiB"] for r in recomputed} == {4 * row}


def test_saved_plus_avoided_is_what_the_plain_run_saves(tmp_path):
    # The inputs of blocks are outputs of others, saved plainly too by the norms.
    plain, _ = rows_of(Logged(blocks(6)), tmp_path / "plain", [StepMonitor()])
    recomputed, _ = rows_of(Logged(blocks(6)), tmp_path / "recomputed")
    for with_callback, without in zip(recomputed, plain, strict=True):
        total = with_callback["memory/saved_MiB"] + with_callback["memory/avoided_MiB"]
        assert total == without["memory/saved_MiB"]
        assert with_callback["memory/saved_MiB"] < 0.6 * without["memory/saved_MiB"]


def test_the_peak_falls_once_the_first_calls_are_over(tmp_path):
    plain, _ = rows_of(Logged(blocks(6, 64)), tmp_path / "plain", [StepMonitor()], batches(6, 64, 64))
    recomputed, _ = rows_of(Logged(blocks(6, 64)), tmp_path / "recomputed", data=batches(6, 64, 64))
    assert recomputed[-1]["memory/peak_MiB"] < plain[-1]["memory/peak_MiB"]


def test_the_peak_includes_parameters_gradients_and_optimizer_state(tmp_path):
    def make():
        model = nn.Linear(128, 128, bias=False)
        return Training(model, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=False))

    rows, _ = rows_of(make(), tmp_path, [StepMonitor()], data=batches(4, size=1, width=128))
    weight = 128 * 128 * 4 / 2**20
    assert all(row["memory/peak_MiB"] > 4 * weight for row in rows)  # weight, gradient, two moments
    assert all(row["memory/peak_MiB"] < 8 * weight for row in rows)


def test_times_are_those_of_what_happened(tmp_path):
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            time.sleep(0.02)
            return self.linear(x).tanh()

    class Sleepy(Logged):
        def on_after_backward(self):
            time.sleep(0.03)

    rows, _ = rows_of(Sleepy(nn.Sequential(Slow(), Slow())), tmp_path, data=batches(3))
    for row in rows:
        assert row["time/forward_ms"] >= 40
        assert row["time/recompute_ms"] >= 40
        assert row["time/backward_ms"] >= row["time/recompute_ms"] + 30
        assert row["time/step_ms"] >= row["time/forward_ms"] + row["time/backward_ms"]
        assert row["time/forward_ms"] < 70


def test_accumulation_sums_times_and_takes_the_largest_memory(tmp_path):
    class Sleepy(Logged):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return super().training_step(batch if batch_idx % 3 == 1 else batch[:1], batch_idx)

    once, _ = rows_of(Logged(), tmp_path / "once", data=batches(1))
    rows, losses = rows_of(Sleepy(), tmp_path / "run", accumulate_grad_batches=3, log_every_n_steps=1)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in losses}) == [0, 1]
    assert all(row["time/forward_ms"] >= 60 for row in rows)
    assert all(row["memory/saved_MiB"] == once[0]["memory/saved_MiB"] for row in rows)


def test_manual_optimization_with_two_optimizers_gives_one_row_per_batch(tmp_path):
    rows, _ = rows_of(TwoOptimizers(), tmp_path)
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["time/backward_ms"] > 0 and row["time/recompute_ms"] > 0 for row in rows)
    assert all(row["time/forward_ms"] + row["time/backward_ms"] < row["time/step_ms"] for row in rows)


def test_a_step_without_loss_still_has_a_row(tmp_path):
    class Skips(Logged):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    rows, _ = rows_of(Skips(), tmp_path, data=batches(3))
    assert len(rows) == 3
    assert "memory/saved_MiB" not in rows[1]


def test_the_last_smaller_batch_has_its_own_peak_or_none(tmp_path):
    data = torch.utils.data.DataLoader(torch.randn(10, 8), batch_size=4)
    rows, _ = rows_of(Logged(), tmp_path, data=data, max_epochs=3)
    full, small = rows[6], rows[8]
    assert small["memory/saved_MiB"] == pytest.approx(full["memory/saved_MiB"] / 2, rel=0.02)
    assert "memory/peak_MiB" not in small or small["memory/peak_MiB"] < full["memory/peak_MiB"]


def test_several_loggers_get_the_same_and_tensorboard_its_charts_once(tmp_path):
    tensorboard, table = TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")
    loop = trainer([ActivationCheckpointing()], logger=[tensorboard, table])
    loop.fit(Logged(), batches(3))
    events = EventAccumulator(tensorboard.log_dir, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    assert set(events.Tags()["scalars"]) >= MEMORY | TIME
    for tag in MEMORY | TIME:
        assert [event.step for event in events.Scalars(tag)] == [0, 1, 2]
    assert len(events.Tensors("custom_scalars__config__")) == 1
    with open(f"{table.log_dir}/metrics.csv") as file:
        saved = [float(row["memory/saved_MiB"]) for row in csv.DictReader(file) if row["memory/saved_MiB"]]
    assert saved == pytest.approx([event.value for event in events.Scalars("memory/saved_MiB")])


def test_without_a_logger_it_says_so_once_and_costs_nothing(caplog):
    class Untouched(Training):
        def training_step(self, batch, batch_idx):
            assert "training_step" not in self.trainer.strategy.__dict__
            return super().training_step(batch, batch_idx)

    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer([ActivationCheckpointing()]).fit(Untouched(), batches(2))
    assert caplog.text.count("no logger") == 1


def test_several_monitors_log_once(tmp_path):
    with pytest.warns(UserWarning, match="several StepMonitors"):
        rows, _ = rows_of(Logged(), tmp_path, [StepMonitor(), StepMonitor()])
    assert len(rows) == 6


@pytest.mark.parametrize("callback", [StepMonitor, ActivationCheckpointing])
def test_monitored_training_is_that_of_the_plain_run(callback, tmp_path):
    for i, make in enumerate((Training, TwoOptimizers)):
        plain = fit(make)
        logger = CSVLogger(tmp_path, name=f"run{i}")
        assert_equal(fit(make, callbacks=[callback()], logger=logger), plain)


def test_a_torch_func_transform_outside_of_layers_works_monitored(tmp_path):
    class Physics(Logged):
        def training_step(self, batch, batch_idx):
            def energy(x):
                return self.model[0](x).square().sum()

            return torch.func.grad(energy)(batch).square().mean() + super().training_step(batch, batch_idx)

    rows, _ = rows_of(Physics(), tmp_path)
    assert len(rows) == 6


def test_compiled_steps_have_times_but_no_invented_memory(tmp_path):
    torch._dynamo.reset()
    module = Logged(nn.Sequential(nn.Linear(8, 8), *[torch.compile(Block(), backend="aot_eager") for _ in range(2)]))
    rows, _ = rows_of(module, tmp_path)
    assert all(row.keys() == TIME | {"step"} for row in rows)


def test_nothing_is_left_after_an_exception(tmp_path):
    class Broken(Logged):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    from lightning_ckpt.recompute.watch import watched

    loop = trainer([StepMonitor()], logger=CSVLogger(tmp_path))
    with pytest.raises(RuntimeError, match="broken"):
        loop.fit(Broken(), batches())
    assert not {"training_step", "backward", "optimizer_step"} & loop.strategy.__dict__.keys()
    assert not watched()
