"""Programs that are hard to serve: what eager PyTorch does is right, and nothing else."""

import gc
import time
import warnings
import weakref

import backend
import pytest
import torch
from offloading import Offloaded, train
from scenarios import DEVICE, Model, Trained, ids, loss_of, seeded
from torch import nn

from lightning_ckpt.offload import OffloadEngine, OffloadOptions

pytestmark = pytest.mark.usefixtures("sim")
OPTIONS = {"keep_last": 0, "max_inflight_bytes": 0}


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


def outcome(program, run):
    """What a program gives, or the kind of its error."""
    try:
        return [tensor.cpu() for tensor in program(run)]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def assert_like_eager(program, raises=None):
    expected = outcome(program, Trained())
    if raises is not None:
        assert (expected is None) == raises
    for policy, seed in (("eager", 0), ("copy_first", 0), ("random", 2)):
        backend.configure(policy, seed)
        got = outcome(program, Offloaded(**OPTIONS))
        torch.accelerator.synchronize()
        assert (got is None) == (expected is None)
        assert got is None or all(map(torch.equal, got, expected))


def boundary(run):
    if isinstance(run, Offloaded):
        run.engine.boundary("next", True)


def test_a_subclass_that_is_changed_in_place():
    from torch.testing._internal.two_tensor import TwoTensor

    def program(run):
        x = TwoTensor(torch.ones(64, 64, device=DEVICE), torch.ones(64, 64, device=DEVICE)).requires_grad_()
        with run.forward():
            y = x * 3
            z = y * y
            y.add_(1)
            boundary(run)
        z.sum().backward()
        return [x.grad.a]

    assert_like_eager(program, raises=True)


def test_a_change_between_a_backward_and_the_backward_of_its_result():
    def program(run):
        x = leaf(64, 64)
        with run.forward():
            y = x * 2
            z = (y**3).sum()
            boundary(run)
        (gradient,) = torch.autograd.grad(z, x, create_graph=True)
        y.add_(1)
        gradient.sum().backward()
        return [x.grad]

    assert_like_eager(program, raises=True)


class _ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.mul_(2)


def test_a_backward_that_changes_what_another_one_needs():
    def program(run):
        x = leaf(64, 64)
        with run.forward():
            y = x * 2
            z = (y * y).sum() + _ChangesWhatItSaved.apply(y).sum()
            boundary(run)
        z.backward()
        return [x.grad]

    assert_like_eager(program, raises=True)


def test_two_halves_of_one_storage_that_are_changed_one_after_the_other():
    """Pieces of `unsafe_chunk` count their changes each on its own."""

    def program(run):
        x = leaf(4, 24)
        with run.forward():
            first, second = (x * 2).unsafe_chunk(2, 0)
            second.sigmoid_()
            boundary(run)
            first.tanh_()
            boundary(run)
            loss = first.sum() + 2 * second.sum()
        loss.backward()
        return [x.grad]

    assert_like_eager(program, raises=False)


def test_a_leaf_that_gets_other_data_before_backward():
    def program(run):
        w, x = leaf(64, 64), leaf(64, 64, seed=1)
        with run.forward():
            loss = (w * x).sum()
            boundary(run)
        w.data = w.data * 2
        loss.backward()
        return [x.grad]

    assert_like_eager(program, raises=False)


def test_a_storage_that_is_emptied_and_filled_again_before_backward():
    def program(run):
        x = leaf(64, 64)
        with run.forward():
            y = x * 2
            z = y.exp().sum() + (y * y).sum()
            y.untyped_storage().resize_(0)
            boundary(run)
        torch.accelerator.synchronize()
        y.untyped_storage().resize_(4 * 64 * 64)
        with torch.no_grad():
            y.data.copy_(x * 2)
        z.backward()
        return [x.grad]

    assert_like_eager(program, raises=False)


