"""Simulated time, against values worked out by hand: copies of 1000 bytes take 1 s out and 0.5 s in."""

import pytest
import torch
from schedules import every_schedule
from small_engine import GPT, Engine
from torch import accelerator, nn
from torch.utils.flop_counter import FlopCounterMode

OUT, IN = 1.0, 0.5


@pytest.fixture
def clock(sim):
    sim.clock.configure(out_bytes_per_s=1000, in_bytes_per_s=2000)
    return sim.clock


def on_device(bytes=1000):
    return torch.zeros(bytes, dtype=torch.uint8, device="sim")


def pinned(bytes=1000):
    return torch.zeros(bytes, dtype=torch.uint8, pin_memory=True)


def copy_out(stream, tensor=None, host=None):
    tensor, host = on_device() if tensor is None else tensor, pinned() if host is None else host
    tensor.record_stream(stream)
    stream.wait_stream(accelerator.current_stream())
    with stream:
        host.copy_(tensor, non_blocking=True)
    return host


def copy_in(stream, host=None):
    with stream:
        return (pinned() if host is None else host).to("sim", non_blocking=True)


def timed_event(stream=None):
    event = torch.Event(enable_timing=True)
    event.record(stream or accelerator.current_stream())
    return event


# ---------------------------------------------------------------- streams


def test_streams_overlap(clock):
    side = torch.Stream()
    clock.spend(3)
    with side:
        clock.spend(1)
        clock.spend(0.1)
    assert clock.stream() == 3
    assert clock.stream(side) == 1.1
    assert clock.now() == 3
    assert clock.host() == 0


def test_waits(clock):
    compute, side = accelerator.current_stream(), torch.Stream()
    clock.spend(3)
    copy_out(side)
    assert clock.stream(side) == 3 + OUT
    compute.wait_stream(side)
    assert clock.stream() == 3 + OUT
    clock.spend(1)
    assert clock.stream() == 3 + OUT + 1
    assert clock.stalled(side) == 3
    assert clock.stalled(compute) == OUT


def test_a_wait_for_the_past_takes_no_time(clock):
    compute, side = accelerator.current_stream(), torch.Stream()
    copy_in(side)
    clock.spend(2)
    compute.wait_stream(side)
    clock.spend(1)
    assert clock.now() == 3
    assert clock.stalled(compute) == 0


def test_late_work_is_no_stall(clock):
    """The side stream would have been idle until 4 anyway, for want of work."""
    compute, side = accelerator.current_stream(), torch.Stream()
    clock.spend(4)
    event = compute.record_event()
    clock.spend(1)
    side.wait_event(event)
    compute.synchronize()
    with side:
        clock.spend(1)
    assert clock.stream(side) == 6
    assert clock.stalled(side) == 0


@pytest.mark.parametrize("waits", ["compute", "side"])
def test_a_last_wait_is_a_stall(clock, waits):
    streams = {"compute": accelerator.current_stream(), "side": torch.Stream()}
    waiting = streams.pop(waits)
    (other,) = streams.values()
    with other:
        clock.spend(3)
    with waiting:
        clock.spend(1)
    waiting.wait_stream(other)
    assert clock.stalled(waiting) == 2
    accelerator.synchronize()
    assert clock.host() == 3
    assert clock.stalled(waiting) == 2


def test_the_latest_of_many_waits_counts(clock):
    compute, sides = accelerator.current_stream(), [torch.Stream() for _ in range(3)]
    for side, seconds in zip(sides, [2, 5, 3], strict=True):
        with side:
            clock.spend(seconds)
        compute.wait_stream(side)
    clock.spend(1)
    assert clock.now() == 6
    assert clock.stalled(compute) == 5


# ---------------------------------------------------------------- links


def test_copies_of_a_direction_do_not_overlap(clock):
    first, second, third = (torch.Stream() for _ in range(3))
    copy_out(first)
    copy_out(second)
    copy_in(third)
    assert [clock.stream(stream) for stream in (first, second, third)] == [OUT, 2 * OUT, IN]
    assert clock.busy("out") == 2 * OUT
    assert clock.busy("in") == IN
    assert clock.stalled(second) == 0


