"""The README's pictures, made of a tiny demo in a real browser; skipped where there is none."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

pytest.importorskip("selenium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("chromium") and shutil.which("chromedriver")), reason="there is no Chromium"),
]
SCRIPT = Path(__file__).parents[1] / "docs" / "pictures.py"
DEMO = SCRIPT.parents[1] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The logs of a tiny demo."""
    folder = tmp_path_factory.mktemp("logs")
    small = ("--model.depth", "2", "--model.width", "32", "--data.length", "32")
    done = subprocess.run([sys.executable, str(DEMO), "--steps", "8", "--logs", str(folder), *small], timeout=600)
    assert done.returncode == 0
    return folder


@pytest.fixture
def script(monkeypatch):
    """The script, imported, with little patience."""
    spec = importlib.util.spec_from_file_location("pictures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PATIENCE", 15)
    return module


@pytest.fixture
def temporary():
    """A folder for the temporary files of the script and its browser, whose sockets need a short path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def start(logs, output, temporary):
    command = [sys.executable, str(SCRIPT), "--logs", str(logs), "--output", str(output)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def assert_no_process_is_left(temporary):
    """None that knows this folder, except for what is still on its way out."""
    deadline = time.monotonic() + 10
    while (left := processes_of(temporary)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def processes_of(folder):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # has ended meanwhile
            if str(folder).encode() in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def test_the_pictures_show_a_point_per_step_and_no_process_is_left(logs, tmp_path, temporary):
    run = start(logs, tmp_path, temporary)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    pictures = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert pictures.keys() == {"demo.png", "tensorboard.png", "tensorboard-overlay.png"}
    assert all(picture.startswith(b"\x89PNG\r\n") and len(picture) > 10_000 for picture in pictures.values())
    assert_no_process_is_left(temporary)


def test_a_script_that_is_stopped_leaves_no_process(logs, tmp_path, temporary):
    run = start(logs, tmp_path, temporary)
    deadline = time.monotonic() + 120
    while not list(temporary.glob("org.chromium.*")):  # the browser runs
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert output.splitlines()[-1] == "stopped"
    assert list(tmp_path.iterdir()) == []
    assert_no_process_is_left(temporary)


def test_a_metric_that_lacks_steps_is_told(script, logs, tmp_path):
    shutil.copytree(logs, tmp_path / "logs")
    with SummaryWriter(tmp_path / "logs" / "demo" / "plain") as writer:
        writer.add_scalar("memory/once_MiB", 1.0, 3)
    with pytest.raises(
        script.PicturesError, match=r"plain has 8 steps, and TensorBoard has 1 points .*memory/once_MiB"
    ):
        script.make(tmp_path / "logs", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_page_that_lacks_a_line_or_section_is_told(script, logs, monkeypatch):
    steps = dict.fromkeys(script.RUNS, 8)
    with script.tensorboard(logs / "demo", steps) as board, script.chromium() as page:
        with pytest.raises(script.PicturesError, match=r"lines of \[8, 8, 8\] points for memory/.*'plain': 9"):
            script.sections(page, board, {**steps, "plain": 9})
        with pytest.raises(script.PicturesError, match=r"lines of \[8, 8, 8, 8, 8, 8\] points in 'memory.*'plain': 9"):
            script.overlays(page, board, {**steps, "plain": 9})
        monkeypatch.setattr(script, "SECTIONS", ["memory", "weather"])
        with pytest.raises(script.PicturesError, match='no charts in a section "weather"'):
            script.sections(page, board, steps)


def test_other_runs_than_those_of_the_demo_are_told(script, logs, tmp_path):
    shutil.copytree(logs / "demo" / "plain", tmp_path / "demo" / "plain")
    with pytest.raises(script.PicturesError, match=r"has the runs \['plain'\] instead of"):
        script.make(tmp_path, tmp_path / "out")
