"""Modes: flags of modules and weights that are turned over between forward and backward."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_ckpt.recompute import ReplayError
from tests.replay.support import Layer, Stack, assert_exact, assert_exact_or_named, stack, train
from tests.support import Training, batches


class Noisy(Layer):
    """Behaves differently in training and evaluation, by a module and by its flag."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x):
        x = self.dropout(self.norm(self.linear(x)))
        return torch.tanh(x * (1.5 if self.training else 1.0)) * x


def changing(change, back=lambda model: None, layer=Noisy):
    """A training whose `change` of the model comes between forward and backward."""

    class Changing(Training):
        def training_step(self, batch, batch_idx):
            back(self.model)
            loss = super().training_step(batch, batch_idx)
            change(self.model)
            return loss

    return lambda: Changing(Stack(layer))


def test_eval_between_forward_and_backward():
    assert_exact(changing(lambda model: model.eval(), lambda model: model.train()))


def test_train_between_an_eval_forward_and_backward():
    assert_exact(changing(lambda model: model.train(), lambda model: model.eval()))


def test_a_pass_in_the_other_mode_between_forward_and_backward():
    def validate(model):
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 8))
        model.train()

    assert_exact(changing(validate))


def test_only_a_submodule_is_turned_over_in_turns():
    class Turns(Training):
        def on_train_batch_start(self, batch, batch_idx):
            for layer in self.model.layers:
                layer.norm.train(batch_idx % 2 == 0)
                layer.dropout.train(batch_idx % 3 == 0)

    assert_exact(lambda: Turns(Stack(Noisy)), steps=9)


def test_a_dropout_probability_changed_between_forward_and_backward():
    def change(p):
        def set_all(model):
            for layer in model.layers:
                layer.dropout.p = p

        return set_all

    assert_exact(changing(change(0.9), change(0.3)))


def test_a_number_in_a_shared_config_changed_between_forward_and_backward():
    class Config:
        gain = 1.0

    class Configured(Layer):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, x):
            return super().forward(x * self.config.gain)

    config = Config()

    def set_gain(gain):
        return lambda model: setattr(config, "gain", gain)

    assert_exact(changing(set_gain(3.0), set_gain(0.5), lambda: Configured(config)))


def test_a_number_of_the_class_changed_between_forward_and_backward():
    class Tempered(Layer):
        temperature = 1.0

        def forward(self, x):
            return super().forward(x * self.temperature)

    def set_temperature(value):
        return lambda model: setattr(Tempered, "temperature", value)

    assert_exact(changing(set_temperature(0.1), set_temperature(1.0), Tempered), steps=6)


# ---------------------------------------------------------------- requires_grad


def test_freezing_between_forward_and_backward():
    assert_exact(changing(lambda m: m.requires_grad_(False), lambda m: m.requires_grad_(True)), steps=4)


def test_unfreezing_between_forward_and_backward():
    def freeze(frozen):
        def set_all(model):
            for layer in model.layers[:2]:
                layer.linear.requires_grad_(not frozen)

        return set_all

    assert_exact(changing(freeze(False), freeze(True)))


def test_frozen_layers_and_frozen_parts_of_layers():
    class Adapted(Layer):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)
            self.linear.requires_grad_(False)

        def forward(self, x):
            return super().forward(x) + self.up(torch.tanh(self.down(x)))

    def make():
        training = stack(Adapted, count=4)
        training.model.stem.requires_grad_(False)
        training.model.layers[1].requires_grad_(False)
        training.model.layers[3].up.requires_grad_(False)
        return training

    assert_exact(make)


def test_layers_thawed_one_after_another():
    class Gradual(Training):
        def on_train_batch_start(self, batch, batch_idx):
            for i, layer in enumerate(self.model.layers):
                layer.requires_grad_(i >= 3 - batch_idx)

    assert_exact(lambda: Gradual(Stack(Noisy)), steps=5)


class Adversarial(pl.LightningModule):
    """Two networks with an optimizer each, whose steps come in the order `order` says."""

    def __init__(self, order):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.model = Stack(Noisy), Stack(Noisy)
        self.order = order

    def training_step(self, batch, batch_idx):
        optimizers = dict(zip("gd", self.optimizers(), strict=True))
        fake = self.generator(batch)
        if self.order == "both forward first":
            verdict = self.model(fake)
        for name in "dg" if self.order == "discriminator first" else "gd":
            self.toggle_optimizer(optimizers[name])
            if name == "g":
                loss = (verdict if self.order == "both forward first" else self.model(fake)).square().mean()
            else:
                loss = (self.model(batch) - self.model(fake.detach())).square().mean()
            optimizers[name].zero_grad()
            if self.order == "untoggled before backward":
                self.untoggle_optimizer(optimizers[name])
            self.manual_backward(loss)
            optimizers[name].step()
            if self.order != "untoggled before backward":
                self.untoggle_optimizer(optimizers[name])
        return None

    def configure_optimizers(self):
        networks = (self.generator, self.model)
        return [torch.optim.Adam(network.parameters(), lr=0.01) for network in networks]


@pytest.mark.parametrize(
    "order", ["discriminator first", "generator first", "both forward first", "untoggled before backward"]
)
def test_two_networks_in_turns(order):
    assert_exact(lambda: Adversarial(order), Noisy)


# ---------------------------------------------------------------- weights


def test_a_weight_changed_between_forward_and_backward_is_an_error_as_without():
    @torch.no_grad()
    def change(model):
        model.layers[1].linear.weight.mul_(0.9)

    with pytest.raises(RuntimeError, match="inplace operation"):
        train(changing(change), None)
    with pytest.raises(ReplayError, match=r"'model\.layers\.1' has a weight .*inplace operation.*Run backward before"):
        train(changing(change))


def test_an_optimizer_step_between_two_backward_passes_is_an_error_as_without():
    class Twice(Training):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            first, second = super().training_step(batch, batch_idx), super().training_step(batch, batch_idx)
            for loss in (first, second):
                self.manual_backward(loss)
                self.optimizers().step()

    with pytest.raises(RuntimeError, match="inplace operation"):
        train(lambda: Twice(Stack(Layer)), None)
    with pytest.raises(ReplayError, match=r"'model\.layers\.2' has a weight"):
        train(lambda: Twice(Stack(Layer)))


def test_weights_swapped_for_an_average_and_back_between_forward_and_backward():
    def swap(model):
        kept = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        with torch.no_grad():
            model(torch.ones(2, 8))
        for parameter, data in zip(model.parameters(), kept, strict=True):
            parameter.data = data

    assert_exact(changing(swap))


def test_weights_replaced_through_data_between_forward_and_backward_are_exact_or_named():
    def move(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.99

    assert_exact_or_named(changing(move), steps=6)


def test_a_weight_replaced_by_a_new_parameter_between_forward_and_backward():
    def replace(model):
        for layer in model.layers:
            layer.spare, layer.linear.bias = layer.linear.bias, nn.Parameter(torch.zeros(8))

    def back(model):
        for layer in model.layers:
            layer.linear.bias = getattr(layer, "spare", layer.linear.bias)

    assert_exact_or_named(changing(replace, back))


def test_gradient_accumulation_and_clipping():
    assert_exact(lambda: stack(Noisy), steps=7, accumulate_grad_batches=3, gradient_clip_val=0.1)


def test_training_between_validation_epochs():
    class Validated(Training):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(self.model, batch))

        def val_dataloader(self):
            return batches(2)

    assert_exact(lambda: Validated(Stack(Noisy)), max_epochs=3, steps=3)
