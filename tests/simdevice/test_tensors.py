"""Tensors, storages and slabs on the device."""

import io
import itertools

import pytest
import torch
from torch import accelerator, nn

expect_race = pytest.mark.expect_race


def side_stream():
    """A stream that comes after everything up to now."""
    stream = torch.Stream()
    stream.wait_stream(accelerator.current_stream())
    return stream


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1:5],
        lambda x: x[1:2].expand(4, 8),
        lambda x: x[:, 0],
        lambda x: x.unfold(1, 3, 2),
        lambda x: x.as_strided((3, 3), (1, 9), 2),
        lambda x: x.diagonal(),
        lambda x: x.view(2, 3, 8).permute(2, 0, 1),
        lambda x: x[:0],
    ],
)
def test_views(sim, view):
    host = torch.arange(48.0).view(6, 8)
    device = host.to("sim")
    assert torch.equal(view(device).cpu(), view(host))
    assert torch.equal((view(device) + 1).cpu(), view(host) + 1)
    target = torch.zeros(6, 8, device="sim")
    if view(host).numel() == view(host).unique().numel():
        view(target).copy_(view(device))
        assert torch.equal(view(target).cpu(), view(host))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.conj(),
        lambda x: x.real,
        lambda x: x.conj().imag,
        lambda x: x @ x.mH,
        lambda x: torch.view_as_complex(torch.view_as_real(x)),
        lambda x: torch.fft.fft(x),
        lambda x: x.abs(),
    ],
)
def test_complex(sim, call):
    host = torch.randn(3, 4, dtype=torch.complex64)
    torch.testing.assert_close(call(host.to("sim")).cpu().resolve_conj(), call(host).resolve_conj())


def test_conjugates_are_copied(sim):
    tensor = torch.randn(3, dtype=torch.complex64)
    host = torch.empty(3, dtype=torch.complex64, pin_memory=True)
    host.copy_(tensor.to("sim").conj(), non_blocking=True)
    accelerator.synchronize()
    assert torch.equal(host, tensor.conj())


def test_memory_formats(sim):
    host = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    device = host.to("sim", non_blocking=True)
    assert device.stride() == host.stride()
    assert torch.equal(device.cpu(), host)
    back = torch.empty_like(host, pin_memory=True)
    sim.clear_counts()
    back.copy_(device, non_blocking=True)
    assert "pageable_copies_out" not in sim.counts()  # the same layout on both sides is copied as it is
    accelerator.synchronize()
    assert torch.equal(back, host)


# ---------------------------------------------------------------- storages


def test_storages(sim):
    storage = torch.UntypedStorage(1024, device="sim")
    tensor = torch.empty(0, device="sim").set_(storage, 16, (4, 8), (8, 1))
    tensor.fill_(3)
    bytes = torch.empty(0, dtype=torch.uint8, device="sim").set_(storage, 0, (1024,), (1,))
    assert bytes[64 : 64 + 128].view(torch.float32).eq(3).all()
    assert tensor.untyped_storage().data_ptr() == storage.data_ptr()
    with pytest.raises(RuntimeError, match="reaches byte 1040 of a storage of 1024"):
        torch.empty(0, device="sim").set_(storage, 250, (10,), (1,))
    assert tensor.set_().shape == (0,)


def test_resized_storages(sim):
    tensor = torch.ones(5, device="sim")
    storage = tensor.untyped_storage()
    storage.resize_(40)
    assert torch.equal(tensor.cpu(), torch.ones(5))
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="its storage has 0 bytes"):
        tensor.cpu()
    storage.resize_(20)
    assert tensor.isnan().all()


def test_saving_and_loading(sim):
    file = io.BytesIO()
    torch.save({"weight": torch.ones(3, device="sim")}, file)
    file.seek(0)
    assert torch.load(file)["weight"].device.type == "sim"
    file.seek(0)
    assert torch.load(file, map_location="cpu")["weight"].device.type == "cpu"