def test_the_link_serves_in_order(clock):
    """A copy that is ready has to wait for one that was submitted before and is not."""
    compute, late, ready = accelerator.current_stream(), torch.Stream(), torch.Stream()
    sources = on_device(), on_device()
    for source in sources:
        for stream in (late, ready):
            source.record_stream(stream)
    compute.synchronize()
    clock.spend(3)
    late.wait_stream(compute)
    for stream, source in zip((late, ready), sources, strict=True):
        with stream:
            pinned().copy_(source, non_blocking=True)
    assert clock.stream(late) == 3 + OUT
    assert clock.stream(ready) == 3 + 2 * OUT
    assert clock.stalled(late) == 3
    assert clock.stalled(ready) == 0


def test_latency(sim):
    sim.clock.configure(out_bytes_per_s=1000, latency_s=0.25)
    side = torch.Stream()
    copy_out(side)
    copy_in(side)
    assert sim.clock.now() == 0.25 + 1 + 0.25


# ---------------------------------------------------------------- the host


def test_the_host_waits(clock):
    compute, side = accelerator.current_stream(), torch.Stream()
    clock.spend(2)
    event = compute.record_event()
    clock.spend(1)
    event.synchronize()
    assert clock.host() == 2
    with side:
        clock.spend(0.5)  # could have run before, but was submitted now
    assert clock.stream(side) == 2.5
    compute.synchronize()
    assert clock.host() == 3
    accelerator.synchronize()
    assert clock.host() == 3


def test_values_wait(clock):
    value = torch.ones((), device="sim")
    clock.spend(2)
    value.item()
    assert clock.host() == 2


def test_blocking_copies_wait(clock):
    clock.spend(2)
    on_device().cpu()
    assert clock.host() == 2 + OUT
    pinned().to("sim")
    assert clock.host() == 2 + OUT + IN


def test_pageable_memory_is_slow_and_blocks(sim):
    sim.clock.configure(out_bytes_per_s=1000, in_bytes_per_s=2000, pageable_factor=0.5)
    torch.zeros(1000, dtype=torch.uint8).to("sim", non_blocking=True)
    assert sim.clock.host() == 2 * IN
    torch.empty(1000, dtype=torch.uint8).copy_(on_device(), non_blocking=True)
    assert sim.clock.host() == 2 * IN + 2 * OUT
    assert sim.counts()["pageable_nonblocking_h2d"] == sim.counts()["pageable_nonblocking_d2h"] == 1


def test_pinned_memory_that_is_not_contiguous_is_staged(sim):
    sim.clock.configure(in_bytes_per_s=2000)
    pinned(2000)[::2].to("sim", non_blocking=True)
    assert sim.clock.host() == IN
    assert sim.counts()["pageable_copies_in"] == 1


def test_conversions(clock):
    """Without blocking, the device converts: what crosses the link is of the host's type."""
    side = torch.Stream()
    with side:
        torch.zeros(1000, dtype=torch.uint8, pin_memory=True).to("sim", torch.float32, non_blocking=True)
        assert clock.stream(side) == IN
        torch.zeros(1000, dtype=torch.uint8, pin_memory=True).copy_(torch.zeros(1000, device="sim"), non_blocking=True)
    assert clock.stream(side) == IN + OUT


def test_conversions_that_block(clock):
    """The host converts: what crosses the link is of the device's type."""
    torch.zeros(250, dtype=torch.uint8, pin_memory=True).to("sim", torch.float32)
    assert clock.now() == IN
    torch.zeros(250, dtype=torch.uint8, pin_memory=True).copy_(torch.zeros(250, device="sim"))
    assert clock.now() == IN + OUT


def test_submissions_take_time_of_the_host(sim):
    sim.clock.configure(submit_s=0.5)
    sim.clock.spend(2)
    sim.clock.spend(2)
    assert sim.clock.host() == 1
    assert sim.clock.now() == 4.5


