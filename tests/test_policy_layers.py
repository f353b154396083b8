"""Layers of every kind under an operator policy: bit for bit as without, and nothing is computed twice that was kept.

Nothing is verified by fingerprints here (`verify="off"`), so that the policy itself has to be exact.
"""

import copy
import functools
import pickle
import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_ckpt.recompute import ReplayError, attach, is_replaying
from lightning_ckpt.recompute.policy import resolve_policy
from tests.support import blocks

WIDTH = 8
MATMUL = "matmul"
#: More than anyone would keep: what draws, what returns several results, what is changed in place, what reads values.
MANY = [
    *(MATMUL, "aten.convolution", "aten._softmax", "aten.topk", "aten.nonzero", "aten.sort.stable", "aten.max.dim"),
    *("aten.bernoulli", "aten.native_dropout", "aten.rand", "aten.randn", "aten.randn_like", "aten.multinomial"),
    *("aten.empty_like", "aten.zeros_like", "aten.clone", "aten.cat", "aten._local_scalar_dense", "aten._foreach_mul"),
    *("aten.exp.default", "aten.tanh.default", "aten.sigmoid", "aten.gelu", "aten.native_layer_norm", "aten.var"),
    *(
        "aten.add.Tensor",
        "aten.mul.Tensor",
        "aten.div.Tensor",
        "aten.where.self",
        "aten.index.Tensor",
        "aten.index_add",
    ),
]


class Part(nn.Module):
    """What layers here are made of: two linear layers, and what `compute` makes of them."""

    compute = None

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.compute(x)


class Stack(nn.Module):
    """Some layers between a stem and nothing."""

    def __init__(self, make_layer, count=2):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make_layer() for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def backward_of_square(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def history(make_model, policy=None, step=backward_of_square, mode=None, steps=3, verify="off"):
    """Losses, gradients and weights of some steps, and the random streams behind them."""
    random.seed(0)
    torch.manual_seed(0)
    model = make_model()
    for name, layer in model.layers.named_children():
        if policy is not None:
            attach(layer, f"layers.{name}", verify, policy=resolve_policy(policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        with mode or torch.enable_grad():
            seen.append(step(model, torch.randn(WIDTH, WIDTH)).detach().clone())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*seen, *model.state_dict().values(), torch.rand(2), torch.tensor(random.random())]


def assert_same(got, plain):
    assert len(got) == len(plain)
    different = [i for i, (one, other) in enumerate(zip(got, plain, strict=True)) if not torch.equal(one, other)]
    assert not different, f"{len(different)} of {len(plain)} tensors, number {different[0]} first"


class Operators(TorchDispatchMode):
    """Counts the operators that really run in replays, and all."""

    def __init__(self):
        super().__init__()
        self.replayed, self.all = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.all[func] += 1
        if is_replaying():
            self.replayed[func] += 1
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- layers

FUNCTIONS = {}


def layer(function):
    """Name a layer's computation, from its `Part` and its input."""
    FUNCTIONS[function.__name__] = function
    return function


def made_of(function):
    return type("Made", (Part,), {"compute": function})


@layer
def block(self, x):
    return x + functional.dropout(torch.tanh(self.two(functional.gelu(self.one(x)))), 0.3)


@layer
def sequence(self, x):
    x = x.view(2, 4, WIDTH)
    return (x + torch.tanh(self.two(torch.tanh(self.one(x.transpose(0, 1))))).transpose(0, 1)).reshape(WIDTH, WIDTH)


@layer
def attention(self, x):
    q, k, v = (f(x).view(1, 2, WIDTH, 4) for f in (self.one, self.two, self.one))
    return x + self.two(torch.tanh(functional.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)))


@layer
def attention_with_dropout(self, x):
    q, k, v = (f(x).view(1, 2, WIDTH, 4) for f in (self.one, self.two, self.one))
    mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    return x + torch.tanh(functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3).reshape(x.shape))


@layer
def convolution(self, x):
    one = functional.conv1d(x[None], self.one.weight.view(WIDTH, WIDTH, 1), self.one.bias)[0]
    return torch.tanh(one) + functional.conv_transpose1d(x[None], self.two.weight.view(WIDTH, WIDTH, 1))[0].exp()


@layer
def experts(self, x):
    """Which expert gets how many rows depends on the values."""
    chosen = self.one(x).topk(2, -1)
    weights, output = chosen.values.softmax(-1), torch.zeros_like(x)
    for i in range(WIDTH):
        rows, place = torch.where(chosen.indices == i)
        if len(rows):
            scaled = torch.tanh(self.two(x[rows] + i)) * weights[rows, place, None]
            output = output.index_add(0, rows, scaled)
    return x + output


