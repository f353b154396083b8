"""Real fits under Lightning's DeepSpeed strategy, on two CPU processes: equal to those without the callback."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed.runs import CASES, TREATMENTS, treatments

BATCHES, LAYERS = 4, 3


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[list[str], Path, str]:
    cases = list(CASES)
    out = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.deepspeed.runs", str(out), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return cases, out, done.stdout + done.stderr


def load(out: Path, case: str, treatment: str, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return torch.load(out / f"{case}.{treatment}.{rank}")


def test_losses_gradients_and_weights_are_equal(runs):
    cases, out, _ = runs
    for case in cases:
        for rank in range(2):
            plain, _ = load(out, case, "plain", rank)
            assert any(name.startswith("gradient") for name in plain)
            for treatment in treatments(case):
                got, _ = load(out, case, treatment, rank)
                assert got.keys() == plain.keys()
                for name, value in plain.items():
                    assert torch.equal(got[name], value), f"{case}, {treatment}: {name} on rank {rank}"


def test_every_layer_runs_once_more(runs):
    cases, out, _ = runs
    for case in cases:
        for treatment in treatments(case):
            arguments, _ = TREATMENTS[treatment]
            _, about = load(out, case, treatment, 0)
            recomputed = 0 if arguments is None else len(range(0, LAYERS, arguments.get("every_n_layers", 1)))
            assert about["calls"] == BATCHES * (LAYERS + recomputed), f"{case}, {treatment}"


def test_what_deepspeed_counts_is_as_without(runs):
    cases, out, _ = runs
    for case in cases:
        _, plain = load(out, case, "plain", 0)
        for treatment in treatments(case):
            _, about = load(out, case, treatment, 0)
            for name in ("counters", "gathered", "stack"):
                assert about[name] == plain[name], f"{case}, {treatment}: {name}"
            # In a replay, the four parts before the last one are gathered once more; the last one is there.
            replays = about["calls"] - plain["calls"]
            assert plain["gathers"] <= about["gathers"] <= plain["gathers"] + 4 * replays
            if case == "zero3_released_at_once":
                assert about["gathers"] == plain["gathers"] + 4 * replays


def test_a_configuration_of_checkpointing_alone_is_no_matter(runs):
    _, _, said = runs
    assert "recomputes in backward" in said
    assert "checkpointed already" not in said
