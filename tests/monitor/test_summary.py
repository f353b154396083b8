"""The summary says what the rows say, during and after fit, and is printed once."""

import logging
import sys
from statistics import median

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.monitor.support import After, Logged, Validated, quiet, read
from tests.support import batches, blocks, trainer

INFO = "lightning.pytorch.utilities.rank_zero"
MIB = 2**20
NAMES = ["elsewhere", "forward", "backward", "optimizer"]


def summed_up(rows):
    """The figures of a summary, from rows."""
    steady = rows[5:] or rows
    step = median(row["time/step_ms"] for row in steady)
    largest = max(rows, key=lambda row: row["memory/peak_MiB"])
    names = ("data", "forward", "backward", "recompute", "optimizer")
    return {
        "steps": len(rows),
        "peak_bytes": largest["memory/peak_MiB"] * MIB,
        "peak_phase": NAMES[int(largest["memory/peak_phase"])],
        "saved_bytes": max(row["memory/saved_MiB"] for row in rows) * MIB,
        "plain_bytes": max(row["memory/saved_MiB"] + row["memory/avoided_MiB"] for row in rows) * MIB,
        "step_ms": step,
        "shares": {name: median(row[f"time/{name}_ms"] for row in steady) / step for name in names},
    }


@pytest.mark.parametrize("count", [1, 5, 6, 8])
def test_the_figures_are_those_of_the_rows(count, tmp_path):
    monitor, logger = quiet(), CSVLogger(tmp_path)
    trainer([ActivationCheckpointing(), monitor], logger=logger).fit(Logged(), batches(count))
    summary = monitor.summary()
    for name, value in summed_up(read(logger)).items():
        assert getattr(summary, name) == pytest.approx(value), name
    assert summary.offloaded_bytes is summary.hidden_share is summary.model_flops is summary.recompute_flops is None


def test_it_can_be_asked_for_before_during_and_after_fit(tmp_path):
    monitor, logger, seen = quiet(), CSVLogger(tmp_path), []
    assert monitor.summary().steps == 0
    assert str(monitor.summary())
    trainer([monitor, After(lambda *_: seen.append(monitor.summary()))], logger=logger).fit(Logged(), batches(7))
    rows = read(logger)
    assert [summary.steps for summary in [*seen, monitor.summary()]] == [1, 2, 3, 4, 5, 6, 7, 7]
    for count, summary in enumerate(seen, 1):
        for name, value in summed_up(rows[:count]).items():
            assert getattr(summary, name) == pytest.approx(value), name


