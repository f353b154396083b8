"""The same rows in every logger, TensorBoard's charts once, the progress bar, and runs without any logger."""

import json
import logging
import re
import struct
import time

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lightning_ckpt import ActivationCheckpointing
from tests.monitor.support import METRICS, After, Logged, Validated, layout, leftovers, monitored, quiet, read
from tests.support import batches, trainer

INFO = "lightning.pytorch.utilities.rank_zero"


def events(logger):
    return EventAccumulator(logger.log_dir, size_guidance={"scalars": 0, "tensors": 0}).Reload()


def layouts(logger):
    """How often TensorBoard's layout of custom scalars was written."""
    accumulator = events(logger)
    tag = "custom_scalars__config__"
    return len(accumulator.Tensors(tag)) if tag in accumulator.Tags()["tensors"] else 0


# ---------------------------------------------------------------- TensorBoard and tables


@pytest.mark.parametrize("log_every", [1, 2, 50])
def test_tensorboard_has_one_point_per_step_at_the_step_of_the_loss(log_every, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    settings = {"log_every_n_steps": log_every, "max_epochs": 2, "val_check_interval": 2}
    trainer([quiet()], logger=logger, **settings).fit(Validated(), batches(4), batches(1))
    accumulator = events(logger)
    assert {tag for tag in accumulator.Tags()["scalars"] if "/" in tag} == METRICS
    for tag in METRICS:
        assert [event.step for event in accumulator.Scalars(tag)] == list(range(8)), tag
    losses = accumulator.Scalars("loss") if log_every < 50 else []
    assert [event.step for event in losses] == list(range(log_every - 1, 8, log_every))


def test_tensorboard_and_a_table_get_the_same(tmp_path):
    tensorboard, table = TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")
    trainer([ActivationCheckpointing()], logger=[tensorboard, table], log_every_n_steps=2).fit(Logged(), batches(3))
    rows, accumulator = read(table), events(tensorboard)
    assert layout(rows) == [(0, "monitor"), (1, "epoch loss monitor"), (2, "monitor")]
    for tag in METRICS:
        assert [event.value for event in accumulator.Scalars(tag)] == pytest.approx([row[tag] for row in rows]), tag


def test_each_tensorboard_has_its_charts_exactly_once(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, name=name) for name in ("one", "two")]
    module = Logged()
    loop = trainer([quiet()], logger=loggers)
    loop.fit(module, batches(2))
    loop.fit_loop.max_epochs = 2
    loop.fit(module, batches(2))  # the same monitor, again
    trainer([quiet()], logger=loggers).fit(module, batches(2))  # another one
    assert [layouts(logger) for logger in loggers] == [1, 1]


def test_a_new_run_of_the_same_monitor_has_charts_of_its_own(tmp_path):
    monitor = quiet()
    for version in (0, 1):
        logger = TensorBoardLogger(tmp_path, version=version)
        trainer([monitor], logger=logger).fit(Logged(), batches(1))
        assert layouts(logger) == 1


