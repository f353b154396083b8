"""Models of six kinds, small enough for a few steps on a CPU, with activations that outweigh their weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 64


class Trained(pl.LightningModule):
    """Trains a model that gives its loss for a batch of keyword arguments.

    Args:
        model: any module that returns something with a `loss`.
        optimizer: from parameters to an optimizer. Default: AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


@dataclass
class Output:
    """What a model gives."""

    loss: Tensor


class Mlp(nn.Module):
    """A residual block whose inner width is its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks of one outer width and very different inner ones.

    Args:
        inner: the inner widths.
        width: the outer width.
    """

    def __init__(self, inner: Iterable[int] = (32, 384, 96, 32, 256, 64), width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(width, each) for each in inner)
        self.head = nn.Linear(width, 8)

    def forward(self, inputs: Tensor, labels: Tensor) -> Output:
        for layer in self.layers:
            inputs = layer(inputs)
        return Output(functional.cross_entropy(self.head(inputs), labels))


def gpt_neox(layers: int = 4, width: int = 32, **settings: Any) -> nn.Module:
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_text(layers, width), use_cache=False, **{**dropout, **settings}))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
    settings = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "use_cache": False}
    return T5ForConditionalGeneration(T5Config(**sizes, **settings))


def vit() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    sizes = {"image_size": 32, "patch_size": 4, "num_labels": 8}
    return ViTForImageClassification(ViTConfig(**_sizes(4, 32), **sizes, **dropout))


def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [3, 2], "num_labels": 8}
    return ResNetForImageClassification(ResNetConfig(layer_type="bottleneck", **sizes))


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    settings = {"output_router_logits": True, "router_jitter_noise": 0.1, "attention_dropout": 0.1, "use_cache": False}
    return MixtralForCausalLM(MixtralConfig(**_text(3, 32), **experts, **settings))


def _sizes(layers: int, width: int) -> dict[str, int]:
    heads = {"num_attention_heads": 2, "intermediate_size": 2 * width}
    return {"hidden_size": width, "num_hidden_layers": layers, **heads}


def _text(layers: int, width: int) -> dict[str, int]:
    return {**_sizes(layers, width), "vocab_size": VOCABULARY}


def tokens(rows: int = 4, length: int = 64) -> dict[str, Tensor]:
    """Random text that is its own label."""
    drawn = torch.randint(0, VOCABULARY, (rows, length))
    return {"input_ids": drawn, "labels": drawn}


def translations(rows: int = 4, length: int = 64, answer: int = 48) -> dict[str, Tensor]:
    """Random text, and another one that answers it."""
    return {
        "input_ids": torch.randint(0, VOCABULARY, (rows, length)),
        "labels": torch.randint(0, VOCABULARY, (rows, answer)),
    }


def images(rows: int = 6, size: int = 32) -> dict[str, Tensor]:
    """Random images and their classes."""
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(0, 8, (rows,))}


def vectors(rows: int = 384, width: int = 32) -> dict[str, Tensor]:
    """Random vectors and their classes."""
    return {"inputs": torch.randn(rows, width), "labels": torch.randint(0, 8, (rows,))}


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model: makes it, with random weights.
        batch: makes a random batch for it.
        can_rehearse: whether its step runs on tensors without numbers.
    """

    model: Callable[[], nn.Module]
    batch: Callable[..., dict[str, Tensor]]
    can_rehearse: bool = True

    def module(self) -> Trained:
        """It, ready for training; the same one every time."""
        torch.manual_seed(0)
        return Trained(self.model())

    def batches(self, count: int, **sizes: int) -> list[dict[str, Tensor]]:
        """Batches of one size; the same ones every time."""
        torch.manual_seed(1)
        return [self.batch(**sizes) for _ in range(count)]


#: The kinds, by name.
KINDS = {
    "gpt_neox": Kind(gpt_neox, tokens),
    "widths": Kind(Stack, vectors),
    "t5": Kind(t5, translations),
    "vit": Kind(vit, images),
    "resnet": Kind(resnet, images),
    "mixtral": Kind(mixtral, tokens, can_rehearse=False),
}
