"""Adapters, frozen layers and quantized weights: most of a layer asks for no gradients, or all of it, or not yet."""

import copy
import filecmp
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.compositions import assert_same, assert_same_values, fitted, leftovers
from tests.support import Block, Training, assert_equal, blocks
from tests.test_huggingface import LLAMA, language_model, tokens
from tests.treatments import TREATMENTS

# ---------------------------------------------------------------- adapters


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, attention_dropout=0.1))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=16))


def lora(**settings: Any) -> LoraConfig:
    """LoRA with dropout, whose matrices are not zero from the start."""
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings}
    return LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, lora_dropout=0.1, **settings)


def prepare_for_kbit(model: Any, **settings: Any) -> None:
    """What is done to a model with quantized weights, all but quantizing them."""
    model.is_loaded_in_4bit = True
    prepare_model_for_kbit_training(model, **settings)
    model.is_loaded_in_4bit = False


@dataclass
class Adapted:
    """A kind of adapter, and what is done to the model before."""

    config: Callable[[], Any] = lora
    base: Callable[[], nn.Module] = llama
    prepare: Callable[[Any], object] = lambda model: None

    def __call__(self) -> Training:
        model = self.base()
        self.prepare(model)
        return language_model(get_peft_model(model, self.config()), use_cache=False)


