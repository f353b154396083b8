"""Exceptions: whatever is raised in the middle of a step, all is as before, and the next steps are exact."""

import queue
import random
import re

import pytest
import torch
from torch import nn

from lightning_ckpt.recompute import ReplayError, is_replaying
from tests.replay.support import Layer, Stack, assert_exact, stack, train
from tests.support import Training


class Stateful(Layer):
    """Has much that an exception could leave behind, and fails for batches that `fails` says."""

    def __init__(self, fails=lambda calls: False):
        super().__init__()
        self.norm, self.calls, self.fails = nn.BatchNorm1d(8), 0, fails

    def forward(self, x):
        self.calls += 1
        x = nn.functional.dropout(self.norm(self.linear(x)), 0.2) * random.random()
        if self.fails(self.calls):
            raise ValueError("bad batch")
        return torch.tanh(x) * x


def calls(module):
    return [layer.calls for layer in module.model.layers]


class Skipping(Training):
    """Skips a batch whose forward fails."""

    def training_step(self, batch, batch_idx):
        try:
            return super().training_step(batch, batch_idx)
        except ValueError:
            return None


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_exception_in_forward_skips_the_batch(at, which):
    def make():
        module = Skipping(Stack(Stateful))
        module.model.layers[which].fails = lambda calls: calls == at
        return module

    assert_exact(make, steps=6, observe=calls)


def test_an_exception_in_forward_that_the_layer_handles_itself():
    class Handles(Stateful):
        def forward(self, x):
            try:
                return super().forward(x)
            except ValueError:
                return self.linear(x)

    assert_exact(lambda: stack(lambda: Handles(lambda calls: calls % 3 == 0)), steps=7, observe=calls)


def test_an_exception_between_two_layers():
    def loss(model, batch):
        x = model.stem(batch)
        for i, layer in enumerate(model.layers):
            x = layer(x)
            if i == 1 and batch[0, 0] > 0:
                raise ValueError("bad batch")
        return x.square().mean()

    assert_exact(lambda: Skipping(Stack(Stateful), loss), steps=8, observe=calls)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.fails:
            raise ValueError("bad gradient")
        return grad * x.cos(), None


class BackwardFails(Stateful):
    """Does not fail in forward, but in backward."""

    fails_in_backward = staticmethod(lambda calls: False)

    def forward(self, x):
        x = super().forward(x)
        return FailsInBackward.apply(x, self.fails_in_backward(self.calls)).exp()


