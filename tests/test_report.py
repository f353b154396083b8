"""The report on runs: read from real logs of real loggers, drawn as it says, and clear about what it cannot do."""

import csv
import subprocess
import sys
from statistics import median

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.report import ReportError, draw, main, read_runs, summary
from tests.support import Training, batches, fit

PEAK, SAVED, STEP, RECOMPUTE = METRICS = (
    "memory/peak_MiB",
    "memory/saved_MiB",
    "time/step_ms",
    "time/recompute_ms",
)
STEPS = 8
RUNS = {"plain": StepMonitor(), "recomputed": ActivationCheckpointing()}


def train(callback, **folders):
    """A real fit, logged to a folder by each of these loggers."""
    loggers = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
    logger = [loggers[kind](folder.parent, name="", version=folder.name) for kind, folder in folders.items()]
    fit(Training, batches(STEPS), [callback] if callback else [], logger=logger, log_every_n_steps=1)


def write(folder, columns):
    """A run as a CSVLogger writes it, of made up values."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["epoch", *columns, "step"])
        table.writerows([0, *values, step] for step, values in enumerate(zip(*columns.values(), strict=True)))


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two runs, each logged by two loggers to a folder of their own."""
    folder = tmp_path_factory.mktemp("logs")
    for name, callback in RUNS.items():
        train(callback, csv=folder / "csv" / name, tensorboard=folder / "tensorboard" / name)
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args: [figures.append(self), save(self, *args)])
    return figures


def lines(axes, style):
    """The points of the lines in a style; those of legends have none."""
    points = [dict(zip(*line.get_data(), strict=True)) for line in axes.lines if line.get_linestyle() == style]
    return [line for line in points if line]


# ---------------------------------------------------------------- reading


def test_what_was_logged_is_read_by_step(logs):
    for run in read_runs(logs / "csv"):
        with open(logs / "csv" / run.name / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        assert run.metrics.keys() == set(METRICS)
        for metric in METRICS:
            assert run.metrics[metric] == {int(row["step"]): float(row[metric]) for row in rows if row[metric]}
            assert list(run.metrics[metric]) == list(range(STEPS))


def test_event_files_are_read_as_tables_are(logs):
    table, events = ({run.name: run for run in read_runs(logs / source)} for source in ("csv", "tensorboard"))
    assert table.keys() == events.keys() == RUNS.keys()
    for a, b in ((table[name], events[name]) for name in RUNS):
        assert b.metrics.keys() == set(METRICS)
        assert all(list(b.metrics[metric]) == list(range(STEPS)) for metric in METRICS)
        assert all(b.values(metric) == pytest.approx(a.values(metric)) for metric in METRICS)


def test_the_table_is_read_where_a_folder_has_event_files_too(tmp_path, monkeypatch):
    train(StepMonitor(), csv=tmp_path / "run", tensorboard=tmp_path / "run")
    assert {path.name.partition(".")[0] for path in (tmp_path / "run").iterdir()} >= {"metrics", "events"}
    monkeypatch.setattr("lightning_ckpt.report._read_events", lambda folder: pytest.fail("read the event files"))
    [run] = read_runs(tmp_path)
    assert len(run.values(STEP)) == STEPS


def test_a_step_that_was_logged_again_has_its_last_value(tmp_path):
    write(tmp_path / "run", {PEAK: [1.0, 2.0, 3.0]})
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write("1,7.0,1\n1,,2\n")  # resumed at step 1; and a row of other metrics
    [run] = read_runs(tmp_path)
    assert run.metrics[PEAK] == {0: 1.0, 1: 7.0, 2: 3.0}


def test_names_are_paths_below_what_all_runs_are_in(tmp_path):
    for place in ("a/x/version_0", "a/x/version_1", "b/x/version_0"):
        write(tmp_path / place, {PEAK: [1.0]})

    def names(*places):
        return {run.name for run in read_runs(*(tmp_path / place for place in places))}

    assert names("a") == {"x/version_0", "x/version_1"}
    assert names("a/x/version_1") == {"version_1"}
    assert names("a", "b") == {"a/x/version_0", "a/x/version_1", "b/x/version_0"}
    assert names("a/x/version_0", "a/x/version_1") == {"version_0", "version_1"}
    assert names("a", "a/x/version_0", "a/../a/x") == {"x/version_0", "x/version_1"}  # each once

    write(tmp_path / "a/x/version_0/version_0", {PEAK: [1.0]})
    assert names("a/x/version_0") == {"version_0", "version_0/version_0"}


def test_a_relative_folder_has_its_name(tmp_path, monkeypatch):
    write(tmp_path / "run", {PEAK: [1.0]})
    monkeypatch.chdir(tmp_path / "run")
    assert [run.name for run in read_runs(".")] == ["run"]


def test_links_are_followed_but_not_in_circles(tmp_path):
    write(tmp_path / "elsewhere" / "run", {PEAK: [1.0]})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "logs")
    assert [run.name for run in read_runs(tmp_path / "logs")] == ["linked/run"]