def test_the_charts_show_lines_that_are_logged(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trainer([quiet()], logger=logger).fit(Logged(), batches(1))
    [event] = events(logger).Tensors("custom_scalars__config__")
    charts = [
        chart for category in Layout.FromString(event.tensor_proto.string_val[0]).category for chart in category.chart
    ]
    lines = [
        sorted(tag for tag in METRICS for pattern in chart.multiline.tag if re.match(pattern, tag)) for chart in charts
    ]
    assert lines == [["memory/peak_MiB", "memory/saved_MiB"], ["time/recompute_ms", "time/step_ms"]]


def test_the_charts_of_the_user_stay_if_he_has_laid_them_out_before(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.experiment.add_custom_scalars({"mine": {"losses": ["Multiline", ["loss"]]}})
    trainer([quiet()], logger=logger).fit(Logged(), batches(1))
    shown = events(logger).Tensors("custom_scalars__config__")[-1]  # the last one of a run is the one that counts
    assert "mine" in [category.title for category in Layout.FromString(shown.tensor_proto.string_val[0]).category]


# ---------------------------------------------------------------- other loggers, for real


def wandb_history(folder):
    """What an offline run has logged: its file is a log of records, in blocks, as LevelDB writes them."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    content, position, message, rows = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # the rest of a block is too short for a header
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        message += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record.FromString(message)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows += [items] if items else []
            message = b""
    return rows


def test_weights_and_biases_gets_one_row_per_step(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger, table = WandbLogger(save_dir=tmp_path, offline=True), CSVLogger(tmp_path)
    trainer([quiet()], logger=[logger, table], log_every_n_steps=2, max_epochs=2).fit(Logged(), batches(3))
    wandb.finish()
    deadline = time.monotonic() + 30
    while len(rows := wandb_history(tmp_path)) < 6 and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of its own writes the file
    true = read(table)
    assert [row["trainer/global_step"] for row in rows] == list(range(6))
    assert ["loss" in row for row in rows] == [False, True] * 3
    for row, other in zip(rows, true, strict=True):
        assert {name: row[name] for name in METRICS} == {name: other[name] for name in METRICS}


def test_mlflow_gets_one_point_per_step(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger, table = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'store'}"), CSVLogger(tmp_path)
    trainer([quiet()], logger=[logger, table], log_every_n_steps=2, max_epochs=2).fit(Logged(), batches(3))
    rows = read(table)
    for name in METRICS:
        points = logger.experiment.get_metric_history(logger.run_id, name)
        assert [(point.step, point.value) for point in points] == [(row["step"], row[name]) for row in rows], name
    losses = logger.experiment.get_metric_history(logger.run_id, "loss")
    assert [point.step for point in losses] == [1, 3, 5]


class Kept(Logger):
    """A logger as users write them."""

    def __init__(self):
        super().__init__()
        self.rows, self.saved = [], 0

    name, version = "kept", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def save(self):
        self.saved = len(self.rows)


def test_a_logger_of_the_users_own_gets_plain_numbers_and_is_saved(tmp_path):
    logger = Kept()
    trainer([quiet()], logger=logger, log_every_n_steps=2).fit(Logged(), batches(3))
    assert [step for step, _ in logger.rows] == [0, 1, 2]
    assert all(type(value) is float for _, row in logger.rows for name, value in row.items() if name in METRICS)
    assert logger.saved == 3
    assert "log_metrics" not in vars(logger)


def test_a_logger_that_changes_what_it_is_given_changes_it_for_no_other(tmp_path):
    class Takes(Kept):
        def log_metrics(self, metrics, step=None):
            super().log_metrics(metrics, step)
            for name in METRICS:
                metrics.pop(name, None)

    table = CSVLogger(tmp_path)
    trainer([quiet()], logger=[Takes(), table]).fit(Logged(), batches(2))
    assert layout(read(table)) == [(0, "monitor"), (1, "monitor")]


def test_a_row_may_be_given_by_keyword_and_position(tmp_path):
    class Writes(Logged):
        def on_train_epoch_end(self):
            self.logger.log_metrics(metrics={"a": 1.0}, step=7)
            self.logger.log_metrics({"b": 1.0}, 8)

    table = CSVLogger(tmp_path)
    trainer([quiet()], logger=table).fit(Writes(), batches(1))
    assert layout(read(table)) == [(0, "monitor"), (7, "a"), (8, "b")]


# ---------------------------------------------------------------- without a logger


def test_without_a_logger_one_line_says_so_and_training_is_not_measured(caplog, capsys):
    found = []

    class Asks(Logged):
        def training_step(self, batch, batch_idx):
            found.append(leftovers(self.trainer, self))
            return super().training_step(batch, batch_idx)

    module = Asks()
    loop = trainer([ActivationCheckpointing()])
    with caplog.at_level(logging.INFO, logger=INFO):
        loop.fit(module, batches(2))
    told = [record.message for record in caplog.records if "StepMonitor" in record.message]
    assert told == ["StepMonitor: the Trainer has no logger, so memory and time of the steps are not measured."]
    assert loop.global_step == 2
    assert len(found) == 2
    assert not any("watcher" in names or "profiler.start" in names for names in found)
    assert "steps" not in capsys.readouterr().out
    assert leftovers(loop, module) == []


def test_a_bare_trainer_is_left_bare_and_one_line_says_so(caplog):
    found = []

    class Asks(Logged):
        def training_step(self, batch, batch_idx):
            found.append(leftovers(self.trainer, self))
            return super().training_step(batch, batch_idx)

    bare = {"logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"}
    loop = trainer([quiet(progress_bar=True)], barebones=True, **dict.fromkeys(bare))
    with caplog.at_level(logging.INFO, logger=INFO):
        loop.fit(Asks(), batches(2))
    told = [record.message for record in caplog.records if "StepMonitor" in record.message]
    assert told == ["StepMonitor: `barebones=True`, so memory and time of the steps are not measured."]
    assert found == [[], []]


def test_nothing_is_said_of_loggers_when_there_is_one(caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger=INFO):
        trainer([quiet()], logger=CSVLogger(tmp_path)).fit(Logged(), batches(1))
    assert "StepMonitor" not in caplog.text


# ---------------------------------------------------------------- the progress bar


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("with_logger", [True, False])
def test_the_progress_bar_shows_peak_and_time_of_the_step(bar, with_logger, tmp_path):
    shown, latest = [], []
    monitor = quiet(progress_bar=True)

    def look(loop, module, batch_idx):
        values = loop.progress_bar_callback.get_metrics(loop, module)
        shown.append({name: value for name, value in values.items() if "/" in name})
        latest.append(monitor._publisher.latest)

    logger = CSVLogger(tmp_path) if with_logger else False
    loop = trainer([monitor, bar(), After(look)], logger=logger, enable_progress_bar=True)
    loop.fit(Logged(), batches(3))
    names = ("memory/peak_MiB", "time/step_ms")
    assert shown == [pytest.approx({name: row[name] for name in names}) for row in latest]
    if with_logger:
        rows = read(logger)
        assert layout(rows) == [(step, "monitor") for step in range(3)]
        assert [row["time/step_ms"] for row in rows] == pytest.approx([bar["time/step_ms"] for bar in shown])


def test_the_progress_bar_keeps_what_was_measured_last(tmp_path):
    shown = []

    def look(loop, module, batch_idx):
        shown.append(loop.progress_bar_metrics.get("time/step_ms"))

    logger = CSVLogger(tmp_path)
    monitor = quiet(progress_bar=True, every_n_steps=2)
    trainer([monitor, After(look)], logger=logger, accumulate_grad_batches=2).fit(Logged(), batches(8))
    first, second = (pytest.approx(row["time/step_ms"]) for row in monitored(read(logger)))
    assert shown == [None, None, None, first, first, first, first, second]


def test_the_text_of_the_bar_holds_both_values_or_none(capsys, tmp_path):
    for wanted in (True, False):
        monitor = quiet(progress_bar=wanted)
        loop = trainer([monitor, TQDMProgressBar()], logger=CSVLogger(tmp_path), enable_progress_bar=True)
        loop.fit(Logged(), batches(2))
        captured = capsys.readouterr()
        text = captured.out + captured.err
        assert "Epoch 0" in text
        assert ("memory/peak_MiB=" in text) is ("time/step_ms=" in text) is wanted


def test_what_the_bar_shows_is_logged_once(tmp_path):
    table = CSVLogger(tmp_path)
    trainer([quiet(progress_bar=True)], logger=table, log_every_n_steps=1).fit(Logged(), batches(3))
    assert layout(read(table)) == [(step, "epoch loss monitor") for step in range(3)]
