"""No process is left behind by a test, whatever it does."""

import time
from pathlib import Path

import pytest

from tests.distributed.launch import run

STARTS_ANOTHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
print(child.pid)
"""


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_time_is_up_for_children_in_sessions_of_their_own_too(tmp_path):
    started = time.monotonic()
    done = run(["-u", "-c", f"{STARTS_ANOTHER}time.sleep(100)"], tmp_path, 1)
    assert time.monotonic() - started < 20
    assert done.code is None
    assert not is_running(int(done.stdout))


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise ValueError", 1)])
def test_who_outlives_the_command_is_counted_and_ended(last, code, tmp_path):
    done = run(["-c", STARTS_ANOTHER + last], tmp_path, 30, grace=0.3)
    assert (done.code, done.left_behind) == (code, 1)
    assert not is_running(int(done.stdout))