def test_the_highest_peak_comes_first(tmp_path):
    for name, peak in ("a", 1.0), ("b", 3.0), ("c", 2.0):
        write(tmp_path / name, {PEAK: [peak, 0.5]})
    write(tmp_path / "d", {STEP: [1.0]})
    assert [run.name for run in read_runs(tmp_path)] == ["b", "c", "a", "d"]


# ---------------------------------------------------------------- what cannot be read


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ReportError, match=r"There is no folder .*nowhere\."):
        read_runs(tmp_path / "nowhere")


def test_a_folder_without_runs_is_an_error_even_beside_others(logs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r".*empty holds no run"):
        read_runs(logs / "csv", tmp_path / "empty")


def test_runs_without_a_monitor_are_named_with_the_cure(tmp_path, caplog):
    train(None, tensorboard=tmp_path / "alone")
    with pytest.raises(ReportError, match=r"nothing to draw: in .*alone, .* add `StepMonitor\(\)`"):
        read_runs(tmp_path)

    train(StepMonitor(), csv=tmp_path / "monitored")
    assert [run.name for run in read_runs(tmp_path)] == ["monitored"]
    [record] = [record for record in caplog.records if record.name == "lightning_ckpt.report"]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"{tmp_path / 'alone'} is left out")
    assert "add `StepMonitor()`" in record.getMessage()


def test_a_row_that_was_cut_off_is_left_out_with_a_warning(tmp_path, caplog):
    write(tmp_path / "run", {PEAK: [1.0, 2.0]})
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write("0,3.0")
    [run] = read_runs(tmp_path)
    assert run.values(PEAK) == [1.0, 2.0]
    assert "rows that cannot be read: 1, first line 4" in caplog.text


def test_a_missing_package_is_an_error_with_the_cure_and_only_where_it_is_needed(logs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing", None)
    monkeypatch.delitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", raising=False)
    assert len(read_runs(logs / "csv")) == 2
    with pytest.raises(ReportError, match=r"event files of TensorBoard, .*pip install 'lightning_ckpt\[report\]'"):
        read_runs(logs / "tensorboard")

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ReportError, match=r"picture, .*pip install 'lightning_ckpt\[report\]'"):
        draw(logs / "csv", output=tmp_path / "report.png")


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize("source", ["csv", "tensorboard"])
def test_the_picture_shows_what_was_logged(logs, source, tmp_path, drawn):
    runs = draw(logs / source, output=tmp_path / "new" / "report.png")
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG\r\n")
    [figure] = drawn
    memory, time = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [run.name for run in runs]
    assert memory.get_ylim()[0] == time.get_ylim()[0] == 0
    assert lines(memory, "--") == [run.metrics[PEAK] for run in runs]
    assert lines(memory, "-") == [run.metrics[SAVED] for run in runs]
    assert lines(time, "-") == [run.metrics[STEP] for run in runs]
    assert lines(time, ":") == [run.metrics[RECOMPUTE] for run in runs if run.name == "recomputed"]  # else 0
    assert [text.get_text() for text in memory.get_legend().get_texts()] == ["peak", "saved activations"]
    assert [text.get_text() for text in time.get_legend().get_texts()] == ["whole step", "recompute"]


