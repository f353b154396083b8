"""StepMonitor on several real processes: rows are those of all ranks, and training is as without it."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.monitored import FOUR, UNEVEN

pytestmark = pytest.mark.slow

FORKED = [
    *("uneven", "swapped", "all_small", "all_large", "plain", "four", "one", "every_third", "default", "accumulated"),
    *("compiled", "many_kinds", "silent", "bar", "unused", "late_optimizer"),
    *("fails_in_backward", "fails_in_optimizer", "fails_at_the_end", "spawn", "another_on_rank_0", "logger_on_rank_0"),
]
SCRIPTS = ["fsdp", "fully_shard", "tensor_parallel", "script"]
PHASES = ("data", "forward", "backward", "recompute", "optimizer")
ROUNDING = 1e-6  # ms, where numbers are added up in another order


@dataclass
class Done:
    """What a command has left."""

    out: Path
    code: int
    stdout: str
    stderr: str

    def said(self, case, mode="with"):
        """What the processes of a case have printed: standard output and standard error."""
        return tuple(text.split(f"\n=== {case} {mode}\n")[1].split("\n=== ")[0] for text in (self.stdout, self.stderr))

    def folder(self, case, mode="with"):
        return self.out / case / mode

    def error(self, case, mode="with"):
        """The last line of what a process has raised."""
        path = self.folder(case, mode) / "error.txt"
        return path.read_text().strip().splitlines()[-1] if path.exists() else None

    def rows(self, case, version="csv"):
        """Rows of the table that hold the monitor's metrics."""
        with open(self.folder(case) / version / "metrics.csv") as file:
            table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
        return [row for row in table if "time/step_ms" in row]

    def ranks(self, case, mode="with"):
        """What each rank has noted itself."""
        paths = sorted(self.folder(case, mode).glob("rank*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def collectives(self, case, mode="with"):
        """How many each batch took, for each rank."""
        counts = [rank["collectives"] for rank in self.ranks(case, mode)]
        return [[after - before for before, after in pairwise(row)] for row in counts]


def run(out, *cases, seconds=400):
    """Run cases in their processes, of which none may be left soon after."""
    command = [sys.executable, "-m", "tests.distributed.monitored", str(out), *cases]
    with open(out / "stdout", "w") as stdout, open(out / "stderr", "w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            process.wait(seconds)
            ends = time.monotonic() + 20
            while is_there(process.pid) and time.monotonic() < ends:
                time.sleep(0.05)
            left = is_there(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not left, "processes have been left behind"
    return Done(out, process.returncode, *((out / name).read_text() for name in ("stdout", "stderr")))


def is_there(group):
    """Whether a group of processes has any."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    done = run(tmp_path_factory.mktemp("forked"), *FORKED)
    assert done.code == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    return run(tmp_path_factory.mktemp("scripts"), *SCRIPTS)


# ---------------------------------------------------------------- ranks put together


def of_ranks(row, name, count=2):
    return [row[f"{name}/rank{rank}"] for rank in range(count)]


def assert_put_together(row, count):
    """What is logged of all ranks follows from what is logged of each."""
    names = {name.split("/rank")[0] for name in row if "/rank" in name}
    assert names >= {"memory/peak_MiB", "memory/saved_MiB", "memory/process_MiB", "time/step_ms", "time/samples_per_s"}
    for name in names:
        values = of_ranks(row, name, count)
        if name == "memory/peak_phase":
            peaks = of_ranks(row, "memory/peak_MiB", count)
            assert row[name] == values[peaks.index(max(peaks))]
        elif name.startswith("memory/"):
            assert row[name] == max(values), name
        elif name.endswith("_ms"):
            assert row[name] == pytest.approx(sum(values) / count, rel=1e-12), name
            assert row[name.replace("time/", "time_max/")] == max(values), name
    maxima = {f"time_max/{phase}_ms" for phase in ("step", *PHASES)}
    logged = {name for name in row if "/" in name and "/rank" not in name}
    assert logged == names | maxima


@pytest.mark.parametrize(
    ("case", "count"), [("uneven", 2), ("swapped", 2), ("plain", 2), ("accumulated", 2), ("four", 4)]
)
def test_a_row_holds_largest_memory_and_mean_and_largest_times_of_all_ranks(forked, case, count):
    rows = forked.rows(case)
    assert [row["step"] for row in rows] == list(range(6 if case == "accumulated" else 4))
    for row in rows:
        assert_put_together(row, count)


def steps_of(notes, accumulate):
    """What a rank has noted, added up for each step of two epochs of five batches, or of one of four."""
    epochs = [notes] if accumulate == 1 else [notes[:5], notes[5:]]
    groups = [epoch[i : i + accumulate] for epoch in epochs for i in range(0, len(epoch), accumulate)]
    return [
        {name: sum(note.get(name, 0.0) for note in group) * 1e3 for name in {*PHASES, "outside", "fetch", "between"}}
        for group in groups
    ]


@pytest.mark.parametrize(("case", "count"), [("uneven", 2), ("accumulated", 2), ("four", 4)])
def test_times_of_each_rank_are_those_that_it_has_measured_itself(forked, case, count):
    for rank, notes in enumerate(forked.ranks(case)):
        steps = steps_of(notes["own"], 2 if case == "accumulated" else 1)
        for row, own in zip(forked.rows(case), steps, strict=True):
            got = {name: row[f"time/{name}_ms/rank{rank}"] for name in (*PHASES, "step")}
            for name in PHASES:
                assert got[name] >= own.get(name, 0.0) - ROUNDING, name
            inside = got["forward"] + got["backward"] + got["optimizer"]
            assert inside <= own["outside"] + ROUNDING
            assert got["recompute"] <= got["backward"]
            assert got["data"] + inside <= got["step"] + ROUNDING
            if row["step"]:  # nobody knows when the first one was asked for
                assert got["data"] <= own["fetch"] + ROUNDING
                assert got["step"] <= own["between"] + ROUNDING


def test_each_rank_has_slept_where_it_was_planned(forked):
    # The test before would see nothing if ranks noted nothing.
    for case, plan in (("uneven", UNEVEN), ("four", FOUR)):
        for row in forked.rows(case):
            for name, sleeps in plan.sleep_ms.items():
                for rank, sleep in enumerate(sleeps if name in PHASES else ()):
                    assert row[f"time/{name}_ms/rank{rank}"] >= sleep
    for row in forked.rows("uneven"):
        assert row["time/recompute_ms/rank0"] >= 3 * 5
        assert row["time_max/data_ms"] >= 40
        assert row["time/data_ms"] >= 20


@pytest.mark.parametrize(
    ("case", "peaks", "phases", "largest"),
    [
        ("uneven", (2, 5), (1, 3), 1),
        ("accumulated", (2, 5), (1, 3), 1),
        ("swapped", (5, 2), (1, 3), 0),
        ("four", (2, 1, 4, 0), (3, 1, 2, None), 2),
    ],
)
def test_the_phase_of_the_peak_is_that_of_the_rank_with_the_largest_peak(forked, case, peaks, phases, largest):
    for row in forked.rows(case):
        got = of_ranks(row, "memory/peak_MiB", len(peaks))
        for planted, peak in zip(peaks, got, strict=True):
            assert planted <= peak <= planted + 0.05
        for rank, phase in enumerate(phases):
            assert phase in (None, row[f"memory/peak_phase/rank{rank}"])
        assert row["memory/peak_MiB"] == got[largest]
        assert row["memory/peak_phase"] == phases[largest]


def test_memory_of_ranks_with_different_batches_is_that_of_ranks_with_equal_ones(forked):
    for small, large, mixed in zip(*(forked.rows(case) for case in ("all_small", "all_large", "plain")), strict=True):
        for name in ("memory/peak_MiB", "memory/after_forward_MiB", "memory/saved_MiB", "memory/avoided_MiB"):
            assert len({*of_ranks(small, name), small[name]}) == 1
            assert len({*of_ranks(large, name), large[name]}) == 1
            assert of_ranks(mixed, name) == [small[name], large[name]]
            assert mixed[name] == large[name]
        assert small["memory/saved_MiB"] < large["memory/saved_MiB"]


def assert_rates_together(row, sizes):
    for rank, size in enumerate(sizes):
        rate = size / row[f"time/step_ms/rank{rank}"] * 1e3
        assert row[f"time/samples_per_s/rank{rank}"] == pytest.approx(rate, rel=1e-9)
    rates = of_ranks(row, "time/samples_per_s", len(sizes))
    together = sum(sizes) / row["time_max/step_ms"] * 1e3  # the step is over when it is over everywhere
    assert together * (1 - 1e-9) <= row["time/samples_per_s"] <= sum(rates) * (1 + 1e-9)


@pytest.mark.parametrize(("case", "sizes"), [("uneven", (2, 6)), ("four", (1, 2, 3, 4))])
def test_rates_are_those_of_all_ranks_together(forked, case, sizes):
    for row in forked.rows(case):
        assert_rates_together(row, sizes)


@pytest.mark.parametrize("case", ["fsdp", "fully_shard"])
def test_rates_are_those_of_all_ranks_together_where_the_model_is_sharded(scripts, case):
    for row in scripts.rows(case):
        assert_rates_together(row, (3, 3))


def test_rates_are_not_larger_than_what_is_done_where_a_rank_ends_late(forked):
    # 8 rows in steps of 300 ms, in which rank 0 waits for rank 1: for its gradients, or for its row.
    for row in forked.rows("late_optimizer"):
        assert row["time/optimizer_ms/rank1"] >= 300
        assert row["time/samples_per_s"] <= 8 / 0.3


def test_rates_are_not_those_of_several_where_ranks_share_a_batch(scripts):
    for row in scripts.rows("tensor_parallel"):
        rates = of_ranks(row, "time/samples_per_s")
        assert min(rates) <= row["time/samples_per_s"] <= max(rates)
        assert row["time/samples_per_s"] <= 3 / 0.05


def test_one_process_has_no_other_ranks(forked):
    rows = forked.rows("one")
    assert [row["step"] for row in rows] == list(range(4))
    assert not [name for row in rows for name in row if "/rank" in name or name.startswith("time_max/")]


# ---------------------------------------------------------------- what is not known


def test_what_one_rank_does_not_know_is_not_logged_of_all(forked):
    unknown = {f"memory/{name}" for name in ("saved_MiB", "avoided_MiB", "peak_MiB", "peak_phase", "after_forward_MiB")}
    rows = forked.rows("compiled")
    assert len(rows) == 2
    for row in rows:
        for name in unknown:
            assert name not in row
            assert f"{name}/rank0" in row
            assert f"{name}/rank1" not in row
        assert row["time/step_ms"] == pytest.approx(sum(of_ranks(row, "time/step_ms")) / 2)
        assert {name for name in row if name.endswith("_per_s") or "_per_s/" in name} == {
            "time/tokens_per_s/rank0",
            "time/samples_per_s/rank1",
        }


def test_a_peak_that_one_rank_has_not_counted_is_not_logged(forked):
    rows = forked.rows("many_kinds")
    assert len(rows) == 40
    known = [row for row in rows if "memory/peak_MiB/rank1" in row]
    assert 16 <= len(known) < 40
    for row in rows:
        assert "memory/peak_MiB/rank0" in row
        for name in ("memory/peak_MiB", "memory/peak_phase", "memory/after_forward_MiB"):
            assert (name in row) == (row in known)
    peaks = [row["memory/peak_MiB"] for row in known if row["step"] > 0]
    assert peaks == sorted(peaks, reverse=True)  # rank 1 has the larger batches, one row less each time
    assert len(set(peaks)) == len(peaks)


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("case", ["uneven", "default", "unused", "every_third", "accumulated", "silent"])
def test_each_logged_step_takes_one_collective_and_no_other_takes_any(forked, case):
    logged = {
        "every_third": [False, False, True, False, False, True, False],
        "accumulated": [False, True, False, True, True] * 2,
        "silent": [False] * 4,
    }.get(case, [True] * 4)
    for got, plain in zip(forked.collectives(case), forked.collectives(case, "without"), strict=True):
        assert sum(plain) >= len(plain)  # that of the gradients, which is counted too
        assert [a - b for a, b in zip(got, plain, strict=True)] == logged


def test_every_n_steps_logs_the_nth_step_first(forked):
    assert [row["step"] for row in forked.rows("every_third")] == [2, 5]


def test_without_a_logger_there_is_no_table_but_with_a_progress_bar(forked):
    assert "StepMonitor: the Trainer has no logger" in forked.said("silent")[1]
    assert forked.said("silent")[0].strip() == ""
    assert forked.said("bar")[0].count("lightning_ckpt, 4 steps") == 1
    assert not list(forked.folder("bar").rglob("*.csv"))


# ---------------------------------------------------------------- training and output


COMPARED = ["uneven", "every_third", "default", "accumulated", "silent", "unused"]


def assert_equal_training(done, case, ranks=2):
    for rank in range(ranks):
        got, want = (torch.load(done.folder(case, mode) / f"rank{rank}.pt") for mode in ("with", "without"))
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(got[name], value), f"{case}: {name} on rank {rank}"


@pytest.mark.parametrize("case", COMPARED)
def test_training_is_that_without_the_monitor_on_every_rank(forked, case):
    assert_equal_training(forked, case)


@pytest.mark.parametrize("case", ["fsdp", "fully_shard", "tensor_parallel"])
def test_sharded_training_is_that_without_the_monitor_and_has_its_rows(scripts, case):
    assert_equal_training(scripts, case)
    rows = scripts.rows(case)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) == (8 if case == "tensor_parallel" else 4)
    for row in rows:
        assert_put_together(row, 2)
        assert row["memory/peak_MiB"] >= row["memory/after_forward_MiB"] >= row["memory/saved_MiB"] > 0
        assert (row["memory/avoided_MiB"] > 0) == (row["time/recompute_ms"] > 0) == (case != "tensor_parallel")


def warnings_of(text):
    return {
        line for line in text.splitlines() if "Warning" in line or "lightning_ckpt/" in line or "torchmetrics" in line
    }


@pytest.mark.parametrize("case", COMPARED)
def test_only_rank_0_speaks_and_warns_of_nothing_new(forked, case):
    stdout, stderr = forked.said(case)
    steps = {"silent": 0, "every_third": 2, "accumulated": 6}.get(case, 4)
    assert stdout.count("lightning_ckpt, ") == stdout.count(f"lightning_ckpt, {steps} steps") == (case != "silent")
    assert forked.said(case, "without")[0].strip() == ""
    assert warnings_of(stderr) <= warnings_of(forked.said(case, "without")[1])


def test_the_rows_are_those_of_the_loss_and_tensorboard_has_the_same(forked):
    with open(forked.folder("uneven") / "csv" / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in table] == ["0", "1", "2", "3"]
    assert all(row["loss"] and row["time/step_ms"] for row in table)
    folder = forked.folder("uneven") / "tensorboard"
    assert len(list(folder.glob("events*"))) == 1
    events = EventAccumulator(str(folder)).Reload()
    rows = forked.rows("uneven")
    for name in set(rows[0]) - {"epoch", "step"}:
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == [0, 1, 2, 3], name
        assert [event.value for event in scalars] == pytest.approx([row[name] for row in rows], rel=1e-6), name


def test_the_monitor_that_comes_along_logs_all_ranks_without_their_own(forked):
    rows = forked.rows("default")
    assert len(rows) == 4
    assert not [name for name in rows[0] if "/rank" in name]
    assert "time_max/step_ms" in rows[0]


def test_the_summary_does_not_compare_one_rank_with_another(forked):
    # Nothing is recomputed, so what is saved is what a plain run saves.
    text = forked.said("plain")[0]
    assert "saved for backward" in text
    assert "in a plain run" not in text


@pytest.mark.parametrize("case", ["uneven", "spawn"])
def test_the_process_that_starts_the_others_says_nothing_untrue(forked, case):
    text = (forked.folder(case) / "summary.txt").read_text()
    assert "recomputed: 3 of 3" in text or "all kept" not in text


# ---------------------------------------------------------------- how processes begin and end


def test_spawned_processes_can_be_handed_a_monitor(forked):
    assert forked.error("spawn") is None
    assert [row["step"] for row in forked.rows("spawn")] == list(range(4))


@pytest.mark.parametrize("where", ["in_backward", "in_optimizer", "at_the_end"])
def test_an_error_on_one_rank_ends_all_with_it(forked, where):
    case = f"fails_{where}"
    planted = f"ValueError: planted in {where.split('_')[-1]}"
    assert forked.error(case) == planted
    if where in ("in_optimizer", "at_the_end"):
        assert forked.error(case, "without") == planted
    steps = [row["step"] for row in forked.rows(case)]
    assert steps == list(range(len(steps)))
    assert 1 <= len(steps) <= 3  # the others are ended before or after they have written the last ones


def test_an_error_on_one_of_two_scripts_ends_the_other_which_logs_what_was_done(scripts):
    stdout, stderr = scripts.said("script")
    assert scripts.code != 0
    assert "ValueError: planted in optimizer" in stderr
    assert [row["step"] for row in scripts.rows("script")] == [0, 1]
    assert "lightning_ckpt, " not in stdout


def test_ranks_need_not_have_equal_loggers(forked):
    assert forked.error("logger_on_rank_0", "without") is None
    assert forked.error("logger_on_rank_0") is None
    assert_equal_training(forked, "logger_on_rank_0")
    assert [row["step"] for row in forked.rows("logger_on_rank_0")] == list(range(4))


def test_one_rank_can_train_another_model_alone(forked):
    assert forked.error("another_on_rank_0", "without") is None
    assert forked.error("another_on_rank_0") is None
    assert len(forked.rows("another_on_rank_0", "alone")) == 8
