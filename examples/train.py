"""A language model over bytes, trained on Python's own standard library: `python examples/train.py fit --help`."""

import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from lightning_ckpt import CheckpointCLI


class ByteGPTNeoX(pl.LightningModule):
    """GPT-NeoX with random weights that predicts the next byte of a text.

    Args:
        width: Size of the hidden states.
        depth: Number of layers.
        heads: Number of attention heads.
        dropout: Probability of dropping a value, in attention and behind it.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(
        self, width: int = 128, depth: int = 8, heads: int = 4, dropout: float = 0.1, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.config = GPTNeoXConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            hidden_dropout=dropout,
            attention_dropout=dropout,
        )
        self.learning_rate = learning_rate
        self.model: GPTNeoXForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this again for validation and the like
            return
        if self.device_mesh is None:  # every strategy but `ModelParallelStrategy`
            self.model = GPTNeoXForCausalLM(self.config)
        else:
            self._build_in_parts(self.device_mesh["data_parallel"])

    def _build_in_parts(self, mesh: DeviceMesh) -> None:
        """Build the model by FSDP2: no rank ever holds all of it."""
        with torch.device("meta"):  # shapes only
            self.model = GPTNeoXForCausalLM(self.config)
        # What travels between ranks is bfloat16, but sums of gradients are not.
        dtype = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in self.model.gpt_neox.layers:  # gathered one after the other
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)  # the rest: embeddings, last norm and head
        # Each rank makes and fills its part only. PyTorch warns on the CPU: there, all ranks draw the same numbers.
        self.model.to_empty(device=self.trainer.strategy.root_device)
        self.model.init_weights()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class StandardLibrarySources(pl.LightningDataModule):
    """The sources of Python's standard library, cut into pieces of equal length.

    Args:
        batch_size: Pieces per batch.
        length: Bytes per piece.
        max_bytes: How much of the sources to read.
    """

    def __init__(self, batch_size: int = 8, length: int = 128, max_bytes: int = 4_000_000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
        whole = min(len(text), self.max_bytes) // self.length * self.length
        self.pieces = torch.frombuffer(text[:whole], dtype=torch.uint8).view(-1, self.length).long()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.pieces, batch_size=self.batch_size, shuffle=True, drop_last=True)


if __name__ == "__main__":
    CheckpointCLI(
        ByteGPTNeoX,
        StandardLibrarySources,
        trainer_defaults={"max_steps": 200, "log_every_n_steps": 1},
    )
