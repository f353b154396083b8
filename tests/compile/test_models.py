"""Hugging Face models, compiled per layer and whole."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.compile.support import assert_exact, compile_each
from tests.support import Training

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_dropout": 0.1,
    "use_cache": False,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def gpt_neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, hidden_dropout=0.1))


def layers_of(model):
    return model.model.layers if isinstance(model, LlamaForCausalLM) else model.gpt_neox.layers


@pytest.mark.slow
@pytest.mark.parametrize(("make_model", "whole"), [(llama, True), (gpt_neox, False)])
def test_hugging_face_models(make_model, whole):
    def make(backend):
        model = make_model().train()
        if whole:
            model.compile(backend=backend)
        else:
            compile_each(layers_of(model), backend)
        return Training(model, lambda model, ids: model(input_ids=ids, labels=ids).loss)

    ids = torch.randint(0, 32, (2, 8, 64), generator=torch.Generator().manual_seed(3))
    runs = assert_exact(make, DataLoader(ids, batch_size=None))
    assert runs["recompute"].products > runs["plain"].products