def test_a_custom_backward_on_another_stream():
    side = torch.Stream(device=DEVICE)

    class OnAnotherStream(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            main = torch.accelerator.current_stream()
            side.wait_stream(main)
            with side:
                (x,) = ctx.saved_tensors
                result = gradient * x
            main.wait_stream(side)
            result.record_stream(main)
            return result

    def program(run):
        x = leaf(64, 64)
        with run.forward():
            y = OnAnotherStream.apply(x * 2)
            boundary(run)
            loss = (y * y).sum()
            boundary(run)
        loss.backward()
        torch.accelerator.synchronize()
        return [x.grad]

    assert_like_eager(program, raises=False)


def test_jagged_tensors():
    def program(run):
        parts = [leaf(3, 64), leaf(5, 64, seed=1)]
        with run.forward():
            x = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
            loss = ((x * 2).exp() * 3).values().sum()
            boundary(run)
        loss.backward()
        return [part.grad for part in parts]

    assert_like_eager(program, raises=False)


class _Computes:
    """Computes with gradients when it is collected, as part of a cycle."""

    def __init__(self, weight):
        self.weight = weight
        self.itself = self

    def __del__(self):
        (self.weight.exp() * self.weight).sum()


def test_a_finalizer_that_computes_amid_the_engines_work():
    weight = leaf(64, 64)
    thresholds = gc.get_threshold()

    def steps(run):
        model = run.model(seeded(Model))
        for step in range(2):
            with run.forward():
                for _ in range(30):
                    _Computes(weight)
                loss = loss_of(model, ids(seed=step))
            loss.backward()
            run.note(loss)
            run.note_gradients(model)

    expected = train(steps, Trained())
    gc.set_threshold(5, 2, 2)
    try:
        assert train(steps, Offloaded(), "random", 1).equals(expected)
    finally:
        gc.set_threshold(*thresholds)


def test_whoever_is_told_something_may_compute():
    run = Offloaded(host_budget="64KiB")
    said = []

    def say(message):
        x = leaf(64, 64)
        with torch.autograd.graph.saved_tensors_hooks(run.engine.pack, lambda handle: handle.tensor()):
            (x * 2).exp().sum().backward()
        said.append(message)

    run.engine._guard._say = say
    model = run.model(seeded(Model))
    for step in range(3):
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        loss.backward()
    assert len(said) == 1


def test_warnings_that_are_errors_leave_nothing_behind():
    run = Offloaded(host_budget="64KiB")
    run.engine._guard._say = warnings.warn
    model = run.model(seeded(Model))

    def forward():
        with run.forward():
            loss_of(model, ids())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="host_budget"):
            forward()
    gc.collect()
    run.engine.begin()
    assert not any(run.leftovers().values()), run.leftovers()


def test_bringing_back_ahead_does_not_need_memory_that_is_not_there():
    model = seeded(lambda: Model(layers=8)).to(DEVICE)

    def peak(**options):
        run = Offloaded(keep_last=0, max_inflight_bytes=0, **options)
        run.model(model)
        for step in range(2):
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
            with run.forward():
                loss = loss_of(model, ids(count=16, seed=step))
            loss.backward()
            model.zero_grad()
            del loss
        return torch.accelerator.max_memory_allocated()

    backend.configure("eager")
    frugal, greedy = peak(prefetch_bytes=0), peak(prefetch_bytes="1GiB")
    assert greedy > frugal
    torch.accelerator.empty_cache()
    backend.set_limit(int(1.05 * frugal) + 2**19)
    peak(prefetch_bytes="1GiB")


def test_an_engine_that_is_dropped_gives_its_memory_back_without_a_garbage_collection():
    def use_engine():
        engine = OffloadEngine(DEVICE, OffloadOptions(move="all", min_bytes=64))
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, lambda handle: handle.tensor()):
            loss = (leaf(64, 64) * 2).exp().sum()
            engine.boundary("next", True)
        loss.backward()
        assert engine.host.locked_bytes > 0
        return weakref.ref(engine.host)

    use_engine()  # what a process does once holds on to the frames that did it: imports, generated code
    gc.collect()
    gc.disable()
    try:
        memory = use_engine()
        # The last to hold the engine is a thread of autograd's, which lets go of a backward after telling that it is
        # over.
        deadline = time.monotonic() + 60
        while memory() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert memory() is None
    finally:
        gc.enable()


def test_a_layer_whose_weight_is_a_parametrization():
    def program(run):
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)).to(DEVICE)
        x = leaf(8, 64)
        with run.forward():
            y = layer(x).tanh()
            boundary(run)
            loss = layer(y).square().mean()
            boundary(run)
        loss.backward()
        return [x.grad, *(parameter.grad for parameter in layer.parameters())]

    assert_like_eager(program, raises=False)
