"""Random programs, and hostile ones by hand: with the engine they compute what they compute without it.

Each seed gives layers, steps, options of the engine and an order in which the device does its work. A program that
fails in eager PyTorch, by a change in place, has to fail with the engine as well.
"""

import contextlib
import copy
import gc
import io
import random
import threading
import time
from dataclasses import dataclass

import backend
import pytest
import torch
from offloading import Offloaded
from scenarios import DEVICE, Trained
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import lightning_ckpt.offload.outbound as outbound_module
from lightning_ckpt.offload.host_memory import HostMemory

pytestmark = [
    pytest.mark.usefixtures("sim"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # of a checkpoint in validation
]

WIDTH = 32


# ---------------------------------------------------------------- runs


class Plain(Trained):
    """A run without the engine."""

    def boundary(self, name):
        pass


class WithEngine(Offloaded):
    """A run with the engine, whose boundaries are also set by hand."""

    def boundary(self, name):
        self.engine.boundary(name, True)

    def settled_leftovers(self):
        """What is held once the device's thread has let go of a backward that failed, which takes a moment."""
        for _ in range(100):
            if not any(self.leftovers().values()):
                break
            gc.collect()
            time.sleep(0.01)
            self.engine.begin()
        return self.leftovers()


def outcome(program, run, policy="lazy", seed=0):
    """Results of a program on the CPU, or the kind of its error."""
    backend.configure(policy, seed)
    torch.manual_seed(0)
    try:
        program(run)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "changed in place"
    torch.accelerator.synchronize()
    return [tensor.cpu() for tensor in run.results]


def equal(one, two):
    if isinstance(one, str) or isinstance(two, str):
        return one == two
    same = [torch.equal(left.nan_to_num(), right.nan_to_num()) for left, right in zip(one, two, strict=True)]
    return bool(same) and all(same)


def assert_same(program, policy="lazy", seed=0, **options):
    """The engine changes nothing, orders everything and leaves nothing behind; returns the run."""
    expected = outcome(program, Plain())
    run = WithEngine(**{"keep_last": 0, "max_inflight_bytes": 0, **options})
    got = outcome(program, run, policy, seed)
    assert equal(got, expected), (got if isinstance(got, str) else "", expected if isinstance(expected, str) else "")
    if expected == "changed in place":
        backend.clear_races()  # the copy out and the change are not ordered, which is why it is an error
    leftovers = run.settled_leftovers()
    assert not any(leftovers.values()), leftovers
    return run


def rows(seed, count=16):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# ---------------------------------------------------------------- parts of a model


class _SavesEverything(torch.autograd.Function):
    """Saves inputs, an output, one tensor twice, a view, nothing at all and something that is no tensor."""

    @staticmethod
    def forward(ctx, x, weight):
        y = torch.tanh(x * weight)
        ctx.save_for_backward(x, weight, y, x, x[1:], None, x[:0])
        ctx.factor = 0.5
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight, y, again, part, nothing, empty = ctx.saved_tensors
        assert nothing is None
        assert empty.numel() == 0
        inner = gradient * (1 - y * y)
        inner = inner + 0 * again + 0 * part.sum() * ctx.factor
        return inner * weight, (inner * x).sum(0)


class _Dirty(torch.autograd.Function):
    """Changes its input, and saves what it has become."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(0.5)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 0.5 * gradient + 0 * x


class Part(nn.Module):
    """One small layer: `kind` names a method below."""

    def __init__(self, kind: str, other: "Part | None" = None) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        if other is not None:
            self.linear.weight = other.linear.weight  # tied
        if kind == "frozen":
            self.linear.requires_grad_(False)
        if kind == "normed":
            self.linear = nn.utils.parametrizations.weight_norm(self.linear)
        self.norm = nn.LayerNorm(WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH) if kind == "recurrent" else None
        self.register_buffer("average", torch.ones(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, self.kind)(self.norm(x))

    def dense(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))

    frozen = normed = dense

    def views(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, dim=1)
        mixed = left.t() * right.exp().t()
        return torch.cat([mixed.t(), (left * right.flip(1))[:, ::2].repeat(1, 2)], dim=1)

    def dropout(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.3) * x[:1].expand_as(x)

    def in_place(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu_()
        z = y * 2
        z += 1
        return z.sigmoid_()

    def everything(self, x: Tensor) -> Tensor:
        return _SavesEverything.apply(self.linear(x), x[0])

    def dirty(self, x: Tensor) -> Tensor:
        return torch.sin(_Dirty.apply(self.linear(x)))

    def checkpointed(self, x: Tensor) -> Tensor:
        return checkpoint(self.dropout, x, use_reentrant=False)

    def reentrant(self, x: Tensor) -> Tensor:
        return checkpoint(self.dropout, x, use_reentrant=True)

    def complex(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.linear(x).view(x.shape[0], -1, 2))
        z = z * z.conj() + torch.fft.fft(z) * z.conj().imag
        return torch.view_as_real(z.resolve_conj()).reshape(x.shape).tanh()

    def half(self, x: Tensor) -> Tensor:
        with torch.autocast("sim", dtype=torch.bfloat16):
            y = self.linear(x)
            with torch.autocast("sim", enabled=False):
                y = torch.exp(-y.float().square())
            return (y @ self.linear.weight.t()).float()

    def indexed(self, x: Tensor) -> Tensor:
        order = x.detach().argsort(dim=1)
        y = self.linear(x).gather(1, order)
        return torch.where(y > 0, y, y * y)

    def on_host(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.sin(self.linear(x)) * x

    def pair(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (TwoTensor(y, y * 2).exp() * 0.1).sigmoid().b

    def overlapping(self, x: Tensor) -> Tensor:
        y = self.linear(x).flatten()
        return (y.as_strided((x.shape[0], WIDTH), (3, 1), 5).exp() * y.unfold(0, WIDTH, 4)[: x.shape[0]]).tanh()

    def reassigned(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.average[:1]
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y * self.average[1:2]

    def recurrent(self, x: Tensor) -> Tensor:
        hidden = None
        for _ in range(2):
            hidden = self.cell(x, hidden)
        return hidden[0] * hidden[1]

    def with_gradient(self, x: Tensor) -> Tensor:
        """As where forces are gradients of an energy."""
        if not torch.is_grad_enabled():
            return x
        x = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.linear(x).sin().sum(), x, create_graph=True)
        return force

    def dropped(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch.exp(y * y).sum()  # saved, and never needed
        return y


KINDS = [name for name in vars(Part) if not name.startswith("_") and name != "forward"]


class Net(nn.Module):
    """Parts one after the other. `stop` fails in front of a part, `change` changes what it gets in place."""

    def __init__(self, kinds: list[str], tied: bool) -> None:
        super().__init__()
        parts: list[Part] = []
        for kind in kinds:
            tie = parts[0] if tied and parts and kind not in ("frozen", "normed") else None
            parts.append(Part(kind, tie if tie is not None and tie.kind not in ("frozen", "normed") else None))
        self.layers = nn.ModuleList(parts)

    def forward(self, x: Tensor, run, boundaries: set[int], stop: int = -1, change: int = -1) -> Tensor:
        skip = x
        for index, layer in enumerate(self.layers):
            if index in boundaries:
                run.boundary(f"by hand {index}")
            if index == stop:
                raise ZeroDivisionError
            before, x = x, layer(x)
            if index % 3 == 2:
                x = x + skip
                skip = x
            if index == change and before.grad_fn is not None:
                before.add_(1)
        return x


# ---------------------------------------------------------------- random programs


@dataclass
class Forward:
    """A forward pass, and what becomes of it."""

    seed: int
    count: int
    boundaries: set[int]
    stop: int
    change: int
    fate: str  # "once", "twice", "partly", "nested" (inside forward), "dropped" or "thread"


class Program:
    """What a seed stands for."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.kinds = [rng.choice(KINDS) for _ in range(rng.randint(3, 7))]
        self.tied = rng.random() < 0.2
        self.steps = [
            [self._forward(rng, 100 * step + index) for index in range(rng.choice([1, 1, 1, 2, 3]))]
            for step in range(rng.randint(2, 4))
        ]
        self.orders = [rng.sample(range(len(step)), len(step)) for step in self.steps]
        self.one_context = [rng.random() < 0.3 for _ in self.steps]
        self.validates = [rng.random() < 0.2 for _ in self.steps]
        self.policy = rng.choice(["lazy", "eager", "copy_first", "compute_first", "random", "random", "random"])
        self.options = {
            "move": rng.choice(["all", "all", "hidden"]),
            "min_bytes": rng.choice([1, 64, 64, 1500]),
            "keep_last": rng.choice([0, 0, 1, 3]),
            "max_inflight_bytes": rng.choice([None, 0, 0, 4000, 1 << 20]),
            "prefetch_bytes": rng.choice([None, 0, 4000, 1 << 20]),
            "host_budget": rng.choice([1 << 24, 1 << 24, 1 << 24, 32768, 0]),
        }
        self.part_bytes = rng.choice([(1 << 20, 1 << 26), (512, 4096), (2048, 8192), (1, 1)])

    def _forward(self, rng: random.Random, seed: int) -> Forward:
        layers = len(self.kinds)
        return Forward(
            seed,
            rng.choice([16, 16, 16, 5, 24]),
            {index for index in range(layers) if rng.random() < 0.2},
            rng.randrange(layers) if rng.random() < 0.1 else -1,
            rng.randrange(layers) if rng.random() < 0.05 else -1,
            rng.choice(["once", "once", "once", "twice", "partly", "nested", "dropped", "thread"]),
        )

    def __call__(self, run) -> None:
        net = run.model(Net(self.kinds, self.tied))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
        for step, order, one_context, validates in zip(
            self.steps, self.orders, self.one_context, self.validates, strict=True
        ):
            optimizer.zero_grad()
            losses: list[tuple[Tensor, Tensor] | None] = []
            with run.forward() if one_context else contextlib.nullcontext():
                for forward in step:
                    with contextlib.nullcontext() if one_context else run.forward():
                        losses.append(self._compute(net, run, forward))
            if validates:
                net.eval()
                with torch.no_grad():
                    run.note(net(rows(7), run, set()))
                net.train()
            for index in order:
                self._backward(losses, index, step[index].fate)
            losses.clear()
            run.note_gradients(net)
            optimizer.step()
            run.step_done()
        run.note(*net.parameters())

    def _compute(self, net, run, forward):
        try:
            x = rows(forward.seed, forward.count).requires_grad_()
            loss = net(x, run, forward.boundaries, forward.stop, forward.change).square().mean()
        except ZeroDivisionError:
            return None
        run.note(loss)
        if forward.fate == "nested":
            loss.backward()
            run.note(x.grad)
            return None
        return loss, x

    def _backward(self, losses, index, fate):
        if losses[index] is None:
            return
        loss, x = losses[index]
        losses[index] = None
        if fate == "twice":
            loss.backward(retain_graph=True)
        elif fate == "partly" and "reentrant" not in self.kinds:  # which does not support that
            torch.autograd.grad(loss, x, retain_graph=True)
        if fate == "thread":
            errors = []
            thread = threading.Thread(target=_keep_error, args=(loss.backward, errors))
            thread.start()
            thread.join()
            if errors:
                raise errors.pop()
        elif fate != "dropped":
            loss.backward()


def _keep_error(function, errors):
    try:
        function()
    except RuntimeError as error:
        errors.append(error)


@pytest.mark.parametrize("seed", range(50))
def test_a_random_program_is_that_without_the_engine(monkeypatch, seed):
    program = Program(seed)
    monkeypatch.setattr(outbound_module, "_PART_BYTES", program.part_bytes)
    assert_same(program, program.policy, seed, **program.options)


# ---------------------------------------------------------------- changes in place


def _through_a_view(y):
    y[8:].zero_()


def _detached(y):
    with torch.no_grad():
        y.detach().mul_(3)


def _as_an_output(y):
    with torch.no_grad():
        torch.add(y, 1, out=y)


def _all_at_once(y):
    with torch.no_grad():
        torch._foreach_add_([y], 1.0)


def _in_inference_mode(y):
    with torch.inference_mode():
        y.add_(1)


def _by_a_function(y):
    _Dirty.apply(y)


@pytest.mark.parametrize("when", ["before the boundary", "after it"])
@pytest.mark.parametrize(
    "change", [_through_a_view, _detached, _as_an_output, _all_at_once, _in_inference_mode, _by_a_function]
)
def test_a_change_in_place_is_an_error_however_it_is_made(change, when):
    def program(run):
        x = rows(0).requires_grad_()
        with run.forward():
            y = torch.sin(x)
            part = y[:4]
            loss = (part * part).sum()
            if when == "after it":
                run.boundary("end")
            change(y)
            run.boundary("end")
        loss.backward()
        run.note(x.grad)

    assert outcome(program, Plain()) == "changed in place"
    assert_same(program)


def test_a_parameter_that_is_changed_before_its_backward_is_an_error():
    def program(run):
        net = run.model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        with run.forward():
            loss = net(rows(0)).sum()
        with torch.no_grad():
            net[1].weight.add_(1)
        loss.backward()
        run.note_gradients(net)

    assert outcome(program, Plain()) == "changed in place"
    assert_same(program)


def test_a_change_in_place_is_fine_once_the_graph_that_saved_the_tensor_is_dropped():
    def program(run):
        x = rows(0).requires_grad_()
        with run.forward():
            y = x * 2
            z = y * y
            run.boundary("one")
            del z
            y.add_(1)
            loss = (torch.exp(y) * y).sum()
            run.boundary("two")
        loss.backward()
        run.note(x.grad)

    assert_same(program, max_inflight_bytes=1 << 20)


# ---------------------------------------------------------------- models that do unusual things


def test_parameters_that_are_taken_away_until_backward():
    """As strategies do that spread parameters over processes."""

    def program(run):
        net = run.model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
        for step in range(3):
            with run.forward():
                loss = net(rows(step)).sin().sum()
            full = [parameter.data for parameter in net.parameters()]
            for parameter in net.parameters():
                parameter.data = torch.empty(0, device=DEVICE)
            for parameter, data in zip(net.parameters(), full, strict=True):
                parameter.data = data.clone()
            loss.backward()
            for parameter in net.parameters():
                parameter.data = parameter.data - 0.01 * parameter.grad
        run.note_gradients(net)

    assert_same(program)


def test_copies_of_a_model_train_next_to_it():
    def program(run):
        net = run.model(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))))
        average = copy.deepcopy(net)
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for step in range(3):
            with run.forward():
                loss = (net(rows(step)) - average(rows(step)).detach()).square().sum() + loaded(rows(step)).sum()
            loss.backward()
        run.note_gradients(net, loaded)

    assert_same(program)


