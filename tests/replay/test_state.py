"""State: what a layer changes, on itself and around, is changed once, and a replay sees what was there before."""

import collections
import dataclasses
import functools
import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from tests.replay import support
from tests.replay.support import Layer, Stack, assert_exact, assert_exact_or_named, stack, train
from tests.support import Training, batches

LOSSES: list = []
TRACKER = support.Tracker()
STEPS = {"count": 0}
HIDDEN = None


# ---------------------------------------------------------------- normalisation


class Normed(Layer):
    def __init__(self, make_norm):
        super().__init__()
        self.norm = make_norm()

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x))) + x


@pytest.mark.parametrize(
    "make_norm",
    [
        lambda: nn.BatchNorm1d(8, momentum=None),
        lambda: nn.BatchNorm1d(8, track_running_stats=False),
        lambda: nn.BatchNorm1d(8, affine=False),
        lambda: nn.SyncBatchNorm(8),
        lambda: nn.BatchNorm1d(8).eval(),
    ],
    ids=["cumulative", "no statistics", "not affine", "sync", "eval"],
)
def test_batch_norm_counts_its_batches_once(make_norm):
    assert_exact(lambda: stack(lambda: Normed(make_norm)))


def test_batch_norm_in_eval_mode_within_a_training_model():
    class Frozen(Training):
        def on_train_batch_start(self, batch, batch_idx):
            for layer in self.model.layers[batch_idx % 3 :]:
                layer.norm.eval()
            for layer in self.model.layers[: batch_idx % 3]:
                layer.norm.train()

    assert_exact(lambda: Frozen(Stack(lambda: Normed(lambda: nn.BatchNorm1d(8)))), steps=7)


@pytest.mark.xfail(
    strict=True,
    reason="limit: statistics of over 4096 channels that begin to change late count twice, seen by verified calls only",
)
def test_wide_batch_norm_whose_momentum_starts_at_zero():
    class Wide(Layer):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 5000), nn.BatchNorm1d(5000, momentum=0.0), nn.Linear(5000, 8)

        def forward(self, x):
            return x + self.down(torch.tanh(self.norm(self.up(x))))

    class Scheduled(Training):
        def on_train_batch_start(self, batch, batch_idx):
            for layer in self.model.layers:
                layer.norm.momentum = 0.1 if batch_idx >= 3 else 0.0

    assert_exact_or_named(lambda: Scheduled(Stack(Wide, 1)), steps=6)


@pytest.mark.parametrize(
    "norm",
    [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm],
    ids=["spectral, hook", "spectral, parametrization", "weight"],
)
def test_normed_weights(norm):
    class NormedWeight(Layer):
        def __init__(self):
            super().__init__()
            self.linear = norm(self.linear)

    assert_exact(lambda: stack(NormedWeight))


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_normed_weight_of_the_layer_itself(norm):
    class Only(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[norm(Only(8, 8)) for _ in range(3)])

        def forward(self, x):
            return self.layers(x)

    assert_exact(lambda: Training(Model()), Only)


def test_a_norm_that_initialises_itself_from_its_first_batch():
    class ActNorm(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("initialized", torch.tensor(False))
            self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = self.linear(x)
            if not self.initialized:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.scale.mul_(1 / (x.std(0) + 1e-6))
                self.initialized.fill_(True)
            return torch.tanh((x + self.shift) * self.scale)

    assert_exact(lambda: stack(ActNorm))


def test_a_norm_that_initialises_itself_through_data():
    class ActNorm(Layer):
        def __init__(self):
            super().__init__()
            self.initialized = False
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = self.linear(x)
            if not self.initialized:
                self.scale.data.mul_(1 / (x.detach().std(0) + 1e-6))
                self.initialized = True
            return torch.tanh(x * self.scale)

    assert_exact_or_named(lambda: stack(ActNorm))


# ---------------------------------------------------------------- weights that forward changes


def test_an_embedding_that_renormalises_its_rows():
    class Positions(Layer):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 8, max_norm=0.5)

        def forward(self, x):
            return super().forward(x + self.embedding(torch.arange(len(x))))

    assert_exact(lambda: stack(Positions))