def test_slow_first_steps_and_rare_spikes_are_told_rather_than_shown(tmp_path, drawn):
    usual = [100.0, 110.0] * 100
    write(tmp_path / "run", {STEP: [5000.0, 900.0, *usual, 1234.0, *usual]})
    draw(tmp_path, output=tmp_path / "report.png")
    time = drawn[0].axes[1]
    assert time.get_ylim()[1] == pytest.approx(1.05 * 2 * 110)
    assert "3 of 403 steps are above the axis, up to 5,000 ms" in time.get_xlabel()
    [marks] = [line for line in time.lines if line.get_marker() == "^"]
    assert list(marks.get_xdata()) == [0, 1, 202]


def test_nothing_is_told_where_all_steps_are_shown(tmp_path, drawn):
    write(tmp_path / "run", {STEP: [100.0] * 5 + [110.0, 150.0]})
    draw(tmp_path, output=tmp_path / "report.png")
    memory, time = drawn[0].axes
    assert time.get_ylim()[1] == pytest.approx(1.05 * 150)
    assert time.get_xlabel() == "optimizer step"
    assert [text.get_text() for text in memory.texts] == ["no run has logged this"]


def test_many_steps_are_drawn_as_medians_and_a_shade(tmp_path, drawn):
    times = [10.0 + step % 7 for step in range(100_000)]
    write(tmp_path / "run", {STEP: times})
    draw(tmp_path, output=tmp_path / "report.png")
    time = drawn[0].axes[1]
    [line] = lines(time, "-")
    assert list(line.values()) == [median(times[start : start + 100]) for start in range(0, 100_000, 100)]
    assert "line: median of 100 steps, shade: least to most" in time.get_xlabel()
    [shade] = time.collections
    low, high = shade.get_datalim(time.transData).intervaly
    assert (low, high) == (10, 16)


def test_a_single_step_is_a_dot(tmp_path, drawn):
    write(tmp_path / "run", {PEAK: [3.0]})
    draw(tmp_path, output=tmp_path / "report.png")
    assert [line.get_marker() for line in drawn[0].axes[0].lines if len(line.get_xdata())] == ["o"]


def test_many_runs_have_a_color_each(tmp_path, drawn):
    for number in range(14):
        write(tmp_path / f"a run with a rather long name {number}", {PEAK: [1.0 + number, 2.0 + number]})
    draw(tmp_path, output=tmp_path / "report.png")
    [legend] = drawn[0].legends
    assert len({line.get_color() for line in legend.get_lines()}) == 14
    assert legend.get_window_extent().width <= drawn[0].bbox.width


def test_a_format_that_cannot_be_written_is_an_error_at_once(tmp_path):
    with pytest.raises(ReportError, match=r"report\.txt should end in \.png, \.svg, \.pdf"):
        draw(tmp_path / "nowhere", output="report.txt")


# ---------------------------------------------------------------- table and command


def test_the_table_sums_up_the_runs(tmp_path):
    write(tmp_path / "a", {PEAK: [9.0, 20.0] + [8.0] * 6, STEP: [99.0] * 5 + [1.0, 10.0, 30.0], RECOMPUTE: [2.5] * 8})
    write(tmp_path / "few", {STEP: [30.0, 10.0, 20.0]})
    assert [line.split() for line in summary(read_runs(tmp_path)).splitlines()] == [
        ["run", "steps", "peak", "MiB", "saved", "MiB", "step", "ms", "recompute"],
        ["a", "8", "20.0", "-", "10.0", "25%"],
        ["few", "3", "-", "-", "20.0", "-"],
    ]


def test_the_command_draws_and_prints(logs, tmp_path):
    command = [sys.executable, "-m", "lightning_ckpt.report", str(logs / "csv"), str(logs / "tensorboard")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = {f"{source}/{name}" for source in ("csv", "tensorboard") for name in RUNS}
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines[1:5]} == names
    assert lines[-1].endswith("Drawn: report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_command_says_what_is_wrong_in_a_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "nowhere")])
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        f"python -m lightning_ckpt.report: error: There is no folder {tmp_path / 'nowhere'}.\n"
    )