def test_it_can_be_asked_for_after_an_error(tmp_path):
    class Breaks(Logged):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    monitor, logger = quiet(), CSVLogger(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        trainer([monitor], logger=logger).fit(Breaks(), batches(3))
    assert monitor.summary().steps == 2
    assert monitor.summary().peak_bytes == summed_up(read(logger))["peak_bytes"]


def test_a_second_fit_is_summed_up_by_itself(tmp_path):
    monitor = quiet()
    for index, (model, size) in enumerate([(blocks(4), 64), (blocks(2), 4)]):
        logger = CSVLogger(tmp_path, version=index)
        trainer([monitor], logger=logger).fit(Logged(model), batches(2, size))
        assert monitor.summary().peak_bytes == summed_up(read(logger))["peak_bytes"]
        assert monitor.summary().steps == 2


def test_unmeasured_steps_do_not_count(tmp_path):
    monitor = quiet(every_n_steps=3)
    trainer([monitor], logger=CSVLogger(tmp_path)).fit(Logged(), batches(7))
    assert monitor.summary().steps == 2


def test_the_step_of_the_largest_peak_gives_the_phase(tmp_path):
    class Grows(Logged):
        def on_after_backward(self):
            if self.trainer.global_step == 1:
                torch.ones(2**18).sum()

    monitor, logger = quiet(), CSVLogger(tmp_path)
    trainer([monitor], logger=logger).fit(Grows(), batches(3))
    phases = [row["memory/peak_phase"] for row in read(logger)]
    assert phases[1] != 1
    assert monitor.summary().peak_bytes > MIB
    assert monitor.summary().peak_phase == NAMES[int(phases[1])]


# ---------------------------------------------------------------- treatments


def treatments(tmp_path, *callbacks):
    monitor = quiet()
    trainer([*callbacks, monitor], logger=CSVLogger(tmp_path)).fit(Logged(blocks(4)), batches(1))
    return monitor.summary()


def test_treated_layers_are_named(tmp_path):
    every_second = treatments(tmp_path, ActivationCheckpointing(every_n_layers=2))
    [line] = every_second.treatments
    assert line.startswith("recomputed: 2 of 4 Block: model.{1, 3}")
    assert ("layers", line) in every_second.rows()
    [line] = treatments(tmp_path, ActivationCheckpointing()).treatments
    assert line.startswith("recomputed: 4 of 4 Block: model.{1, 2, 3, 4}")


@pytest.mark.parametrize("callbacks", [[], [ActivationCheckpointing(enabled=False)]], ids=["alone", "switched off"])
def test_a_plain_run_is_called_so(callbacks, tmp_path):
    summary = treatments(tmp_path, *callbacks)
    assert summary.treatments == ()
    assert summary.rows()[0] == ("layers", "all kept, as in the plain run")


def test_treatments_are_those_of_the_latest_fit(tmp_path):
    monitor, logger = quiet(), CSVLogger(tmp_path)
    trainer([ActivationCheckpointing(), monitor], logger=logger).fit(Logged(), batches(1))
    assert monitor.summary().treatments
    trainer([monitor], logger=logger).fit(Logged(), batches(1))
    assert monitor.summary().treatments == ()


# ---------------------------------------------------------------- its text


def printed(capsys, caplog, callbacks, module=None, folder=None, **settings):
    with caplog.at_level(logging.INFO, logger=INFO):
        loop = trainer(callbacks, logger=CSVLogger(folder), **settings)
        loop.fit(Logged() if module is None else module, batches(2))
    return capsys.readouterr().out, [record.message for record in caplog.records if "lightning_ckpt," in record.message]


def test_rich_prints_the_table_once(capsys, caplog, tmp_path):
    out, logged = printed(capsys, caplog, [ActivationCheckpointing()], folder=tmp_path)
    assert out.count("lightning_ckpt, 2 steps") == 1
    assert logged == []
    for text in ("recomputed: 2", "peak memory", "saved for backward", "instead of", "time of a step", "recompute"):
        assert text in out
    assert "─" in out


def test_without_rich_the_plain_table_is_told_once(capsys, caplog, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rich", None)  # as if it were not installed
    monitor = StepMonitor()
    out, logged = printed(capsys, caplog, [monitor], folder=tmp_path)
    assert "steps" not in out
    assert logged == [str(monitor.summary())]


def test_the_plain_table_holds_every_figure_in_a_line_of_its_own(tmp_path):
    monitor = quiet()
    module = Logged(blocks(4, 128))
    trainer([ActivationCheckpointing(), monitor], logger=CSVLogger(tmp_path)).fit(module, batches(6, 256, 128))
    summary = monitor.summary()
    title, *lines = str(summary).splitlines()
    assert title == "lightning_ckpt, 6 steps:"
    assert [tuple(line.strip().split("  ", 1)[i].strip() for i in (0, 1)) for line in lines] == summary.rows()
    table = dict(summary.rows())
    assert table["peak memory"] == f"{summary.peak_bytes / MIB:,.1f} MiB, in {summary.peak_phase}"
    saved, plain = summary.saved_bytes, summary.plain_bytes
    text = f"{saved / 1024:,.1f} KiB instead of {plain / MIB:,.1f} MiB in a plain run ({saved / plain:.0%})"
    assert table["saved for backward"] == text
    assert table["time of a step"].startswith(f"{summary.step_ms:,.1f} ms: data ")


def test_long_and_odd_names_of_layers_are_printed_as_they_are(capsys, caplog, tmp_path):
    module = Logged()
    module.model = torch.nn.ModuleDict({"[red]a": module.model[1], "[/b]c": module.model[2]})
    module.loss = lambda model, batch: model["[/b]c"](model["[red]a"](batch)).square().mean()
    out, _ = printed(capsys, caplog, [ActivationCheckpointing()], module, tmp_path)
    assert "[red]a" in out
    assert "[/b]c" in out


def test_without_table_nothing_is_printed(capsys, caplog, tmp_path):
    assert printed(capsys, caplog, [quiet()], folder=tmp_path) == ("", [])


def test_it_is_printed_once_for_every_fit(capsys, caplog, tmp_path):
    monitor = StepMonitor()
    for _ in range(2):
        out, _ = printed(capsys, caplog, [monitor, StepMonitor()], folder=tmp_path)
        assert out.count("lightning_ckpt, 2 steps") == 1


def test_validation_alone_prints_nothing(capsys, caplog, tmp_path):
    module, loop = Validated(), trainer([StepMonitor()], logger=CSVLogger(tmp_path))
    loop.validate(module, batches(1), verbose=False)
    assert "lightning_ckpt" not in capsys.readouterr().out


@pytest.mark.parametrize("finder", ["batch size", "learning rate"])
def test_trials_of_the_tuner_are_neither_printed_nor_logged(finder, capsys, tmp_path):
    class Tuned(Logged):
        def __init__(self):
            super().__init__()
            self.batch_size, self.lr = 2, 0.1

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=self.batch_size)

    tuner = (
        BatchSizeFinder(steps_per_trial=2, max_trials=2)
        if finder == "batch size"
        else LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    )
    logger, monitor = CSVLogger(tmp_path), StepMonitor()
    loop = trainer([tuner, monitor], logger=logger, limit_train_batches=4, default_root_dir=tmp_path)
    loop.fit(Tuned())
    assert capsys.readouterr().out.count("lightning_ckpt,") == 1
    rows = read(logger)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert monitor.summary().steps == 4
    assert monitor.summary().step_ms == pytest.approx(summed_up(rows)["step_ms"])
