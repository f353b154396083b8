"""Every kind of training loop: manual and automatic, several losses, several backwards, steps inside backward."""

import functools
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_ckpt.recompute.watch import unwatch, watch
from tests.support import Block, Training
from tests.treatments import (
    TREATMENTS,
    assert_exact,
    assert_exact_or_refused,
    assert_same_run,
    counted_calls,
    note_gradients,
    train,
)

WIDTH = 8


class Layer(nn.Module):
    """Linear, dropout and a nonlinearity that saves its result."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + functional.dropout(torch.tanh(self.linear(x)), 0.1)


def mlp(out=WIDTH, count=2):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Layer() for _ in range(count)], nn.Linear(WIDTH, out))


class Manual(Training):
    """Manual optimization of one model; subclasses say what a step is."""

    automatic_optimization = False

    def __init__(self, model=None):
        super().__init__(model or mlp())

    def step(self, loss, **backward):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, **backward)
        optimizer.step()
        return {"loss": loss.detach()}


# ---------------------------------------------------------------- automatic optimization


class Clipping(Training):
    """Clips by itself, and differently for every other step."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        algorithm = "value" if self.global_step % 2 else "norm"
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)


class Retaining(Training):
    """Goes back twice through one graph."""

    def backward(self, loss):
        loss.backward(retain_graph=True)
        (2 * loss).backward()


class HoldingZeros(Training):
    """Keeps gradients as tensors of zeros, and looks at them in hooks."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.01)


class SkippingSteps(Training):
    """Some batches have no loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx != 1 else None


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


def norm_of_input_gradient(model, batch):
    batch = batch.clone().requires_grad_()
    output = model(batch)
    (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    return output.square().mean() + (gradient.norm(dim=-1) - 1).square().mean()


def loss_of_two_towers(model, batch):
    one, two = model(batch), model(batch.flip(-1) * 0.5)
    logits = functional.normalize(one, dim=-1) @ functional.normalize(two, dim=-1).t()
    target = torch.arange(len(batch))
    return functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)


def loss_of_jacobian(model, batch):
    """The contraction of the network, from its whole Jacobian, row by row."""
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), batch[:2], create_graph=True)
    return model(batch).square().mean() + jacobian.square().mean()


def loss_of_moment(model, batch):
    """A Hessian-vector product, as in influence functions and in sharpness regularizers."""
    loss = model(batch).square().mean()
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    products = torch.autograd.grad(gradients, weights, [g.detach() for g in gradients], create_graph=True)
    return loss + sum(product.square().sum() for product in products)


#: By name: what is trained, arguments of the Trainer, and how often layers run for one call of the plain run. Where one
#: graph is gone through several times, layer by layer, what a replay has regained is not kept for that long.
AUTOMATIC = {
    "clip by norm": (Training, {"gradient_clip_val": 0.01}, 2),
    "clip by value": (Training, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 2),
    "clip by hand": (Clipping, {}, 2),
    "accumulate": (Training, {"accumulate_grad_batches": 2}, 2),
    "accumulate and clip": (Training, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01}, 2),
    "anomaly": (Training, {"detect_anomaly": True, "limit_train_batches": 1}, 2),
    "zeros": (HoldingZeros, {}, 2),
    "skip": (SkippingSteps, {}, Fraction(5, 3)),
    "lbfgs": (functools.partial(Training, optimizer=lbfgs), {}, 2),
    "two towers": (functools.partial(Training, loss=loss_of_two_towers), {}, 2),
    "retain graph": (Retaining, {}, 3),
    "gradient penalty": (functools.partial(Training, loss=norm_of_input_gradient), {}, 3),
    "Hessian-vector product": (functools.partial(Training, loss=loss_of_moment), {}, 4),
    "Jacobian": (functools.partial(Training, loss=loss_of_jacobian), {}, None),
}


@pytest.mark.parametrize("name", AUTOMATIC)
@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning", "ignore:Anomaly Detection:UserWarning")
def test_automatic_optimization(name):
    make, settings, times = AUTOMATIC[name]
    assert_exact(make, Block, times=times, settings=lambda: dict(settings))


# ---------------------------------------------------------------- manual optimization


