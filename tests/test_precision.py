"""Every precision of the Trainer, and autocast by hand: recomputed layers train as without, bit for bit."""

import functools
import traceback
import warnings

import pytest
import torch
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from tests.support import Block, Training, blocks, trainer
from tests.treatments import assert_exact, note_gradients

WIDTH = 8
BF16, HALF = torch.bfloat16, torch.float16

#: For what is made in many variants; the two ways of offload move nothing here.
TWO = ("recompute", "matmul")


class Seeing(Block):
    """A block that makes tensors of the default type, as some positional embeddings do, and notes its own types."""

    def __init__(self):
        super().__init__(WIDTH)
        self.types = set()

    def forward(self, x):
        y = super().forward(x) * torch.rand(WIDTH) + torch.linspace(0, 1, WIDTH)
        self.types.add((x.dtype, self.linear(x).dtype))
        return torch.exp(-y.square())


class Net(nn.Module):
    """Layers of one class between a stem and a head."""

    def __init__(self, make_layer, count=3):
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(make_layer() for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---------------------------------------------------------------- what the Trainer offers

#: By name: the arguments of the Trainer, and the type in which the linear layers compute.
PRECISIONS = {
    "32-true": (lambda: {"precision": "32-true"}, torch.float32),
    "64-true": (lambda: {"precision": "64-true"}, torch.float64),
    "bf16-true": (lambda: {"precision": "bf16-true"}, BF16),
    "16-true": (lambda: {"precision": "16-true"}, HALF),
    "bf16-mixed": (lambda: {"precision": "bf16-mixed"}, BF16),
    "16-mixed": (lambda: {"precision": "16-mixed"}, BF16),  # which is what Lightning makes of it on the CPU
    "Precision": (lambda: {"plugins": [Precision()]}, torch.float32),
    "DoublePrecision": (lambda: {"plugins": [DoublePrecision()]}, torch.float64),
    "HalfPrecision bf16": (lambda: {"plugins": [HalfPrecision("bf16-true")]}, BF16),
    "HalfPrecision 16": (lambda: {"plugins": [HalfPrecision("16-true")]}, HALF),
    "MixedPrecision bf16": (lambda: {"plugins": [MixedPrecision("bf16-mixed", "cpu")]}, BF16),
    "MixedPrecision 16": (lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]}, HALF),
}


def seeing():
    return Training(Net(Seeing))


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.filterwarnings("ignore:You passed .*precision='16-mixed':UserWarning")
def test_equals_the_plain_run_in_every_precision(name):
    settings, dtype = PRECISIONS[name]
    for trained in assert_exact(seeing, Seeing, settings=settings):
        assert {computed for layer in trained.module.model.layers for _, computed in layer.types} == {dtype}


# ---------------------------------------------------------------- what is not installed


