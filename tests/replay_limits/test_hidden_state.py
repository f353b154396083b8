"""State of a layer in places that are easy to overlook: slots, closures, defaults, threads, caches, parameters."""

import collections
import functools
import threading
import types
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import ReplayError
from tests.replay_limits.support import Scaled, compare
from tests.support import Training, assert_equal, batches, fit, trainer

# ---------------------------------------------------------------- slots


class Meter:
    __slots__ = ("calls", "mean")

    def __init__(self):
        self.calls = 0
        self.mean = torch.zeros(())

    def update(self, x):
        self.calls += 1
        self.mean = self.mean * 0.9 + x.detach().abs().mean() * 0.1


@dataclass(slots=True)
class Schedule:
    step: int = 0
    temperature: float = 1.0


class Private:
    __slots__ = ("__calls",)

    def __init__(self):
        self.__calls = 0

    def next(self):
        self.__calls += 1
        return self.__calls


class SlottedList(list):
    __slots__ = ("cursor",)


def test_an_object_with_slots_counts_once():
    class Layer(Scaled):
        def __init__(self):
            super().__init__()
            self.meter = Meter()

        def forward(self, x):
            self.meter.update(x)
            return self.use(x, 1 + self.meter.mean / self.meter.calls)

    plain, got = compare(Layer)
    assert got.meter.calls == plain.meter.calls == 4
    assert torch.equal(got.meter.mean, plain.meter.mean)


def test_a_dataclass_with_slots_counts_once():
    class Layer(Scaled):
        def __init__(self):
            super().__init__()
            self.schedule = Schedule()

        def forward(self, x):
            self.schedule.step += 1
            self.schedule.temperature *= 0.9
            return self.use(x, self.schedule.temperature)

    plain, got = compare(Layer)
    assert got.schedule == plain.schedule


def test_a_slot_with_a_private_name_counts_once():
    class Layer(Scaled):
        def __init__(self):
            super().__init__()
            self.counter = Private()

        def forward(self, x):
            return self.use(x, 1 / self.counter.next())

    compare(Layer)


def test_slots_of_the_layer_itself_count_once():
    class Layer(Scaled):
        __slots__ = ("calls",)

        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.use(x, 1.0)

    plain, got = compare(Layer)
    assert got.calls == plain.calls == 4


def test_slots_of_a_list_count_once():
    class Layer(Scaled):
        def __init__(self):
            super().__init__()
            self.ring = SlottedList([1.0, 0.5, 0.25])
            self.ring.cursor = 0

        def forward(self, x):
            scale = self.ring[self.ring.cursor % 3]
            self.ring.cursor += 1
            return self.use(x, scale)

    plain, got = compare(Layer)
    assert got.ring.cursor == plain.ring.cursor == 4


# ---------------------------------------------------------------- closures


def counted_scale():
    calls = 0

    def scale():
        nonlocal calls
        calls += 1
        return 1 / calls

    return scale


def averaged_scale():
    mean = torch.zeros(())

    def scale(x):
        nonlocal mean
        mean = mean * 0.5 + x.detach().abs().mean()
        return 1 + mean

    return scale


def remembered_scale():
    history = []

    def scale(x):
        nonlocal history
        history = [*history, x.detach().abs().mean()]
        return 1 + sum(history)

    return scale


def numpy_scale():
    mean = np.float64(0)

    def scale(x):
        nonlocal mean
        mean = mean * 0.5 + x.detach().abs().mean().item()
        return 1 + float(mean)

    return scale


class Closure(Scaled):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.use(x, self.scale(x))


def test_a_number_in_a_closure_counts_once():
    def make():
        scale = counted_scale()
        return Closure(lambda x: scale())

    plain, got = compare(make)
    assert got.scale(None) == plain.scale(None) == 1 / 5


@pytest.mark.parametrize("make_scale", [averaged_scale, remembered_scale, numpy_scale])
def test_what_a_closure_assigns_anew_is_rolled_back(make_scale):
    plain, got = compare(lambda: Closure(make_scale()))
    assert got.scale(torch.ones(1)) == plain.scale(torch.ones(1))


def test_what_a_closure_assigns_without_using_it_counts_once():
    def make():
        total = torch.zeros(())

        def watch_mean(x):
            nonlocal total
            total = total + x.detach().mean()
            return total

        layer = Closure(lambda x: watch_mean(x) * 0 + 1)
        layer.total = watch_mean
        return layer

    plain, got = compare(make)
    assert torch.equal(got.total(torch.zeros(1)), plain.total(torch.zeros(1)))


