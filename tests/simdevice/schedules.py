"""The schedules that a test of streams is worth running under, as arguments of `backend.configure`."""

import pytest

SCHEDULES = [
    ("lazy", 0),
    ("compute_first", 0),
    ("copy_first", 0),
    ("eager", 0),
    *[("random", seed) for seed in range(8)],
]

every_schedule = pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
