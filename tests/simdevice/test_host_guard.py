import pytest
import torch
from host_guard import HostGuard
from small_engine import Engine


@pytest.mark.parametrize("policy", ["lazy", "eager", "copy_first"])
@pytest.mark.parametrize("wait", [True, False])
def test_read_under_a_copy_out(sim, policy, wait):
    sim.configure(policy)
    handle = Engine().pack(torch.randn(64, device="sim"))
    with HostGuard() as guard:
        if wait:
            handle.copied_out.synchronize()
        handle.host.clone()
    assert bool(guard.races) != wait


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("write", [True, False])
def test_write_under_a_copy_in(sim, wait, write):
    sim.configure("eager")
    source = torch.ones(64, pin_memory=True)
    stream = torch.Stream()
    with HostGuard() as guard:
        with stream:
            source.to("sim", non_blocking=True)
        if wait:
            stream.synchronize()
        if write:
            source.fill_(2)
        else:
            source.clone()  # both only read
    assert bool(guard.races) == (write and not wait)


def test_other_parts_of_a_slab(sim):
    slab = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    tensor = torch.ones(1024, dtype=torch.uint8, device="sim")
    slab[1024:2048].copy_(tensor, non_blocking=True)
    with HostGuard() as guard:
        slab[:1024].fill_(0)
        slab[2048:].clone()
        assert not guard.races
        slab[1000:1025].clone()
    assert len(guard.races) == 1