class GAN(Training):
    """Generator and discriminator in turns; the discriminator is called twice for its own loss.

    The generator's loss is made before `toggle_optimizer` freezes the discriminator, and goes back after it.
    """

    automatic_optimization = False

    def __init__(self):
        super().__init__(nn.ModuleDict({"generator": mlp(), "discriminator": mlp(1)}))

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.05) for part in self.model.values()]

    def discriminator_loss(self, real, fake):
        judge = self.model["discriminator"]
        return functional.softplus(-judge(real)).mean() + functional.softplus(judge(fake.detach())).mean()

    def training_step(self, batch, batch_idx):
        generate, judge = self.model.values()
        first, second = self.optimizers()
        fake = generate(torch.randn_like(batch))
        generator_loss = functional.softplus(-judge(fake)).mean()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(generator_loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        discriminator_loss = self.discriminator_loss(batch, fake)
        second.zero_grad()
        self.manual_backward(discriminator_loss)
        second.step()
        self.untoggle_optimizer(second)
        return {"loss": (generator_loss + discriminator_loss).detach()}


class WassersteinGAN(GAN):
    """The critic is penalised for the norm of its gradient between real and generated samples."""

    def discriminator_loss(self, real, fake):
        judge = self.model["discriminator"]
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        penalty = (gradient.norm(dim=-1) - 1).square().mean()
        return judge(fake.detach()).mean() - judge(real).mean() + 10 * penalty


class Sharpness(Manual):
    """SAM: the gradient is taken where the weights are worst nearby."""

    def training_step(self, batch, batch_idx):
        weights = list(self.model.parameters())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.model, batch))
        with torch.no_grad():
            steps = [0.05 * w.grad / (w.grad.norm() + 1e-12) for w in weights]
            torch._foreach_add_(weights, steps)
        optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        self.manual_backward(loss)
        with torch.no_grad():
            torch._foreach_sub_(weights, steps)
        optimizer.step()
        return {"loss": loss.detach()}


class SeveralLosses(Manual):
    """Three losses of one output, each with a backward of its own, then one of another output."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        output = self.model(batch)
        losses = [output.square().mean(), output.abs().mean(), (output - batch).square().mean()]
        for loss in losses[:-1]:
            self.manual_backward(loss, retain_graph=True)
        self.manual_backward(losses[-1])
        self.manual_backward(self.model(2 * batch).sin().mean())
        optimizer.step()
        return {"loss": sum(losses).detach()}


class SeveralOutputs(Manual):
    """One backward of several heads, with gradients given by hand."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.model[1](self.model[0](batch))
        outputs = [self.model[2](hidden), self.model[3](hidden.sin()), hidden]
        torch.autograd.backward(outputs, [torch.ones_like(o) * (i + 1) for i, o in enumerate(outputs)])
        optimizer.step()
        return {"loss": sum(o.sum() for o in outputs).detach()}


class SomeInputs(Manual):
    """Backward towards some of the weights only, then `torch.autograd.grad` towards others."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        late = list(self.model[2].parameters())
        loss.backward(inputs=late, retain_graph=True)
        early = list(self.model[0].parameters())
        for weight, gradient in zip(early, torch.autograd.grad(loss, early), strict=True):
            weight.grad = gradient
        optimizer.step()
        return {"loss": loss.detach()}


class ConflictingGradients(Manual):
    """PCGrad: the gradient of each loss is projected away from the other one's."""

    def training_step(self, batch, batch_idx):
        output = self.model(batch)
        weights = list(self.model.parameters())
        losses = [output.square().mean(), (output - batch).abs().mean()]
        one, two = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses)
        for weight, a, b in zip(weights, one, two, strict=True):
            overlap = (a * b).sum()
            weight.grad = a + b - (overlap.clamp(max=0) / b.square().sum().clamp(min=1e-12)) * b
        self.optimizers().step()
        return {"loss": sum(losses).detach()}


