"""Correct patterns are not reported, and neither kernels written in Python nor threads of the host come to a halt."""

import copy
import threading

import pytest
import torch
from small_engine import GPT, Engine
from torch import accelerator

every_policy = pytest.mark.parametrize(
    ("policy", "seed"),
    [("lazy", 0), ("compute_first", 0), ("copy_first", 0), ("eager", 0), ("random", 1), ("random", 2), ("thread", 0)],
)


@every_policy
def test_references_instead_of_record_stream(sim, policy, seed):
    """A tensor is kept until its event is seen on the host, or until the stream of its memory has waited for it."""
    sim.configure(policy, seed)
    stream = torch.Stream()
    kept, copies, expected = [], [], []
    for step in range(12):
        tensor = torch.randn(256, device="sim") * step
        expected.append(tensor.cpu())
        stream.wait_stream(accelerator.current_stream())
        host = torch.empty(256, pin_memory=True)
        with stream:
            host.copy_(tensor, non_blocking=True)
        kept.append((stream.record_event(), tensor))
        copies.append(host)
        del tensor
        if step % 3 == 0:
            kept = [(event, tensor) for event, tensor in kept if not event.query()]
        elif len(kept) > 3:
            event, tensor = kept.pop(0)
            accelerator.current_stream().wait_event(event)
            del tensor
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(copies, expected, strict=True))


@every_policy
@pytest.mark.parametrize("allocate_first", [False, True])
def test_pool_of_a_side_stream(sim, policy, seed, allocate_first):
    """Memory of the side stream, freed without record_stream, but that stream waits before it touches it again."""
    sim.configure(policy, seed)
    stream, compute = torch.Stream(), accelerator.current_stream()
    sources = [torch.full((256,), float(i)).pin_memory() for i in range(8)]
    total = torch.zeros(256, device="sim")
    for source in sources:
        with stream:
            if allocate_first:  # an allocation touches nothing
                tensor = torch.empty(256, device="sim")
            stream.wait_stream(compute)
            if not allocate_first:
                tensor = torch.empty(256, device="sim")
            tensor.copy_(source, non_blocking=True)
        compute.wait_stream(stream)
        total = total + tensor
        del tensor
    assert torch.equal(total.cpu(), torch.full((256,), 28.0))


@every_policy
def test_thread_of_the_host(sim, policy, seed):
    sim.configure(policy, seed)
    engine = Engine()
    tensors = [torch.randn(512, device="sim") for _ in range(6)]
    handles = [engine.pack(tensor) for tensor in tensors]
    got = []

    def work():
        for handle in handles:
            handle.copied_out.synchronize()
            got.append(handle.host.clone())

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        matrix = torch.randn(64, 64, device="sim")
        (matrix @ matrix).relu()
    thread.join(30)
    assert not thread.is_alive()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(got, tensors, strict=True))


@torch.library.custom_op("simtest::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: gradient * 2)


@every_policy
def test_operator_in_python(sim, policy, seed):
    sim.configure(policy, seed)
    x = torch.ones(64, device="sim", requires_grad=True)
    (twice(x) + twice(x * 3)).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((64,), 8.0))


@every_policy
def test_save_on_cpu(sim, policy, seed):
    sim.configure(policy, seed)
    torch.manual_seed(0)
    model = GPT()
    rows = torch.randint(0, 40, (2, 16))
    on_device = copy.deepcopy(model).to("sim")
    model.loss(rows).backward()
    rows = rows.to("sim")
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="sim"):
        loss = on_device.loss(rows)
    loss.backward()
    for expected, got in zip(model.parameters(), on_device.parameters(), strict=True):
        assert torch.allclose(got.grad.cpu(), expected.grad, atol=1e-5)
