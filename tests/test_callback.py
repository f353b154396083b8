"""ActivationCheckpointing in real Trainer runs: where layers come from, what it leaves behind, what it says."""

import copy
import logging
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.recompute import attached
from tests.support import Block, Calls, Training, assert_equal, batches, blocks, fit, trainer

INFO = "lightning.pytorch.utilities.rank_zero"


def touched(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if "forward" in part.__dict__]


class BuildsInSetup(Training):
    def __init__(self):
        super().__init__(nn.Identity())

    def setup(self, stage):
        if isinstance(self.model, nn.Identity):
            self.model = blocks()


class BuildsInConfigureModel(Training):
    def __init__(self):
        super().__init__(nn.Identity())

    def configure_model(self):
        if isinstance(self.model, nn.Identity):
            self.model = blocks()


# ---------------------------------------------------------------- exactness and engagement


@pytest.mark.parametrize("make", [Training, BuildsInSetup, BuildsInConfigureModel])
def test_layers_are_found_wherever_they_are_built(make, monkeypatch):
    plain = fit(make)
    calls = []
    original = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: calls.append(1) or original(self, x))
    assert_equal(fit(make, callbacks=[ActivationCheckpointing()]), plain)
    assert len(calls) == 2 * 4 * 3


def test_only_the_chosen_layers_run_twice(monkeypatch):
    torch.manual_seed(0)
    module = Training()
    calls = Calls(monkeypatch, module)
    trainer([ActivationCheckpointing(every_n_layers=2)]).fit(module, batches(3))
    assert [calls.counts[f"model.{i}"] for i in range(1, 5)] == [6, 3, 6, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"barebones": True, "logger": None, "enable_checkpointing": None, "enable_progress_bar": None},
        {"max_epochs": 2, "limit_train_batches": 2},
    ],
    ids=lambda settings: next(iter(settings)) + "=" + str(next(iter(settings.values()))),
)
def test_equals_the_plain_run_with_trainer_settings(settings):
    if settings.get("barebones"):
        settings = {**settings, "enable_model_summary": None, "num_sanity_val_steps": None}
    plain = fit(Training, **settings)
    assert_equal(fit(Training, callbacks=[ActivationCheckpointing()], **settings), plain)


def test_equals_the_plain_run_with_lbfgs_which_calls_the_closure_many_times():
    def make():
        return Training(blocks(2), optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=4))

    plain = fit(make)
    assert_equal(fit(make, callbacks=[ActivationCheckpointing()]), plain)


