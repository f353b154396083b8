"""Two real processes equal the run without the callback, bit for bit on each rank."""

import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
@pytest.mark.parametrize("cases", [["ddp", "ddp_unused"], ["fsdp_flat", "fsdp_nested", "fully_shard"]], ids=" ".join)
def test_two_processes_equal_the_run_without_the_callback(cases, tmp_path):
    command = [sys.executable, "-m", "tests.distributed.two_processes", str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Said on rank 0 only.
    assert (done.stdout + done.stderr).count("recomputes in backward") == len(cases)
    for case in cases:
        for rank in range(2):
            got, want = (torch.load(tmp_path / f"{case}.{mode}.{rank}") for mode in ("with", "without"))
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert torch.equal(got[name], value), f"{case}: {name} on rank {rank}"
