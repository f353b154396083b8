"""Observers: who watches sees a step once; who acts, acts in both runs."""

import functools

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_ckpt import is_replaying
from lightning_ckpt.recompute import ReplayError
from tests.replay.support import Layer, Stack, assert_exact, assert_exact_or_named, stack
from tests.support import Training


class Hooked(Training):
    """`hook(module, seen)` puts hooks on a module; what they see is kept in `seen`."""

    def __init__(self, place, layer=Layer):
        super().__init__(Stack(layer))
        self.seen = []
        for made in self.model.layers:
            place(made, self.seen)


def seen(module):
    return module.seen


# ---------------------------------------------------------------- watching


@pytest.mark.parametrize("inner", [True, False], ids=["inside", "on the layer"])
@pytest.mark.parametrize("always", [True, False], ids=["always_call", ""])
@pytest.mark.parametrize("with_kwargs", [True, False], ids=["with_kwargs", ""])
def test_watching_hooks_see_a_step_once(inner, always, with_kwargs):
    def place(layer, seen):
        module = layer.linear if inner else layer
        module.register_forward_pre_hook(lambda *a: seen.append(("pre", len(a))), with_kwargs=with_kwargs)
        module.register_forward_hook(
            lambda *a: seen.append(("post", a[-1].detach().sum().item())), with_kwargs=with_kwargs, always_call=always
        )

    assert_exact(lambda: Hooked(place), observe=seen)


def test_watching_hooks_may_compute_with_gradients_on():
    """What autograd saves for them is not saved in the replay, where they are quiet."""

    def place(layer, seen):
        layer.linear.register_forward_hook(lambda module, args, output: seen.append((output * output).norm().item()))

    assert_exact(lambda: Hooked(place), observe=seen)


def test_global_hooks_see_a_step_once():
    counts = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: counts.append(type(module).__name__)
    )

    class Counting(Training):
        def on_train_start(self):
            counts.clear()

    try:
        assert_exact(lambda: Counting(Stack(Layer)), observe=lambda module: list(counts))
    finally:
        handle.remove()


def test_hooks_that_know_the_replay_by_asking():
    def place(layer, seen):
        def observe_and_act(module, args, output):
            if not is_replaying():
                seen.append(output.detach().mean().item())
            return output * 0.5

        layer.linear.register_forward_hook(observe_and_act)

    assert_exact(lambda: Hooked(place), observe=seen)


def test_backward_hooks_inside_a_layer_see_a_step_once():
    def place(layer, seen):
        layer.linear.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].sum().item()))
        layer.linear.register_full_backward_pre_hook(lambda m, gout: seen.append(gout[0].mean().item()))

    assert_exact(lambda: Hooked(place), observe=seen)


def test_metrics_that_hooks_update_count_once():
    class Measured(Training):
        def __init__(self):
            super().__init__(Stack(Layer))
            self.mean = torchmetrics.MeanMetric()
            for layer in self.model.layers:
                layer.linear.register_forward_hook(lambda m, a, output: self.mean.update(output.detach()))

    def observe(module):
        return module.mean.update_count, module.mean.compute().item()

    assert_exact(Measured, observe=observe)


def test_hooks_on_parameters_and_activations_act_once():
    class Activations(Layer):
        def forward(self, x):
            x = self.linear(x)
            x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            return torch.tanh(x) * x

    class Clipped(Training):
        def __init__(self):
            super().__init__(Stack(Activations))
            for parameter in self.model.parameters():
                parameter.register_hook(lambda grad: grad * 0.5)

    assert_exact(Clipped)


# ---------------------------------------------------------------- acting


def test_hooks_that_change_outputs_and_arguments():
    def place(layer, seen):
        layer.linear.register_forward_hook(lambda module, args, output: output * 0.5)
        layer.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        layer.register_forward_hook(lambda module, args, output: output.sin())
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))

    assert_exact(lambda: Hooked(place))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return {"hidden": torch.tanh(self.linear(x * scale))}


