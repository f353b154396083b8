"""Training with the engine equals training without it, in every order in which the device may do its work."""

import backend
import pytest
import torch
from offloading import Offloaded, train
from scenarios import DEVICE, SCENARIOS, Block, Model, Trained, ids, loss_of, seeded
from schedules import SCHEDULES
from torch import nn

import lightning_ckpt.offload.outbound as outbound_module
from lightning_ckpt.offload import OffloadEngine, OffloadOptions

pytestmark = pytest.mark.usefixtures("sim")


@pytest.fixture(scope="module")
def plain():
    """The results of the plain run of each scenario."""
    runs = {}

    def get(name):
        if name not in runs:
            runs[name] = train(SCENARIOS[name], Trained())
        return runs[name]

    return get


@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_training_is_that_of_the_plain_run(plain, monkeypatch, name, policy, seed):
    if name in ("no_layers", "odd_tensors"):
        monkeypatch.setattr(outbound_module, "_PART_BYTES", (2048, 8192))
    expected = plain(name)
    run = train(SCENARIOS[name], Offloaded(), policy, seed)
    assert run.equals(expected)
    assert run.engine.take_statistics().out_bytes > 0
    assert not any(run.leftovers().values()), run.leftovers()
    assert run.said == []


@pytest.mark.parametrize("name", ["plain_steps", "forwards_and_backwards_interleaved", "part_of_the_graph"])
@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"keep_last": 3},
        {"max_inflight_bytes": 0, "prefetch_bytes": 0},
        {"max_inflight_bytes": "1GiB", "prefetch_bytes": "1GiB"},
        {"move": "hidden"},
        {"min_bytes": 4096},
    ],
    ids=str,
)
def test_no_option_makes_training_inexact(plain, name, options):
    expected = plain(name)
    run = train(SCENARIOS[name], Offloaded(**options), "random", 5)
    assert run.equals(expected)
    assert not any(run.leftovers().values()), run.leftovers()


@pytest.mark.parametrize("name", SCENARIOS)
def test_layers_that_travel_in_parts(plain, monkeypatch, name):
    expected = plain(name)
    monkeypatch.setattr(outbound_module, "_PART_BYTES", (512, 4096))
    run = train(SCENARIOS[name], Offloaded(), "random", 6)
    assert run.equals(expected)
    assert not any(run.leftovers().values()), run.leftovers()


def test_parts_of_a_layer_leave_less_on_the_device(monkeypatch):
    def resident():
        run = train(SCENARIOS["plain_steps"], Offloaded(keep_last=0))
        return run.engine.take_statistics().resident_bytes

    whole = resident()
    monkeypatch.setattr(outbound_module, "_PART_BYTES", (512, 2048))
    assert resident() < 0.6 * whole


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_without_the_engine_is_repeatable(plain, name):
    assert train(SCENARIOS[name], Trained(), "random", 3).equals(plain(name))


# ---------------------------------------------------------------- in-place changes


def modified_after(layers_in_between):
    """`b * b` needs `b`, which is changed after it was saved: an error in eager PyTorch, whenever that happens."""
    run = Offloaded(max_inflight_bytes=0, keep_last=0)
    engine = run.engine
    x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    with run.forward():
        engine.boundary("first", True)
        b = x * 2
        c = b * b
        for index in range(layers_in_between):
            engine.boundary(f"layer {index}", True)
            c = c.exp()
        b.add_(1)
        engine.boundary("last", True)
        return c.sum()


@pytest.mark.parametrize("layers_in_between", [0, 1, 3])
def test_a_change_in_place_after_saving_is_the_error_of_eager_pytorch(layers_in_between):
    loss = modified_after(layers_in_between)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \(64, 64\)\].*version 1"
    ):
        loss.backward()
    backend.clear_races()  # the copy out and the change are not ordered, which is why it is an error


def test_a_kept_tensor_that_was_changed_in_place_is_an_error_too():
    run = Offloaded(min_bytes="1GiB")
    x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    with run.forward():
        b = x * 2
        loss = (b * b).sum()
        b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_saved_again_after_a_change_is_the_new_value():
    def gradient(run):
        x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
        with run.forward():
            b = x * 2
            b.add_(1)  # nothing has saved it yet
            loss = (b * b).sum()
            d = loss * b  # saves the same storage once more
        d.sum().backward()
        return x.grad

    assert torch.equal(gradient(Trained()), gradient(Offloaded(keep_last=0)))


