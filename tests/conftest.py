"""Settings for every test: one thread, so that sums are in the same order, and a quiet Lightning."""

import logging
import warnings

import pytest
import torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*exists and is not empty.*")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