@layer
def draws_everywhere(self, x):
    y = torch.native_dropout(self.one(x), 0.3, True)[0] * torch.bernoulli(torch.full((WIDTH,), 0.5))
    y = functional.gumbel_softmax(y + torch.randn_like(y)) * functional.dropout(self.two(x), 0.2)
    return (
        torch.tanh(functional.rrelu(y, training=True) * torch.rand(WIDTH)) + x[torch.multinomial(y.abs() + 1, 1)[:, 0]]
    )


@layer
def draws_in_a_fork(self, x):
    y = torch.tanh(self.one(x))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        y = y * torch.bernoulli(torch.full((WIDTH,), 0.5)) + torch.rand(WIDTH)
    return x + torch.tanh(self.two(y) * torch.rand(WIDTH))


@layer
def relu_in_place(self, x):
    hidden = functional.relu(self.one(x), inplace=True)
    return x + self.two(hidden) * torch.sigmoid(hidden)


@layer
def view_in_place(self, x):
    hidden = self.one(x)
    hidden[:2].mul_(2)
    hidden.view(-1)[3:].add_(1)
    return x + self.two(torch.tanh(hidden))


@layer
def chunk_in_place(self, x):
    """`unsafe_chunk` cuts a tensor whose version then does not move; recurrent cells use it."""
    one, two = self.one(x).unsafe_chunk(2, -1)
    return x + self.two(torch.tanh(torch.cat([one.mul_(2), two.add_(1)], -1)))


@layer
def without_gradients(self, x):
    with torch.no_grad():
        gate = torch.sigmoid(self.one(x) @ x.t()).mean()
    with torch.inference_mode():
        number = torch.sigmoid(self.two(x)).mean().item()
    return x + torch.tanh(self.two(torch.tanh(self.one(x)))) * gate * number


@layer
def gradient_inside(self, x):
    y = torch.tanh(functional.dropout(self.one(x), 0.3) * torch.bernoulli(torch.full((WIDTH,), 0.5)))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return x + torch.tanh(self.two(y) + gradient)


@layer
def gradient_inside_and_in_place(self, x):
    hidden = self.one(x)
    hidden.add_(1)
    y = torch.tanh(hidden)
    (gradient,) = torch.autograd.grad(y.sum(), self.one.weight, create_graph=True)
    return x + self.two(y) @ torch.tanh(gradient)


@layer
def falls_back(self, x):
    """Tries an operator that fails, and swallows that."""
    try:
        y = x @ torch.ones(WIDTH + 1, WIDTH)
    except RuntimeError:
        y = self.one(x)
    return x + self.one(torch.tanh(self.two(torch.tanh(y))))


@layer
def vmapped(self, x):
    return x + torch.tanh(torch.vmap(lambda row: self.one.weight @ row)(torch.tanh(self.two(x))))


@layer
def checkpointed_part(self, x):
    return x + torch.tanh(checkpoint(lambda y: self.two(torch.tanh(y)), torch.tanh(self.one(x)), use_reentrant=False))


@layer
def sparse_complex_nested(self, x):
    y = torch.sparse.mm(torch.eye(WIDTH).to_sparse(), self.one(x))
    z = torch.complex(y, self.two(x))
    rows = torch.nested.nested_tensor([x[:3].detach(), x[3:].detach()])
    padded = torch.nested.to_padded_tensor(functional.linear(rows, self.one.weight, self.one.bias), 0.0)
    return x + torch.tanh((z.mH @ z).real) + torch.tanh(padded.sum((0, 1)))


@layer
def several_results(self, x):
    values, order = torch.sort(self.one(x), stable=True)
    halves = torch._foreach_mul([values, self.two(x)], 2.0)
    best = torch.max(halves[0], -1)
    return torch.tanh(halves[1]) * torch.sigmoid(best.values)[:, None] + torch.sigmoid(x.gather(-1, order))


@layer
def with_function(self, x):
    return x + torch.tanh(Doubling.apply(self.one(x), self.two.weight))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y = 2 * x @ weight
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return 2 * gradient @ weight.t(), 2 * x.t() @ gradient


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        y = self.norm(self.linear(x))
        return torch.tanh(y - self.norm.running_mean) * torch.exp(self.norm.running_var)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x):
        state = None
        for _ in range(2):
            state = self.cell(x, state)
        return x + (state[0] if isinstance(state, tuple) else state)


class Sequences(Recurrent):
    def forward(self, x):
        return x + self.cell(x.view(2, 4, WIDTH))[0].reshape(x.shape)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, weight):
        return weight + self.up @ self.down


class Parametrized(Part):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.one, "weight", LowRank())
        nn.utils.parametrizations.spectral_norm(self.two)

    compute = block