# ---------------------------------------------------------------- what travels


def copied_bytes(run, make_loss):
    """Bytes that the device itself counted on the way out."""
    before = backend.counts().get("bytes_out", 0)
    with run.forward():
        loss = make_loss()
        run.engine.boundary("end", True)
    torch.accelerator.synchronize()
    copied = backend.counts().get("bytes_out", 0) - before
    loss.backward()
    return copied


def test_parameters_never_travel_also_as_views_and_as_casts_of_autocast():
    linear = nn.Linear(64, 64, device=DEVICE)
    frozen = nn.Linear(64, 64, device=DEVICE).requires_grad_(False)
    norm = nn.LayerNorm(64, device=DEVICE)
    x = torch.randn(1, 64, device=DEVICE, requires_grad=True)
    for autocast in (False, True):
        run = Offloaded(keep_last=0, min_bytes=1024)  # every activation is smaller, every weight is larger
        run.engine.learn(nn.ModuleList([linear, frozen, norm]))

        def make_loss(autocast=autocast):
            with torch.autocast("sim", dtype=torch.bfloat16, enabled=autocast):
                y = frozen(linear(norm(x)))
                y = y @ linear.weight.t() @ frozen.weight.t() @ linear.weight.view(2, 32, 64)[1].t()
            return y.float().sum()

        assert copied_bytes(run, make_loss) == 0
        assert run.engine.take_statistics().stayed["parameter"] > 5


def test_each_storage_travels_once_whatever_looks_at_it():
    run = Offloaded(keep_last=0)
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)

    def make_loss():
        y = x * 3
        left, right = y.chunk(2, dim=1)
        return (left * right).sum() + (y.t() * y.flip(0)).sum() + y.exp().sum()

    unique = 4 * 64 * 64 * 3  # y, its flipped copy and exp's result; x is the leaf
    assert copied_bytes(run, make_loss) in (unique, unique + 4 * 64 * 64)


def test_a_broadcast_tensor_travels_as_it_is_stored():
    run = Offloaded(keep_last=0)
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)

    def make_loss():
        mask = (x[:1] * 2).expand(64, 64)
        return (mask * mask.exp()).sum()

    assert copied_bytes(run, make_loss) <= 4 * 64 + 2 * 4 * 64 * 64


def test_a_small_view_of_a_large_storage_does_not_drag_it_along():
    data = torch.randn(1000, 64, 8, device=DEVICE)  # somebody keeps a whole data set there
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    run = Offloaded(keep_last=0)
    slice_bytes = 4 * 64 * 8
    assert copied_bytes(run, lambda: (data[3].t() * weight).sum()) <= 2 * slice_bytes
    assert copied_bytes(run, lambda: (data[:, 5, 0] * weight[:1]).sum()) == 0
    assert run.engine.take_statistics().stayed["sparse view"] == 1


def test_subclasses_travel_as_their_parts():
    from torch.testing._internal.two_tensor import TwoTensor

    def gradient(run):
        x = TwoTensor(torch.ones(64, 64, device=DEVICE), torch.full((64, 64), 2.0, device=DEVICE)).requires_grad_()
        with run.forward():
            y = (x * 3).exp()
            if isinstance(run, Offloaded):
                run.engine.boundary("end", True)
            loss = y.sum()
        loss.backward()
        return x.grad

    run = Offloaded(keep_last=0, max_inflight_bytes=0)
    expected, got = gradient(Trained()), gradient(run)
    assert torch.equal(expected.a, got.a)
    assert torch.equal(expected.b, got.b)
    assert run.engine.take_statistics().out_bytes >= 2 * 4 * 64 * 64


def test_tensors_of_another_device_and_small_ones_stay():
    run = Offloaded(min_bytes=1024)
    host, small = torch.ones(64, 64, requires_grad=True), torch.ones(8, device=DEVICE, requires_grad=True)
    with run.forward():
        loss = (host * host).sum() + (small * 2).exp().sum().cpu()
    loss.backward()
    statistics = run.engine.take_statistics()
    assert statistics.out_bytes == 0
    stayed = statistics.stayed
    assert stayed["other device"] >= 1
    assert stayed["small"] >= 1


