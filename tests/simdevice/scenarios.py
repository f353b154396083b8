"""Ways to train, each a function that trains a little and returns everything a plain run would have."""

import contextlib
from collections.abc import Callable
from typing import Any

import backend  # noqa: F401  registers the device
import torch
from torch import Tensor, nn
from torch.nn import functional

DEVICE = torch.device("sim", 0)
Forward = Callable[[], contextlib.AbstractContextManager[Any]]
SCENARIOS: dict[str, Callable[["Trained"], None]] = {}


class Block(nn.Module):
    """A transformer block with dropout, written out, so that views, splits and residuals are saved."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, layers: int = 3, width: int = 16, vocabulary: int = 40, length: int = 8) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Trained:
    """One training run: how to enter forward, and what came out.

    Args:
        forward: makes the context of a forward pass.
        watch: told each model, before it trains.
        step_done: told when an optimizer has stepped.
    """

    def __init__(
        self,
        forward: Forward = contextlib.nullcontext,
        watch: Callable[[nn.Module], None] = lambda model: None,
        step_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.forward = forward
        self.step_done = step_done
        self._watch = watch
        self.results: list[Tensor] = []

    def model(self, model: nn.Module) -> nn.Module:
        model = model.to(DEVICE)
        self._watch(model)
        return model

    def note(self, *tensors: Tensor) -> None:
        self.results += [tensor.detach().clone() for tensor in tensors]

    def note_gradients(self, *models: nn.Module) -> None:
        for model in models:
            self.note(*(parameter.grad for parameter in model.parameters() if parameter.grad is not None))

    def equals(self, other: "Trained") -> bool:
        pairs = zip(self.results, other.results, strict=True)
        return bool(self.results) and all(torch.equal(one.cpu(), two.cpu()) for one, two in pairs)


def scenario(function: Callable[[Trained], None]) -> Callable[[Trained], None]:
    SCENARIOS[function.__name__] = function
    return function


def ids(count: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(0, 40, (count, 8), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@scenario
def plain_steps(run: Trained) -> None:
    model = run.model(seeded(Model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        loss.backward()
        run.note(loss)
        run.note_gradients(model)
        optimizer.step()
        run.step_done()


@scenario
def accumulation_and_clipping(run: Trained) -> None:
    model = run.model(seeded(Model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    for step in range(2):
        for micro in range(2):
            with run.forward():
                loss = loss_of(model, ids(seed=2 * step + micro)) / 2
            loss.backward()
            run.note(loss)
        run.note(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        run.step_done()


@scenario
def autocast_to_bfloat16(run: Trained) -> None:
    model = run.model(seeded(Model))
    for step in range(3):
        with run.forward(), torch.autocast("sim", dtype=torch.bfloat16):
            loss = loss_of(model, ids(seed=step))
        loss.backward()
        run.note(loss)
        run.note_gradients(model)


@scenario
def weights_in_bfloat16(run: Trained) -> None:
    model = run.model(seeded(Model).to(torch.bfloat16))
    for step in range(3):
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        loss.backward()
        run.note(loss)
        run.note_gradients(model)


@scenario
def several_forwards_before_one_backward(run: Trained) -> None:
    model = run.model(seeded(Model))
    for step in range(3):
        with run.forward():
            losses = [loss_of(model, ids(seed=2 * step)), loss_of(model, ids(seed=2 * step + 1))]
        (losses[0] * losses[1]).backward()
        run.note(*losses)
        run.note_gradients(model)


@scenario
def forwards_and_backwards_interleaved(run: Trained) -> None:
    """As in a pipeline: the next forward runs before the last backward."""
    model = run.model(seeded(Model))
    waiting: list[Tensor] = []
    for step in range(5):
        with run.forward():
            waiting.append(loss_of(model, ids(seed=step)))
        if len(waiting) == 3:
            loss = waiting.pop(0)
            loss.backward()
            run.note(loss)
            run.note_gradients(model)
    for loss in reversed(waiting):
        loss.backward()
    run.note_gradients(model)


@scenario
def retained_graph(run: Trained) -> None:
    model = run.model(seeded(Model))
    for step in range(3):
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        for _ in range(3):
            loss.backward(retain_graph=True)
            run.note_gradients(model)
        run.note(*torch.autograd.grad(loss, list(model.parameters())))


@scenario
def double_backward(run: Trained) -> None:
    model = run.model(seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))))
    for step in range(3):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(DEVICE).requires_grad_()
        with run.forward():
            out = model(batch).square().sum()
            (gradient,) = torch.autograd.grad(out, batch, create_graph=True)
            loss = out + gradient.square().sum()
        loss.backward()
        run.note(loss, gradient)
        run.note_gradients(model)


@scenario
def lbfgs(run: Trained) -> None:
    model = run.model(seeded(Model))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    model.eval()

    def closure() -> Tensor:
        optimizer.zero_grad()
        with run.forward():
            loss = loss_of(model, ids())
        loss.backward()
        return loss

    for _ in range(2):
        run.note(optimizer.step(closure))
        run.step_done()
    run.note_gradients(model)


@scenario
def two_networks_in_turns(run: Trained) -> None:
    """A generator and a critic with an optimizer each; backward runs inside forward, as in manual optimization."""
    generator = run.model(
        seeded(
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3)))
        )
    )
    critic = run.model(
        seeded(
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3)))
        )
    )
    optimizers = [torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())]
    for step in range(3):
        noise = torch.randn(32, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        with run.forward():
            for sign, optimizer in zip((1, -1), optimizers, strict=True):
                optimizer.zero_grad()
                loss = sign * critic(generator(noise)).mean()
                loss.backward()
                run.note(loss)
                run.note_gradients(generator, critic)
                optimizer.step()
        run.step_done()


@scenario
def a_step_that_fails(run: Trained) -> None:
    model = run.model(seeded(Model))
    for step in range(3):
        with contextlib.suppress(ZeroDivisionError), run.forward():
            loss = loss_of(model, ids(seed=step))
            if step == 1:
                raise ZeroDivisionError
        if step != 1:
            loss.backward()
        del loss
        run.note_gradients(model)


@scenario
def a_backward_that_fails(run: Trained) -> None:
    model = run.model(seeded(Model))
    for step in range(3):
        with run.forward():
            x = model.token(ids(seed=step))
            for index, layer in enumerate(model.layers):
                x = layer(x)
                if step == 1 and index == 1:
                    x.register_hook(_fail)
            loss = model.head(x).square().mean()
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()
        run.note_gradients(model)
        model.zero_grad()


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


@scenario
def losses_that_are_dropped(run: Trained) -> None:
    model = run.model(seeded(Model))
    for step in range(5):
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        if step % 3 == 0:
            loss.backward()
        run.note(loss)
        del loss
    run.note_gradients(model)


@scenario
def validation_between(run: Trained) -> None:
    model = run.model(seeded(Model))
    for step in range(3):
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        model.eval()
        with torch.no_grad():
            run.note(loss_of(model, ids(seed=10 + step)))
        model.train()
        run.note(loss_of(model, ids(seed=20 + step)))  # with gradients, outside of a training step
        loss.backward()
        run.note_gradients(model)


@scenario
def part_of_the_graph(run: Trained) -> None:
    """Gradients of two losses that share layers, one after the other, and of an input in the middle."""
    model = run.model(seeded(Model))
    for step in range(3):
        with run.forward():
            x = model.token(ids(seed=step))
            middle = None
            for index, layer in enumerate(model.layers):
                x = layer(x)
                middle = x if index == 1 else middle
            one, two = x.square().mean(), middle.exp().mean()
        run.note(*torch.autograd.grad(one, middle, retain_graph=True))
        two.backward(retain_graph=True)
        one.backward()
        run.note_gradients(model)


@scenario
def no_layers(run: Trained) -> None:
    model = run.model(seeded(lambda: nn.Linear(64, 64)))
    for step in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        with run.forward():
            for _ in range(20):
                x = torch.tanh(model(x)) + x
            loss = x.square().mean()
        loss.backward()
        run.note(loss)
        run.note_gradients(model)


@scenario
def odd_tensors(run: Trained) -> None:
    """Strided views, broadcast masks, complex numbers, slices of one storage, empty tensors."""
    weight = nn.Parameter(torch.linspace(-1, 1, 4096).view(64, 64).to(DEVICE))
    mask = torch.rand(1, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for step in range(3):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        with run.forward():
            y = x @ weight
            left, right = y.chunk(2, dim=1)
            y = left * right.flip(1) + y[:, ::2].exp() * mask.expand(64, 64)[:, 1::2]
            z = torch.view_as_complex(y.reshape(64, 16, 2).contiguous())
            y = torch.view_as_real(z * z.conj()).sum() + y[1:3, 5:9].square().sum() + y[:0].sum()
            loss = y + (left.t() * right.t()[:, :1]).mean()
        loss.backward()
        run.note(loss, weight.grad)
        weight.grad = None


@scenario
def convolutions(run: Trained) -> None:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    model = run.model(seeded(lambda: nn.Sequential(block(3, 8), *(block(8, 8) for _ in range(4)), nn.AvgPool2d(2))))
    for step in range(3):
        with run.forward():
            images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            loss = model(images).square().mean()
        loss.backward()
        run.note(loss, *model.buffers())
        run.note_gradients(model)


@scenario
def tensors_that_are_filled_after_they_were_saved(run: Trained) -> None:
    """RReLU saves its noise before it is drawn."""
    block = lambda: nn.Sequential(nn.Linear(64, 64), nn.RReLU(), nn.Linear(64, 64), nn.RReLU())  # noqa: E731
    model = run.model(seeded(lambda: nn.Sequential(*(block() for _ in range(3)))))
    for step in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        torch.manual_seed(step)
        with run.forward():
            loss = model(x).square().mean()
        loss.backward()
        run.note(loss)
        run.note_gradients(model)
