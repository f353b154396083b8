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
from lightning_ckpt.measure.saved import SavedBytes, saved_bytes
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
    assert counted == SavedBytes(saved=5 * 4 * KIB, avoided=everything - 4 * 4 * KIB, complete=True)


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


def test_after_the_first_batches_the_peak_of_a_kind_is_known():
    meter, weight = CountedPeak(), torch.ones(KIB // 4)

    def batch(kib):
        meter.begin(("batch", kib), lambda: [weight])
        with meter.counting(), meter.counting():
            x = torch.empty(kib * KIB // 4)
            y = x * 2
        del x, y
        return meter.end([SavedBytes(kib, 0, True)])

    assert [batch(1), batch(2), batch(1), batch(2)] == [3 * KIB, 5 * KIB, 3 * KIB, 5 * KIB]
    assert meter._counted == CountedPeak.WARM_UP
    assert [batch(2), batch(1)] == [5 * KIB, 3 * KIB]
    assert meter._counted == CountedPeak.WARM_UP


def test_too_many_kinds_are_not_all_counted_and_not_guessed():
    meter = CountedPeak()
    peaks = []
    for size in range(1, 60):
        meter.begin(size, list)
        with meter.counting():
            torch.empty(size)
        peaks.append(meter.end([]))
    assert peaks[: CountedPeak.WARM_UP] == [4, 8, 12, 16]
    assert peaks[CountedPeak.WARM_UP :] == [None] * (59 - CountedPeak.WARM_UP)


def test_a_kind_is_counted_again_after_a_while():
    meter, peaks, size = CountedPeak(), [], 1
    for step in range(2 * CountedPeak.RECOUNT_EVERY):
        size = 1 if step < 10 else 2
        meter.begin("same", list)
        with meter.counting():
            torch.empty(size)
        peaks.append(meter.end([]))
    assert peaks[0] == 4
    assert peaks[-1] == 8


def test_a_batch_that_saves_something_else_is_another_kind():
    meter = CountedPeak()

    def batch(saved):
        meter.begin("same", list)
        with meter.counting():
            torch.empty(1)
        return meter.end([SavedBytes(saved, 0, True)])

    assert [batch(1) for _ in range(CountedPeak.WARM_UP + 1)] == [4] * (CountedPeak.WARM_UP + 1)
    assert batch(2) is None


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
