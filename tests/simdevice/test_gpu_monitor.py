"""The check of the monitor on a real accelerator, `benchmarks/gpu_monitor.py`, runs, and finds what it should."""

import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_support import SimAccelerator

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_monitor import Check

from lightning_ckpt.measure.counters import PeakCounter


def settings():
    return {"accelerator": SimAccelerator(), "strategy": SingleDeviceStrategy(device=torch.device("sim:0"))}


@pytest.fixture
def check(sim, tmp_path):
    sim.configure("eager")
    return Check(4, 64, 2, str(tmp_path), settings)


def test_peaks_are_equal_and_the_users_counters_untouched(check, capsys):
    assert check.peaks()
    assert "peak: equal in 4 steps" in capsys.readouterr().out


def test_a_wrong_peak_is_found(check, capsys, monkeypatch):
    take = PeakCounter.take
    monkeypatch.setattr(
        PeakCounter, "take", lambda self: (reading := take(self))._replace(peak_allocated=reading.peak_allocated + 1)
    )
    assert not check.peaks()
    assert "peak: DIFFERENT" in capsys.readouterr().out


def test_a_full_device_is_explained_and_its_snapshot_written(check, sim, capsys):
    sim.set_limit(2**30 + 2**28)
    check.out_of_memory()
    assert "snapshots: ['out_of_memory_rank0_step0.pickle" in capsys.readouterr().out
