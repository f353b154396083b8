"""Starts processes that train together, once for all tests that look at what they have done, and leaves none behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from filelock import FileLock

MARK = "STARTED_BY_TEST"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m")


@dataclass
class Done:
    """What a command has left."""

    folder: str
    code: int | None
    stdout: str
    stderr: str
    left_behind: int = 0

    @property
    def out(self) -> Path:
        return Path(self.folder)


def run(arguments: Sequence[str], folder: Path, seconds: float, grace: float = 10, cwd: Path | None = None) -> Done:
    """Run Python with `arguments`, `OUT` among them for the folder; whatever process has come of it is ended then.

    Those that are left after an orderly end are counted. `code` is None if time was up.
    """
    mark = uuid.uuid4().hex
    command = [sys.executable, *(str(folder) if argument == "OUT" else argument for argument in arguments)]
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True, cwd=cwd
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            code = process.poll()
            left = _wait_for(mark, grace) if code is not None else 0
        finally:
            _end(mark)
            process.wait()
    return Done(str(folder), code, *((folder / name).read_text() for name in ("stdout", "stderr")), left)


def shared(factory: pytest.TempPathFactory, name: str, arguments: Sequence[str], seconds: float) -> Done:
    """The same, without an error, by the first of the test processes that asks."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result = base / name, base / f"{name}.json"
    with FileLock(base / f"{name}.lock"):
        if not result.exists():
            done = run(arguments, folder, seconds)
            result.write_text(json.dumps(asdict(done)))
    done = Done(**json.loads(result.read_text()))
    assert done.code is not None, f"not done after {seconds} s:\n{done.stdout}{done.stderr}"
    assert done.code == 0, done.stdout + done.stderr
    assert done.left_behind == 0
    return done


def started(mark: str) -> list[int]:
    """Processes that have come of a command, also those in sessions of their own; not those that are only unreaped."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has just ended, or is not ours
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _wait_for(mark: str, seconds: float) -> int:
    ends = time.monotonic() + seconds
    while (left := started(mark)) and time.monotonic() < ends:
        time.sleep(0.05)
    return len(left)


def _end(mark: str) -> None:
    while left := started(mark):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