class Cell(nn.Module):
    """A recurrent cell whose hidden state is passed along."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, hidden):
        hidden = self.cell(functional.dropout(x, 0.1), hidden)
        return torch.tanh(hidden), hidden


class Truncated(Manual):
    """Truncated backpropagation through time: the hidden state is carried to the next chunk, detached."""

    detached = True

    def __init__(self):
        super().__init__(Cell())
        self.hidden = torch.zeros(4, WIDTH)

    def training_step(self, batch, batch_idx):
        total = torch.zeros(())
        for _ in range(2):
            outputs = []
            for _ in range(3):
                output, self.hidden = self.model(batch, self.hidden)
                outputs.append(output)
            loss = torch.stack(outputs).square().mean()
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.hidden = self.hidden.detach()
            total += loss.detach()
        return {"loss": total}


class Carried(Manual):
    """The graph of the first chunk is kept and gone through again by the second chunk's backward."""

    def __init__(self):
        super().__init__(Cell())

    def training_step(self, batch, batch_idx):
        hidden = torch.zeros_like(batch)
        self.optimizers().zero_grad()
        for _ in range(3):
            output, hidden = self.model(batch, hidden)
            loss = output.square().mean()
            self.manual_backward(loss, retain_graph=True)
        self.optimizers().step()
        return {"loss": loss.detach()}


class MetaLearning(Manual):
    """MAML: the layers run with weights that a step of an inner loop has made, which hang on a graph.

    Args:
        before: so many calls with the layers' own weights come before.
    """

    def __init__(self, before):
        super().__init__()
        self.before = before

    def training_step(self, batch, batch_idx):
        for _ in range(self.before if batch_idx == 0 else 0):
            self.model(batch)
        weights = dict(self.model.named_parameters())
        inner = self.loss(self.model, batch)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        output = torch.func.functional_call(self.model, fast, (batch + 1,))
        return self.step(output.square().mean())


MANUAL = {
    "GAN": (GAN, Layer, 2),
    "SAM": (Sharpness, Layer, 2),
    "several outputs": (SeveralOutputs, Layer, 2),
    "some inputs": (SomeInputs, Layer, 2),
    "truncated": (Truncated, Cell, 2),
    "Wasserstein GAN": (WassersteinGAN, Layer, None),
    "several losses": (SeveralLosses, Layer, 3),
    "conflicting gradients": (ConflictingGradients, Layer, 3),
    "carried": (Carried, Cell, 3),
}


@pytest.mark.parametrize("name", MANUAL)
def test_manual_optimization(name):
    make, layers, times = MANUAL[name]
    assert_exact(make, layers, times=times)


@pytest.mark.parametrize("first", [0, 3], ids=["from the first call", "later"])
def test_meta_learning(first):
    """Weights that are in place for a call only are there in its replay, too."""
    assert_exact(functools.partial(MetaLearning, first), Layer, times=None)


# ---------------------------------------------------------------- steps inside backward


class FusedSteps(Manual):
    """Every weight takes its step as soon as its gradient is there, while backward goes on."""

    writes_data = False

    def __init__(self, model):
        super().__init__(model)
        self.events = []

    def configure_optimizers(self):
        for name, weight in self.model.named_parameters():
            optimizer = torch.optim.Adam([weight], lr=0.01)
            weight.register_post_accumulate_grad_hook(functools.partial(self.take_step, name, optimizer))
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def take_step(self, name, optimizer, weight):
        self.events.append(name)
        if self.writes_data:
            weight.data.add_(weight.grad, alpha=-0.1)
        else:
            optimizer.step()
        weight.grad = None

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.model, batch)
        note_gradients(self, None)  # there are none outside of backward
        self.manual_backward(loss)
        return {"loss": loss.detach()}


class FusedStepsOnData(FusedSteps):
    """Steps that no version of a weight tells of."""

    writes_data = True


