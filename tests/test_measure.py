"""Bytes and times, against what can be worked out by hand."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_ckpt.measure.clock import HostClock
from lightning_ckpt.measure.live import LiveBytes
from lightning_ckpt.measure.peak import CountedPeak
from lightning_ckpt.measure.phases import Phases
from lightning_ckpt.measure.sampling import Sample
from lightning_ckpt.measure.saved import SavedBytes, saved_bytes
from lightning_ckpt.measure.step import StepMeter
from lightning_ckpt.measure.work import Work
from lightning_ckpt.recompute import attach
from tests.support import blocks

KIB = 1024


class Exp(nn.Module):
    """Saves its output: one tensor of the input's size."""

    def forward(self, x):
        return x.exp()


def source(kib=4):
    return torch.ones(kib * KIB // 4, requires_grad=True)


def saved(output, parameters=()):
    return saved_bytes([output], parameters).saved


# ---------------------------------------------------------------- saved for backward


def test_each_storage_counts_once_whoever_looks_at_it():
    y = source().exp()  # saves y
    assert saved(y * y) == 4 * KIB
    assert saved((y * y[:10].sum()) * y.view(2, -1).sum()) >= 4 * KIB
    assert saved(y[:512].sin() + y[512:].cos()) == 4 * KIB


def test_parameters_and_views_of_them_do_not_count():
    linear = nn.Linear(32, 32)
    x = torch.ones(8, 32, requires_grad=True)
    output = linear(x)  # saves x and the transposed weight
    assert saved(output, linear.parameters()) == 8 * 32 * 4
    assert saved(output) == 8 * 32 * 4 + 32 * 32 * 4


def test_what_a_python_function_saves_or_hangs_on_its_context_counts():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.sin())
            ctx.other = x.cos()
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0] * ctx.other

    assert saved(Keeps.apply(source())) == 8 * KIB


def test_a_graph_that_backward_has_released_counts_nothing():
    y = source().exp()
    output = y.sin().sum()
    output.backward()
    assert saved(output) == 0


def test_nothing_is_unpacked_or_changed_by_counting():
    y = source().exp()
    output = y.sin()
    y.add_(1)
    saved(output)  # would raise autograd's in-place error if it unpacked
    with pytest.raises(RuntimeError, match="inplace"):
        output.sum().backward()


def test_other_peoples_checkpointing_counts_what_it_keeps():
    model = checkpoint_wrapper(nn.Sequential(Exp(), Exp(), Exp()))
    x = source().view(-1)  # saves nothing of its own
    assert saved(model(x)) == 4 * KIB


def test_saved_on_cpu_by_a_hook_counts():
    with torch.autograd.graph.save_on_cpu():
        assert saved(source().exp()) == 4 * KIB


class _Watcher:
    def replay_begins(self):
        pass

    def replay_ends(self):
        pass


def test_recomputed_layers_keep_their_inputs_and_tell_what_they_avoid(monkeypatch):
    monkeypatch.setattr("lightning_ckpt.recompute.watch._watchers", [_Watcher()])
    plain = nn.Sequential(*[nn.Sequential(Exp(), Exp(), Exp()) for _ in range(5)])
    x = source().view(-1)
    everything = saved(plain(x))
    assert everything == 15 * 4 * KIB
    for i, layer in enumerate(plain):
        attach(layer, str(i))
    counted = saved_bytes([plain(x)], [])
    # 5 inputs stay. Plainly, x itself would not be kept, and the outputs of blocks are inputs of others.
    assert counted.complete
    sizes = counted.saved, counted.avoided, counted.plain
    assert sizes == (5 * 4 * KIB, everything - 4 * 4 * KIB, everything)


def test_compiled_parts_make_the_count_incomplete():
    torch._dynamo.reset()
    output = torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(source())
    assert not saved_bytes([output], []).complete


# ---------------------------------------------------------------- live and peak bytes on the CPU