# ---------------------------------------------------------------- limits


def held_after_forward(**options):
    run = Offloaded(**options)
    model = run.model(seeded(lambda: Model(layers=8)))
    sizes = []
    for step in range(2):
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        sizes.append(run.engine.resident_bytes)
        loss.backward()
        run.step_done()
    return run, sizes


def test_what_stays_is_the_last_layers_and_what_is_under_way():
    everything = held_after_forward(keep_last=100)[1][-1]
    layer = everything / 8.5  # embedding and head save about half a layer
    for keep_last in (0, 1, 2, 4):
        run, sizes = held_after_forward(keep_last=keep_last)
        inflight = sum(flight.nbytes for flight in run.engine._outbound._flights)
        assert inflight == 0
        assert sizes[-1] <= (keep_last + 2) * layer * 1.3
        assert sizes[-1] >= (keep_last + 1) * layer * 0.7


@pytest.mark.parametrize("policy", ["lazy", "eager", "copy_first"])
def test_what_was_under_way_is_not_held_through_backward(policy):
    backend.configure(policy)
    run = Offloaded(keep_last=0)
    model = run.model(seeded(lambda: Model(layers=8)))
    held = []
    for step in range(2):
        with run.forward():
            x = model.token(ids(seed=step))
            for index, layer in enumerate(model.layers):
                x = layer(x)
                if index == 0:
                    x.register_hook(lambda gradient: held.append(run.engine.resident_bytes))
            loss = x.square().mean()
        before = run.engine.resident_bytes
        loss.backward()
    assert before > 0
    assert held[-1] < 0.2 * before


def test_the_host_budget_is_kept_and_the_rest_stays_visibly():
    expected = train(SCENARIOS["plain_steps"], Trained())
    run = train(SCENARIOS["plain_steps"], Offloaded(host_budget="128KiB"))
    assert run.equals(expected)
    assert run.engine.host.locked_bytes <= 128 * 1024
    assert run.engine.take_statistics().stayed_bytes["host budget"] > 0
    assert len(run.said) == 1
    assert "`host_budget`" in run.said[0]


def test_a_budget_that_is_shared_by_the_ranks_of_a_machine():
    engine = OffloadEngine(DEVICE, OffloadOptions(host_budget="64MiB"), local_ranks=4)
    regions = [engine.host.take(2**20) for _ in range(40)]
    assert sum(region is not None for region in regions) == 16


def test_pageable_memory_where_pinning_fails():
    expected = train(SCENARIOS["plain_steps"], Trained())
    backend.set_pinned_limit(0)
    run = train(SCENARIOS["plain_steps"], Offloaded(), "random", 2)
    backend.set_pinned_limit()
    assert run.equals(expected)
    assert not run.engine.host.pinned
    assert len(run.said) == 1
    assert "pin" in run.said[0]


def test_what_travels_and_what_stays_is_described():
    run = train(SCENARIOS["plain_steps"], Offloaded())
    described = run.engine.describe()
    assert "MiB travel to the host" in described
    assert "MiB (last)" in described
    assert "tensors (parameter)" in described


def test_nothing_is_allocated_after_the_first_steps():
    run = Offloaded()
    model = run.model(seeded(lambda: Model(layers=4)))
    for step in range(20):
        with run.forward():
            loss = loss_of(model, ids(count=1 + step % 3, seed=step))
        loss.backward()
        run.step_done()
        if step == 3:
            allocated = run.engine.host.allocations
    assert run.engine.host.allocations == allocated
    assert run.engine.take_statistics().late_allocations == 0


def test_a_model_that_does_not_fit_trains_with_the_engine():
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    model = seeded(lambda: nn.Sequential(*(Block(64, 4) for _ in range(12)))).to(DEVICE)

    def step(run):
        with run.forward():
            loss = model(torch.ones(8, 32, 64, device=DEVICE)).square().mean()
        loss.backward()
        torch.accelerator.synchronize()

    run = Offloaded(keep_last=1)
    run.model(model)
    backend.configure("eager")
    step(run)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    step(run)
    needed = torch.accelerator.max_memory_allocated() - before
    torch.accelerator.empty_cache()
    backend.set_limit(before + int(1.15 * needed))
    backend.configure("copy_first")
    with pytest.raises(torch.OutOfMemoryError):
        step(Trained())
    model.zero_grad()
    torch.accelerator.empty_cache()
    step(run)
    step(run)


