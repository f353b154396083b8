"""Compiled models under DDP on two processes equal their plain runs, bit for bit on each rank, and save less."""

import subprocess
import sys

import pytest
import torch

from tests.distributed.compiled import TREATED


@pytest.mark.slow
def test_compiled_models_on_two_processes(tmp_path):
    command = [sys.executable, "-m", "tests.distributed.compiled", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for case, treatments in TREATED.items():
        for rank in range(2):
            seen, want = torch.load(tmp_path / f"{case}.plain.{rank}")
            saved = {"plain": seen["saved"]}
            assert case == "layers" or seen["graphs"][0] > 1, "not split where buckets end"
            for name in treatments:
                what, got = torch.load(tmp_path / f"{case}.{name}.{rank}")
                assert got.keys() == want.keys()
                for key, value in want.items():
                    assert torch.equal(got[key], value), f"{case}, {name}: {key} on rank {rank}"
                assert what["breaks"] == seen["breaks"]
                assert len(set(what["graphs"])) == 1, "compiled again after the first batch"
                saved[name] = what["saved"]
            assert saved["recompute"] < saved.get("matmul", saved["plain"]) <= saved["plain"], case
