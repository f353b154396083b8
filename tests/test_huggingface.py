"""What is special about Hugging Face models: their own switch, eval mode, key-value caches."""

import logging

import pytest
import torch
from transformers import Gemma3nTextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import attach
from tests.support import Calls, Training, assert_equal, fit, trainer

LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def tokens(count=3):
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(torch.randint(1, 32, (count * 2, 10), generator=generator), batch_size=2)


def language_model(model, **kwargs):
    return Training(model, loss=lambda model, batch: model(input_ids=batch, labels=batch, **kwargs).loss)


def llama(**kwargs):
    return language_model(LlamaForCausalLM(LlamaConfig(**LLAMA, attention_dropout=0.1)), **kwargs)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_key_value_cache_is_replayed_and_said(use_cache, caplog):
    plain = fit(lambda: llama(use_cache=use_cache), tokens())
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        got = fit(lambda: llama(use_cache=use_cache), tokens(), [ActivationCheckpointing()])
    assert_equal(got, plain)
    assert ("3 layers fill a key-value cache" in caplog.text) == use_cache


def test_the_cache_that_the_caller_gets_is_that_of_the_plain_run():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    batch = next(iter(tokens()))
    plain = model(batch, use_cache=True).past_key_values
    for name, layer in model.named_modules():
        if name.startswith("model.layers.") and name.count(".") == 2:
            attach(layer, name)
    output = model(batch, use_cache=True)
    output.logits.sum().backward()
    assert output.past_key_values.get_seq_length() == batch.shape[1]
    for got, want in zip(output.past_key_values.layers, plain.layers, strict=True):
        assert torch.equal(got.keys, want.keys)
        assert torch.equal(got.values, want.values)


def test_layers_that_share_keys_and_values_of_earlier_ones_are_exact():
    from transformers import Gemma3nForCausalLM

    def make():
        config = Gemma3nTextConfig(
            vocab_size=32,
            vocab_size_per_layer_input=32,
            hidden_size=16,
            hidden_size_per_layer_input=8,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
            laurel_rank=4,
            altup_num_inputs=2,
        )
        return language_model(Gemma3nForCausalLM(config), use_cache=True)

    plain = fit(make, tokens())
    assert_equal(fit(make, tokens(), [ActivationCheckpointing()]), plain)


def test_layers_are_recomputed_in_eval_mode_too(monkeypatch):
    class EvalMode(Training):
        def on_train_start(self):
            self.model.eval()

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=16))
    module = EvalMode(model, loss=lambda model, batch: model(input_ids=batch, labels=batch).loss)
    calls = Calls(monkeypatch, module)
    trainer([ActivationCheckpointing()]).fit(module, tokens(2))
    assert calls.counts["model.transformer.h.1.mlp.c_fc"] == 4


def test_huggingface_own_checkpointing_is_off_meanwhile_and_on_afterwards(monkeypatch, caplog):
    def make():
        module = llama(use_cache=False)
        module.model.activation_checkpointing_enable(every_n_layers=2)
        module.model.train()
        return module

    plain = fit(lambda: llama(use_cache=False), tokens())
    assert_equal(fit(make, tokens(), [ActivationCheckpointing()]), plain)
    module = make()
    calls = Calls(monkeypatch, module)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer([ActivationCheckpointing()]).fit(module, tokens(1))
    assert [calls.counts[f"model.model.layers.{i}.mlp.gate_proj"] for i in range(3)] == [2, 2, 2]
    assert "own checkpointing of 2 layers is off until the end of `fit`" in caplog.text
    assert [layer.gradient_checkpointing for layer in module.model.model.layers] == [True, False, True]


def test_the_users_config_is_not_changed():
    module = llama()
    before = module.model.config.to_dict()
    trainer([ActivationCheckpointing()]).fit(module, tokens(1))
    assert module.model.config.to_dict() == before
    assert not any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
