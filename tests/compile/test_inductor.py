"""Code that the default backend generates."""

import shutil

import pytest
import torch

from lightning_ckpt import ActivationCheckpointing
from tests.compile.support import TREATMENTS, blocks, compile_each, rows, train
from tests.support import Block, Training, assert_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"),
]


def module(_):
    return torch.compile(Training(blocks(1)))


def layers(_):
    model = blocks(1)
    compile_each(model[1:], "inductor", mode="default", fullgraph=True)
    return Training(model)


def assert_exact(make, treatments=TREATMENTS, **kwargs):
    plain = train(make, [], rows(2), **kwargs)
    for treatment in map(TREATMENTS.get, treatments):
        got = train(make, [ActivationCheckpointing(**treatment, layers=Block)], rows(2), **kwargs)
        assert_equal(got.run, plain.run)
        assert got.breaks == plain.breaks
        assert sum(got.saved) < sum(plain.saved)


def test_generated_code_of_layers_equals_the_plain_generated_code():
    assert_exact(layers)


def test_generated_code_of_a_module_equals_the_plain_generated_code():
    assert_exact(module, ["recompute"])


def test_fused_half_precision_is_exact_where_fused_casts_round():
    """By default what is fused is not rounded to half precision in between, and a recompute is fused with backward."""
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert_exact(layers, ["recompute"], precision="bf16-mixed")
