"""Layers that torchao has quantized, under adapters; where it is not installed, there is nothing to collect."""

import pytest

quantization = pytest.importorskip("torchao.quantization")

from peft import get_peft_model  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

from tests.compositions import assert_same  # noqa: E402
from tests.test_finetuning import llama, lora  # noqa: E402
from tests.test_huggingface import language_model, tokens  # noqa: E402


def test_layers_quantized_by_torchao_under_adapters_are_exact():
    def make():
        model = llama()
        quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
        return language_model(get_peft_model(model, lora()), use_cache=False)

    assert_same(make, "recompute", data=tokens(), counted=LlamaAttention)