class Hooked(Part):
    """Its hooks multiply, too: two watch, one acts, one comes and goes within the layer."""

    def __init__(self):
        super().__init__()
        self.one.register_forward_hook(lambda module, args, output: (output.detach() @ output.detach()).sum() and None)
        self.one.register_forward_hook(lambda module, args, output: output @ output.t() @ output / WIDTH)
        self.two.register_full_backward_hook(lambda module, before, after: None)

    def compute(self, x):
        handle = self.two.register_forward_hook(lambda module, args, output: output @ output)
        y = self.two(torch.tanh(self.one(x)))
        handle.remove()
        y.register_hook(lambda gradient: gradient @ gradient.t() @ gradient)
        return x + torch.tanh(y)


LAYERS = {
    **{name: made_of(function) for name, function in FUNCTIONS.items()},
    "batch norm that reads its statistics": Norm,
    **{kind.__name__: functools.partial(Recurrent, kind) for kind in (nn.GRUCell, nn.LSTMCell, nn.RNNCell)},
    **{kind.__name__: functools.partial(Sequences, kind) for kind in (nn.GRU, nn.LSTM, nn.RNN)},
    "parametrized": Parametrized,
    "hooked": Hooked,
    "transformer": functools.partial(nn.TransformerEncoderLayer, WIDTH, 2, 16, batch_first=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_exact(name):
    make = functools.partial(Stack, LAYERS[name])
    plain = history(make)
    for policy in (MATMUL, MANY):
        assert_same(history(make, policy), plain)


# ---------------------------------------------------------------- what runs how often


@pytest.mark.parametrize(
    "name", ["block", "sequence", "attention", "convolution", "experts", "checkpointed_part", "LSTM"]
)
def test_what_is_kept_runs_once_and_the_rest_twice(name):
    policy = [MATMUL, "aten.convolution", "aten.topk"]
    operators = Operators()
    history(functools.partial(Stack, LAYERS[name]), policy, mode=operators)
    listed = resolve_policy(policy)
    assert listed & operators.all.keys(), "a listed operator runs in forward"
    assert not listed & operators.replayed.keys()
    assert operators.replayed, "others run again"


def test_a_listed_operator_runs_again_where_its_result_was_changed():
    """As often as without it in the list: nothing changed is ever given, and nothing is kept in vain."""
    make = functools.partial(Stack, LAYERS["relu_in_place"])
    without, listed = Operators(), Operators()
    history(make, ["aten.bmm"], mode=without)
    history(make, MATMUL, mode=listed)
    assert listed.replayed[torch.ops.aten.addmm.default] == without.replayed[torch.ops.aten.addmm.default] // 2 > 0


# ---------------------------------------------------------------- what the caller does


class TwoResults(Part):
    def compute(self, x):
        hidden = self.one(x)
        return hidden, self.two(torch.tanh(x)) * torch.sigmoid(hidden)


class ChangesResults(Stack):
    """Changes in place what layers return, which no gradient needs."""

    def forward(self, x):
        for layer in self.layers:
            hidden, y = layer(self.stem(x))
            hidden.add_(1).mul_(3)
            x = functional.relu_(hidden) + y
        return x


class KeepsState(Part):
    """Changes in the next call, in place, what an operator returned in the last one."""

    def __init__(self):
        super().__init__()
        self.state = None

    def compute(self, x):
        if self.state is not None:
            with torch.no_grad():
                self.state.mul_(0.5)
        hidden = self.one(x)
        y = torch.sigmoid(hidden) if self.state is None else torch.sigmoid(hidden) + self.state
        self.state = hidden.detach()
        return x + self.two(torch.tanh(y))


class CalledTwice(Stack):
    def forward(self, x):
        for layer in self.layers:
            layer.state = None
        return super().forward(super().forward(x))


def retained(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    model(x).sum().backward()
    (2 * loss).backward()
    return loss


def penalised(model, x):
    x = x.requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + gradient.square().mean()
    loss.backward()
    return loss


def row_by_row(model, x):
    """Backward for many gradients at once, by vmap."""
    x = x.requires_grad_()
    basis = torch.eye(WIDTH * WIDTH).view(-1, WIDTH, WIDTH)[:4]
    (rows,) = torch.autograd.grad(model(x), x, basis, is_grads_batched=True, create_graph=True)
    loss = rows.square().mean()
    loss.backward()
    return loss


def cast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(model(x)).float().square().mean()
    loss.backward()
    return loss


def with_cached_parametrizations(model, x):
    with parametrize.cached():
        loss = model(model(x)).square().mean()
    loss.backward()
    return loss


class Halving(TorchDispatchMode):
    """Somebody's own mode, which changes what products return."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result / 2 if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else result


def in_a_mode(model, x):
    with Halving():
        loss = model(x).square().mean()
    loss.backward()
    return loss


def smooth(self, x):
    return x + torch.tanh(self.two(torch.tanh(self.one(x))))


CALLERS = {
    "changes results": (functools.partial(ChangesResults, TwoResults), backward_of_square),
    "a state that is changed in place": (functools.partial(CalledTwice, KeepsState), backward_of_square),
    "called twice": (functools.partial(CalledTwice, LAYERS["block"]), backward_of_square),
    "retained": (functools.partial(Stack, LAYERS["block"]), retained),
    "penalised": (functools.partial(Stack, LAYERS["block"]), penalised),
    "row by row": (functools.partial(Stack, made_of(smooth)), row_by_row),
    "autocast": (functools.partial(Stack, LAYERS["block"]), cast),
    "cached parametrizations": (functools.partial(Stack, Parametrized), with_cached_parametrizations),
    "in a mode": (functools.partial(Stack, LAYERS["block"]), in_a_mode),
}


@pytest.mark.parametrize("name", CALLERS)
def test_whatever_the_caller_does_is_exact(name):
    make, step = CALLERS[name]
    plain = history(make, step=step)
    for policy in (MATMUL, MANY):
        assert_same(history(make, policy, step), plain)


# ---------------------------------------------------------------- what nobody can see: exact, or an error with a name


@functools.lru_cache
def basis(scale):
    """Computed at the first call for a scale, by a product of the same shapes as the layer's own."""
    return torch.linspace(0, 1, WIDTH * WIDTH).view(WIDTH, WIDTH) @ torch.full((WIDTH, WIDTH), scale)


class Cached(Part):
    """The product behind the cache runs in forward and not in the replay."""

    def compute(self, x):
        y = basis(torch.initial_seed() / 100 + 0.01)
        return x + torch.tanh(torch.tanh(x @ self.one.weight) @ self.two.weight + y) @ self.one.weight


class WritesData(Part):
    def compute(self, x):
        hidden = self.one(x)
        hidden.data.mul_(2)
        return x + self.two(torch.tanh(hidden))


class SetsData(Part):
    def compute(self, x):
        hidden = self.one(x)
        hidden.data = hidden.data.round(decimals=1) * 2
        return x + self.two(torch.tanh(hidden))


class WritesByNumPy(Part):
    def compute(self, x):
        hidden = self.one(x)
        hidden.detach().numpy()[...] *= 2
        return x + self.two(torch.tanh(hidden))


@torch.library.custom_op("lightning_ckpt_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws from PyTorch's stream, which nothing in its schema tells, and from Python's."""
    return x + torch.rand(x.shape) * random.random()


noisy.register_autograd(lambda ctx, gradient: gradient)


class CallsNoisy(Part):
    def compute(self, x):
        return x + torch.tanh(self.two(torch.tanh(noisy(self.one(x))) * random.random()) * torch.rand(WIDTH))


@pytest.mark.parametrize("verify", ["sample", "always"])
@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (Cached, MATMUL),
        (WritesData, MATMUL),
        (SetsData, MATMUL),
        (WritesByNumPy, MATMUL),
        (CallsNoisy, [MATMUL, "lightning_ckpt_tests.noisy"]),
    ],
)
def test_what_nobody_can_see_is_exact_or_an_error_with_the_layers_name(make, policy, verify):
    basis.cache_clear()
    plain = history(functools.partial(Stack, make))
    basis.cache_clear()
    refusal = None
    try:
        assert_same(history(functools.partial(Stack, make), policy, verify=verify), plain)
    except ReplayError as error:
        refusal = str(error)
    assert refusal is None or refusal.startswith("Recomputed layer 'layers.")


@pytest.mark.parametrize("make", [Cached, WritesData, CallsNoisy])
def test_the_same_layers_are_exact_without_a_policy_for_them(make):
    basis.cache_clear()
    plain = history(functools.partial(Stack, make))
    basis.cache_clear()
    assert_same(history(functools.partial(Stack, make), ["aten.bmm"]), plain)


# ---------------------------------------------------------------- copies made in training


def test_a_copy_or_pickle_made_in_training_runs_as_the_original_does():
    model = blocks()
    for name, part in model.named_children():
        attach(part, name, "off", policy=resolve_policy(MATMUL))
    rows = torch.randn(4, WIDTH)
    backward_of_square(model, rows)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        operators = Operators()
        torch.manual_seed(1)
        with operators:
            loss = backward_of_square(copied, rows)
        assert operators.replayed
        assert torch.ops.aten.addmm.default in operators.all
        assert torch.ops.aten.addmm.default not in operators.replayed
        torch.manual_seed(1)
        assert torch.equal(loss, backward_of_square(model, rows))
