"""Two ways to choose layers that are in wide use, with the model they were published for."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

from lightning_ckpt import ActivationCheckpointing
from tests.support import Calls, Training, assert_equal, fit

DEPTH = 4


def gpt_neox():
    config = GPTNeoXConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return Training(GPTNeoXForCausalLM(config), lambda model, batch: model(batch, labels=batch, use_cache=False).loss)


def texts():
    return DataLoader(torch.randint(32, (6, 12), generator=torch.Generator().manual_seed(7)), batch_size=2)


@pytest.mark.parametrize(
    ("check_fn", "indices"),
    [
        pytest.param(lambda module: isinstance(module, GPTNeoXLayer), [0, 1, 2, 3], id="every layer"),
        pytest.param(
            lambda module: isinstance(module, GPTNeoXLayer) and module.attention.layer_idx % 2 == 0,
            [0, 2],
            id="every other layer, by its index",
        ),
    ],
)
def test_a_predicate_chooses_gpt_neox_layers(monkeypatch, check_fn, indices):
    plain = fit(gpt_neox, texts())
    calls = []

    def watched():
        module = gpt_neox()
        calls.append(Calls(monkeypatch, module))
        return module

    got = fit(watched, texts(), [ActivationCheckpointing(check_fn=check_fn)])
    assert_equal(got, plain)
    batches = len(plain.losses)
    for index in range(DEPTH):
        again = index in indices
        assert calls[0].counts[f"model.gpt_neox.layers.{index}.mlp"] == batches * (1 + again), index
