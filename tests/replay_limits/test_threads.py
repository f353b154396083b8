"""Layers called from several threads at once: gradients are those of one thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import attach, detach
from tests.replay_limits.support import Scaled, compare
from tests.support import Training, assert_equal, batches, fit

JOIN = 20  # seconds until a thread counts as stuck


class Simple(Scaled):
    def forward(self, x):
        return self.use(self.use(x, 1.0), 0.5)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


class CountsCalls(Scaled):
    """Looks at what it has counted, and wastes some time with it."""

    def __init__(self):
        super().__init__()
        self.calls, self.history = 0, []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        x = self.use(x, 1.0)
        assert self.history[-1] == self.calls
        return x


def run_all(tasks):
    """Run every task in a thread of its own; their results."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(timeout=JOIN) for future in [pool.submit(task) for task in tasks]]


class Branches(nn.Module):
    """Two branches that run in threads; two, since a sum of more depends on the order that threads end in."""

    def __init__(self, make, count=2, shared=False, threads=True):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        layer = make()
        self.branches = nn.ModuleList(layer if shared else make() for _ in range(count))
        self.threads = threads

    def forward(self, x):
        x = self.stem(x)
        tasks = [lambda branch=branch, i=i: branch(x * (i + 1)) for i, branch in enumerate(self.branches)]
        return sum(run_all(tasks) if self.threads else [task() for task in tasks])


@pytest.mark.parametrize("make", [Simple, Normed, CountsCalls])
def test_branches_in_threads_equal_branches_in_a_row(make):
    plain = fit(lambda: Training(Branches(make, threads=False)), batches(4))
    for _ in range(3):
        assert_equal(fit(lambda: Training(Branches(make)), batches(4), [callback(make)]), plain)


def test_one_layer_in_several_threads_equals_the_layer_in_a_row():
    plain = fit(lambda: Training(Branches(CountsCalls, shared=True, threads=False)), batches(4))
    for _ in range(3):
        got = fit(lambda: Training(Branches(CountsCalls, shared=True)), batches(4), [callback(CountsCalls)])
        assert_equal(got, plain)


def test_one_layer_that_counts_in_several_threads_counts_every_call_once():
    models = []

    def make():
        models.append(Branches(CountsCalls, count=4, shared=True))
        return Training(models[-1])

    fit(make, batches(4), [callback(CountsCalls)])
    assert models[0].branches[0].calls == 4 * 4
    assert sorted(models[0].branches[0].history) == list(range(1, 17))


def callback(layer):
    return ActivationCheckpointing(layers=layer, verify="always")


# ---------------------------------------------------------------- forward and backward in threads


def gradients(layer, x, steps=5):
    """Forward and backward a few times; the gradient of the input in the end."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        layer(x).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("make", [Simple, pytest.param(CountsCalls, marks=pytest.mark.slow)])
def test_forward_and_backward_of_many_layers_in_threads(make):
    layers = [make() for _ in range(6)]
    inputs = [torch.randn(4, 8) for _ in layers]
    plain = [gradients(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    for i, layer in enumerate(layers):
        attach(layer, f"layers.{i}", "always")
    pairs = zip(layers, inputs, strict=True)
    got = run_all([lambda layer=layer, x=x: gradients(layer, x) for layer, x in pairs])
    for layer in layers:
        detach(layer)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def test_forward_and_backward_of_one_layer_in_many_threads():
    layer = Simple()
    layer.requires_grad_(False)  # its weights' gradients would add up in any order
    inputs = [torch.randn(4, 8) for _ in range(6)]
    plain = [gradients(layer, x) for x in inputs]
    attach(layer, "layer", "always")
    got = run_all([lambda x=x: gradients(layer, x) for x in inputs])
    detach(layer)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


class BackwardElsewhere(Training):
    """Runs backward in another thread than forward, as PyTorch does itself for accelerators."""

    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with self.around():
            loss = self.loss(self.model, batch)
        optimizer.zero_grad()
        run_all([lambda: loss.backward()])
        optimizer.step()
        return {"loss": loss.detach()}

    def around(self):
        return torch.autocast("cpu", torch.bfloat16)


local = threading.local()


class ReadsLocal(Scaled):
    def forward(self, x):
        return self.use(x, getattr(local, "scale", 1.0))


class CountsInLocal(Scaled):
    def __init__(self):
        super().__init__()
        self.local = threading.local()
        self.local.calls = 0

    def forward(self, x):
        self.local.calls += 1
        return self.use(x, 1 / self.local.calls)


class WithLocal(BackwardElsewhere):
    def training_step(self, batch, batch_idx):
        local.scale = 0.5 + batch_idx
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("layer", [Simple, Normed, CountsCalls, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout())])
def test_backward_in_another_thread_is_exact(layer):
    compare(layer, BackwardElsewhere)


def test_a_thread_local_switch_of_the_forwards_thread_is_on_in_the_replays_thread():
    compare(ReadsLocal, WithLocal)


def test_a_thread_local_count_of_the_forwards_thread_is_seen_in_the_replays_thread():
    plain, got = compare(CountsInLocal, BackwardElsewhere)
    assert got.local.calls == plain.local.calls == 4


# ---------------------------------------------------------------- locks and hooks


def test_a_layer_that_takes_gradients_inside_its_forward_in_another_thread_does_not_block():
    class Force(Scaled):
        """The gradient of an energy, which an accelerator's backward thread computes."""

        def forward(self, x):
            energy = self.use(x, 1.0).square().sum()
            forces = []
            thread = threading.Thread(
                target=lambda: forces.append(torch.autograd.grad(energy, x, create_graph=True)[0]), daemon=True
            )
            thread.start()
            thread.join(2)
            assert forces, "stuck"
            return forces[0]

    layer = Force()
    x = torch.randn(4, 8, requires_grad=True)
    layer(x).sum().backward()
    plain, x.grad = x.grad, None
    attach(layer, "layer")
    try:
        layer(x).sum().backward()
    finally:
        detach(layer)
    assert torch.equal(x.grad, plain)


def test_global_hooks_are_as_before_after_calls_that_overlap():
    fired = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: fired.append(module))
    table = nn.modules.module._global_forward_hooks
    before = dict(table)
    entered, left = threading.Barrier(2), threading.Event()

    class First(Scaled):
        def forward(self, x):
            entered.wait(5)  # both are inside now
            return self.use(x, 1.0)

    class Second(Scaled):
        def forward(self, x):
            entered.wait(5)
            left.wait(5)  # the first has left
            return self.use(x, 1.0)

    first, second = First(), Second()
    attach(first, "first")
    attach(second, "second")

    def run_first():
        first(torch.ones(2, 8))
        left.set()

    try:
        run_all([run_first, lambda: second(torch.ones(2, 8))])
        assert dict(table) == before
    finally:
        handle.remove()
        detach(first)
        detach(second)


def test_an_exception_in_one_thread_leaves_the_layer_free_for_others():
    class Fails(Scaled):
        def forward(self, x, fail=False):
            if fail:
                raise ValueError("on purpose")
            return self.use(x, 1.0)

    layer = Fails()
    attach(layer, "layer")
    x = torch.ones(2, 8, requires_grad=True)

    def fail():
        with pytest.raises(ValueError, match="on purpose"):
            layer(x, fail=True)

    run_all([fail])
    run_all([lambda: layer(x).sum().backward()])
    detach(layer)
    assert x.grad is not None
