"""The examples, run as a user runs them, and what TensorBoard shows of their logs."""

import contextlib
import csv
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNS = ("plain", "every_n_layers=1", "every_n_layers=2")
STEPS = 8
METRICS = {
    *("memory/peak_MiB", "memory/peak_phase", "memory/after_forward_MiB", "memory/process_MiB"),
    *("memory/saved_MiB", "memory/avoided_MiB", "time/step_ms", "time/data_ms", "time/forward_ms", "time/backward_ms"),
    *("time/recompute_ms", "time/optimizer_ms", "time/tokens_per_s"),
}


def example(script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    (logs / "demo" / "an earlier run").mkdir(parents=True)
    small = ("--model.depth", 2, "--model.width", 32, "--data.length", 32)
    done = example("demo.py", "--steps", STEPS, "--logs", logs, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    return logs, done.stdout


@pytest.mark.slow
def test_demo_compares_three_runs(demo):
    logs, output = demo
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.startswith(RUNS)}
    assert tuple(rows) == RUNS
    saved, avoided, peak = ({run: float(row[column]) for run, row in rows.items()} for column in range(3))
    assert saved["plain"] > saved["every_n_layers=2"] > saved["every_n_layers=1"]
    assert peak["plain"] > peak["every_n_layers=2"] > peak["every_n_layers=1"]
    assert 0 == avoided["plain"] < avoided["every_n_layers=2"] < avoided["every_n_layers=1"]
    assert len({row[-1] for row in rows.values()}) == 1
    assert "The final losses are equal to the last bit." in output
    assert f"{os.path.relpath(sys.executable)} -m tensorboard.main --logdir {logs / 'demo'}" in output
    assert f"{os.path.relpath(sys.executable)} -m lightning_ckpt.report {logs / 'demo-csv'}" in output
    assert {folder.name for folder in (logs / "demo").iterdir()} == set(RUNS)


def test_demo_fails_where_the_losses_differ(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    def train(flags, tensorboard, table):
        table.mkdir(parents=True)
        with open(table / "metrics.csv", "w") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "loss", *METRICS])
            writer.writerow([9, 2.0 if table.name == "plain" else 2.0000000000000004, *[1.0] * len(METRICS)])

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--logs", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"The final losses differ: .*2\.0, .*2\.0000000000000004"):
        demo.main()


class TensorBoard:
    """A TensorBoard server on the loopback interface, asked over HTTP."""

    def __init__(self, port):
        self.address = f"http://127.0.0.1:{port}/data/plugin/"
        self.opener = build_opener(ProxyHandler({}))

    def get(self, path, **query):
        with self.opener.open(f"{self.address}{path}?{urlencode(query)}", timeout=30) as answer:
            return json.load(answer)

    def steps(self, run, tag):
        return [step for _, step, _ in self.get("scalars/scalars", run=run, tag=tag)]

    def has_loaded(self):
        """Tags appear before their points."""
        with contextlib.suppress(OSError):
            tags = self.get("scalars/tags")
            return all(
                {"loss", *METRICS} <= tags.get(run, {}).keys()
                and all(len(self.steps(run, tag)) == STEPS for tag in ("loss", *METRICS))
                for run in RUNS
            )
        return False


@pytest.fixture(scope="module")
def tensorboard(demo):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The fast loader has tags in random order, and the default keeps no more than 1000 points.
    options = [
        *("--logdir", demo[0] / "demo", "--host", "127.0.0.1", "--port", port),
        *("--reload_interval", 1, "--load_fast", "false", "--samples_per_plugin", "scalars=100000"),
    ]
    command = [sys.executable, "-m", "tensorboard.main", *map(str, options)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        board = TensorBoard(port)
        deadline = time.monotonic() + 60
        while not board.has_loaded() and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.2)
        yield board
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_tensorboard_has_every_metric_at_the_steps_of_the_loss(tensorboard, run):
    tags = tensorboard.get("scalars/tags")[run]
    assert {tag for tag in tags if tag.startswith(("memory/", "time/"))} == METRICS
    steps = tensorboard.steps(run, "loss")
    assert len(steps) == len(set(steps)) == STEPS
    for tag in METRICS:
        assert tensorboard.steps(run, tag) == steps, tag


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_tensorboard_overlays_the_memory_curves_in_one_chart(tensorboard, run):
    categories = tensorboard.get("custom_scalars/layout")["category"]
    patterns = [chart["multiline"]["tag"] for category in categories for chart in category["chart"]]
    charts = [
        {
            tag: len(events)
            for pattern in chart
            for tag, events in tensorboard.get("custom_scalars/scalars", run=run, tag=pattern)["tag_to_events"].items()
        }
        for chart in patterns
    ]
    memory = next(chart for chart in charts if "memory/saved_MiB" in chart)
    assert {"memory/saved_MiB", "memory/peak_MiB"} <= memory.keys()
    assert set(memory.values()) == {STEPS}