def test_printing(sim):
    assert repr(torch.ones(2, device="sim")) == "tensor([1., 1.], device='sim:0')"


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    "draw",
    [
        lambda device: torch.rand(5, device=device),
        lambda device: torch.randn(4, 9, device=device),
        lambda device: torch.randint(0, 99, (7,), device=device),
        lambda device: torch.randperm(9, device=device),
        lambda device: torch.empty(6, device=device).bernoulli_(0.3),
        lambda device: torch.empty(6, device=device).exponential_(),
        lambda device: torch.rand_like(torch.ones(3, device=device)),
        lambda device: nn.functional.dropout(torch.ones(40, device=device), 0.4),
        lambda device: nn.functional.dropout(torch.ones(6, 8, device=device).t(), 0.4),
        lambda device: torch.bernoulli(torch.full((9,), 0.5, device=device)),
        lambda device: torch.multinomial(torch.ones(4, device=device), 2),
        lambda device: torch.normal(torch.zeros(3, device=device), 1.0),
    ],
)
def test_random_numbers_are_those_of_the_cpu(sim, draw):
    results = []
    for device in ("cpu", "sim"):
        torch.manual_seed(5)
        first = draw(device)
        torch.rand(3)
        results += [first.cpu(), draw(device).cpu()]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_generators(sim):
    results = [
        torch.randn(4, device="sim", generator=torch.Generator(device).manual_seed(1)).cpu()
        for device in ("cpu", "sim")
    ]
    assert torch.equal(*results)


# ---------------------------------------------------------------- results


def alike(call):
    """The layout and the type of a result on both devices."""
    results = []
    for device in ("cpu", "sim"):
        torch.manual_seed(0)
        results.append(call(device))
    assert torch.equal(results[0], results[1].cpu())
    return len({(result.size(), result.stride(), result.dtype) for result in results}) == 1


def test_results_are_not_mistaken(sim):
    """What is known of an operator's results holds for the same sizes, strides, types and numbers only."""
    for stop in (5.0, 7.0, 5):
        assert alike(lambda device, stop=stop: torch.arange(0, stop, device=device))
    for other in (2.0, torch.tensor(2.0, dtype=torch.float64), 2.0, torch.tensor(2.0)):
        assert alike(lambda device, other=other: torch.where(torch.tensor(True), torch.ones((), device=device), other))
    for view in (lambda x: x, lambda x: x.t(), lambda x: x[:1], lambda x: x[:2, :2], lambda x: x[:, :1]):
        assert alike(lambda device, view=view: nn.functional.hardswish(view(torch.ones(4, 4, device=device))))
    for dims in ([0], [1], [0, 1]):
        assert alike(lambda device, dims=dims: torch.roll(torch.randn(3, 4).to(device), dims, dims))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert alike(lambda device, dtype=dtype: nn.functional.hardswish(torch.ones(3, dtype=dtype, device=device)))


# ---------------------------------------------------------------- operators that wait


def test_shapes_that_depend_on_values(sim):
    x = torch.tensor([1.0, 0.0, 2.0], device="sim")
    assert x.nonzero().cpu().tolist() == [[0], [2]]
    assert x[x > 0].cpu().tolist() == [1, 2]
    assert set(sim.counts()) >= {"sync:aten::nonzero", "sync:aten::index"}


def test_errors_come_late(sim):
    nn.functional.embedding(torch.tensor([7], device="sim"), torch.ones(3, 2, device="sim"))
    with pytest.raises(RuntimeError, match=r"asynchronous error in aten::\w+ on stream 0: index out of range"):
        accelerator.synchronize()
    accelerator.synchronize()


def test_loops_of_queries_end(sim):
    stream = torch.Stream()
    with stream:
        event = (torch.ones(3, device="sim") + 1, stream.record_event())[1]
    assert not stream.query()
    while not stream.query():
        pass
    assert event.query()


# ---------------------------------------------------------------- slabs