def make_local_class():
    calls = 0

    class Local(Scaled):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return self.use(x, 1.0)

        def calls(self):
            return calls

    return Local()


def test_what_the_methods_of_a_local_class_close_over_counts_once():
    plain, got = compare(make_local_class)
    assert got.calls() == plain.calls() == 4


def test_a_closure_that_somebody_put_on_the_layer_as_forward_counts_once():
    def make():
        layer = Closure(lambda x: 1.0)
        inner, calls = layer.forward, 0

        def forward(x):
            nonlocal calls
            calls += 1
            return inner(x) / calls

        layer.forward = forward
        return layer

    compare(make)


def test_attributes_of_a_function_on_the_layer_count_once():
    def make():
        def scale(x):
            scale.calls += 1
            return 1.0

        scale.calls = 0
        return Closure(scale)

    plain, got = compare(make)
    assert got.scale.calls == plain.scale.calls == 4


# ---------------------------------------------------------------- modules in hiding


class Hiding(Scaled):
    """Batch norm in a place where `modules()` does not find it."""

    def __init__(self, hide, find, nested):
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.norms = hide(nn.Sequential(norm) if nested else norm)
        self.find = find

    def forward(self, x):
        return self.use(self.find(self.norms)(x), 1.0)


class Holder:
    __slots__ = ("module",)

    def __init__(self, module):
        self.module = module