def test_live_bytes_follow_births_and_deaths():
    with LiveBytes() as live:
        a = torch.empty(1 * KIB // 4)
        b = torch.empty(2 * KIB // 4)
        view = b[1:]
        b.add_(1)
        assert live.current == 3 * KIB
        del b
        assert live.current == 3 * KIB  # the view holds it
        del view
        c = torch.empty(1 * KIB // 4)
        assert (live.current, live.peak) == (2 * KIB, 3 * KIB)
    del a
    assert live.current == 1 * KIB
    del c
    assert (live.current, live.peak) == (0, 3 * KIB)


def test_adopted_tensors_count_until_they_die():
    weight = torch.empty(KIB // 4)
    live = LiveBytes()
    live.adopt([weight, weight[1:]])
    with live:
        bigger = weight.repeat(2)
    assert live.peak == 3 * KIB
    del weight
    assert live.current == bigger.untyped_storage().nbytes()


def test_the_peak_of_a_recomputed_chain_is_its_inputs_and_one_layer():
    model = nn.Sequential(*[nn.Sequential(Exp(), Exp(), Exp(), Exp()) for _ in range(6)])
    for i, layer in enumerate(model):
        attach(layer, str(i))
    with LiveBytes() as live:
        model(source(64).view(-1)).sum().backward()
    unit = 64 * KIB
    # In the last layer's backward: 6 inputs, the layer's 4 values, and the gradient with one temporary.
    assert 10 * unit <= live.peak <= 13 * unit
    for layer in model:
        del layer.forward
    with LiveBytes() as plain:
        model(source(64).view(-1)).sum().backward()
    assert plain.peak >= 24 * unit


def test_counting_does_not_keep_compiled_code_from_running_compiled():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with LiveBytes():
        torch.compile(lambda x: x.exp().sin(), backend=backend)(torch.ones(4))
    assert len(graphs) == 1


def saves(count):
    return (SavedBytes(count, 0, count, pattern=count, complete=True),)


def counted_batch(meter, kind, kib, seen=(), present=()):
    """One batch that takes so much in one phase: its memory, and whether it was counted."""
    meter.begin(kind, lambda: present)
    counted = meter._live is not None
    with meter.counting(), meter.counting():
        torch.empty(kib * KIB // 4)
    meter.phase_ends("forward")
    return meter.end(seen), counted


def peak_of(memory):
    return None if memory is None else memory.peaks["forward"]


def test_the_peak_of_each_phase_is_its_own_and_includes_what_is_there():
    meter, weight = CountedPeak(), torch.ones(KIB // 4)
    meter.begin("batch", lambda: [weight])
    meter.phase_ends("rest")
    with meter.counting():
        kept = torch.empty(2 * KIB // 4)
        torch.empty(4 * KIB // 4)
    meter.phase_ends("forward")
    meter.forward_ends()
    with meter.counting():
        torch.empty(KIB // 4)
        del kept
    meter.phase_ends("backward")
    meter.phase_ends("rest")
    memory = meter.end(saves(1))
    assert memory.peaks == {"rest": KIB, "forward": 7 * KIB, "backward": 4 * KIB}
    assert memory.after_forward == 3 * KIB
    assert memory.peak_reserved is None


def test_after_the_first_batches_the_peak_of_a_kind_is_known_without_counting():
    meter = CountedPeak()
    sizes = [1, 2] * 10
    seen = [counted_batch(meter, kib, kib, saves(kib)) for kib in sizes]
    assert [peak_of(memory) for memory, _ in seen] == [kib * KIB for kib in sizes]
    assert not any(counted for _, counted in seen[2 * Sample.WARM_UP :])


def test_what_is_there_at_the_beginning_is_a_part_of_the_kind():
    meter = CountedPeak()
    for _ in range(2 * Sample.WARM_UP):
        counted_batch(meter, "same", 1)
    memory, counted = counted_batch(meter, "same", 1, present=[torch.ones(KIB // 4)])
    assert counted
    assert peak_of(memory) == 2 * KIB


def test_a_batch_that_saves_something_else_is_not_guessed_and_the_next_is_counted():
    meter = CountedPeak()
    for _ in range(2 * Sample.WARM_UP):
        assert peak_of(counted_batch(meter, "same", 1, saves(1))[0]) == KIB
    assert counted_batch(meter, "same", 2, saves(2)) == (None, False)
    memory, counted = counted_batch(meter, "same", 2, saves(2))
    assert counted
    assert peak_of(memory) == 2 * KIB


def test_compiled_batches_have_no_peak():
    meter = CountedPeak()
    assert counted_batch(meter, "same", 1, (SavedBytes(1, 0, 1, pattern=1, complete=False),))[0] is None


def test_a_sample_measures_what_is_new_but_not_too_much_of_it():
    sample, measured = Sample(), 0
    for number in range(1000):
        chosen = sample.begin(number)
        measured += chosen
        if chosen:
            sample.learn((), number)
        assert sample.recall(()) == (number if chosen else None)
    assert measured == Sample.BURST + 1000 // Sample.BUDGET


def test_a_sample_measures_a_kind_again_after_a_while():
    sample, figures = Sample(), []
    for number in range(2 * Sample.REPEAT_EVERY):
        if sample.begin("same"):
            sample.learn((), "early" if number < Sample.REPEAT_EVERY // 2 else "late")
        figures.append(sample.recall(()))
    assert figures[0] == "early"
    assert figures[-1] == "late"


def test_a_sample_remembers_no_more_than_it_promises(monkeypatch):
    monkeypatch.setattr(Sample, "KINDS", 10)
    sample = Sample()
    for number in range(200):
        if sample.begin(number):
            sample.learn((), number)
        sample.recall(())
    assert len(sample._figures) <= 10
    assert len(sample._settled) <= 10


# ---------------------------------------------------------------- times


def test_each_moment_belongs_to_the_innermost_phase():
    phases = Phases(HostClock())
    with phases.phase("outer"):
        time.sleep(0.02)
        with phases.phase("inner"):
            time.sleep(0.03)
        time.sleep(0.02)
    seconds = phases.seconds()
    assert seconds.keys() == {"outer", "inner"}
    assert seconds["outer"] >= 0.04
    assert seconds["inner"] >= 0.03
    start = phases.clock.mark()
    phases.add("outer", start - 1, start)
    assert phases.seconds()["outer"] == pytest.approx(seconds["outer"] + 1)


def test_counting_leaves_training_alone():
    model, x = blocks(), torch.ones(4, 8)

    def step(context):
        torch.manual_seed(0)
        model.zero_grad()
        with context:
            loss = model(x).square().sum()
            loss.backward()
        return [loss.detach(), *[parameter.grad for parameter in model.parameters()], torch.rand(1)]

    for got, want in zip(step(LiveBytes()), step(torch.autograd.set_grad_enabled(True)), strict=True):
        assert torch.equal(got, want)


def test_higher_order_operators_run_under_the_count():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 16, 8)
    want = flex_attention(q, q, q)
    with LiveBytes() as live:
        assert torch.equal(flex_attention(q, q, q), want)
    assert live.peak >= want.untyped_storage().nbytes()


def test_a_phase_is_told_about_when_another_takes_its_place():
    told = []
    phases = Phases(HostClock(), told.append)
    with phases.phase("outer"), phases.phase("inner"):
        pass
    with phases.phase("last"):
        pass
    assert told == ["rest", "outer", "inner", "outer", "rest", "last"]


# ---------------------------------------------------------------- a step


class Ticks:
    """A clock that is told the time."""

    now = 0.0

    def mark(self):
        return self.now

    def has_passed(self, mark):
        return True

    def seconds(self, start, end):
        return end - start

    def wait_for(self, mark):
        pass

    wait = mark


def test_a_step_is_the_sum_of_its_micro_batches_and_of_the_waits_for_their_data():
    meter = StepMeter(torch.device("cpu"))
    ticks = meter.clock = Ticks()

    def micro_batch():
        meter.fetch_begins()
        ticks.now += 1
        meter.fetch_ends()
        ticks.now += 2  # moved to the device
        meter.data_ends()
        meter.batch_begins("same", [], list)
        with meter.phase("optimizer"):
            ticks.now += 4
            with meter.phase("forward"):
                ticks.now += 8
            with meter.phase("backward"):
                ticks.now += 16
                meter.replay_begins()
                meter.replay_begins()  # a recomputed layer inside another
                ticks.now += 32
                meter.replay_ends()
                meter.replay_ends()
        meter.batch_ends(Work(6, 2))
        ticks.now += 64  # between micro-batches

    assert not meter.is_measuring
    micro_batch()
    assert meter.step_ends() is None
    meter.begin()
    assert meter.is_measuring
    for _ in range(2):
        micro_batch()
    record = meter.step_ends()
    assert not meter.is_measuring
    expected = {"data": 3, "optimizer": 4, "forward": 8, "backward": 48, "recompute": 32, "step": 63}
    assert record.phases.seconds() == {name: 2 * seconds for name, seconds in expected.items()}
    assert record.work == [Work(6, 2)] * 2
    assert len(record.memory) == 2
    meter.begin()
    micro_batch()
    meter.drop()
    assert meter.step_ends() is None
    meter.close()