class WithInner(Layer):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return super().forward(self.inner(x, scale=1.0)["hidden"])


def test_hooks_that_change_keyword_arguments():
    def place(layer, seen):
        def change(module, args, kwargs):
            return args, {**kwargs, "scale": 0.5}

        layer.inner.register_forward_pre_hook(change, with_kwargs=True)

    assert_exact(lambda: Hooked(place, WithInner))


def test_hooks_that_change_keyword_arguments_where_they_are():
    def place(layer, seen):
        def change(module, args, kwargs):
            kwargs["scale"] = 0.5

        layer.inner.register_forward_pre_hook(change, with_kwargs=True)

    assert_exact(lambda: Hooked(place, WithInner))


def test_hooks_that_change_an_output_where_it_is():
    def place(layer, seen):
        def change(module, args, output):
            output["hidden"] = output["hidden"] * 0.5

        layer.inner.register_forward_hook(change)

    assert_exact(lambda: Hooked(place, WithInner))


class Projects(Inner):
    def forward(self, x, scale=1.0):
        return {"hidden": self.linear(x * scale)}


class WithProjection(WithInner):
    def __init__(self):
        super().__init__()
        self.inner = Projects()


@pytest.mark.parametrize("through", ["operator", "dict"])
def test_hooks_that_change_a_tensor_in_an_output_where_it_is(through):
    def place(layer, seen):
        if through == "operator":
            layer.inner.linear.register_forward_hook(lambda module, args, output: (output.mul_(0.5), None)[1])
        else:
            layer.inner.register_forward_hook(lambda module, args, output: (output["hidden"].mul_(0.5), None)[1])

    assert_exact(lambda: Hooked(place, WithProjection))


def test_a_hook_that_changes_an_output_through_data_is_refused():
    def place(layer, seen):
        layer.inner.linear.register_forward_hook(lambda module, args, output: (output.data.mul_(0.5), None)[1])

    with pytest.raises(ReplayError, match=r"'model\.layers\.2' saved tensor \d .* with other values in the replay"):
        assert_exact(lambda: Hooked(place, WithProjection))


def test_a_hook_that_acts_on_one_call_of_a_module_and_watches_another():
    class Twice(Layer):
        def forward(self, x):
            return super().forward(torch.cat([self.linear(x[:2]), x[2:]]).sin())

    def place(layer, seen):
        layer.linear.register_forward_hook(lambda module, args, output: output + 0.5 if len(output) == 4 else None)

    assert_exact(lambda: Hooked(place, Twice))


def test_hooks_that_tap_a_feature_which_the_layer_reads_afterwards():
    class Tapped(Layer):
        def __init__(self):
            super().__init__()
            self.body, self.features = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), {}
            self.body[1].register_forward_hook(self.tap)

        def tap(self, module, args, output):
            self.features["tanh"] = output

        def forward(self, x):
            x = self.body(x)
            return super().forward(x * self.features["tanh"])

    assert_exact(lambda: stack(Tapped))


def test_hooks_that_set_a_mask_which_another_module_reads():
    class Masked(Layer):
        def __init__(self):
            super().__init__()
            self.state = {"mask": None}

            def prepare(module, args):
                self.state["mask"] = (args[0] > 0).float()

            self.linear.register_forward_pre_hook(prepare)

        def forward(self, x):
            return torch.sin(super().forward(x) * self.state["mask"])

    assert_exact(lambda: stack(Masked), steps=6)


def around_forward(hook, start=0):
    """A training whose layers have `hook` inside only while forward runs, as in activation steering."""

    class Steered(Training):
        def training_step(self, batch, batch_idx):
            if batch_idx < start:
                return super().training_step(batch, batch_idx)
            handles = [layer.linear.register_forward_hook(hook) for layer in self.model.layers]
            loss = super().training_step(batch, batch_idx)
            for handle in handles:
                handle.remove()
            return loss

    return lambda: Steered(Stack(Layer))


