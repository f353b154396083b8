"""DDP on two real processes equals the run without the callback, bit for bit on each rank."""

import subprocess
import sys

import pytest
import torch


def run(out, mode):
    command = [sys.executable, "-m", "tests.distributed.two_processes", str(out), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def flat(state):
    yield from ((f"weight {name}", value) for name, value in state["weights"].items())
    yield from ((f"gradient {name}", value) for name, value in state["gradients"].items())
    yield "random", state["random"]


@pytest.mark.slow
def test_two_processes_equal_the_run_without_the_callback(tmp_path):
    run(tmp_path / "without", "without")
    output = run(tmp_path / "with", "with")
    assert output.count("recomputes in backward") == 2  # once per fit, on rank 0 only
    for strategy in ("ddp_fork", "ddp_fork_find_unused_parameters_true"):
        for rank in range(2):
            got, want = (torch.load(tmp_path / f"{mode}.{strategy}.{rank}") for mode in ("with", "without"))
            for (name, a), (_, b) in zip(flat(got), flat(want), strict=True):
                assert (a is None and b is None) or torch.equal(a, b), f"{name} on rank {rank} with {strategy}"