def test_a_weight_that_forward_rescales_through_data():
    class Rescaled(Layer):
        def forward(self, x):
            self.linear.weight.data.mul_(1.5 / self.linear.weight.data.norm())
            self.linear.weight.data.mul_(1 + 1e-3)
            return super().forward(x)

    assert_exact_or_named(lambda: stack(Rescaled))


@pytest.mark.xfail(
    strict=True,
    reason="limit: writes through `.data` to a weight that begin late are seen by verified calls only",
)
def test_a_weight_that_forward_decays_after_a_warm_up():
    class Decayed(Layer):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def forward(self, x):
            self.steps += 1
            if self.steps > 3:
                self.linear.weight.data.mul_(0.9)
            return super().forward(x)

    assert_exact_or_named(lambda: stack(Decayed), steps=8)


# ---------------------------------------------------------------- codebooks and observers


class Scaled(Layer):
    """Makes its scale when it first runs, in the place of an attribute."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(x.shape[-1]))
        return torch.tanh(self.linear(x)) * self.scale


def test_a_weight_that_the_first_forward_makes():
    class Counted(Training):
        def on_after_backward(self):
            assert all(layer.scale.grad is not None for layer in self.model.layers)

    assert_exact(lambda: Counted(Stack(Scaled)))


class Codebook(Layer):
    """Vector quantisation with moving averages, `through` assignment, in-place operators or `.data`."""

    def __init__(self, through, codes=16, start=0):
        super().__init__()
        self.through, self.start, self.steps = through, start, 0
        self.register_buffer("codes", torch.randn(codes, 8))
        self.register_buffer("sizes", torch.ones(codes))

    def forward(self, x):
        x = self.linear(x)
        distances = torch.cdist(x, self.codes)
        chosen = nn.functional.one_hot(distances.argmin(1), len(self.codes)).float()
        quantised = chosen @ self.codes
        self.steps += 1
        if self.steps > self.start:
            with torch.no_grad():
                self.update(chosen, x)
        return x + (quantised - x).detach() + 0.1 * torch.tanh(quantised * x)

    def update(self, chosen, x):
        sizes = self.sizes * 0.9 + chosen.sum(0) * 0.1
        codes = self.codes * 0.9 + (chosen.T @ x) / sizes[:, None] * 0.1
        if self.through == "assignment":
            self.sizes, self.codes = sizes, codes
        elif self.through == "in place":
            self.sizes.copy_(sizes)
            self.codes.copy_(codes)
        else:
            self.sizes.data.copy_(sizes)
            self.codes.data.copy_(codes)


@pytest.mark.parametrize("through", ["assignment", "in place", "data"])
@pytest.mark.parametrize("codes", [16, 1024], ids=["small", "large"])
def test_a_codebook_by_moving_averages(through, codes):
    assert_exact(lambda: stack(lambda: Codebook(through, codes)))


@pytest.mark.parametrize(
    ("through", "codes"),
    [
        ("assignment", 16),
        ("assignment", 1024),
        ("in place", 16),
        ("in place", 1024),
        ("data", 16),
        pytest.param(
            "data",
            1024,
            marks=pytest.mark.xfail(
                strict=True,
                reason="limit: writes through `.data` to large buffers that begin late are seen by verified calls only",
            ),
        ),
    ],
)
def test_a_codebook_whose_updates_start_after_a_warm_up(through, codes):
    assert_exact_or_named(lambda: stack(lambda: Codebook(through, codes, start=3)), steps=8)


def test_a_codebook_seen_through_a_transposed_view():
    class Viewed(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(6, 8))
            self.transposed = self.codes.T

        def forward(self, x):
            x = self.linear(x)
            self.codes.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return torch.tanh(x @ self.transposed @ self.codes)

    assert_exact_or_named(lambda: stack(Viewed))


def test_fake_quantisation_with_moving_observers():
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Quantised(Layer):
        def __init__(self):
            super().__init__()
            self.fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

        def forward(self, x):
            return torch.tanh(self.fake(self.linear(x))) * x

    assert_exact(lambda: stack(Quantised))


# ---------------------------------------------------------------- hidden states


class Recurrent(Layer):
    """Carries a hidden state from call to call."""

    def __init__(self):
        super().__init__()
        self.hidden = None

    def forward(self, x):
        hidden = torch.zeros_like(x) if self.hidden is None else self.hidden
        self.hidden = torch.tanh(self.linear(x) + 0.5 * hidden)
        return self.hidden * x


def test_a_hidden_state_that_is_detached_in_every_call():
    class Detaching(Recurrent):
        def forward(self, x):
            output = super().forward(x)
            self.hidden = self.hidden.detach()
            return output

    assert_exact(lambda: stack(Detaching), observe=lambda m: [layer.hidden.tolist() for layer in m.model.layers])


def unrolled(model, batch):
    for layer in model.layers:
        layer.hidden = None
    return sum(model(batch * t).square().mean() for t in (1.0, 0.5, 0.25))


def test_gradients_flow_through_hidden_states_of_several_calls_in_a_step():
    assert_exact(lambda: stack(Recurrent, unrolled))


def test_gradients_flow_through_pairs_of_hidden_states():
    class Cell(Layer):
        def __init__(self):
            super().__init__()
            self.cell, self.hidden = nn.LSTMCell(8, 8), None

        def forward(self, x):
            self.hidden = self.cell(x, self.hidden)
            return x + self.hidden[0]

    assert_exact(lambda: stack(Cell, unrolled))


def test_a_spiking_layer_whose_membrane_is_changed_in_place():
    class Membrane(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("potential", torch.zeros(4, 8))
            self.spikes = 0

        def forward(self, x):
            self.potential.mul_(0.5).add_(self.linear(x).detach())
            fired = self.potential > 0.3
            self.spikes += int(fired.sum())
            self.potential[fired] -= 0.3
            return torch.sigmoid(self.linear(x) * self.potential) * x

    assert_exact(lambda: stack(Membrane), observe=lambda m: [layer.spikes for layer in m.model.layers])


@pytest.mark.parametrize("start", [None, 0.0], ids=["None", "tensor"])
def test_a_hidden_state_in_a_closure(start):
    class Closure(Layer):
        def __init__(self):
            super().__init__()
            hidden = None if start is None else torch.zeros(4, 8)

            def carry(x):
                nonlocal hidden
                hidden = x.detach() if hidden is None else torch.tanh(hidden * 0.5 + x.detach())
                return hidden

            self.carry = carry

        def forward(self, x):
            return torch.tanh(self.linear(x) * self.carry(x))

    assert_exact(lambda: stack(Closure))


def test_a_hidden_state_in_a_global():
    class InGlobal(Layer):
        def forward(self, x):
            global HIDDEN
            HIDDEN = torch.zeros_like(x) if HIDDEN is None else torch.tanh(HIDDEN + x.detach())
            return torch.tanh(self.linear(x) * HIDDEN)

    def make():
        global HIDDEN
        HIDDEN = None
        return stack(InGlobal)

    assert_exact(make, observe=lambda module: HIDDEN.tolist())


# ---------------------------------------------------------------- counters and trackers


@dataclasses.dataclass(slots=True)
class Statistics:
    calls: int = 0
    total: float = 0.0
    history: list = dataclasses.field(default_factory=list)


def test_statistics_in_a_dataclass_with_slots():
    class Counting(Layer):
        def __init__(self):
            super().__init__()
            self.statistics = Statistics()

        def forward(self, x):
            self.statistics.calls += 1
            self.statistics.total += float(x.detach().sum())
            self.statistics.history.append(self.statistics.calls)
            return super().forward(x) / self.statistics.calls

    assert_exact(lambda: stack(Counting), observe=lambda m: [layer.statistics for layer in m.model.layers])


@pytest.mark.parametrize(
    "make",
    [list, lambda: collections.deque(maxlen=3), lambda: collections.defaultdict(list)],
    ids=["list", "deque", "defaultdict"],
)
def test_auxiliary_losses_in_containers_count_once(make):
    class Balanced(Layer):
        def __init__(self):
            super().__init__()
            self.losses = make()

        def forward(self, x):
            gate = self.linear(x).softmax(-1)
            target = self.losses["balance"] if isinstance(self.losses, dict) else self.losses
            target.append(gate.mean(0).square().sum())
            return x * gate

    def loss(model, batch):
        output, extra = model(batch).square().mean(), 0.0
        for layer in model.layers:
            for item in next(iter(layer.losses.values())) if isinstance(layer.losses, dict) else layer.losses:
                extra = extra + item
            layer.losses.clear()
        return output + extra

    assert_exact(lambda: stack(Balanced, loss), observe=lambda m: [len(layer.losses) for layer in m.model.layers])


def test_losses_that_stay_in_the_list_until_after_backward():
    class Tracked(Layer):
        def __init__(self):
            super().__init__()
            self.losses = []

        def forward(self, x):
            x = self.linear(x)
            self.losses.append(x.square().mean())
            return torch.tanh(x)

    class Counting(Training):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen = [*getattr(self, "seen", []), [len(layer.losses) for layer in self.model.layers]]
            for layer in self.model.layers:
                layer.losses = []

    def loss(model, batch):
        return model(batch).square().mean() + sum(layer.losses[0] for layer in model.layers)

    assert_exact(lambda: Counting(Stack(Tracked), loss), observe=lambda module: module.seen)


class GlobalTracker(Layer):
    def forward(self, x):
        x = self.linear(x)
        LOSSES.append(x.detach().square().mean().item())
        return torch.tanh(x)


def test_a_global_list_counts_once():
    def make():
        LOSSES.clear()
        return stack(GlobalTracker)

    assert_exact(make, observe=lambda module: list(LOSSES))


def test_a_global_list_that_is_made_anew_in_every_step_counts_once():
    class Fresh(Training):
        def on_train_batch_start(self, batch, batch_idx):
            global LOSSES
            self.counts = [*getattr(self, "counts", []), len(LOSSES)]
            LOSSES = []

    def make():
        LOSSES.clear()
        return Fresh(Stack(GlobalTracker))

    assert_exact(make, observe=lambda module: module.counts)


def test_a_list_of_the_class_that_is_made_anew_in_every_step_counts_once():
    class Router(Layer):
        losses: list = []

        def forward(self, x):
            x = self.linear(x)
            type(self).losses.append(x.detach().mean().item())
            return torch.tanh(x)

    class Fresh(Training):
        def on_train_batch_start(self, batch, batch_idx):
            self.counts = [*getattr(self, "counts", []), len(Router.losses)]
            Router.losses = []

    def make():
        Router.losses = []
        return Fresh(Stack(Router))

    assert_exact(make, observe=lambda module: module.counts)


def test_a_tracker_object_of_the_class_counts_once():
    class Tracked(Layer):
        tracker = support.Tracker()

        def forward(self, x):
            self.tracker.count += 1
            return super().forward(x)

    def make():
        Tracked.tracker.count = 0
        return stack(Tracked)

    assert_exact(make, observe=lambda module: Tracked.tracker.count)


def test_a_global_tracker_of_a_class_from_elsewhere_counts_once():
    class Tracked(Layer):
        def forward(self, x):
            TRACKER.count += 1
            return super().forward(x)

    def make():
        TRACKER.count = 0
        return stack(Tracked)

    assert_exact(make, observe=lambda module: TRACKER.count)


def test_a_list_of_another_module_counts_once():
    class Tracked(Layer):
        def forward(self, x):
            support.RECORDED.append(1)
            return super().forward(x)

    def make():
        support.RECORDED.clear()
        return stack(Tracked)

    assert_exact(make, observe=lambda module: len(support.RECORDED))


def test_a_function_of_another_module_that_records_counts_once():
    from tests.replay.support import record

    class Tracked(Layer):
        def forward(self, x):
            support.record(float(x.detach().mean()))
            return super().forward(x)

    def make():
        support.RECORDED.clear()
        return stack(Tracked)

    assert record is support.record
    assert_exact(make, observe=lambda module: list(support.RECORDED))


def test_a_counter_in_the_closure_of_the_class_counts_once():
    counts = {"calls": 0}

    class Tracked(Layer):
        def forward(self, x):
            counts["calls"] += 1
            return super().forward(x)

    def make():
        counts["calls"] = 0
        return stack(Tracked)

    assert_exact(make, observe=lambda module: counts["calls"])


def test_a_global_that_only_a_static_method_names_counts_once():
    class Tracked(Layer):
        @staticmethod
        def count():
            STEPS["count"] += 1

        def forward(self, x):
            self.count()
            return super().forward(x)

    def make():
        STEPS["count"] = 0
        return stack(Tracked)

    assert_exact(make, observe=lambda module: STEPS["count"])


def test_a_global_that_a_decorated_forward_names_counts_once():
    class Single(Layer):
        @torch.autocast("cpu", enabled=False)
        def forward(self, x):
            STEPS["count"] += 1
            return super().forward(x)

    def make():
        STEPS["count"] = 0
        return stack(Single)

    assert_exact(make, observe=lambda module: STEPS["count"])


def test_a_counter_of_the_module_behind_a_weak_reference_counts_once():
    class Reporting(Layer):
        owner = None

        def forward(self, x):
            self.owner().seen += len(x)
            return super().forward(x)

    class Owner(Training):
        def __init__(self):
            super().__init__(Stack(Reporting))
            self.seen = 0
            for layer in self.model.layers:
                layer.owner = weakref.ref(self)

    assert_exact(Owner, observe=lambda module: module.seen)


def test_a_counter_of_the_module_behind_a_bound_method_counts_once():
    class Reporting(Layer):
        def forward(self, x):
            self.report(len(x))
            return super().forward(x)

    class Owner(Training):
        def __init__(self):
            super().__init__(Stack(Reporting))
            self.seen = 0
            for layer in self.model.layers:
                layer.report = self.report

        def report(self, rows):
            self.seen += rows

    assert_exact(Owner, observe=lambda module: module.seen)


@pytest.mark.xfail(
    strict=True,
    reason="limit: an iterator is advanced by the replay too, seen only where forward and replay read differently",
)
def test_a_count_by_an_iterator_is_exact_or_named():
    class Iterating(Layer):
        def __init__(self):
            super().__init__()
            self.steps = itertools.count()

        def forward(self, x):
            warm = next(self.steps) < 4
            return super().forward(x) * (1.0 if warm else 0.5)

    assert_exact_or_named(lambda: stack(Iterating), steps=8)


def test_a_numpy_histogram_and_a_thread_local_count_once():
    class Histogram(Layer):
        def __init__(self):
            super().__init__()
            self.histogram, self.local = np.zeros(4), threading.local()
            self.local.calls = 0

        def forward(self, x):
            self.histogram += np.histogram(x.detach().numpy(), bins=4)[0]
            self.local.calls += 1
            return super().forward(x) / float(self.histogram.sum())

    def observe(module):
        return [(layer.histogram.tolist(), layer.local.calls) for layer in module.model.layers]

    assert_exact(lambda: stack(Histogram), observe=observe)


def test_a_method_with_a_cache_and_a_cached_property():
    class Cached(Layer):
        @functools.cached_property
        def positions(self):
            return torch.rand(8)

        @functools.lru_cache(maxsize=2)  # noqa: B019
        def mask(self, rows):
            return torch.rand(rows, 1) > 0.2

        def forward(self, x):
            return super().forward(x * self.mask(len(x))) * self.positions

    assert_exact_or_named(lambda: stack(Cached))


@pytest.mark.parametrize("start", [0, 3])
def test_a_dict_in_which_one_key_takes_the_place_of_another(start):
    class Phased(Layer):
        def __init__(self):
            super().__init__()
            self.active = {"first": True}

        def forward(self, x):
            return super().forward(x * (2.0 if "first" in self.active else 0.5))

    class Switching(Training):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for layer in self.model.layers if batch_idx >= start else []:
                name = "second" if "first" in layer.active else "first"
                layer.active.clear()
                layer.active[name] = True
            return loss

    assert_exact_or_named(lambda: Switching(Stack(Phased)), steps=8)


def test_a_submodule_that_is_built_in_the_first_call():
    class Lazily(Layer):
        def forward(self, x):
            if not hasattr(self, "late"):
                self.late = nn.Linear(8, 8)
            return torch.tanh(self.late(super().forward(x)))

    assert_exact(lambda: stack(Lazily))


# ---------------------------------------------------------------- cached activations and metrics


def tensors_with_graphs():
    gc.collect()
    return sum(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in gc.get_objects())


def test_a_cached_activation_is_the_same_object_after_backward_and_no_graph_stays():
    class Cached(Layer):
        def __init__(self):
            super().__init__()
            self.maps = {}

        def forward(self, x):
            self.maps["attention"] = torch.tanh(self.linear(x))
            return x * self.maps["attention"].exp()

    class Watching(Training):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.before = [layer.maps["attention"] for layer in self.model.layers]
            return loss + sum(item.mean() for item in self.before)

        def on_before_optimizer_step(self, optimizer):
            assert all(
                layer.maps["attention"] is item for layer, item in zip(self.model.layers, self.before, strict=True)
            )
            self.before = None

    before = tensors_with_graphs()
    got = assert_exact(lambda: Watching(Stack(Cached)))
    for layer in got.module.model.layers:
        layer.maps.clear()
    assert tensors_with_graphs() == before


def test_pairs_of_hidden_states_leave_no_graph_once_they_are_dropped():
    class Cell(Layer):
        def __init__(self):
            super().__init__()
            self.cell, self.hidden = nn.LSTMCell(8, 8), None

        def forward(self, x):
            self.hidden = self.cell(x, self.hidden)
            return x + self.hidden[0]

    before = tensors_with_graphs()
    module = train(lambda: stack(Cell, unrolled), steps=4).module
    for layer in module.model.layers:
        layer.hidden = None
    assert tensors_with_graphs() == before


@pytest.mark.parametrize("how", ["update", "forward"])
def test_a_torchmetric_inside_is_updated_once(how):
    class Measured(Layer):
        def __init__(self):
            super().__init__()
            self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

        def forward(self, x):
            x = torch.tanh(self.linear(x))
            self.mean.update(x.detach()) if how == "update" else self.mean(x.detach())
            self.all.update(x.detach().sum())
            return x * x

    def observe(module):
        return [(m.mean.update_count, m.mean.compute().item(), m.all.compute().tolist()) for m in module.model.layers]

    assert_exact(lambda: stack(Measured), observe=observe)


def test_a_collection_of_metrics_hidden_in_a_dict_is_updated_once():
    class Measured(Layer):
        def __init__(self):
            super().__init__()
            self.metrics = {
                "hidden": [torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])]
            }

        def forward(self, x):
            x = torch.tanh(self.linear(x))
            self.metrics["hidden"][0].update(x.detach())
            return x * x

    def observe(module):
        return [{k: v.item() for k, v in m.metrics["hidden"][0].compute().items()} for m in module.model.layers]

    assert_exact(lambda: stack(Measured), observe=observe)


def test_modules_hidden_in_a_list_with_modules_of_their_own():
    class Hides(Layer):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2)))]

        def forward(self, x):
            return super().forward(self.hidden[0](x).sin())

    def observe(module):
        return [made.hidden[0][1][0].running_mean.tolist() for made in module.model.layers]

    assert_exact(lambda: stack(Hides), observe=observe)


def test_an_optimizer_that_steps_in_backward():
    class InBackward(Training):
        def configure_optimizers(self):
            for parameter in self.parameters():
                optimizer = torch.optim.Adam([parameter], lr=0.01)

                def step(parameter, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                parameter.register_post_accumulate_grad_hook(step)
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def make():
        tied = nn.Linear(8, 8)

        def layer():
            made = Layer()
            made.linear = tied
            return made

        return InBackward(Stack(layer))

    assert_exact(make, data=batches(5))


@functools.lru_cache
def scales(width: int) -> tuple[torch.Tensor, list[int]]:
    """Its annotation is no class, though it looks like one."""
    return torch.linspace(0.5, 1.0, width), [width]


def test_types_with_arguments_are_no_state():
    class Annotated(Layer):
        def __init__(self):
            super().__init__()
            self.kinds = [list[int], dict[str, tuple[int, ...]]]

        def forward(self, x):
            return super().forward(x) * scales(x.shape[-1])[0]

    assert_exact(lambda: stack(Annotated))