def test_saved_tensors_that_are_looked_at():
    def program(run):
        x = rows(0).requires_grad_()
        with run.forward():
            y = x.exp()
            z = y.sigmoid()
            run.boundary("end")
            seen = z.grad_fn._saved_result, y.grad_fn._saved_result
            loss = (z * seen[0]).sum()
        loss.backward()
        run.note(x.grad, *seen)

    assert_same(program)


def test_a_hook_in_backward_that_trains_something():
    def program(run):
        x, weight = rows(0).requires_grad_(), rows(3).requires_grad_()

        def hook(gradient):
            with torch.enable_grad(), run.forward():
                inner = torch.exp(weight.detach().requires_grad_() * 0.1)
                run.boundary("inside")
                (inner * inner).sum().backward()
            return gradient * 1.5

        with run.forward():
            y = x
            for index in range(4):
                y = torch.sin(y * weight)
                run.boundary(f"layer {index}")
                if index == 2:
                    y.register_hook(hook)
            loss = y.sum()
        loss.backward()
        run.note(x.grad, weight.grad)

    assert_same(program)


def test_a_batched_function_and_a_forward_derivative():
    def program(run):
        x = rows(0).requires_grad_()
        with run.forward():
            y = torch.func.vmap(lambda row: row.exp() * row)(x * 2)
            run.boundary("one")
            y, tangent = torch.func.jvp(lambda y: torch.sin(y) * y, (y,), (torch.ones_like(x),))
            run.boundary("two")
            loss = (y + tangent).sum()
        loss.backward()
        run.note(x.grad)

    assert_same(program)


