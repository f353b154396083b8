"""Every test starts with a compiler that has seen nothing."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