# ---------------------------------------------------------------- events


def test_elapsed_time(clock):
    start = timed_event()
    clock.spend(1.5)
    middle = timed_event()
    clock.spend(0.25)
    end = timed_event()
    end.synchronize()
    assert start.elapsed_time(middle) == 1500
    assert middle.elapsed_time(end) == 250
    late = timed_event()
    late.synchronize()
    assert end.elapsed_time(late) == 0


def test_an_event_is_recorded_when_the_stream_gets_there(clock):
    compute, side = accelerator.current_stream(), torch.Stream()
    clock.spend(2)
    side.wait_stream(compute)
    waited = timed_event(side)
    compute.synchronize()
    clock.spend(1)
    compute.synchronize()
    idle = timed_event(side)
    idle.synchronize()
    assert waited.elapsed_time(idle) == 1000


@every_schedule
def test_time_decides_what_a_query_sees(sim, clock, policy, seed):
    sim.configure(policy, seed)
    compute = accelerator.current_stream()
    clock.spend(1)
    first = compute.record_event()
    clock.spend(1)
    second = compute.record_event()
    assert not first.query()
    first.synchronize()
    assert first.query()
    assert not second.query()
    assert not compute.query()
    compute.synchronize()
    assert second.query()
    assert compute.query()


def test_a_loop_of_queries_waits(clock):
    compute = accelerator.current_stream()
    clock.spend(1)
    event = compute.record_event()
    for _ in range(10):  # work in between: the host only looks
        event.query()
        clock.spend(0)
    assert clock.host() == 0
    while not event.query():
        pass
    assert clock.host() == 1
    clock.spend(1)
    while not compute.query():
        pass
    assert clock.host() == 2


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_time_decides_when_recorded_memory_returns(sim, clock, policy):
    sim.configure(policy)
    side = torch.Stream()
    tensor = on_device()
    address = tensor.data_ptr()
    copy_out(side, tensor)
    del tensor
    assert on_device().data_ptr() != address
    side.synchronize()
    kept = [on_device() for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in kept]


@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_time_decides_when_pinned_memory_returns(sim, clock, policy):
    sim.configure(policy)
    side = torch.Stream()
    copy_out(side)
    pinned()
    assert sim.counts()["pinned_os_allocations"] == 2
    side.synchronize()
    kept = [pinned() for _ in range(2)]
    assert len(kept) == 2
    assert sim.counts()["pinned_os_allocations"] == 2
    assert sim.counts()["pinned_requests"] == 4


@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_memory_that_is_short_waits(sim, clock, policy):
    """An allocation beyond the limit waits for the streams that use freed memory, as a caching allocator does."""
    sim.configure(policy)
    side = torch.Stream()
    tensor = on_device()
    copy_out(side, tensor)
    del tensor
    sim.set_limit(accelerator.memory_reserved())
    on_device()
    assert clock.host() == OUT


def test_pinned_memory_takes_time_to_get(sim):
    sim.clock.configure(pinned_alloc_s=0.5, pinned_alloc_bytes_per_s=1024)
    first = pinned(1000)
    assert sim.clock.host() == 0.5 + 1  # a power of two, 1024 bytes
    del first
    pinned(800)
    assert sim.clock.host() == 1.5


# ---------------------------------------------------------------- operators


def test_operators(sim):
    sim.clock.configure(operator_s=0.25)
    tensor = torch.empty(10, device="sim")
    tensor.view(2, 5).t()
    assert sim.clock.now() == 0
    (tensor + 1).relu_()
    assert sim.clock.now() == 0.5


def test_bytes(sim):
    first, second = torch.ones(250, device="sim"), torch.ones(250, device="sim")
    sim.clock.configure(memory_bytes_per_s=1000)
    first + second
    assert sim.clock.now() == 3
    first.clone()
    assert sim.clock.now() == 5