def test_copies_between_slabs(sim):
    """Tensors of many types as bytes of one pinned slab and of one slab on the device."""
    slab = torch.empty(1 << 14, dtype=torch.uint8, pin_memory=True)
    device_slab = torch.empty(1 << 14, dtype=torch.uint8, device="sim")
    tensors = [
        torch.randn(100, device="sim"),
        torch.randn(33, dtype=torch.float64, device="sim"),
        torch.randint(-9, 9, (77,), dtype=torch.int16, device="sim"),
        torch.rand(5, 7, device="sim") < 0.5,
    ]
    stream = side_stream()
    offsets = []
    for i, tensor in enumerate(tensors):
        offset = 1024 * (i + 1) + 8 * i
        host = slab[offset : offset + tensor.nbytes]
        assert host.is_pinned()
        with stream:
            host.copy_(tensor.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            device_slab[offset : offset + tensor.nbytes].copy_(host, non_blocking=True)
        tensor.record_stream(stream)
        offsets.append(offset)
    accelerator.current_stream().wait_stream(stream)
    for tensor, offset in zip(tensors, offsets, strict=True):
        back = device_slab[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(back.cpu(), tensor.cpu())
    assert sim.counts()["pinned_os_allocations"] == 1
    assert "pageable_copies_in" not in sim.counts()


def regions(kind):
    slab = torch.zeros(4096, dtype=torch.uint8, **({"device": "sim"} if kind == "device" else {"pin_memory": True}))
    accelerator.synchronize()
    return slab[1000:2000], slab[2000:3000], slab[1999:2999]


@pytest.mark.parametrize(("first", "second"), itertools.product(["read", "write"], repeat=2))
@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("overlap", [False, True])
@expect_race
def test_regions_conflict_if_they_overlap(sim, kind, first, second, overlap):
    one, apart, overlapping = regions(kind)
    others = torch.zeros(
        2, 1000, dtype=torch.uint8, **({"pin_memory": True} if kind == "device" else {"device": "sim"})
    )
    accelerator.synchronize()
    streams = torch.Stream(), torch.Stream()
    targets = one, overlapping if overlap else apart
    for stream, region, other, use in zip(streams, targets, others, (first, second), strict=True):
        with stream:
            if use == "read":
                other.copy_(region, non_blocking=True)
            else:
                region.copy_(other, non_blocking=True)
    assert len(sim.races()) == (overlap and "write" in (first, second))


@pytest.mark.parametrize("policy", ["compute_first", "copy_first", "eager", "lazy"])
def test_poison_spares_other_regions(sim, policy):
    """Streams fill their own part of new memory in any order."""
    sim.configure(policy)
    slab = torch.empty(4096, device="sim")
    sources = [torch.full((2048,), float(i)).pin_memory() for i in range(2)]
    stream = side_stream()
    with stream:
        slab[2048:].copy_(sources[1], non_blocking=True)
    slab[:2048].copy_(sources[0], non_blocking=True)
    stream.synchronize()
    assert slab.cpu().view(2, -1).mean(1).tolist() == [0, 1]


def test_poison_spares_the_source_of_a_pending_copy(sim):
    host = torch.ones(1000, pin_memory=True)
    incoming = host.to("sim", non_blocking=True)
    host.copy_(torch.zeros(1000, device="sim"), non_blocking=True)
    assert incoming.eq(1).all()
    assert host.eq(0).all()


def test_poison_of_a_pending_copy_spares_other_regions(sim):
    slab = torch.ones(2000, pin_memory=True)
    tensor = torch.zeros(1000, device="sim")
    incoming = slab[:1000].to("sim", non_blocking=True)  # still reads its region
    slab[1000:].copy_(tensor, non_blocking=True)
    assert slab[1000:].isnan().all()
    assert incoming.eq(1).all()


# ---------------------------------------------------------------- memory


@expect_race
@pytest.mark.parametrize("wait", [False, True])
def test_memory_of_another_stream(sim, wait):
    """Memory of a pool is only free from the point of the allocation on, even if it is new."""
    torch.ones(3, device="sim")
    tensor = torch.empty(256, device="sim")
    source = torch.ones(256).pin_memory()
    stream = torch.Stream()
    if wait:
        stream.wait_stream(accelerator.current_stream())
    with stream:
        tensor.copy_(source, non_blocking=True)
    stream.synchronize()
    assert bool(sim.races()) != wait
    assert all("the allocation" in race for race in sim.races())


@expect_race
@pytest.mark.parametrize("strict", [False, True])
def test_strict_free(sim, strict):
    """A missing record_stream is only found if something reuses the memory, or with `strict_free`."""
    sim.configure(strict_free=strict)
    tensor = torch.ones(256, device="sim")
    host = torch.empty(256, pin_memory=True)
    with side_stream():
        host.copy_(tensor, non_blocking=True)
    del tensor
    assert bool(sim.races()) == strict
    torch.ones(256, device="sim")
    assert sim.races()


def test_pinned_memory(sim):
    """Its allocations are powers of two."""
    kept, held = sim.pinned_bytes()[0], sim.pinned_held()  # by tensors of other tests
    tensors = [torch.empty(1100, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    assert sim.pinned_bytes() == (kept + 4096, kept + 4096)
    del tensors
    assert sim.pinned_bytes() == (kept, kept + 4096)
    assert sim.pinned_held() == held + 4096
    torch.empty(2000, dtype=torch.uint8, pin_memory=True)
    counts = sim.counts()
    assert [counts[name] for name in ("pinned_requests", "pinned_os_allocations", "pinned_os_bytes")] == [3, 2, 4096]
    accelerator.empty_host_cache()
    assert sim.pinned_held() == held


def test_pinned_memory_is_not_reused_too_early(sim):
    tensor = torch.ones(256, device="sim")
    host = torch.empty(256, pin_memory=True)
    address = host.data_ptr()
    host.copy_(tensor, non_blocking=True)
    del host
    assert torch.empty(256, pin_memory=True).data_ptr() != address
    accelerator.synchronize()
    kept = [torch.empty(256, pin_memory=True) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in kept]


def test_pinned_memory_that_is_reused_forgets(sim):
    """Its allocator hands memory out once the streams are through with it: nothing is left to wait for."""
    sim.configure("eager")
    tensors = torch.ones(2, 256, device="sim")
    streams = side_stream(), side_stream()
    addresses = []
    for stream, tensor in zip(streams, tensors, strict=True):
        host = torch.empty(256, pin_memory=True)
        addresses.append(host.data_ptr())
        with stream:
            host.copy_(tensor, non_blocking=True)
        del host
    assert addresses[0] == addresses[1]


def test_limits(sim):
    limit = accelerator.memory_reserved() + (1 << 20)
    sim.set_limit(limit)
    tensor = torch.empty(1 << 19, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty((1 << 19) + 1, dtype=torch.uint8, device="sim")
    assert accelerator.memory_stats()["num_ooms"] == 1
    assert torch.sim.get_device_properties("sim").total_memory == limit
    del tensor
    torch.empty(1 << 20, dtype=torch.uint8, device="sim")  # the cache is given back for it
    sim.set_pinned_limit(sim.pinned_held() + (1 << 12))
    pinned = torch.empty(1 << 11, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(RuntimeError, match="out of pinned memory"):
        torch.empty((1 << 11) + 1, dtype=torch.uint8, pin_memory=True)
    del pinned
    torch.empty(1 << 12, dtype=torch.uint8, pin_memory=True)


def test_counts(sim):
    x = torch.ones(100, pin_memory=True).to("sim", non_blocking=True)
    x.cpu()
    torch.ones(100).to("sim", non_blocking=True)
    counts = sim.counts()
    assert (counts["bytes_in"], counts["copies_in"], counts["pageable_copies_in"]) == (800, 2, 1)
    assert (counts["bytes_out"], counts["copies_out"], counts["pageable_copies_out"]) == (400, 1, 1)
    assert counts["pageable_nonblocking_h2d"] == 1


def test_properties(sim, monkeypatch):
    assert not torch.sim.get_device_properties("sim:0").is_integrated
    monkeypatch.setattr(torch.sim.get_device_properties(0), "is_integrated", True)
    assert torch.sim.get_device_properties().is_integrated


def test_trace(sim):
    sim.trace(True)
    x = torch.ones(3, device="sim")
    assert sim.pending()[0] == 1
    assert sim.trace(True) == ["submit s0 aten::fill_"]
    x.cpu()
    assert sim.trace(False) == ["submit s0 copy_D2H", "run s0 aten::fill_", "run s0 copy_D2H"]