@pytest.mark.parametrize(
    "start",
    [0, 3],
    ids=["always", "after a warm-up"],
)
def test_an_acting_hook_that_is_there_only_while_forward_runs(start):
    assert_exact_or_named(around_forward(lambda module, args, output: output + 0.5, start), steps=7)


@pytest.mark.parametrize(
    "start",
    [0, 3],
    ids=["always", "after a warm-up"],
)
def test_an_acting_hook_that_is_put_on_between_forward_and_backward(start):
    class Late(Training):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == start:
                for layer in self.model.layers:
                    layer.linear.register_forward_hook(lambda module, args, output: output * 0.5)
            return loss

    assert_exact_or_named(lambda: Late(Stack(Layer)), steps=7)


@pytest.mark.parametrize(
    "start",
    [0, 3],
    ids=["first call", "after a warm-up"],
)
def test_an_acting_hook_that_removes_itself(start):
    class Once(Training):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx != start:
                return
            for layer in self.model.layers:

                def once(module, args, output, layer=layer):
                    layer.handle.remove()
                    return output + 0.5

                layer.handle = layer.linear.register_forward_hook(once)

    assert_exact_or_named(lambda: Once(Stack(Layer)), steps=7)


# ---------------------------------------------------------------- logging


class Logs(Layer):
    """Logs by what it is given as `log`."""

    log = None

    def forward(self, x):
        x = self.linear(x)
        self.log("activation", x.detach().abs().mean())
        return torch.tanh(x)


def logging(give):
    class Logged(Training):
        def __init__(self):
            super().__init__(Stack(Logs, 1))
            for layer in self.model.layers:
                layer.log = give(self)

    return Logged


SETTINGS = [
    {},
    {"on_epoch": True, "on_step": True},
    {"on_epoch": True, "reduce_fx": "sum"},
    {"on_epoch": True, "reduce_fx": "mean", "batch_size": 3},
    {"on_epoch": True, "reduce_fx": "max"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_value_that_a_layer_logs_counts_once(settings):
    assert_exact(logging(lambda module: lambda *args: module.log(*args, **settings)), max_epochs=2)


def test_a_value_that_a_layer_logs_by_a_bound_method_counts_once():
    assert_exact(logging(lambda module: functools.partial(module.log, on_epoch=True, reduce_fx="sum")))


def test_a_dict_that_a_layer_logs_counts_once():
    def give(module):
        return lambda name, value: module.log_dict({name: value, "rows": 1.0}, on_epoch=True, reduce_fx="sum")

    assert_exact(logging(give))


def test_a_metric_object_that_a_layer_logs_counts_once():
    class Measured(Training):
        def __init__(self):
            super().__init__(Stack(Logs, 1))
            self.activation = torchmetrics.MeanMetric()
            self.model.layers[0].log = self.measure

        def measure(self, name, value):
            self.activation.update(value)
            self.log(name, self.activation, on_step=False, on_epoch=True)

    assert_exact(Measured, max_epochs=2)


@pytest.mark.xfail(
    strict=True,
    reason="limit: values that a layer hands to the logger itself, not by `log`, are written again by the replay",
)
def test_values_that_a_layer_hands_to_the_logger_are_written_once(tmp_path):
    class Writer(pl.loggers.CSVLogger):
        written: list = []

        def log_metrics(self, metrics, step=None):
            self.written.append(dict(metrics))

    class Written(Training):
        def __init__(self):
            super().__init__(Stack(Logs, 1))
            self.model.layers[0].log = lambda name, value: self.logger.log_metrics({name: value.item()})

    def make():
        Writer.written = []
        return Written()

    logger = Writer(tmp_path)
    assert_exact(make, logger=logger, log_every_n_steps=1, observe=lambda module: list(Writer.written))
