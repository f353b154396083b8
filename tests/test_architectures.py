"""Real models of many kinds train bit for bit as without the callback, and every chosen layer runs exactly twice."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.measure.saved import SavedBytes, saved_bytes
from lightning_ckpt.recompute import attach, detach
from lightning_ckpt.recompute.watch import unwatch, watch
from lightning_ckpt.selection import select_layers
from tests.support import Block, Run, Training, assert_equal, blocks, fit

STEPS, BATCH, LENGTH, WIDTH, VOCABULARY = 3, 4, 8, 16, 32


def small(**kwargs: Any) -> dict[str, Any]:
    """Sizes that most Hugging Face configs name alike."""
    return {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, **kwargs}


def small_text(**kwargs: Any) -> dict[str, Any]:
    return small(vocab_size=VOCABULARY, **kwargs)


def gpt_neox() -> nn.Module:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**small_text(attention_dropout=0.1, hidden_dropout=0.1)))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**small_text(num_key_value_heads=1, attention_dropout=0.1)))


def gpt2() -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**small_text()))


def albert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return AlbertForMaskedLM(AlbertConfig(**small_text(embedding_size=8), **dropout))


def bart() -> nn.Module:
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": LENGTH}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    dropout = {"attention_dropout": 0.1, "activation_dropout": 0.1, "decoder_layerdrop": 0.1}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, **sizes, **heads, **dropout))


def t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def vit() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(**small(image_size=16, patch_size=8), **dropout))


def swin() -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.3}
    return SwinForImageClassification(SwinConfig(**sizes, **dropout))


def resnet() -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]))


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "router_jitter_noise": 0.1, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**small_text(num_key_value_heads=1, attention_dropout=0.1), **experts))


def mamba() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 3}
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, **sizes))


def transformer_encoder() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(), num_layers=3, enable_nested_tensor=False)


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=32, dropout=0.1, batch_first=True, norm_first=True)


class DoubleConv(nn.Module):
    """Two convolutions, each with its norm and activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        parts = []
        for channels in (inputs, outputs):
            parts += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(inplace=True)]
        self.parts = nn.Sequential(*parts, nn.Dropout2d(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class UNet(nn.Module):
    """Down, across and up again, with a skip connection at every size."""

    def __init__(self, channels: tuple[int, ...] = (4, 8, 16)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(channels))
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1)
        self.down = nn.ModuleList(DoubleConv(few, many) for few, many in pairs)
        self.middle = nn.Conv2d(channels[-1], channels[-1], 3, padding=1)
        self.up = nn.ModuleList(DoubleConv(2 * many, few) for few, many in reversed(pairs))
        self.head = nn.Conv2d(channels[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)


def language_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def image_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(pixel_values=batch, labels=torch.arange(len(batch)) % 2).loss


def tokens() -> Tensor:
    return torch.randint(2, VOCABULARY, (STEPS * BATCH, LENGTH))


def images() -> Tensor:
    return torch.randn(STEPS * BATCH, 3, 16, 16)


def sequences() -> Tensor:
    return torch.randn(STEPS * BATCH, LENGTH, WIDTH)


def rows() -> Tensor:
    return torch.randn(STEPS * BATCH, 8)


def children_of(name: str, count: int) -> list[str]:
    return [f"{name}.{index}" for index in range(count)]


@dataclass
class Architecture:
    """A model to train.

    Args:
        build: makes the model.
        layers: qualified names of its layers in the order of `model.modules()`, nested ones included.
        data: makes the rows of the training data.
        loss: function of model and batch; default: mean square of the output.
        hf_switch: whether Hugging Face's own switch works on it.
    """

    build: Callable[[], nn.Module]
    layers: list[str]
    data: Callable[[], Tensor] = rows
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    hf_switch: bool = False


TEXT = {"data": tokens, "loss": language_loss, "hf_switch": True}
IMAGE = {"data": images, "loss": image_loss, "hf_switch": True}

ARCHITECTURES = {
    "gpt_neox": Architecture(gpt_neox, children_of("gpt_neox.layers", 3), **TEXT),
    "llama": Architecture(llama, children_of("model.layers", 3), **TEXT),
    "gpt2": Architecture(gpt2, children_of("transformer.h", 3), **TEXT),
    "bert": Architecture(bert, children_of("bert.encoder.layer", 3), **TEXT),
    # One group of weights, called once per hidden layer.
    "albert": Architecture(albert, ["albert.encoder.albert_layer_groups.0"], **{**TEXT, "hf_switch": False}),
    "bart": Architecture(bart, children_of("model.encoder.layers", 2) + children_of("model.decoder.layers", 3), **TEXT),
    "t5": Architecture(t5, children_of("encoder.block", 2) + children_of("decoder.block", 3), **TEXT),
    "vit": Architecture(vit, children_of("vit.layers", 3), **IMAGE),
    # Stages and the layers inside them are both marked as layers; what lies in a chosen stage is part of it.
    "swin": Architecture(
        swin,
        [
            name
            for stage in children_of("swin.encoder.layers", 2)
            for name in (stage, *children_of(f"{stage}.blocks", 2))
        ],
        **IMAGE,
    ),
    "resnet": Architecture(
        resnet,
        children_of("resnet.encoder.stages.0.layers", 2) + children_of("resnet.encoder.stages.1.layers", 2),
        data=images,
        loss=image_loss,
    ),
    "mixtral": Architecture(mixtral, children_of("model.layers", 3), **TEXT),
    "mamba": Architecture(mamba, children_of("backbone.layers", 3), **TEXT),
    "transformer_encoder": Architecture(transformer_encoder, children_of("layers", 3), data=sequences),
    "sequential": Architecture(blocks, [str(index) for index in range(1, 5)]),
    "unet": Architecture(UNet, children_of("down", 2) + children_of("up", 2), data=images),
}
SWITCHABLE = [name for name, architecture in ARCHITECTURES.items() if architecture.hf_switch]


def chosen_layers(layers: list[str], every_n_layers: int) -> list[str]:
    """The first and every n-th name, without those inside another one of these."""
    counted = layers[::every_n_layers]
    return [name for name in counted if not any(name.startswith(f"{other}.") for other in counted)]


def record_forwards(patch: pytest.MonkeyPatch, model: nn.Module) -> SimpleQueue[str]:
    """Record forward calls of every module of `model`, Hugging Face layers and replays included, from now on.

    In a queue, since a replay would put back a counter that it can reach. Hugging Face layers compare their class's
    `forward` with the one they have wrapped, but only where their own switch is on, and here it is off.
    """
    record: SimpleQueue[str] = SimpleQueue()
    names = {id(module): name for name, module in model.named_modules()}

    def recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def record_and_run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) in names:
                record.put(names[id(module)])
            return forward(module, *args, **kwargs)

        return record_and_run

    for cls in {type(module) for module in model.modules()}:
        if "forward" in vars(cls):
            patch.setattr(cls, "forward", recorded(cls.forward))
    return record


@dataclass
class CountedRun:
    run: Run
    calls: Counter[str]


def train(architecture: Architecture, *callbacks: ActivationCheckpointing, **trainer_kwargs: Any) -> CountedRun:
    """Fit the model from fixed seeds and count forwards."""
    torch.manual_seed(7)
    data = DataLoader(architecture.data(), batch_size=BATCH)
    torch.manual_seed(0)
    module = Training(architecture.build(), architecture.loss)
    with pytest.MonkeyPatch.context() as patch:
        record = record_forwards(patch, module.model)
        run = fit(lambda: module, data, callbacks, **trainer_kwargs)
    return CountedRun(run, Counter(record.get() for _ in range(record.qsize())))


@functools.cache
def plain_training(name: str) -> CountedRun:
    return train(ARCHITECTURES[name])


@pytest.mark.parametrize("every_n_layers", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_bit_for_bit_and_runs_only_the_chosen_layers_twice(name: str, every_n_layers: int, tmp_path) -> None:
    architecture, plain = ARCHITECTURES[name], plain_training(name)
    callback, logger = ActivationCheckpointing(every_n_layers=every_n_layers), CSVLogger(tmp_path)
    recomputed = train(architecture, callback, logger=logger)  # with a logger, the monitor is at work too

    assert len(recomputed.run.losses) == STEPS
    assert_equal(recomputed.run, plain.run)

    chosen = chosen_layers(architecture.layers, every_n_layers)
    inside = tuple(f"{layer}." for layer in chosen)
    assert set(chosen) <= plain.calls.keys()
    for module, count in plain.calls.items():
        if module in chosen:
            assert recomputed.calls[module] == 2 * count, f"{module} is a chosen layer"
        elif not module.startswith(inside):  # inside a layer, a replay may stop before the last modules
            assert recomputed.calls[module] == count, f"{module} is outside of the chosen layers"


@pytest.mark.parametrize("every_n_layers", [1, 2, 3])
@pytest.mark.parametrize("name", SWITCHABLE)
def test_chooses_the_layers_that_hugging_faces_switch_chooses(name: str, every_n_layers: int) -> None:
    model = ARCHITECTURES[name].build()
    selected = list(select_layers(model, every_n_layers=every_n_layers).layers)

    model.activation_checkpointing_enable(every_n_layers=every_n_layers)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, GradientCheckpointingLayer)}
    switched = {name: layer for name, layer in layers.items() if layer.gradient_checkpointing}
    inside = {id(part) for layer in switched.values() for part in layer.modules() if part is not layer}
    assert selected == [name for name, layer in switched.items() if id(layer) not in inside]
    assert selected


