"""Compiled models in real training: shapes that change, precision, statistics, accumulation, two backwards."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.compile.support import assert_exact, blocks, compile_each, rows
from tests.support import Block, Training


def whole(make_model, **options):
    return lambda backend: Training(torch.compile(make_model(), backend=backend, **options))


def each(make_model, **options):
    def make(backend):
        model = make_model()
        compile_each([layer for layer in model.modules() if isinstance(layer, (Block, Normed))], backend, **options)
        return Training(model)

    return make


class Ragged(torch.utils.data.Dataset):
    """Batches of changing length."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(256 + 64 * (index * 3 % 5), 16, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "dynamic"), [(whole, None), (each, True)])
def test_batches_of_changing_length(way, dynamic):
    runs = assert_exact(way(blocks, dynamic=dynamic), DataLoader(Ragged(), batch_size=None))
    assert runs["recompute"].graphs[1] == runs["recompute"].graphs[-1]


class Normed(nn.Module):
    """Has statistics, which forward changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


@pytest.mark.parametrize("way", [whole, each])
def test_statistics_of_batch_normalization(way):
    assert_exact(way(lambda: nn.Sequential(nn.Linear(16, 16), Normed(), Normed())))


class Tied(Block):
    """Uses the weight of another layer as well."""

    def __init__(self, other):
        super().__init__(16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = other.weight

    def forward(self, x):
        return super().forward(x) + self.tied(torch.sigmoid(x))


def tied():
    stem = nn.Linear(16, 16)
    return nn.Sequential(stem, Tied(stem), Tied(stem))


@pytest.mark.parametrize("way", [whole, each])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_and_a_weight_that_layers_share(way, precision):
    assert_exact(way(tied), precision=precision)


@pytest.mark.parametrize("way", [whole, each])
def test_accumulated_gradients(way):
    assert_exact(way(blocks), rows(4), accumulate_grad_batches=2)


class Twice(Training):
    """Two backwards through one graph."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        output = self.model(batch)
        loss = output.square().mean()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(output.abs().mean())
        optimizer.step()
        return loss


@pytest.mark.parametrize("way", [whole, each])
def test_a_graph_that_is_kept_for_a_second_backward(way):
    assert_exact(lambda backend: Twice(way(blocks)(backend).model))