ADAPTED = {
    "llama": Adapted(),
    "gpt2": Adapted(lambda: lora(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True), gpt2),
    "modules_to_save": Adapted(lambda: lora(modules_to_save=["lm_head", "mlp"])),
    "embeddings": Adapted(lambda: lora(target_modules=["embed_tokens", "q_proj"])),
    "inputs_require_gradients": Adapted(prepare=lambda model: model.enable_input_require_grads()),
    "kbit": Adapted(prepare=lambda model: prepare_for_kbit(model, use_gradient_checkpointing=False)),
    "bfloat16": Adapted(prepare=lambda model: model.bfloat16()),
    "dora": Adapted(lambda: lora(use_dora=True)),
    # Its hooks are on the layers in forward only; they take from the batch where the adapter begins to act.
    "alora": Adapted(lambda: lora(alora_invocation_tokens=[3])),
    "ia3": Adapted(
        lambda: IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
    ),
    "prefix": Adapted(lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
}
ALL_TREATMENTS = [(name, treatment) for name in ("llama", "gpt2") for treatment in TREATMENTS]
RECOMPUTED = [(name, "recompute") for name in ADAPTED if name not in ("llama", "gpt2")]
KEPT = [(name, "matmul") for name in ("modules_to_save", "dora", "alora", "prefix")]


@pytest.mark.parametrize(("name", "treatment"), ALL_TREATMENTS + RECOMPUTED + KEPT)
def test_adapters_train_as_in_the_plain_run(name, treatment):
    counted = GPT2Attention if name == "gpt2" else LlamaAttention
    got, plain = assert_same(ADAPTED[name], treatment, data=tokens(), counted=counted)
    assert got.run.gradients[0].keys() == {n for n, p in got.module.named_parameters() if p.requires_grad}
    assert leftovers(got.module) == leftovers(plain.module)


def test_the_hooks_of_an_activated_adapter_matter():
    plain, activated = (fitted(ADAPTED[name], data=tokens(), counted=None).run for name in ("llama", "alora"))
    assert not torch.equal(plain.losses[0], activated.losses[0])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_was_switched_on_for_the_adapter_is_replaced_and_comes_back(when, reentrant):
    def switch_on(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def make():
        model = llama()
        if when == "before":
            prepare_for_kbit(model, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model = get_peft_model(model, lora())
        if when == "after":
            switch_on(model)
        return language_model(model, use_cache=False)

    plain = fitted(ADAPTED["kbit" if when == "before" else "llama"], data=tokens(), counted=LlamaAttention)
    got = fitted(make, "recompute", data=tokens(), counted=LlamaAttention)
    assert got.replayed == got.ran == plain.ran
    assert_equal(got.run, plain.run)
    assert "own checkpointing of 3 layers is off until the end of `fit`" in got.said
    layers = got.module.model.base_model.model.model.layers
    assert all(layer.gradient_checkpointing for layer in layers)


class Compared(Training):
    """Draws the model towards itself without adapters, and makes the two adapters agree, in one backward."""

    def __init__(self, reference_has_gradients):
        model = get_peft_model(llama(), lora(modules_to_save=["lm_head"]), adapter_name="first")
        model.add_adapter("second", lora(modules_to_save=["lm_head"]))
        model.enable_input_require_grads()
        super().__init__(model)
        self.reference_has_gradients = reference_has_gradients

    def training_step(self, batch, batch_idx):
        def logits():
            return self.model(input_ids=batch, use_cache=False).logits

        self.model.set_adapter("first")
        first = logits()
        with self.model.disable_adapter(), torch.set_grad_enabled(self.reference_has_gradients):
            reference = logits()
        self.model.set_adapter("second")
        second = logits()
        self.model.set_requires_grad(["first", "second"])
        return (first - second).square().mean() + (first - reference).abs().mean()


@pytest.mark.parametrize("treatment", ["recompute", "matmul"])
@pytest.mark.parametrize("reference_has_gradients", [False, True])
def test_adapters_that_are_switched_between_forward_and_backward_are_exact(reference_has_gradients, treatment):
    got, _ = assert_same(lambda: Compared(reference_has_gradients), treatment, data=tokens(), counted=LlamaAttention)
    both = {name for step in got.run.gradients for name in step if "lora" in name}
    assert {"first", "second"} <= {part for name in both for part in name.split(".")}


class Alternating(pl.Callback):
    """Trains another adapter in every step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.model.set_adapter(["first", "second"][batch_idx % 2])


def two_adapters():
    model = get_peft_model(llama(), lora(), adapter_name="first")
    model.add_adapter("second", lora(target_modules=["o_proj"]))
    return language_model(model, use_cache=False)


def test_another_adapter_in_every_step_is_exact():
    got, _ = assert_same(two_adapters, "recompute", lambda: [Alternating()], tokens(4), counted=LlamaAttention)
    assert [any("second" in name for name in step) for step in got.run.gradients] == [False, True, False, True]


class SavesAdapter(pl.Callback):
    """Saves the adapter after every epoch, beside the checkpoints of Lightning."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.model.save_pretrained(self.folder / f"epoch{trainer.current_epoch}")


def test_adapters_are_saved_loaded_and_merged_as_after_the_plain_run(tmp_path):
    make = ADAPTED["modules_to_save"]

    def train(treatment):
        folder = tmp_path / str(treatment)

        def callbacks():
            return [SavesAdapter(folder), ModelCheckpoint(folder / "checkpoints", filename="last")]

        settings = {"enable_checkpointing": True, "max_epochs": 2}
        done = fitted(make, treatment, callbacks, tokens(2), counted=LlamaAttention, **settings)
        done.module.model.save_pretrained(folder / "end")
        return folder, done

    expected, plain = train(None)
    folder, got = train("recompute")
    assert got.replayed == got.ran > 0
    for saved in ("epoch0", "epoch1", "end"):
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert filecmp.cmp(folder / saved / file, expected / saved / file, shallow=False), f"{saved}/{file}"
    assert not filecmp.cmp(*(folder / f"epoch{i}" / "adapter_model.safetensors" for i in range(2)), shallow=False)

    a, b = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=False) for f in (folder, expected))
    assert list(a["state_dict"]) == list(b["state_dict"])
    assert all(torch.equal(a["state_dict"][name], value) for name, value in b["state_dict"].items())

    batch = next(iter(tokens()))
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(make.base(), folder / "end").eval()
    assert torch.equal(loaded(batch).logits, got.module.model.eval()(batch).logits)
    with got.module.model.disable_adapter(), plain.module.model.disable_adapter():
        assert torch.equal(got.module.model(batch).logits, plain.module.model.eval()(batch).logits)
    merged, want = (done.module.model.merge_and_unload() for done in (got, plain))
    assert type(merged) is LlamaForCausalLM
    assert list(merged.state_dict()) == list(make.base().state_dict())
    assert_same_values(merged, want)


class Merges(pl.Callback):
    """Looks at the merged model while training goes on."""

    def on_train_epoch_end(self, trainer, pl_module):
        self.merged = copy.deepcopy(pl_module.model).merge_and_unload()
        pl_module.model.merge_adapter()
        pl_module.model.unmerge_adapter()


def test_adapters_can_be_merged_between_two_epochs():
    merged = [
        done.callback(Merges).merged
        for done in assert_same(
            ADAPTED["llama"], "recompute", lambda: [Merges()], tokens(2), counted=LlamaAttention, max_epochs=2
        )
    ]
    assert_same_values(*merged)


# ---------------------------------------------------------------- frozen layers


def frozen(count: int, of: int = 4) -> Training:
    """A model whose stem and first `count` of some blocks are frozen."""
    model = blocks(of)
    model[: count + 1].requires_grad_(False)
    return Training(nn.Sequential(model, nn.Linear(8, 8)))


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_frozen_layers_before_trained_ones_are_not_run_again(treatment):
    got, _ = assert_same(lambda: frozen(2), treatment, replays=1 / 2)
    assert re.search(r"2 of 4 layers .*first training batch.*model\.0\.\{1, 2\}", got.said)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_model_that_is_frozen_but_for_its_head_has_nothing_to_recompute_and_this_is_said(treatment):
    got, _ = assert_same(lambda: frozen(4), treatment, replays=0)
    assert re.search(r"4 of 4 layers .*first training batch.*model\.0\.\{1, 2, 3, 4\}", got.said)


@pytest.mark.parametrize("trained", ["norm", "linear", "linear.bias", "none"])
@pytest.mark.parametrize("treatment", ["recompute", "matmul"])
def test_partly_frozen_layers_are_exact(trained, treatment):
    def make():
        module = Training()
        for name, parameter in module.model[1:].named_parameters():
            parameter.requires_grad_(trained in name)
        return module

    got, _ = assert_same(make, treatment)
    assert "of 4 layers" not in got.said.replace("4 of 4 Block", "")


# ---------------------------------------------------------------- layers that thaw


class Backboned(Training):
    """A backbone of blocks that is thawed later, and a head."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.backbone = nn.Sequential(*blocks(3), nn.BatchNorm1d(8))
        self.head = nn.Sequential(Block(), Block(), nn.Linear(8, 8))

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class ThawsOneBlockPerEpoch(BaseFinetuning):
    """Thaws from the back; freezes the last block of the head in the last epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        self.unfreeze_and_add_param_group(pl_module.backbone[-2 - epoch], optimizer, lr=0.05)
        if epoch == 2:
            self.freeze(pl_module.head[1])


FINETUNING = {
    # replays of 5 blocks in 3 epochs, of which 3 are frozen at first
    "backbone": (lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05), (2 + 5 + 5) / 15),
    "blocks": (ThawsOneBlockPerEpoch, (3 + 4 + 5) / 15),
}