# Theory: with every block of a chain recomputed, what is kept is each block's input, and what is outside of blocks.


class Watcher:
    def replay_begins(self) -> None: ...

    def replay_ends(self) -> None: ...


@pytest.fixture
def watched():
    """Frames note what they leave unsaved only while somebody watches."""
    watcher = Watcher()
    watch(watcher)
    yield
    unwatch(watcher)


def saved_for_backward(model: nn.Module, x: Tensor) -> SavedBytes:
    torch.manual_seed(3)
    loss = model(x).square().mean()
    return saved_bytes([loss], model.parameters())


def chain_of_mlp_blocks() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(*[Block(32) for _ in range(8)]), torch.randn(64, 32)


def chain_of_transformer_blocks() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(*[encoder_layer() for _ in range(8)]), torch.randn(BATCH, 32, WIDTH)


CHAINS = [chain_of_mlp_blocks, chain_of_transformer_blocks]


@pytest.mark.parametrize("make_chain", CHAINS)
def test_a_recomputed_chain_keeps_the_inputs_of_its_blocks_and_what_is_outside(make_chain, watched) -> None:
    model, x = make_chain()
    for name, block in model.named_children():
        attach(block, name)

    inputs_of_blocks = len(model) * x.nbytes  # every block's output has the shape of its input
    outside = x.nbytes  # `square` keeps the output of the last block, `mean` only the shape
    saved = saved_for_backward(model, x)
    assert saved.saved == pytest.approx(inputs_of_blocks + outside, rel=0.02)
    assert saved.complete


@pytest.mark.parametrize("make_chain", CHAINS)
def test_saved_and_avoided_bytes_add_up_to_what_the_plain_chain_saves(make_chain, watched) -> None:
    model, x = make_chain()
    plain = saved_for_backward(model, x)
    for name, block in model.named_children():
        attach(block, name)
    recomputed = saved_for_backward(model, x)
    for block in model:
        detach(block)

    assert plain.avoided == 0
    assert recomputed.saved + recomputed.avoided == plain.saved
    assert recomputed.saved < plain.saved / 2
    assert saved_for_backward(model, x) == plain