class Borrowing(nn.Module):
    """A layer with a weight of its own and one that others use, too."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.own(torch.tanh(self.shared(x))))


class Lending(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*[Borrowing(self.shared) for _ in range(3)])

    def forward(self, x):
        return self.shared(self.layers(x))


@pytest.mark.parametrize("fused", [FusedSteps, FusedStepsOnData])
@pytest.mark.parametrize(
    ("model", "layers"), [(mlp, Layer), (Lending, Borrowing)], ids=["own weights", "shared weights"]
)
def test_steps_inside_backward(fused, model, layers):
    runs = assert_exact(lambda: fused(model()), layers)
    for trained in runs:
        assert trained.module.events == runs[0].module.events
        assert len(trained.module.events) == 3 * len(list(trained.module.model.parameters()))


class NotesReplays:
    def __init__(self, events):
        self.events = events

    def replay_begins(self):
        self.events.append("replay")

    def replay_ends(self): ...


def test_weights_step_after_the_replay_of_their_own_layer_and_before_that_of_earlier_ones():
    module = FusedSteps(nn.Sequential(*[Layer() for _ in range(3)]))
    notes = NotesReplays(module.events)
    watch(notes)
    try:
        train(lambda: module, Layer, "recompute")
    finally:
        unwatch(notes)
    one_backward = [event for i in "210" for event in ("replay", f"{i}.linear.bias", f"{i}.linear.weight")]
    assert module.events == 3 * one_backward


class EndsWithShift(nn.Module):
    """The gradient of the shift is there before anything that was saved is asked for."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return torch.tanh(x * self.scale) * self.scale + self.shift


class TokenMixing(nn.Module):
    """An MLP over the positions of a sequence: its last bias is added after the product, to what is not contiguous."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.two(functional.gelu(self.one(x.transpose(-1, -2)))).transpose(-1, -2)


@pytest.mark.parametrize("layer", [EndsWithShift, TokenMixing])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_step_before_the_replay_is_exact_or_refused_by_name(layer, treatment):
    def make():
        return FusedSteps(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(0, (1, 4)), layer(), layer()))

    assert_exact_or_refused(make, layer, treatment, "Recomputed layer 'model.3' has a weight of shape")


# ---------------------------------------------------------------- a user's own `torch.utils.checkpoint`


class CheckpointsLayers(nn.Module):
    """Calls its layers, or every second one, through `torch.utils.checkpoint`."""

    def __init__(self, use_reentrant, every=1):
        super().__init__()
        self.layers, self.use_reentrant, self.every = mlp(count=4), use_reentrant, every

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if isinstance(layer, Layer) and i % self.every == 0:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
            else:
                x = layer(x)
        return x


class CheckpointsSegments(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.stem, self.layers, self.use_reentrant = nn.Linear(WIDTH, WIDTH), mlp(count=4), use_reentrant

    def forward(self, x):
        return checkpoint_sequential(self.layers, 2, self.stem(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("make_model", "plainly", "left"),
    [
        (CheckpointsLayers, [6, 6, 6, 6], "4 of 4 layers"),
        (functools.partial(CheckpointsLayers, every=2), [3, 6, 3, 6], "2 of 4 layers"),
        (CheckpointsSegments, [6, 6, 3, 3], "2 of 4 layers"),
    ],
    ids=["all layers", "every second layer", "segments"],
)
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_layers_that_the_model_checkpoints_run_twice_and_that_is_said(
    make_model, plainly, left, use_reentrant, treatment
):
    def make():
        return Training(make_model(use_reentrant))

    plain = train(make, Layer)
    assert plain.calls == plainly
    with pytest.warns(UserWarning, match=f"{left} are checkpointed already, by a function that the model calls"):
        got = train(make, Layer, treatment)
    assert got.calls == [6] * 4, "each layer once forward and once for backward, by whomever"
    assert_same_run(got, plain)


class CheckpointsPart(nn.Module):
    """A layer that calls `torch.utils.checkpoint` for a part of itself."""

    use_reentrant = False

    def __init__(self):
        super().__init__()
        self.linear, self.part = nn.Linear(WIDTH, WIDTH), Layer()

    def forward(self, x):
        return x + torch.sigmoid(checkpoint(self.part, self.linear(x), use_reentrant=self.use_reentrant))


class CheckpointsPartReentrant(CheckpointsPart):
    use_reentrant = True


@pytest.mark.parametrize("layer", [CheckpointsPart, CheckpointsPartReentrant])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_layer_that_checkpoints_a_part_of_itself_is_exact_and_the_part_runs_three_times(layer, treatment):
    def make():
        return Training(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), layer()))

    plain = train(make, layer)
    with pytest.warns(UserWarning, match="checkpoint a part of themselves"), counted_calls((Layer,)) as parts:
        got = train(make, layer, treatment)
    assert (got.calls, list(parts.values())) == ([6, 6], [9, 9])
    assert_same_run(got, plain)