class SkippingBackward(Training):
    """Skips a batch whose backward fails."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        try:
            self.manual_backward(loss)
        except (ValueError, ReplayError) as error:
            self.caught = [*getattr(self, "caught", []), str(error).partition("\n")[0]]
            assert not is_replaying()
            return
        optimizer.step()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_exception_in_the_backward_of_a_function_inside(which):
    def make():
        module = SkippingBackward(Stack(BackwardFails))
        module.model.layers[which].fails_in_backward = lambda calls: calls in (2, 5)
        return module

    got = assert_exact(make, steps=7, observe=lambda module: (calls(module), module.caught))
    assert got.module.caught == ["bad gradient"] * 2


def test_an_exception_in_a_gradient_hook():
    class Checks(Training):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x = self.model.stem(batch)
            for layer in self.model.layers:
                x = layer(x)
                x.register_hook(self.check(batch_idx))
            try:
                self.manual_backward(x.square().mean())
            except ValueError:
                return
            self.optimizers().step()
            self.optimizers().zero_grad()

        def check(self, batch_idx):
            def check(grad):
                if batch_idx in (1, 3):
                    raise ValueError("bad gradient")

            return check

    assert_exact(lambda: Checks(Stack(Stateful)), steps=6, observe=calls)


class FailsInReplay(Stateful):
    """Fails in the replay of its fourth call."""

    def forward(self, x):
        x = super().forward(x)
        if is_replaying() and self.calls == 4:
            raise ValueError("bad replay")
        return torch.sigmoid(x) * x


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_exception_in_the_replay_leaves_all_as_it_was(which):
    def make():
        layers = iter(range(3))
        return SkippingBackward(Stack(lambda: FailsInReplay() if next(layers) == which else Stateful()))

    class Without(SkippingBackward):
        """The same training, whose fourth batch is skipped by itself."""

        def manual_backward(self, loss):
            if self.model.layers[0].calls == 4:
                loss.backward()
                raise ValueError("bad replay")
            super().manual_backward(loss)

    def make_plain():
        module = make()
        module.__class__ = Without
        return module

    def observe(module):
        return calls(module), [layer.norm.num_batches_tracked.item() for layer in module.model.layers]

    plain, got = train(make_plain, None, steps=7, observe=observe), train(make, steps=7, observe=observe)
    (caught,) = got.module.caught
    assert re.search(rf"'model\.layers\.{which}' raised ValueError\(bad replay\) in the replay", caught)
    assert got.observed == plain.observed
    assert got.streams == plain.streams
    for name, value in plain.run.state.items():
        assert torch.equal(got.run.state[name], value), name


def test_an_exception_that_only_the_replay_meets_tells_the_layer():
    files = queue.SimpleQueue()

    class Reads(Layer):
        def forward(self, x):
            return super().forward(x * files.get_nowait())

    def make():
        while not files.empty():
            files.get()
        for _ in range(3):
            files.put(0.5)
        return stack(Reads)

    with pytest.raises((ReplayError, queue.Empty)) as info:
        train(make, steps=1)
    text = str(info.value) + "".join(getattr(info.value, "__notes__", []))
    assert "model.layers.2" in text


def test_a_refused_step_leaves_all_as_it_was():
    class Refused(SkippingBackward):
        def manual_backward(self, loss):
            if self.trainer.global_step == 2 and not hasattr(self, "caught"):
                with torch.no_grad():
                    self.model.layers[1].linear.weight.mul_(1.0)
            super().manual_backward(loss)

    class Plain(Refused):
        def training_step(self, batch, batch_idx):
            try:
                return super().training_step(batch, batch_idx)
            except RuntimeError:
                self.caught = ["inplace"]

    plain = train(lambda: Plain(Stack(Stateful)), None, steps=6, observe=calls)
    got = train(lambda: Refused(Stack(Stateful)), steps=6, observe=calls)
    assert len(got.module.caught) == len(plain.module.caught) == 1
    assert "'model.layers.1' has a weight" in got.module.caught[0]
    assert got.observed == plain.observed
    assert got.streams == plain.streams
    for name, value in plain.run.state.items():
        assert torch.equal(got.run.state[name], value), name


def test_interrupting_a_fit_and_starting_another():
    class Interrupted(Training):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise ValueError("stop here")

    class Goes(Training):
        pass

    kept = {}

    def first():
        kept["module"] = Interrupted(Stack(Stateful))
        return kept["module"]

    def second():
        kept["module"].__class__ = Goes
        return kept["module"]

    results = []
    for recomputed in (None, Layer):
        with pytest.raises(ValueError, match="stop here"):
            train(first, recomputed)
        assert all("forward" not in vars(layer) for layer in kept["module"].model.layers)
        results.append(train(second, recomputed, observe=calls))
    plain, got = results
    assert got.observed == plain.observed
    assert got.streams == plain.streams
    assert all(torch.equal(got.run.state[name], value) for name, value in plain.run.state.items())


def test_running_out_of_memory_in_forward_and_going_on_with_half_the_batch():
    def loss(model, batch):
        try:
            return model(batch).square().mean()
        except ValueError:
            return sum(model(half).square().mean() for half in batch.chunk(2)) / 2

    def make():
        module = stack(Stateful, loss)
        module.model.layers[1].fails = lambda calls: calls in (2, 7)
        return module

    assert_exact(make, steps=6, observe=calls)


def test_a_loop_that_an_exception_ends():
    class Consumes(Layer):
        def forward(self, x, steps):
            try:
                while True:
                    x = torch.tanh(self.linear(x * steps.pop()))
            except IndexError:
                return x

    def loss(model, batch):
        x = model.stem(batch)
        for layer in model.layers:
            x = layer(x, [0.5, 1.0])
        return x.square().mean()

    assert_exact(lambda: stack(Consumes, loss))