class Products(nn.Module):
    """Every operator whose floating point operations are counted."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 6, 3, stride=2)
        self.transposed = nn.ConvTranspose2d(6, 4, 2)
        self.linear = nn.Linear(16, 5)
        self.linear2 = nn.Linear(5, 6, bias=False)

    def forward(self, x):
        x = self.transposed(self.convolution(x)).flatten(2)
        x = torch.baddbmm(x.transpose(1, 2) @ x, x.transpose(1, 2), x)
        x = self.linear2(self.linear(x))
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_flops(sim):
    model = Products()
    x = torch.randn(2, 4, 8, 8)
    with FlopCounterMode(display=False) as counter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        model(x).sum().backward()
    model, x = model.to("sim"), x.to("sim")
    sim.clock.configure(flops_per_s=1e12)
    model(x).sum().backward()
    assert round(sim.clock.now() * 1e12) == counter.get_total_flops()


def test_flops_of_groups(sim):
    """Four channels in two groups, six filters, nine positions: forward, and the gradient of the weights alone."""
    layer, x = nn.Conv2d(4, 6, 3, groups=2).to("sim"), torch.randn(1, 4, 5, 5, device="sim")
    sim.clock.configure(flops_per_s=1e12)
    layer(x).sum().backward()
    assert round(sim.clock.now() * 1e12) == 2 * (2 * 9 * 6 * 2 * 3 * 3)


def test_operators_that_need_the_host_wait(sim):
    tensor = torch.ones(4, device="sim")
    sim.clock.configure(operator_s=1)
    tensor.nonzero()
    assert sim.clock.host() == 1
    nn.functional.dropout(tensor)
    assert sim.clock.host() == 1  # random numbers do not


# ---------------------------------------------------------------- timed layers


def test_timed(sim, clock):
    packed = []
    x = torch.ones(3, device="sim", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda none: none):
        y = clock.timed(x, 1, 2)
    assert clock.now() == 1
    y.sum().backward()
    assert clock.now() == 3
    assert not packed
    with torch.no_grad():
        clock.timed(x, 1, 2)
    assert clock.now() == 4
    assert torch.equal(x.grad.cpu(), torch.ones(3))


@every_schedule
@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu_pays_for_every_byte(sim, pin_memory, policy, seed):
    """Its copies are on the stream of the layers: nothing overlaps. They only block without pinned memory."""
    sim.configure(policy, seed)
    sim.clock.configure(out_bytes_per_s=1000, in_bytes_per_s=2000, pageable_factor=0.5)
    clock, slower = sim.clock, 1 if pin_memory else 2
    forward, backward, depth = 0.25, 0.75, 4
    layers = [clock.layer(torch.sin, forward, backward) for _ in range(depth)]
    x = torch.zeros(250, device="sim", requires_grad=True)  # 1000 bytes
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory, device_type="sim"):
        y = nn.Sequential(*layers)(x)
    assert clock.now() == depth * (slower * OUT + forward)
    assert clock.host() == (0 if pin_memory else clock.now() - forward)
    y.backward(torch.ones_like(y))
    assert clock.now() == depth * (slower * OUT + forward + slower * IN + backward)
    assert sim.counts()["bytes_out"] == sim.counts()["bytes_in"] == depth * 1000


@every_schedule
@pytest.mark.parametrize("work", [0.25, 0.5, 1.0])
def test_double_buffering_takes_the_longer_of_both(sim, clock, work, policy, seed):
    sim.configure(policy, seed)
    compute, side = accelerator.current_stream(), torch.Stream()
    parts = [torch.full((1000,), i, dtype=torch.uint8).pin_memory() for i in range(6)]
    buffers = [on_device(), on_device()]
    side.wait_stream(compute)
    used = [compute.record_event(), compute.record_event()]
    total = torch.zeros(1000, dtype=torch.uint8, device="sim")
    for i, part in enumerate(parts):
        side.wait_event(used[i % 2])
        with side:
            buffers[i % 2].copy_(part, non_blocking=True)
        compute.wait_stream(side)
        total += buffers[i % 2]
        clock.spend(work)
        used[i % 2] = compute.record_event()
    assert clock.now() == IN + (len(parts) - 1) * max(IN, work) + work
    assert clock.stalled(compute) == IN + (len(parts) - 1) * max(0, IN - work)
    assert total.cpu().eq(sum(range(6))).all()


# ---------------------------------------------------------------- the clock itself


def summary(sim, policy, seed):
    """What the clock says of two steps with an engine that prefetches, polls and runs short of memory."""
    sim.reset()
    sim.configure(policy, seed)
    torch.manual_seed(0)
    model = GPT().to("sim")
    rows = torch.randint(0, 40, (2, 16)).to("sim")
    sim.clock.configure(
        out_bytes_per_s=1e6, in_bytes_per_s=2e6, latency_s=1e-5, operator_s=1e-5, flops_per_s=1e9,
        memory_bytes_per_s=1e8, submit_s=1e-6, pinned_alloc_s=1e-3,
    )  # fmt: skip
    engine = Engine()
    engine.skip = {parameter.data_ptr() for parameter in model.parameters()}
    retries = accelerator.memory_stats()["num_alloc_retries"]
    sim.set_limit(accelerator.memory_reserved() + 200_000)
    events = []
    times = []
    for _ in range(2):
        with engine:
            loss = model.loss(rows)
        events.append(engine.out_stream.record_event())
        times.append([event.query() for event in events])
        loss.backward()
        times.append(loss.item())
        times += [sim.clock.host(), sim.clock.now()]
    times += [sim.clock.stream(stream) for stream in (engine.out_stream, engine.in_stream)]
    times += [sim.clock.stalled(stream) for stream in (None, engine.out_stream, engine.in_stream)]
    times += [sim.clock.busy("out"), sim.clock.busy("in"), sim.counts()["pinned_os_allocations"]]
    times.append(accelerator.memory_stats()["num_alloc_retries"] - retries)
    sim.set_limit()
    return times


def test_schedules_do_not_matter(sim):
    expected = summary(sim, "lazy", 0)
    assert expected[-1] > 0, "the memory should have been short"
    for policy, seed in [("compute_first", 0), ("copy_first", 0), ("eager", 0), ("random", 0), ("random", 1)]:
        assert summary(sim, policy, seed) == expected


def test_log(sim, clock):
    side = torch.Stream()
    clock.spend(9)
    clock.log(True)
    clock.spend(1, "layer")
    copy_out(side)
    clock.spend(0)
    assert clock.log(False) == [(0, "layer", 9, 10), (side.stream_id, "copy_D2H", 10, 10 + OUT)]
    clock.spend(1)
    assert clock.log(False) == []


def test_reset(clock):
    compute, side = accelerator.current_stream(), torch.Stream()
    clock.spend(1)
    old = timed_event()
    side.wait_event(old)
    copy_out(side)
    clock.reset()
    assert clock.now() == clock.host() == clock.stalled(side) == clock.busy("out") == 0
    clock.spend(2)
    side.wait_event(old)  # of an earlier time: zero
    copy_in(side)
    assert clock.stream(side) == IN
    assert clock.stream(compute) == 2


def test_off(sim, clock):
    clock.spend(1)
    assert clock.is_on
    clock.off()
    assert not clock.is_on
    clock.spend(1)
    assert not any(sim.pending().values()) or sim.pending()[0] == 1  # the first delay only
    on_device().cpu()
    event = accelerator.current_stream().record_event()
    event.synchronize()
    assert clock.now() == 1
    clock.configure()
    assert clock.now() == 0


@pytest.mark.parametrize(
    ("setting", "value"), [("out_bytes_per_s", 0), ("latency_s", -1), ("pageable_factor", 0), ("flops_per_s", -1)]
)
def test_settings_are_checked(sim, setting, value):
    with pytest.raises(ValueError, match=setting):
        sim.clock.configure(**{setting: value})
    assert not sim.clock.is_on
    with pytest.raises(ValueError, match="negative"):
        sim.clock.spend(-1)