@pytest.mark.parametrize(
    ("treatment", "ours_last"), [*((treatment, False) for treatment in TREATMENTS), ("recompute", True)]
)
@pytest.mark.parametrize("name", FINETUNING)
def test_layers_that_thaw_during_training_are_recomputed_from_then_on(name, treatment, ours_last):
    make, replays = FINETUNING[name]
    got, _ = assert_same(Backboned, treatment, lambda: [make()], replays=replays, ours_last=ours_last, max_epochs=3)
    assert "backbone.1.linear.weight" not in got.run.gradients[0]
    assert "backbone.1.linear.weight" in got.run.gradients[-1]


def test_layers_that_thaw_between_forward_and_backward_of_different_batches_are_exact():
    class Thaws(Training):
        def on_train_batch_start(self, batch, batch_idx):
            self.model[1:3].requires_grad_(batch_idx % 2 == 0)

    assert_same(lambda: Thaws(), "recompute", accumulate_grad_batches=2)


# ---------------------------------------------------------------- quantized weights


class Int8Linear(nn.Module):
    """Weights of one byte and a scale, as buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Int8Tensor(Tensor):
    """A weight of one byte and a scale as a tensor subclass that knows few operators, as torchao makes them."""

    @staticmethod
    def __new__(cls, bytes_: Tensor, scale: Tensor) -> "Int8Tensor":
        return Tensor._make_wrapper_subclass(cls, bytes_.shape, dtype=scale.dtype, requires_grad=False)

    def __init__(self, bytes_: Tensor, scale: Tensor) -> None:
        self.bytes_, self.scale = bytes_, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["bytes_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride) -> "Int8Tensor":
        return cls(inner["bytes_"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, bias = args
            return _Int8Product.apply(x, weight, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return cls(function(args[0].bytes_), function(args[0].scale))
        raise NotImplementedError(f"Int8Tensor knows no {function}")


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight.bytes_.to(x.dtype) * weight.scale, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ (weight.bytes_.to(gradient.dtype) * weight.scale), None, None


def with_subclass(linear: nn.Linear) -> nn.Module:
    plain = Int8Linear(linear)
    linear.weight = nn.Parameter(Int8Tensor(plain.weight, plain.scale), requires_grad=False)
    return linear


class CarryingParameter(nn.Parameter):
    """A weight that carries its scale as an attribute until it is used, as bitsandbytes makes them."""

    scale: Tensor | None


class MovesScale(nn.Linear):
    """Takes the scale from its weight in the first call; a second first call would do without."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        quantized = Int8Linear(linear)
        self.weight = CarryingParameter(quantized.weight.float(), requires_grad=False)
        self.weight.scale = quantized.scale
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.scale is not None:
            self.scale, self.weight.scale = self.weight.scale, None
        weight = self.weight if self.scale is None else self.weight * self.scale
        return nn.functional.linear(x, weight, self.bias)


QUANTIZED = {"buffers": Int8Linear, "subclass": with_subclass, "carried": MovesScale}


@pytest.mark.parametrize("treatment", ["recompute", "matmul"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_layers_with_quantized_weights_are_exact(name, treatment):
    def make():
        model = blocks(3)
        for block in model[1:]:
            block.linear = QUANTIZED[name](block.linear)
        return Training(model)

    got, _ = assert_same(make, treatment)
    assert "model.1.norm.weight" in got.run.gradients[0]
    assert "model.1.linear.weight" not in got.run.gradients[0]


class Quantized(nn.Module):
    """A trained block beside a quantized one of PyTorch, through which no gradients flow."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.side = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.side(x.detach())


@pytest.mark.parametrize("treatment", ["recompute", "matmul"])
def test_layers_that_hold_layers_quantized_by_pytorch_are_exact(treatment):
    assert_same(lambda: Training(nn.Sequential(nn.Linear(8, 8), *[Quantized() for _ in range(3)])), treatment)


def test_frozen_layers_quantized_by_pytorch_are_not_run_again():
    def make():
        model = blocks(4)
        model[:3].requires_grad_(False)
        for i in (1, 2):
            model[i] = torch.ao.quantization.quantize_dynamic(model[i], {nn.Linear})
        return Training(model)

    assert_same(make, "recompute", replays=1 / 2)
