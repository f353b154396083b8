"""The tester tested: planted bugs are found, by order and by value, and a correct engine is not reported."""

import contextlib
import copy

import pytest
import torch
from schedules import every_schedule
from small_engine import GPT, Engine
from torch import accelerator

expect_race = pytest.mark.expect_race


@pytest.fixture(scope="module")
def reference():
    """A model, batches, and what training on the CPU gives."""
    torch.manual_seed(0)
    model = GPT()
    batches = torch.randint(0, 40, (2, 2, 16))
    return model, batches, train(copy.deepcopy(model), batches, "cpu")


def train(model, batches, device, engine=None):
    """Losses and last gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if engine:
        engine.skip = {parameter.data_ptr() for parameter in model.parameters()}
    losses = []
    for rows in batches:
        rows = rows.to(device)
        optimizer.zero_grad()
        with engine or contextlib.nullcontext():
            loss = model.loss(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), [parameter.grad.cpu() for parameter in model.parameters()]


def train_on_device(reference, engine):
    model, batches, _ = reference
    return train(copy.deepcopy(model).to("sim"), batches, "sim", engine)


def agree(first, second):
    pairs = [(first[0], second[0]), *zip(first[1], second[1], strict=True)]
    return all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


# ---------------------------------------------------------------- engines


@every_schedule
def test_correct_engine(sim, reference, policy, seed):
    sim.configure(policy, seed)
    engine = Engine()
    assert agree(train_on_device(reference, engine), reference[2])
    assert engine.packed > 50


@expect_race
@every_schedule
@pytest.mark.parametrize(
    "bug",
    [
        "copy in before copy out",
        "no record_stream out",
        "no record_stream in",
        "use before copy in",
        "copy out before use",
    ],
)
def test_order_finds(sim, reference, bug, policy, seed):
    sim.configure(policy, seed)
    with contextlib.suppress(RuntimeError):  # a poisoned index, say
        train_on_device(reference, Engine(bug))
    assert sim.races()


@expect_race
@pytest.mark.parametrize(
    ("bug", "policy"),
    [
        ("copy in before copy out", "lazy"),
        ("no record_stream out", "compute_first"),
        ("use before copy in", "lazy"),
        ("copy out before use", "copy_first"),
    ],
)
def test_values_find(sim, reference, bug, policy):
    sim.configure(policy)
    try:
        got = train_on_device(reference, Engine(bug))
    except RuntimeError:
        return
    assert not agree(got, reference[2])


@expect_race
@pytest.mark.parametrize("bugs", [(), ("buffer reused early",)])
def test_buffer_reused_under_a_prefetch(sim, bugs):
    engine = Engine(*bugs)
    first, second = torch.randn(64, device="sim"), torch.randn(64, device="sim")
    one = engine.pack(first)
    engine.fetch(one)
    two = engine.pack(second)
    assert one.buffer.data_ptr() == two.buffer.data_ptr()
    two.copied_out.synchronize()
    right = torch.equal(engine.unpack(one).cpu(), first.cpu())
    assert right != bool(bugs)
    assert bool(sim.races()) == bool(bugs)


def test_the_host_reads_poison(sim):
    tensor = torch.randn(64, device="sim")
    handle = Engine().pack(tensor)
    assert handle.host.isnan().all()
    assert not handle.copied_out.query()
    assert sim.host_unsynced(handle.buffer.data_ptr())
    handle.copied_out.synchronize()
    assert torch.equal(handle.host, tensor.cpu())
    assert not sim.host_unsynced(handle.buffer.data_ptr())


# ---------------------------------------------------------------- memory


def test_memory(sim):
    model = GPT(width=64, layers=4, length=64).to("sim")
    rows = torch.randint(0, 40, (4, 64)).to("sim")
    accelerator.synchronize()

    def run(engine):
        with engine or contextlib.nullcontext():
            loss = model(rows).square().mean()
        loss.backward()
        accelerator.synchronize()
        model.zero_grad()

    def peak(engine):
        sim.configure("eager")
        accelerator.reset_peak_memory_stats()
        run(engine)
        return accelerator.max_memory_allocated() - others

    others = accelerator.memory_allocated() - sum(each.nbytes for each in (rows, *model.parameters()))
    assert peak(Engine(prefetch=1)) < 0.6 * peak(None)
    accelerator.empty_cache()
    sim.set_limit(accelerator.memory_allocated() + (4 << 20))
    sim.configure("copy_first")
    with pytest.raises(torch.OutOfMemoryError):
        run(None)
    accelerator.empty_cache()
    run(Engine(prefetch=1))