def test_two_hundred_steps_leave_nothing_behind():
    run = Offloaded()
    model = run.model(
        seeded(
            lambda: nn.Sequential(
                nn.Embedding(40, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
            )
        )
    )
    torch.accelerator.synchronize()
    for step in range(200):
        with run.forward():
            loss = model(ids(seed=step)).square().mean()
        if step % 7 == 3:
            continue  # dropped
        loss.backward()
        model.zero_grad()
        run.step_done()
        if step == 11:
            torch.accelerator.synchronize()
            held = torch.accelerator.memory_allocated(), run.engine.host.locked_bytes
    del loss
    torch.accelerator.synchronize()
    run.engine.begin()
    assert not any(run.leftovers().values()), run.leftovers()
    assert (torch.accelerator.memory_allocated(), run.engine.host.locked_bytes) <= held


# ---------------------------------------------------------------- other streams, the end


def test_activations_stay_where_forward_uses_several_streams():
    other = torch.Stream(device=DEVICE)
    model = seeded(lambda: nn.Sequential(*(Block(32, 4) for _ in range(4)))).to(DEVICE)

    def gradients(run):
        model.zero_grad()
        for step in range(3):
            x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            torch.accelerator.synchronize()
            torch.manual_seed(step)
            with run.forward():
                left = model[1](model[0](x))
                other.wait_stream(torch.accelerator.current_stream())
                with other:
                    right = model[3](model[2](x))
                torch.accelerator.current_stream().wait_stream(other)
                loss = (left * right).mean()
            loss.backward()
            torch.accelerator.synchronize()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(Trained())
    run = Offloaded()
    run.model(model)
    assert all(map(torch.equal, gradients(run), expected))
    assert len(run.said) == 1
    assert "several streams" in run.said[0]


def test_training_on_a_stream_of_its_own():
    expected = train(SCENARIOS["plain_steps"], Trained())
    stream = torch.Stream(device=DEVICE)
    run = Offloaded()
    torch.accelerator.synchronize()
    with stream:
        train(SCENARIOS["plain_steps"], run, "random", 1)
    assert run.equals(expected)
    assert run.engine.take_statistics().out_bytes > 0
    assert run.said == []


def test_a_graph_outlives_the_engine():
    run = Offloaded()
    model = run.model(seeded(Model))
    with run.forward():
        loss = loss_of(model, ids())
    run.engine.close()
    loss.backward()
    run.note_gradients(model)
    plain = Trained()
    model = plain.model(seeded(Model))
    loss_of(model, ids()).backward()
    plain.note_gradients(model)
    assert run.equals(plain)
    with run.forward():
        loss_of(model, ids()).backward()
    assert run.engine.resident_bytes == 0


# ---------------------------------------------------------------- compiled code


def compiled_steps(run, compile_layers):
    model = seeded(Model)
    for layer in model.layers:
        layer.dropout.p = 0.0  # compiled dropout draws other numbers
    compile_layers(model)
    model = run.model(model)
    for step in range(3):
        model.zero_grad()
        with run.forward():
            loss = loss_of(model, ids(seed=step))
        loss.backward()
        run.note(loss)
        run.note_gradients(model)


def _by_method(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def _by_module(model):
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")


@pytest.mark.parametrize("compile_layers", [_by_method, _by_module])
def test_layers_that_are_compiled_one_by_one(compile_layers):
    torch._dynamo.reset()
    expected = train(lambda run: compiled_steps(run, compile_layers), Trained())
    run = train(lambda run: compiled_steps(run, compile_layers), Offloaded(), "random", 3)
    assert run.equals(expected)
    statistics = run.engine.take_statistics()
    assert statistics.in_bytes > 0
    assert run.engine._outbound.largest < statistics.out_bytes / 4  # layer by layer, not all at once
    torch._dynamo.reset()