def outcome(make_plugins, precision, callbacks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer(callbacks, precision=precision, plugins=make_plugins()).fit(Training())
        except Exception as error:
            from_here = [
                frame for frame in traceback.extract_tb(error.__traceback__) if "lightning_ckpt" in frame.filename
            ]
            return type(error), str(error), [str(warning.message) for warning in caught], from_here
    raise AssertionError("it is installed")


@pytest.mark.parametrize(
    ("make_plugins", "precision", "words"),
    [
        (list, "transformer-engine", "transformer_engine"),
        (list, "transformer-engine-float16", "transformer_engine"),
        (lambda: [TransformerEnginePrecision(weights_dtype=BF16)], None, "transformer_engine"),
        (lambda: [BitsandbytesPrecision(mode="nf4")], None, "bitsandbytes"),
    ],
    ids=["transformer-engine", "transformer-engine-float16", "TransformerEnginePrecision", "BitsandbytesPrecision"],
)
def test_what_is_not_installed_is_lightnings_own_error(make_plugins, precision, words):
    without = outcome(make_plugins, precision, [])
    got = outcome(make_plugins, precision, [ActivationCheckpointing()])
    assert got == without
    assert words in got[1]
    assert not [file for file in got[3] if "lightning_ckpt" in file], "nothing of the package is in between"


# ---------------------------------------------------------------- loss scaling


def scaled(init_scale):
    # Nothing grows within a few steps, so that the final scale counts the steps that were skipped.
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def test_steps_that_the_scaler_skips_are_skipped_all_the_same():
    scale = 2.0**18

    def settings():
        return {**scaled(scale), "max_epochs": 4}

    runs = assert_exact(seeing, Seeing, settings=settings)
    skipped = [not all(g.isfinite().all() for g in step.values()) for step in runs[0].run.gradients]
    assert 0 < sum(skipped) < len(skipped), "some steps overflow and some do not"
    scales = [trained.module.trainer.precision_plugin.scaler.get_scale() for trained in runs]
    assert scales == [scale / 2 ** sum(skipped)] * len(runs)


class ManuallyScaled(Training):
    """Scales by hand, in manual optimization, without any help of the Trainer."""

    automatic_optimization = False

    def __init__(self):
        super().__init__(Net(Seeing))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF):
            loss = self.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        note_gradients(self, optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        return {"loss": loss.detach()}


def test_a_scaler_of_the_users_own():
    runs = assert_exact(ManuallyScaled, Seeing, settings=lambda: {"max_epochs": 3})
    assert len({trained.module.scaler.get_scale() for trained in runs}) == 1
    assert runs[0].module.scaler.get_scale() < 2.0**18


# ---------------------------------------------------------------- the user's own autocast


class Part(nn.Module):
    """What is recomputed here: two linear layers, and what `compute` makes of them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def branch(self, x):
        return functional.dropout(torch.tanh(self.two(functional.gelu(self.one(x)))), 0.1)

    def forward(self, x):
        return x + self.branch(x)


class AutocastInside(Part):
    def forward(self, x):
        with torch.autocast("cpu", BF16):
            return x + self.branch(x)


class AutocastInsideHalf(Part):
    def forward(self, x):
        with torch.autocast("cpu", HALF):
            return x + self.branch(x)


class DisabledInside(Part):
    def forward(self, x):
        y = self.branch(x)
        with torch.autocast("cpu", enabled=False):
            return x + self.branch(y.float()) + y


class NestedInside(Part):
    """On, off, another type, each within the other, and the weights used in all of them."""

    def forward(self, x):
        with torch.autocast("cpu", BF16):
            y = self.branch(x)
            with torch.autocast("cpu", enabled=False):
                y = self.branch(y.float())
                with torch.autocast("cpu", HALF, cache_enabled=False):
                    y = y + self.branch(y)
            return x + self.branch(y)


class WithoutCacheInside(Part):
    def forward(self, x):
        with torch.autocast("cpu", BF16, cache_enabled=False):
            return x + self.branch(x) + self.branch(2 * x)


class Decorated(Part):
    @torch.autocast("cpu", BF16)
    def branch(self, x):
        return super().branch(x)


class CastingFunction(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class WithFunction(Part):
    """Calls a function that leaves autocast, by PyTorch's decorators for it."""

    def forward(self, x):
        return x + torch.tanh(CastingFunction.apply(self.branch(x), self.two.weight))


class Conditional(Part):
    """Does something else where autocast is on."""

    def forward(self, x):
        y = self.branch(x)
        if torch.is_autocast_enabled("cpu"):
            y = y + self.branch(y.sin()) * torch.tensor(0.5, dtype=torch.get_autocast_dtype("cpu"))
        return x + y


PARTS = [
    *(Part, AutocastInside, AutocastInsideHalf, DisabledInside, NestedInside, WithoutCacheInside, Decorated),
    *(WithFunction, Conditional),
]

#: What surrounds the forward of the model; backward runs outside of it.
SURROUNDINGS = {
    "nothing": lambda: torch.autocast("cpu", enabled=False),
    "autocast": lambda: torch.autocast("cpu", BF16),
    "autocast without cache": lambda: torch.autocast("cpu", BF16, cache_enabled=False),
    "half": lambda: torch.autocast("cpu", HALF),
}


def in_surroundings(surroundings, part):
    def loss(model, batch):
        with SURROUNDINGS[surroundings]():
            return model(batch).float().square().mean()

    return Training(Net(part), loss)


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("part", PARTS)
def test_autocast_inside_layers_and_around_them(part, surroundings):
    assert_exact(functools.partial(in_surroundings, surroundings, part), part, TWO)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_autocast_inside_layers_in_the_trainers_precision(precision):
    # Some want weights of single precision, with or without recompute.
    parts = tuple(PARTS) if precision == "bf16-mixed" else (Part, AutocastInside, Decorated, Conditional)

    def make():
        return Training(nn.Sequential(nn.Linear(WIDTH, WIDTH), *(part() for part in parts)))

    assert_exact(make, parts, settings=lambda: {"precision": precision})


class AroundForwardAndBackward(Training):
    """Manual optimization with backward under autocast, too, as is not advised but done."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", BF16):
            loss = self.loss(self.model, batch)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
        self.optimizers().step()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("part", [Part, DisabledInside, NestedInside])
def test_backward_under_autocast(part):
    assert_exact(lambda: AroundForwardAndBackward(Net(part)), part)


# ---------------------------------------------------------------- weights that layers share, and the cache of casts


class Sharing(nn.Module):
    """Uses a weight that others use as well, also where no gradient flows."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = functional.gelu(self.shared(x))
        with torch.no_grad():
            gate = torch.sigmoid(self.shared(x)).mean()
        return x + self.own(y) * gate + self.shared(y)


class FirstWithoutGradients(Sharing):
    """The weight is cast for the first time where no gradient flows."""

    def forward(self, x):
        with torch.no_grad():
            gate = torch.sigmoid(self.shared(x)).mean()
        return x + self.own(functional.gelu(self.shared(x))) * gate


class KeptSharing(nn.Module):
    """Is not recomputed, though it shares the weight."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return x + functional.gelu(self.shared(x))


class SharedNet(nn.Module):
    """Three layers and a head with one weight: casts of it come from recomputed layers and from others."""

    def __init__(self, part, other=None):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([part(self.shared), (other or part)(self.shared), part(self.shared)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.shared(x).float()


@pytest.mark.parametrize("surroundings", ["autocast", "autocast without cache", "precision"])
@pytest.mark.parametrize("part", [Sharing, FirstWithoutGradients])
@pytest.mark.parametrize("other", [None, KeptSharing])
def test_a_weight_shared_between_layers(part, other, surroundings):
    def loss(model, batch):
        with SURROUNDINGS[surroundings]():
            return model(batch).square().mean()

    if surroundings == "precision":
        make, settings = (lambda: Training(SharedNet(part, other))), (lambda: {"precision": "bf16-mixed"})
    else:
        make, settings = (lambda: Training(SharedNet(part, other), loss)), dict
    for trained in assert_exact(make, part, TWO, settings=settings):
        assert len(trained.calls) == (3 if other is None else 2)


class Language(nn.Module):
    """Embeds tokens and predicts the next ones with the same weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = blocks(2)
        self.head = Head(self.embedding.weight)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.log_softmax(functional.linear(x, self.weight), -1)


def tokens():
    return DataLoader(torch.randint(0, 16, (6, 9), generator=torch.Generator().manual_seed(3)), batch_size=2)


def next_token(model, batch):
    return functional.nll_loss(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def next_token_in_autocast(model, batch):
    with torch.autocast("cpu", BF16):
        return next_token(model, batch)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "autocast"])
@pytest.mark.parametrize("layers", [(Block,), (Block, Head, nn.Embedding)], ids=["blocks", "all"])
def test_tied_embedding(layers, precision):
    loss, settings = next_token, (lambda: {"precision": precision})
    if precision == "autocast":
        loss, settings = next_token_in_autocast, dict
    for trained in assert_exact(lambda: Training(Language(), loss), layers, settings=settings, data=tokens()):
        assert trained.module.model.head.weight is trained.module.model.embedding.weight