def test_gradients_of_a_function_are_an_error_and_not_wrong():
    run = WithEngine()
    with run.forward(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: (x**3).sum())(rows(0))


def test_a_subclass_that_cannot_be_taken_apart_stays():
    class Tagged(torch.Tensor):
        pass

    def program(run):
        x = rows(0).as_subclass(Tagged).requires_grad_()
        with run.forward():
            y = x * 2
            loss = (y * y.exp()).sum()
            run.boundary("end")
        loss.backward()
        run.note(x.grad.as_subclass(Tensor))

    assert assert_same(program).engine.take_statistics().stayed["subclass"] > 0


# ---------------------------------------------------------------- threads


def run_at_once(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_threads_that_train_at_once():
    def program(run):
        leaves = [rows(seed).requires_grad_() for seed in range(2)]

        def train(leaf):
            for _ in range(4):
                with run.forward():
                    y = leaf
                    for index in range(4):
                        y = torch.sin(y * 1.1) * y
                        run.boundary(f"layer {index}")
                    loss = y.sum()
                loss.backward()

        run_at_once([threading.Thread(target=train, args=(leaf,)) for leaf in leaves])
        run.note(*(leaf.grad for leaf in leaves))

    assert_same(program)


def test_two_backward_passes_at_once():
    def program(run):
        leaves = [rows(seed).requires_grad_() for seed in range(2)]
        threads = []
        for leaf in leaves:
            with run.forward():
                y = leaf
                for index in range(8):
                    y = torch.sin(y * 1.1) * y.cos()
                    run.boundary(f"layer {index}")
                threads.append(threading.Thread(target=y.sum().backward))
        run_at_once(threads)
        run.note(*(leaf.grad for leaf in leaves))

    assert_same(program)


# ---------------------------------------------------------------- memory that runs out


def _deep():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def test_training_goes_on_after_the_device_ran_out_of_memory_in_backward():
    def program(run):
        net = run.model(_deep())
        for step in range(4):
            net.zero_grad()
            with run.forward():
                loss = net(rows(step, 4096)).square().mean()
            if step == 1 and isinstance(run, WithEngine):
                torch.accelerator.synchronize()
                torch.accelerator.empty_cache()
                backend.set_limit(torch.accelerator.memory_reserved() + 2**20)
                with pytest.raises(torch.OutOfMemoryError):
                    loss.backward(retain_graph=True)
                backend.set_limit()
                net.zero_grad()
            loss.backward()
            del loss
            run.note_gradients(net)

    assert_same(program)


def test_a_system_that_pins_no_more_memory_makes_no_difference():
    def program(run):
        net = run.model(_deep())
        for step in range(3):
            if step == 1:
                backend.set_pinned_limit(backend.pinned_held())
            with run.forward():
                loss = net(rows(step, 16 * 4**step)).square().mean()
            loss.backward()
            run.note_gradients(net)
        backend.set_pinned_limit()

    said = []
    host = HostMemory(None, 2**14, on_pageable=said.append)
    assert_same(program, "random", 4, host=host)
    assert len(said) == 1
    assert not host.pinned


def test_layers_are_copied_once_while_there_is_host_memory_for_them():
    def program(run):
        net = run.model(_deep())
        for step in range(3):
            with run.forward():
                loss = net(rows(step, 64)).square().mean()
            loss.backward()
            run.note_gradients(net)

    saved = 3 * 7 * 64 * WIDTH * 4  # the batch, and what comes out of each of six layers
    statistics = assert_same(program).engine.take_statistics()
    assert saved - 3 * 2 * 64 * WIDTH * 4 <= statistics.in_bytes <= statistics.out_bytes <= saved
    statistics = assert_same(program, host_budget=2**14).engine.take_statistics()
    assert statistics.out_bytes <= 3 * 2**14
    assert statistics.stayed_bytes["host budget"] > 0