@pytest.mark.parametrize(
    ("hide", "find"),
    [
        (lambda norm: [norm], lambda norms: norms[0]),
        (lambda norm: {"a": {"b": norm}}, lambda norms: norms["a"]["b"]),
        (lambda norm: (1, [norm]), lambda norms: norms[1][0]),
        (Holder, lambda norms: norms.module),
        (lambda norm: functools.partial(norm), lambda norms: norms),
        (lambda norm: norm.forward, lambda norms: norms),
        (lambda norm: lambda x: norm(x), lambda norms: norms),
    ],
    ids=["list", "dict", "tuple", "slot", "partial", "method", "closure"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_module_hidden_in_an_attribute_counts_once(hide, find, nested):
    norms = []

    def make():
        def hide_and_keep(norm):
            norms.append(norm[0] if nested else norm)
            return hide(norm)

        return Hiding(hide_and_keep, find, nested)

    compare(make)
    plain, got = norms
    assert got.num_batches_tracked == plain.num_batches_tracked == 4
    assert torch.equal(got.running_mean, plain.running_mean)


class Borrowing(Scaled):
    def forward(self, x, borrowed):
        return self.use(borrowed(x), 1.0)


@pytest.mark.parametrize(
    "lend",
    [
        lambda norm: norm,
        pytest.param(lambda norm: norm.forward, id="method"),
        pytest.param(lambda norm: functools.partial(norm), id="partial"),
        pytest.param(lambda norm: lambda x: norm(x), id="closure"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_module_among_the_arguments_counts_once(lend, nested):
    class Lender(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.norm = nn.Sequential(nn.BatchNorm1d(8)) if nested else nn.BatchNorm1d(8)
            self.layer = Borrowing()

        def forward(self, x):
            return self.layer(self.stem(x), lend(self.norm))

    plain = fit(lambda: Training(Lender()), batches(4))
    assert_equal(fit(lambda: Training(Lender()), batches(4), [ActivationCheckpointing(layers=Borrowing)]), plain)


# ---------------------------------------------------------------- mutable default arguments


class Memo(Scaled):
    def forward(self, x, memo={"calls": 0}):  # noqa: B006
        memo["calls"] += 1
        return self.use(x, 1 / memo["calls"])


class Stamp:
    calls = 0


class Stamped(Scaled):
    def forward(self, x, stamp=Stamp()):  # noqa: B008
        stamp.calls += 1
        return self.use(x, 1.0)


class Totalling(Scaled):
    def forward(self, x, total=torch.zeros(1)):  # noqa: B008
        total += 1
        return self.use(x, 1.0)


def remember(x, memo=[]):  # noqa: B006
    memo.append(x.detach().mean())
    return sum(memo)


class Remembering(Scaled):
    def forward(self, x):
        return self.use(x, 1 + remember(x))


def test_a_mutable_default_of_forward_counts_once():
    def make():
        Memo.forward.__defaults__[0]["calls"] = 0
        return Memo()

    compare(make)
    assert Memo.forward.__defaults__[0]["calls"] == 4


def test_an_object_as_default_counts_once():
    def make():
        Stamped.forward.__defaults__[0].calls = 0
        return Stamped()

    compare(make)
    assert Stamped.forward.__defaults__[0].calls == 4


def test_a_tensor_as_default_that_forward_changes_in_place_is_refused():
    with pytest.raises(ReplayError, match=r"'model\.1' changed .*Totalling\.forward\(\) defaults\[0\] in place"):
        compare(Totalling)


def test_a_mutable_default_of_a_helper_function_counts_once():
    def make():
        remember.__defaults__[0].clear()
        return Remembering()

    compare(make)
    assert len(remember.__defaults__[0]) == 4


# ---------------------------------------------------------------- threading.local


switch = threading.local()


class Switched(Scaled):
    def forward(self, x):
        return self.use(x, getattr(switch, "scale", 1.0))


class SwitchesAround(Training):
    """Switches around the forward, as a context manager of a library would."""

    def training_step(self, batch, batch_idx):
        switch.scale = 0.5 + batch_idx
        try:
            return super().training_step(batch, batch_idx)
        finally:
            del switch.scale


class OwnSwitch(Scaled):
    def __init__(self):
        super().__init__()
        self.local = threading.local()
        self.local.calls = 0

    def forward(self, x):
        self.local.calls += 1
        return self.use(x, 1 / self.local.calls)


def test_a_thread_local_switch_around_the_forward_is_on_in_the_replay():
    compare(Switched, SwitchesAround, verify="off")
    assert not hasattr(switch, "scale")


def test_a_thread_local_of_the_layer_counts_once():
    plain, got = compare(OwnSwitch)
    assert got.local.calls == plain.local.calls == 4


# ---------------------------------------------------------------- parametrizations


class Twice(nn.Module):
    """A parametrized weight, used two times in one forward."""

    def __init__(self, parametrization):
        super().__init__()
        self.linear = parametrization(nn.Linear(8, 8))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return torch.tanh(self.linear(self.dropout(torch.tanh(self.linear(x)))))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


def symmetric(linear):
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


class CachedAround(Training):
    def training_step(self, batch, batch_idx):
        with parametrize.cached():
            return super().training_step(batch, batch_idx)


class CachedAroundBackward(Training):
    """`cached` around forward and backward, with the weight used outside of the layer too."""

    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with parametrize.cached():
            loss = self.loss(self.model, batch) + self.model[1].linear.weight.square().sum()
            optimizer.zero_grad()
            self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


PARAMETRIZATIONS = [symmetric, parametrizations.weight_norm, parametrizations.spectral_norm]


@pytest.mark.parametrize("parametrization", PARAMETRIZATIONS)
@pytest.mark.parametrize("module", [Training, CachedAround, CachedAroundBackward])
def test_parametrized_weights_are_cached_as_in_forward(parametrization, module):
    compare(lambda: Twice(parametrization), module)
    assert parametrize._cache_enabled == 0
    assert not parametrize._cache


def test_a_cache_of_parametrizations_inside_the_layer_is_replayed():
    class Layer(Twice):
        def forward(self, x):
            with parametrize.cached():
                return super().forward(x)

    compare(lambda: Layer(symmetric))


# ---------------------------------------------------------------- parameters the layer writes itself


class ActNorm(nn.Module):
    """Glow's: the first batch decides scale and shift."""

    def __init__(self, write):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("ready", torch.tensor(False))
        self.write = write
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.write(self.shift, -x.mean(0))
                self.write(self.scale, 1 / (x.std(0) + 1e-3))
                self.ready.fill_(True)
        return torch.tanh(self.linear((x + self.shift) * self.scale))


def _write_data(parameter, value):
    parameter.data = value


@pytest.mark.parametrize(
    "write",
    [lambda p, value: p.copy_(value), lambda p, value: p.data.copy_(value), _write_data],
    ids=["copy_", "data.copy_", "data="],
)
def test_data_dependent_initialisation_happens_once(write):
    compare(lambda: ActNorm(write))


class Manual(Training):
    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.run(batch)
        optimizer.step()
        return {"loss": loss.detach()}


class PenaltyApart(Manual):
    """A penalty on a weight that the layer wrote, with a backward of its own."""

    def run(self, batch):
        loss = self.loss(self.model, batch)
        penalty = self.model[1].scale.square().sum()
        self.manual_backward(loss)
        self.manual_backward(penalty)
        return loss


class TwoLossesOfTwoCalls(Manual):
    """The layer runs twice, and two losses go back through both calls."""

    def run(self, batch):
        output = self.model(self.model(batch))
        self.manual_backward(output.sum(), retain_graph=True)
        self.manual_backward(output.square().mean())
        return output.sum()


@pytest.mark.parametrize("module", [PenaltyApart, TwoLossesOfTwoCalls])
def test_a_replayed_initialisation_does_not_disturb_other_graphs_of_the_weight(module):
    compare(lambda: ActNorm(lambda p, value: p.copy_(value)), module)


class MomentumCopy(nn.Module):
    """A student and its moving average, MoCo's way: the copy moves in every forward, then both are used."""

    def __init__(self, move, used=True):
        super().__init__()
        self.student = nn.Linear(8, 8)
        self.teacher = nn.Linear(8, 8)
        self.teacher.requires_grad_(False)
        self.move = move
        self.used = used

    def forward(self, x):
        with torch.no_grad():
            for copy, own in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.move(copy, own)
            target = self.teacher(x)
        return torch.tanh(self.student(x)) * (target if self.used else 1)


def move_in_place(copy, own):
    copy.mul_(0.9).add_(own, alpha=0.1)


def move_data_in_place(copy, own):
    copy.data.mul_(0.9).add_(own.data, alpha=0.1)


def move_data(copy, own):
    copy.data = copy.data * 0.9 + own.data * 0.1


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("move", [move_in_place, move_data_in_place, move_data])
def test_a_momentum_copy_moves_once_per_step(move, used):
    compare(lambda: MomentumCopy(move, used))


class WideNorm(nn.Module):
    """Data-dependent initialisation of a large weight."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 1024)
        self.down = nn.Linear(1024, 8)
        self.ready = False

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.up.weight.div_(self.up(x).std())
            self.ready = True
        return self.down(torch.tanh(self.up(x)))


def test_data_dependent_initialisation_of_a_large_weight_is_refused():
    with pytest.raises(ReplayError, match=r"'model\.1' changed a parameter of shape \(1024, 8\) in place"):
        compare(WideNorm)


# ---------------------------------------------------------------- lazy modules


class LazyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.LazyLinear(16)
        self.norm = nn.LazyBatchNorm1d()
        self.down = nn.LazyLinear(8)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


class LazyStatistics(nn.Module):
    """Nothing lazy but buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LazyBatchNorm1d(affine=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(self.norm(x)))


class LazyByHand(nn.Module):
    """Makes its table in the first call, from the random stream that dropout uses too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.randn(x.shape[1:])
        return torch.tanh(self.linear(nn.functional.dropout(x + self.table, 0.3)))


@pytest.mark.parametrize("layer", [LazyBlock, LazyByHand, LazyStatistics])
def test_lazy_layers_are_exact_from_their_first_call(layer):
    compare(layer)


# ---------------------------------------------------------------- containers


class Handover(Scaled):
    """Takes work from one list to another."""

    def __init__(self):
        super().__init__()
        self.pending = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
        self.done = []

    def forward(self, x):
        self.done.insert(0, self.pending.pop())
        return self.use(x, self.done[0])


class Phase(Scaled):
    """Knows by a key in which phase it is."""

    def __init__(self):
        super().__init__()
        self.phase = {"even": True}

    def forward(self, x):
        now = next(iter(self.phase))
        self.phase["odd" if now == "even" else "even"] = self.phase.pop(now)
        return self.use(x, 1.0 if now == "even" else 0.5)


class Recent(Scaled):
    """The last scales in a deque, the names of those used in a set, the count in a defaultdict."""

    def __init__(self):
        super().__init__()
        self.scales = collections.deque([1.0, 2.0, 3.0], maxlen=3)
        self.names = {"start"}
        self.counts = collections.defaultdict(int)

    def forward(self, x):
        self.scales.append(len(self.scales) / 4 + len(self.names))
        self.counts[str(len(self.names))] += 1
        self.names.add(f"call {len(self.names)}")
        return self.use(x, sum(self.scales) / 10)


class Swap(Scaled):
    """Front and back buffers that change places."""

    def __init__(self):
        super().__init__()
        self.sides = {"front": torch.ones(8), "back": torch.full((8,), 0.5)}

    def forward(self, x):
        self.sides["front"], self.sides["back"] = self.sides["back"], self.sides["front"]
        return self.use(x, self.sides["front"])


class ArrayMemory(Scaled):
    """Statistics in a NumPy array."""

    def __init__(self, array):
        super().__init__()
        self.array = array

    def forward(self, x):
        self.array[1:] += x.detach().abs().mean(0).numpy()[1:]
        return self.use(x, torch.from_numpy(np.array(self.array)).float())


class WeakNote:
    def __init__(self):
        self.calls = 0


class Weak(Scaled):
    """Counts in an object that it reaches by a weak reference."""

    def __init__(self, note):
        super().__init__()
        self.note = weakref.ref(note)

    def forward(self, x):
        self.note().calls += 1
        return self.use(x, 1 / self.note().calls)


@pytest.mark.parametrize("layer", [Handover, Phase, Recent, Swap])
def test_containers_on_the_layer_change_once(layer):
    plain, got = compare(layer)
    for name in ("pending", "done", "phase", "names", "counts", "scales"):
        assert getattr(got, name, None) == getattr(plain, name, None)


def memory_map(tmp_path, name):
    return np.memmap(tmp_path / name, dtype=np.float32, mode="w+", shape=(8,))


def test_a_numpy_array_on_the_layer_changes_once():
    plain, got = compare(lambda: ArrayMemory(np.zeros(16, np.float32)[::2]))
    assert (got.array == plain.array).all()


def test_a_memory_map_on_the_layer_changes_once(tmp_path):
    names = iter("ab")
    plain, got = compare(lambda: ArrayMemory(memory_map(tmp_path, next(names))))
    assert (got.array == plain.array).all()


def test_what_a_weak_reference_leads_to_changes_once():
    notes = []

    def make():
        notes.append(WeakNote())
        return Weak(notes[-1])

    compare(make)
    assert notes[0].calls == notes[1].calls == 4


# ---------------------------------------------------------------- very large containers


class Archive(Scaled):
    """Remembers every row it saw; `grow` entries per call."""

    def __init__(self, entries, grow):
        super().__init__()
        self.entries = list(range(entries))
        self.grow = grow

    def forward(self, x):
        self.entries.extend(range(self.grow))
        return self.use(x, 1.0)


class Tables(Scaled):
    """A large table, or many that are large together, and beside them a counter."""

    def __init__(self, tables, entries):
        super().__init__()
        self.tables = {i: list(range(entries)) for i in range(tables)}
        self.counts = types.SimpleNamespace(calls=0)

    def forward(self, x):
        self.counts.calls += 1
        return self.use(x, 1.0)


class TakesMany(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, rows):
        return torch.tanh(self.linear(x * rows[-1]))


def test_a_container_too_large_to_be_kept_is_reported():
    with pytest.warns(UserWarning, match=r"cannot be kept for the recompute: model\.1\.entries"):
        fit_recomputed(lambda: Archive(20_000, 1))


def test_a_container_that_becomes_too_large_later_is_reported_or_refused():
    with pytest.warns(UserWarning, match=r"cannot be kept for the recompute: model\.1\.entries"):
        fit_recomputed(lambda: Archive(0, 4_000), steps=5)


@pytest.mark.parametrize(("tables", "entries"), [(1, 20_000), (200, 100)])
def test_what_lies_beside_a_large_container_counts_once_or_is_reported(tables, entries):
    with pytest.warns(UserWarning, match=r"cannot be kept for the recompute: model\.1\.") as caught:
        layer = fit_recomputed(lambda: Tables(tables, entries))
    assert layer.counts.calls == 3 or any("model.1.counts" in str(warning.message) for warning in caught)


def test_a_very_large_list_among_the_arguments_is_reported():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layer = nn.Linear(8, 8), TakesMany()

        def forward(self, x):
            return self.layer(self.stem(x), [float(i) / 20_000 for i in range(20_000)])

    plain = fit(lambda: Training(Many()))
    with pytest.warns(UserWarning, match=r"cannot be kept.*model\.layer.*1"):
        got = fit(lambda: Training(Many()), callbacks=[ActivationCheckpointing(layers=TakesMany)])
    assert_equal(got, plain)


def fit_recomputed(make_layer, steps=3):
    model = nn.Sequential(nn.Linear(8, 8), make_layer(), nn.Linear(8, 8))
    trainer([ActivationCheckpointing(layers="model.1")]).fit(Training(model), batches(steps))
    return model[1]


def test_a_refusal_names_the_layer():
    class Layer(Scaled):
        def __init__(self):
            super().__init__()
            self.numbers = iter(range(1, 100))

        def forward(self, x):
            return self.use(x, 1 / next(self.numbers))

    with pytest.raises(ReplayError, match=r"'model\.1' saved tensor \d+ .*other values"):
        compare(Layer)