class TwoOptimizers(Training):
    """Manual optimization: two backward passes through one graph, two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        output = self.model(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(output.square().mean(), retain_graph=True)
        self.manual_backward(output.abs().mean())
        first.step()
        second.step()

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:4], lr=0.1), torch.optim.Adam(parameters[4:], lr=0.01)


def test_equals_the_plain_run_in_manual_optimization_with_two_optimizers():
    plain = fit(TwoOptimizers)
    assert_equal(fit(TwoOptimizers, callbacks=[ActivationCheckpointing()]), plain)


def test_a_layer_in_several_places_is_attached_once_and_replayed_at_each_call(monkeypatch):
    def make():
        return Training(nn.Sequential(nn.Linear(8, 8), *[Block()] * 4))

    plain = fit(make)
    calls = []
    original = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: calls.append(1) or original(self, x))
    callback = ActivationCheckpointing()
    assert_equal(fit(make, callbacks=[callback]), plain)
    assert len(callback.selection) == 1
    assert len(calls) == 2 * 4 * 3


def test_validation_runs_layers_once(monkeypatch):
    class Validated(Training):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.model(batch).square().mean())

    torch.manual_seed(0)
    module = Validated()
    calls = Calls(monkeypatch, module)
    trainer([ActivationCheckpointing()]).fit(module, batches(3), batches(5))
    assert calls.counts["model.1"] == 2 * 3 + 5


@pytest.mark.parametrize("finder", ["batch size", "learning rate"])
def test_trials_of_the_tuner_are_recomputed_too(finder, monkeypatch, tmp_path):
    class Tuned(Training):
        def __init__(self):
            super().__init__()
            self.batch_size, self.lr = 2, 0.1

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=self.batch_size)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    per_step = []
    original, step = Block.forward, Tuned.training_step
    monkeypatch.setattr(Block, "forward", lambda self, x: per_step.append(1) or original(self, x))
    monkeypatch.setattr(Tuned, "training_step", lambda self, *args: per_step.append(0) or step(self, *args))
    tuner = (
        BatchSizeFinder(steps_per_trial=2, max_trials=2)
        if finder == "batch size"
        else LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    )
    trainer([ActivationCheckpointing(), tuner], limit_train_batches=4, default_root_dir=tmp_path).fit(Tuned())
    steps = "".join(map(str, per_step)).split("0")[1:]
    assert len(steps) > 4
    assert {len(step) for step in steps} == {8}


# ---------------------------------------------------------------- nothing is left behind


def test_nothing_is_left_after_fit_and_the_callback_can_be_used_again(monkeypatch):
    module, callback = Training(), ActivationCheckpointing()
    names = [name for name, _ in module.named_modules()]
    loop = trainer([callback])
    for _ in range(2):
        loop.fit(module, batches(2))
        loop.fit_loop.epoch_progress.reset()
        assert touched(module) == []
        assert "setup" not in loop.strategy.__dict__
        assert not {"training_step", "backward", "optimizer_step"} & loop.strategy.__dict__.keys()
    assert [name for name, _ in module.named_modules()] == names
    calls = Calls(monkeypatch, module)
    loop.fit(module, batches(2))
    assert calls.counts["model.1"] == 4


def test_validate_test_and_predict_are_not_touched(monkeypatch):
    class Evaluated(Training):
        def validation_step(self, batch, batch_idx):
            with torch.enable_grad():
                assert touched(self) == []
                self.model(batch)

        test_step = predict_step = validation_step

    module = Evaluated()
    loop = trainer([ActivationCheckpointing()], inference_mode=False)
    calls = Calls(monkeypatch, module)
    loop.validate(module, batches(1), verbose=False)
    loop.test(module, batches(1), verbose=False)
    loop.predict(module, batches(1))
    assert calls.counts["model.1"] == 3


class Interrupted(Training):
    def __init__(self, error, where="training_step"):
        super().__init__()
        self.error, self.where = error, where

    def setup(self, stage):
        if self.where == "setup":
            raise self.error

    def training_step(self, batch, batch_idx):
        assert touched(self) == ["model.1", "model.2", "model.3", "model.4"]
        if batch_idx == 1:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("where", ["setup", "training_step"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_nothing_is_left_after_an_exception(error, where):
    module, loop = Interrupted(error, where), trainer([ActivationCheckpointing()])
    with pytest.raises((RuntimeError, SystemExit)):
        loop.fit(module, batches())
    assert touched(module) == []
    assert "setup" not in loop.strategy.__dict__
    assert "training_step" not in loop.strategy.__dict__


def test_after_an_exception_the_next_fit_is_exact():
    def make():
        torch.manual_seed(0)
        module = Training()
        original = module.loss
        module.loss = lambda model, batch: (_ for _ in ()).throw(RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"):
            trainer([ActivationCheckpointing()]).fit(module, batches())
        module.loss = original
        return module

    plain = fit(Training)
    assert_equal(fit(make, callbacks=[ActivationCheckpointing()]), plain)


def test_checkpoints_load_with_and_without_the_callback(tmp_path):
    def make():
        return Training(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))

    torch.manual_seed(0)
    module = make()
    loop = trainer([ActivationCheckpointing()])
    loop.fit(module, batches())
    loop.save_checkpoint(tmp_path / "with.ckpt")
    saved = torch.load(tmp_path / "with.ckpt", weights_only=False)
    assert list(saved["state_dict"]) == list(make().state_dict())
    assert saved["callbacks"] == {}
    resumed = []
    for callbacks in ([], [ActivationCheckpointing()]):
        torch.manual_seed(2)
        again = make()
        trainer(callbacks, max_epochs=2).fit(again, batches(), ckpt_path=tmp_path / "with.ckpt", weights_only=False)
        resumed.append(again.state_dict())
    assert all(torch.equal(resumed[0][name], resumed[1][name]) for name in resumed[0])


def test_averaged_weights_are_those_of_the_plain_run():
    plain = fit(Training, callbacks=[WeightAveraging()])
    assert_equal(fit(Training, callbacks=[ActivationCheckpointing(), WeightAveraging()]), plain)


def test_a_deep_copy_or_pickle_made_in_training_runs_its_own_weights():
    class Copied(Training):
        def on_train_batch_end(self, *args):
            for copied in (copy.deepcopy(self.model), pickle.loads(pickle.dumps(self.model))):
                with torch.no_grad():
                    for parameter in copied.parameters():
                        parameter.zero_()
                x = torch.ones(2, 8, requires_grad=True)
                assert torch.equal(copied(x), torch.zeros(2, 8))
                copied(x).sum().backward()
                assert copied[1].linear.weight.grad is not None
            self.copied = copied

    module = Copied()
    trainer([ActivationCheckpointing()]).fit(module, batches())
    assert attached(module.copied[1]).layer is module.copied[1]


def test_a_copy_made_in_training_can_be_trained_itself():
    class Copied(Training):
        def on_train_end(self):
            self.__dict__["twin"] = Training(copy.deepcopy(self.model))

    module = Copied()
    trainer([ActivationCheckpointing()]).fit(module, batches())
    trainer([ActivationCheckpointing()]).fit(module.twin, batches())
    assert touched(module.twin) == []


# ---------------------------------------------------------------- two callbacks, others' checkpointing


def test_two_callbacks_with_layers_of_their_own_both_act(monkeypatch):
    callbacks = [ActivationCheckpointing(layers=f"model.{i}") for i in (1, 3)]
    plain = fit(Training)
    assert_equal(fit(Training, callbacks=callbacks), plain)
    module = Training()
    calls = Calls(monkeypatch, module)
    trainer(callbacks).fit(module, batches(1))
    assert [calls.counts[f"model.{i}"] for i in range(1, 5)] == [2, 1, 2, 1]


@pytest.mark.parametrize("other", ["model.1", "model.1.linear"])
def test_two_callbacks_on_one_layer_are_an_error_that_names_both(other):
    module = Training()
    loop = trainer([ActivationCheckpointing(layers=other), ActivationCheckpointing(every_n_layers=3)])
    with pytest.raises(MisconfigurationException, match=rf"layer 'model\.1'.*every_n_layers=3.*layers='{other}'"):
        loop.fit(module, batches())
    assert touched(module) == []


def test_a_wrapped_layer_is_left_to_its_wrapper():
    def make():
        model = blocks()
        model[2] = checkpoint_wrapper(model[2])
        return Training(model)

    plain = fit(make)
    with pytest.warns(UserWarning, match=r"1 of 4 chosen layers are.*already.*checkpoint_wrapper.*model\.2"):
        assert_equal(fit(make, callbacks=[ActivationCheckpointing()]), plain)


class PartlyCheckpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(checkpoint(self.inner, x, use_reentrant=False))


def test_a_layer_that_checkpoints_a_part_of_itself_is_reported_and_exact():
    def make():
        return Training(nn.Sequential(nn.Linear(8, 8), *[PartlyCheckpointed() for _ in range(3)]))

    plain = fit(make)
    with pytest.warns(UserWarning, match=r"PartlyCheckpointed layers checkpoint a part.*model\.\{1, 2, 3\}"):
        assert_equal(fit(make, callbacks=[ActivationCheckpointing()]), plain)


# ---------------------------------------------------------------- what it says


def test_the_choice_is_printed_once_and_short(caplog):
    module = Training(blocks(100))
    with caplog.at_level(logging.INFO, logger=INFO):
        trainer([ActivationCheckpointing(every_n_layers=3)]).fit(module, batches(2))
    printed = [record.message for record in caplog.records if "recomputes in backward" in record.message]
    assert len(printed) == 1
    assert "34 of 100 Block: model.{1, 4, 7, ..., 100}, 0.000336 MiB of parameters each" in printed[0]
    assert len(printed[0]) < 250


def test_disabled_says_so_and_leaves_the_model_alone(caplog, monkeypatch):
    module = Training()
    calls = Calls(monkeypatch, module)
    with caplog.at_level(logging.INFO, logger=INFO):
        trainer([ActivationCheckpointing(enabled=False)]).fit(module, batches(3))
    assert calls.counts["model.1"] == 3
    assert "ActivationCheckpointing(every_n_layers=1, enabled=False): off" in caplog.text


def test_a_layer_that_is_never_called_is_reported():
    class Unused(Training):
        def __init__(self):
            super().__init__()
            self.spare = nn.ModuleList([Block(), Block()])

    with pytest.warns(UserWarning, match=r"2 of 6 layers were not called.*spare\.\{0, 1\}"):
        trainer([ActivationCheckpointing()]).fit(Unused(), batches(2))


@pytest.mark.parametrize("layers", ["Blokc", "model.9", nn.Conv2d])
def test_a_pattern_that_matches_nothing_ends_the_fit(layers):
    with pytest.raises(ValueError, match="matches no module of Training"):
        trainer([ActivationCheckpointing(layers=layers)]).fit(Training(), batches())


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_bad_every_n_layers_is_refused_at_once(value):
    with pytest.raises(ValueError, match=rf"every_n_layers={value!r}` must be an integer of at least 1"):
        ActivationCheckpointing(every_n_layers=value)


def test_layers_and_check_fn_together_are_refused():
    with pytest.raises(ValueError, match="either `layers` or `check_fn`"):
        ActivationCheckpointing(layers="Block", check_fn=lambda module: True)


def test_no_option_makes_training_inexact():
    assert set(ActivationCheckpointing.__init__.__annotations__) == {
        "every_n_layers",
        "layers",
        "check_fn",
        "enabled",
        "monitor",
        "verify",
        "offload",
        "policy",
        "memory_budget",
        "plan",
        "return",
    }


def test_metrics_inside_a_model_are_never_layers():
    class Measured(Training):
        def __init__(self):
            super().__init__()
            self.metrics = nn.ModuleList([MeanMetric(), MeanMetric()])

    callback = ActivationCheckpointing(check_fn=lambda module: not list(module.children()))
    trainer([callback]).fit(Measured(), batches(1))
    assert not any("metrics" in name for name in callback.selection.layers)


def test_a_monitor_comes_along_once(tmp_path):
    loop = trainer([ActivationCheckpointing()], logger=True, default_root_dir=tmp_path)
    loop.fit(Training(), batches(1))
    loop.fit(Training(), batches(1))
    assert sum(isinstance(callback, StepMonitor) for callback in loop.callbacks) == 1
    own = trainer([ActivationCheckpointing(), StepMonitor()])
    own.fit(Training(), batches(1))
    assert sum(isinstance(callback, StepMonitor) for callback in own.callbacks) == 1
    without = trainer([ActivationCheckpointing(monitor=False)])
    without.fit(Training(), batches(1))
    assert not any(isinstance(callback, StepMonitor) for callback in without.callbacks)


def test_layers_in_another_lightning_module_are_found():
    class Outer(Training):
        def __init__(self):
            super().__init__(Training())

        def training_step(self, batch, batch_idx):
            return self.model.training_step(batch, batch_idx)

    callback = ActivationCheckpointing()
    trainer([callback]).fit(Outer(), batches(1))
    assert list(callback.selection.layers) == [f"model.model.{i}" for i in range(1, 5)]
    assert not isinstance(next(iter(callback.selection.layers.values())), pl.LightningModule)
