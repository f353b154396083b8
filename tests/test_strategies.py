"""Strategies and the callback's `offload` on the CPU, where nothing is moved: names, options, flags, plain training."""

import functools
import logging
import re
from importlib.util import find_spec

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_ckpt
from lightning_ckpt import (
    ActivationCheckpointing,
    OffloadDDPStrategy,
    OffloadDeepSpeedStrategy,
    OffloadFSDPStrategy,
    OffloadMixin,
    OffloadModelParallelStrategy,
    OffloadOptions,
    OffloadStrategy,
)
from lightning_ckpt.offload import OffloadError
from lightning_ckpt.strategies import local_ranks
from tests.monitor.support import Logged, layout, rows_of
from tests.support import Calls, Run, Training, assert_equal, batches, fit, trainer
from tests.test_callback import INFO, TwoOptimizers, touched
from tests.test_cli import callback_of, run
from tests.test_selection import WITHOUT_LIGHTNING, run_python

STRATEGIES = {
    "ckpt_offload": (OffloadStrategy, SingleDeviceStrategy),
    "ckpt_offload_ddp": (OffloadDDPStrategy, DDPStrategy),
    "ckpt_offload_fsdp": (OffloadFSDPStrategy, FSDPStrategy),
    "ckpt_offload_model_parallel": (OffloadModelParallelStrategy, ModelParallelStrategy),
    "ckpt_offload_deepspeed": (OffloadDeepSpeedStrategy, DeepSpeedStrategy),
}
WITHOUT_DEEPSPEED = [name for name in STRATEGIES if name != "ckpt_offload_deepspeed"]
WHY = "nothing is moved: there is no accelerator, so saved activations are in host memory already."

needs_no_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")


class OffloadOwnStrategy(OffloadMixin, SingleDeviceStrategy):
    """What a user writes for a strategy of their own."""


@pytest.fixture
def said(caplog):
    """What was said about moving since this was called last."""

    def said() -> list[str]:
        words = ("moved", "travel")
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [message for message in messages if any(word in message for word in words)]

    with caplog.at_level(logging.INFO, logger=INFO):
        yield said


def hooks_and_attributes(module: nn.Module) -> dict[str, dict[str, object]]:
    """All that may be attached to the parts of a module; containers by their content."""
    return {
        name: {
            key: list(value) if isinstance(value, dict) else id(value)
            for key, value in vars(part).items()
            if key not in ("_trainer", "_metric_attributes", "_current_fx_name", "training", "_device", "_fabric")
        }
        for name, part in module.named_modules()
    }


def again(loop: pl.Trainer, *args, **kwargs) -> None:
    """Fit once more with the same Trainer."""
    loop.fit_loop.epoch_progress.reset()
    loop.fit(*args, **kwargs)


# ---------------------------------------------------------------- names and objects


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_registered_with_one_line_about_it(name):
    entry, (cls, base) = StrategyRegistry[name], STRATEGIES[name]
    assert entry["strategy"] is cls
    assert cls.strategy_name == name
    assert re.fullmatch(r"\S[^\n]*host memory[^\n]*", entry["description"])
    assert issubclass(cls, OffloadMixin)
    assert issubclass(cls, base)


@pytest.mark.slow
def test_importing_the_package_is_enough_for_the_names():
    done = run_python(
        "import lightning_ckpt\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        f"assert {set(STRATEGIES)} <= set(StrategyRegistry)\n"
        "print(type(Trainer(strategy='ckpt_offload', accelerator='cpu', logger=False).strategy).__name__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["OffloadStrategy"]


@pytest.mark.parametrize("name", WITHOUT_DEEPSPEED)
def test_a_name_gives_the_defaults(name):
    strategy = trainer(strategy=name).strategy
    assert type(strategy) is STRATEGIES[name][0]
    assert strategy.offload_options == OffloadOptions()
    assert strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize("name", WITHOUT_DEEPSPEED)
def test_an_object_keeps_its_options(name):
    given = STRATEGIES[name][0](
        move="all",
        min_bytes="1MiB",
        keep_last=3,
        max_inflight_bytes="2GB",
        prefetch_bytes=1000,
        host_budget="8GiB",
    )
    strategy = trainer(strategy=given).strategy
    assert strategy is given
    assert strategy.offload_options == OffloadOptions("all", 2**20, 3, 2 * 10**9, 1000, 8 * 2**30)


def test_arguments_of_the_base_reach_it():
    assert OffloadDDPStrategy(keep_last=2, find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}
    assert OffloadFSDPStrategy(keep_last=2, use_orig_params=False).kwargs["use_orig_params"] is False
    assert OffloadModelParallelStrategy(keep_last=2, tensor_parallel_size=3)._tensor_parallel_size == 3
    assert OffloadOwnStrategy("meta", keep_last=2).root_device == torch.device("meta")


@pytest.mark.parametrize("cls", [OffloadStrategy, OffloadModelParallelStrategy, OffloadOwnStrategy])
def test_an_unknown_argument_is_an_error_that_names_it(cls):
    with pytest.raises(TypeError, match="keep_lst"):  # DDP and FSDP pass what they do not know on to PyTorch
        cls(keep_lst=2)


@pytest.mark.parametrize("name", ["ckpt_offlod", "ckpt", "offload", "ckpt_offload_xla", ""])
def test_an_unknown_name_is_lightnings_own_error(name):
    with pytest.raises(ValueError, match=f"invalid strategy name: `strategy={name!r}`"):
        trainer(strategy=name)
    with pytest.raises(KeyError, match="ckpt_offload_model_parallel"):
        StrategyRegistry.get(name)


def test_names_of_lightning_are_what_they_were():
    assert type(trainer(strategy="auto").strategy) is SingleDeviceStrategy
    assert type(trainer(strategy="ddp", devices=2).strategy) is DDPStrategy
    with pytest.raises(AttributeError, match="OffloadStrategies"):
        lightning_ckpt.OffloadStrategies  # noqa: B018


@needs_no_deepspeed
def test_deepspeed_that_is_not_installed_is_lightnings_own_error():
    with pytest.raises(MisconfigurationException) as plain:
        DeepSpeedStrategy()
    for attempt in (OffloadDeepSpeedStrategy, lambda: trainer(strategy="ckpt_offload_deepspeed")):
        with pytest.raises(MisconfigurationException, match="must have DeepSpeed installed") as raised:
            attempt()
        assert str(raised.value) == str(plain.value)


# ---------------------------------------------------------------- devices


class NumberedCPU(CPUAccelerator):
    """The CPU under a number, to tell the device that the Trainer chose from the default."""

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", index) for index in range(devices)]


@pytest.mark.parametrize("strategy", ["ckpt_offload", OffloadStrategy], ids=["name", "object"])
def test_the_device_is_the_one_that_the_trainer_chose(strategy):
    strategy = strategy if isinstance(strategy, str) else strategy(keep_last=2)
    loop = trainer(strategy=strategy, accelerator=NumberedCPU(), devices=1)
    assert loop.strategy.root_device == torch.device("cpu", 0)
    assert (loop.num_devices, loop.world_size, loop.strategy.is_global_zero) == (1, 1, True)
    loop.fit(Training(), batches(1))


def test_a_device_that_is_given_is_kept():
    for device in ("meta", torch.device("meta")):
        assert trainer(strategy=OffloadStrategy(device)).strategy.root_device == torch.device("meta")
        assert trainer(strategy=OffloadStrategy(device=device)).strategy.root_device == torch.device("meta")
    chosen = trainer(strategy=OffloadStrategy("cpu"), accelerator=NumberedCPU(), devices=1)
    assert chosen.strategy.root_device == torch.device("cpu")


def test_what_is_no_device_is_pytorchs_own_error():
    with pytest.raises(RuntimeError, match="nonsense"):
        OffloadStrategy("nonsense")


@pytest.mark.parametrize("devices", [2, 5])
@pytest.mark.parametrize(
    "make", [lambda: "ckpt_offload", OffloadStrategy, lambda: OffloadStrategy("cpu")], ids=["name", "object", "device"]
)
def test_more_than_one_device_is_an_error_that_names_the_strategy_for_it(make, devices):
    with pytest.raises(MisconfigurationException) as raised:
        trainer(strategy=make(), devices=devices)
    assert str(raised.value) == (
        f"`strategy='ckpt_offload'` trains on one device, but the Trainer has {devices}. Write `devices=1`, or "
        "`strategy='ckpt_offload_ddp'`."
    )
    assert "ckpt_offload_ddp" in StrategyRegistry


@pytest.mark.parametrize(
    ("strategy", "settings", "ranks"),
    [
        ("ckpt_offload", {}, 1),
        (OffloadOwnStrategy, {}, 1),
        ("ckpt_offload_ddp", {"devices": 3}, 3),
        ("ckpt_offload_ddp", {"devices": 2, "num_nodes": 4}, 2),
        ("ckpt_offload_fsdp", {"devices": 2}, 2),
        ("ckpt_offload_model_parallel", {"devices": 2}, 2),
        ("ddp", {"devices": 2}, 2),
        ("auto", {}, 1),
    ],
)
def test_the_processes_on_this_machine_are_counted(strategy, settings, ranks):
    strategy = strategy if isinstance(strategy, str) else strategy()
    assert local_ranks(trainer(strategy=strategy, **settings)) == ranks


class AskedError(Exception):
    """Raised in the place of an engine, which needs an accelerator, with what it was asked for."""


@pytest.mark.parametrize("name", WITHOUT_DEEPSPEED)
def test_an_engine_is_told_the_device_the_options_and_the_processes_of_the_machine(name, monkeypatch):
    def engine(device, options, *, local_ranks, say):
        raise AskedError(device, options, local_ranks)

    monkeypatch.setattr("lightning_ckpt.strategies.why_not", lambda device: None)
    monkeypatch.setattr("lightning_ckpt.strategies.OffloadEngine", engine)
    devices = 1 if name == "ckpt_offload" else 3
    loop = trainer(strategy=STRATEGIES[name][0](keep_last=2, host_budget="8GB"), devices=devices)
    loop.strategy.connect(Training())
    with pytest.raises(AskedError) as asked:
        loop.strategy._start(loop)
    assert asked.value.args == (torch.device("cpu"), OffloadOptions(keep_last=2, host_budget=8 * 10**9), devices)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("cls", [*(cls for cls, _ in STRATEGIES.values()), OffloadOwnStrategy])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_last": -1}, "`keep_last=-1` must be a number of layers"),
        ({"move": "some"}, "`move='some'` must be 'hidden' or 'all'"),
        ({"min_bytes": "8G"}, r"`min_bytes='8G'`: .*'8GB'.*'8GiB'"),
        ({"max_inflight_bytes": -5}, "`max_inflight_bytes=-5`: .*'8GB'"),
        ({"prefetch_bytes": 0.5}, r"`prefetch_bytes=0\.5`: .*'8GB'"),
        ({"host_budget": "many"}, "`host_budget='many'`: .*'8GB'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_has_no_meaning_is_refused_at_once_and_quoted(cls, options, words):
    with pytest.raises(OffloadError, match=words):
        cls(**options)


@pytest.mark.parametrize("offload", ["yes", "true", 1, 0, None, 0.5, {"keep_last": 2}, OffloadOptions])
def test_the_callback_refuses_what_is_no_option(offload):
    with pytest.raises(ValueError, match="must be True, False or options") as raised:
        ActivationCheckpointing(offload=offload)
    assert str(raised.value).startswith(f"`offload={offload!r}` must be")
    assert "`OffloadOptions(keep_last=2)`" in str(raised.value)


def test_the_callback_is_shown_with_its_offload():
    options = OffloadOptions(keep_last=2)
    assert repr(ActivationCheckpointing()) == "ActivationCheckpointing(every_n_layers=1)"
    assert repr(ActivationCheckpointing(offload=False)) == "ActivationCheckpointing(every_n_layers=1)"
    assert repr(ActivationCheckpointing(offload=True)) == "ActivationCheckpointing(every_n_layers=1, offload=True)"
    shown = repr(ActivationCheckpointing(2, enabled=False, offload=options))
    assert shown == f"ActivationCheckpointing(every_n_layers=2, enabled=False, offload={options!r})"
    # The options are shown as they would be written.
    assert eval(repr(ActivationCheckpointing(offload=options))).offload == options


# ---------------------------------------------------------------- training on the CPU is the plain one


def ways() -> dict[str, dict[str, object]]:
    """Arguments of the Trainer for every way to switch offload on."""
    return {
        "name": {"strategy": "ckpt_offload"},
        "upper case": {"strategy": "CKPT_OFFLOAD"},
        "object": {"strategy": OffloadStrategy(move="all", keep_last=0, min_bytes=0, host_budget="1GiB")},
        "device": {"strategy": OffloadStrategy("cpu")},
        "own": {"strategy": OffloadOwnStrategy(keep_last=2)},
        "callback": {"callbacks": [ActivationCheckpointing(offload=True)]},
        "callback's options": {"callbacks": [ActivationCheckpointing(offload=OffloadOptions(move="all", keep_last=0))]},
        "both": {"strategy": "ckpt_offload", "callbacks": [ActivationCheckpointing(offload=True)]},
        "both with options": {
            "strategy": OffloadStrategy(keep_last=2),
            "callbacks": [ActivationCheckpointing(2, offload=OffloadOptions(keep_last=3))],
        },
        "callback without offload": {"strategy": "ckpt_offload", "callbacks": [ActivationCheckpointing()]},
        "disabled callback": {
            "strategy": "ckpt_offload",
            "callbacks": [ActivationCheckpointing(offload=True, enabled=False)],
        },
    }


@functools.cache
def plain(make: type[Training] = Training, **settings) -> Run:
    return fit(make, **settings)


@pytest.mark.parametrize("way", ways())
def test_equals_the_plain_run(way):
    assert_equal(fit(Training, **ways()[way]), plain())


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"max_epochs": 2, "limit_train_batches": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("way", ["name", "both"])
def test_equals_the_plain_run_with_trainer_settings(way, settings):
    assert_equal(fit(Training, **ways()[way], **settings), plain(**settings))


@pytest.mark.parametrize("way", ["name", "both"])
def test_equals_the_plain_run_in_manual_optimization(way):
    assert_equal(fit(TwoOptimizers, **ways()[way]), plain(TwoOptimizers))


class Watched(Training):
    """Looks in training at what holds a tensor between forward and backward."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        strategy = self.trainer.strategy
        self.__dict__.setdefault("seen", []).append((hooks, strategy.offload_engine, strategy.offloaded_layers))
        return loss


def test_no_engine_and_no_hooks_run_where_nothing_can_be_moved():
    module = Watched()
    trainer(strategy="ckpt_offload").fit(module, batches(2))
    assert module.seen == [(None, None, {})] * 2


@pytest.mark.parametrize("way", ["callback", "both", "both with options"])
def test_layers_are_recomputed_all_the_same(way, monkeypatch):
    module, arguments = Training(), ways()[way]
    every_n_layers = arguments["callbacks"][0].every_n_layers
    calls = Calls(monkeypatch, module)
    trainer(**arguments).fit(module, batches(3))
    assert [calls.counts[f"model.{i}"] for i in range(1, 5)] == [6, 3 * 2 // every_n_layers] * 2


@pytest.mark.parametrize("way", ["name", "disabled callback"])
def test_a_strategy_alone_recomputes_nothing(way, monkeypatch):
    module = Training()
    calls = Calls(monkeypatch, module)
    trainer(**ways()[way]).fit(module, batches(3))
    assert [calls.counts[f"model.{i}"] for i in range(1, 5)] == [3] * 4


def test_the_monitor_has_nothing_to_say_about_offload(tmp_path):
    rows = rows_of(Logged(), tmp_path, [ActivationCheckpointing(offload=True)], strategy="ckpt_offload")
    assert layout(rows) == [(step, "monitor") for step in range(6)]
    without = rows_of(Logged(), tmp_path, [ActivationCheckpointing()])
    for name in ("memory/peak_MiB", "memory/saved_MiB", "memory/avoided_MiB"):
        assert [row[name] for row in rows] == [row[name] for row in without]


# ---------------------------------------------------------------- what is said


def test_that_nothing_is_moved_is_said_once_in_every_fit(said):
    loop = trainer(strategy="ckpt_offload", max_epochs=2)
    loop.fit(Training(), batches(3))
    assert said() == [f"OffloadStrategy: {WHY} Training is the plain one."]
    again(loop, Training(), batches(3))
    assert said() == [f"OffloadStrategy: {WHY} Training is the plain one."]


def test_a_strategy_of_ones_own_says_its_name(said):
    trainer(strategy=OffloadOwnStrategy()).fit(Training(), batches(1))
    assert said() == [f"OffloadOwnStrategy: {WHY} Training is the plain one."]


@pytest.mark.parametrize("offload", [True, OffloadOptions(keep_last=2)], ids=["true", "options"])
def test_the_callback_says_once_that_nothing_is_moved(said, offload):
    callback = ActivationCheckpointing(offload=offload)
    trainer([callback], max_epochs=2).fit(Training(), batches(3))
    assert said() == [f"{callback!r}: {WHY} Layers are recomputed all the same."]


def test_together_each_speaks_for_itself(said):
    callback = ActivationCheckpointing(offload=True)
    trainer([callback], strategy="ckpt_offload").fit(Training(), batches(2))
    assert sorted(said()) == [
        f"{callback!r}: {WHY} Layers are recomputed all the same.",
        f"OffloadStrategy: {WHY} Training is the plain one.",
    ]


def test_a_callback_that_is_off_says_nothing_about_moving(said, caplog):
    trainer([ActivationCheckpointing(offload=True, enabled=False)]).fit(Training(), batches(2))
    assert "ActivationCheckpointing(every_n_layers=1, enabled=False, offload=True): off" in caplog.text
    assert said() == []


def test_without_offload_nothing_is_said_about_moving(said):
    trainer([ActivationCheckpointing()]).fit(Training(), batches(2))
    assert said() == []


class Evaluated(Logged):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.model(batch).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(batch)


@pytest.mark.parametrize("way", ["name", "both"])
def test_only_fit_says_anything(said, way):
    module, loop = Evaluated(), trainer(**ways()[way])
    loop.validate(module, batches(1), verbose=False)
    loop.test(module, batches(1), verbose=False)
    loop.predict(module, batches(1))
    assert said() == []


# ---------------------------------------------------------------- nothing is left behind


@pytest.mark.parametrize("way", ["name", "object", "callback's options", "both"])
def test_nothing_is_left_on_the_model_or_the_strategy(way):
    module = Training()
    trainer().fit(module, batches(1))  # what Lightning itself leaves
    before = hooks_and_attributes(module)
    loop = trainer(**ways()[way])
    for _ in range(2):
        again(loop, module, batches(2))
        assert hooks_and_attributes(module) == before
        assert touched(module) == []
        assert not {"setup", "training_step", "backward", "optimizer_step"} & vars(loop.strategy).keys()
        assert not any(getattr(owner, "offload_engine", None) for owner in [loop.strategy, *loop.callbacks])
        assert not getattr(loop.strategy, "offloaded_layers", {})


def test_the_model_is_untouched_in_training_too():
    class Looks(Training):
        def on_train_batch_start(self, batch, batch_idx):
            self.__dict__["inside"] = hooks_and_attributes(self.model)

    module = Looks()
    before = hooks_and_attributes(module.model)
    trainer(strategy="ckpt_offload").fit(module, batches(1))
    assert module.inside == before


@pytest.mark.parametrize("way", ["name", "both"])
def test_fit_twice_then_evaluate_equals_the_plain_sequence(way):
    def sequence(**arguments):
        torch.manual_seed(0)
        module = Evaluated()
        loop = trainer(**arguments)
        results = []
        for _ in range(2):
            again(loop, module, batches(3), batches(2))
            results.append({name: value.clone() for name, value in module.state_dict().items()})
        results += loop.validate(module, batches(2), verbose=False) + loop.test(module, batches(3), verbose=False)
        predicted = loop.predict(module, batches(2))
        again(loop, module, batches(3))
        return [*results, module.state_dict(), dict(enumerate(predicted)), {"random": torch.rand(3)}]

    expected, got = sequence(), sequence(**ways()[way])
    assert len(got) == len(expected) == 7
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])) for name in theirs)


class Breaks(Training):
    """Fails in the second batch of its first fit."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return loss


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("way", ["name", "both"])
def test_after_an_exception_nothing_is_left_and_the_next_fit_equals_the_plain_one(said, way, error):
    def broken_then_fit(**arguments):
        torch.manual_seed(0)
        module, loop = Breaks(error), trainer(**arguments)
        before = hooks_and_attributes(module.model)
        with pytest.raises((RuntimeError, SystemExit)):
            loop.fit(module, batches(3))
        assert hooks_and_attributes(module.model) == before
        assert not any(getattr(owner, "offload_engine", None) for owner in [loop.strategy, *loop.callbacks])
        torch.manual_seed(1)
        again(loop, module, batches(3))
        return {**module.state_dict(), "random": torch.rand(3)}

    expected = broken_then_fit()
    assert said() == []
    got = broken_then_fit(**ways()[way])
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert len(said()) == 2 * (2 if way == "both" else 1)


@pytest.mark.parametrize(
    ("first", "second"), [("plain", "name"), ("name", "plain"), ("name", "name"), ("plain", "both"), ("both", "plain")]
)
def test_checkpoints_load_whatever_the_strategy_was(first, second, tmp_path):
    def arguments(way):
        return {} if way == "plain" else ways()[way]

    def module():
        return Training(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))

    def resumed(first, second):
        torch.manual_seed(0)
        loop, path = trainer(**arguments(first)), tmp_path / f"{first}.{second}.ckpt"
        loop.fit(module(), batches())
        loop.save_checkpoint(path)
        torch.manual_seed(2)
        loop, again = trainer(**arguments(second), max_epochs=2), module()
        loop.fit(again, batches(), ckpt_path=path, weights_only=False)
        assert loop.global_step == 6
        return torch.load(path, weights_only=False), again.state_dict()

    (expected_file, expected), (file, got) = resumed("plain", "plain"), resumed(first, second)
    assert file.keys() == expected_file.keys()
    assert file["callbacks"] == expected_file["callbacks"] == {}
    assert list(file["state_dict"]) == list(expected_file["state_dict"])
    assert all(torch.equal(got[name], value) for name, value in expected.items())


# ---------------------------------------------------------------- the command line


def flags(cli) -> tuple[object, OffloadOptions | None, object]:
    """Type of the strategy, its options, and the callback's offload."""
    strategy = cli.trainer.strategy
    return type(strategy), getattr(strategy, "offload_options", None), callback_of(cli).offload


TRAINED = [
    ([], (SingleDeviceStrategy, None, False)),
    (["--trainer.strategy", "ckpt_offload"], (OffloadStrategy, OffloadOptions(), False)),
    (
        ["--trainer.strategy", "lightning_ckpt.OffloadStrategy", "--trainer.strategy.keep_last", "2"],
        (OffloadStrategy, OffloadOptions(keep_last=2), False),
    ),
    (
        ["--trainer.strategy=OffloadStrategy", "--trainer.strategy.move=all", "--trainer.strategy.host_budget=8GB"],
        (OffloadStrategy, OffloadOptions("all", host_budget=8 * 10**9), False),
    ),
    (
        [
            "--trainer.strategy=lightning_ckpt.OffloadStrategy",
            "--trainer.strategy.min_bytes=1MiB",
            "--trainer.strategy.max_inflight_bytes=1000",
            "--trainer.strategy.prefetch_bytes=2GB",
            "--trainer.strategy.device=cpu",
        ],
        (OffloadStrategy, OffloadOptions("hidden", 2**20, 1, 1000, 2 * 10**9), False),
    ),
    (["--ckpt.offload", "true"], (SingleDeviceStrategy, None, True)),
    (["--ckpt.offload", "false"], (SingleDeviceStrategy, None, False)),
    (["--ckpt.offload.keep_last", "2"], (SingleDeviceStrategy, None, OffloadOptions(keep_last=2))),
    (
        ["--ckpt.offload.move=all", "--ckpt.offload.host_budget=8GiB", "--ckpt.offload.min_bytes=4096"],
        (SingleDeviceStrategy, None, OffloadOptions("all", 4096, host_budget=8 * 2**30)),
    ),
    (
        ["--trainer.strategy", "ckpt_offload", "--ckpt.offload", "true"],
        (OffloadStrategy, OffloadOptions(), True),
    ),
]


def written(value) -> str | None:
    return " ".join(value) or "none" if isinstance(value, list) else ""


def weights(cli) -> dict[str, torch.Tensor]:
    return cli.model.state_dict()


@pytest.mark.parametrize(("arguments", "expected"), TRAINED, ids=written)
def test_flags_switch_offload_on_and_training_is_the_plain_one(said, arguments, expected):
    without = weights(run("fit"))
    assert said() == []
    cli = run("fit", *arguments)
    assert flags(cli) == expected
    assert len(said()) == (expected[1] is not None) + (expected[2] is not False)
    assert all(torch.equal(weights(cli)[name], value) for name, value in without.items())


@pytest.mark.parametrize(("arguments", "expected"), TRAINED[1:], ids=written)
def test_a_printed_config_gives_the_same_run(capsys, tmp_path, arguments, expected):
    with pytest.raises(SystemExit):
        run("fit", *arguments, "--print_config")
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert flags(run("fit", "--config", str(path))) == expected
    with pytest.raises(SystemExit):
        run("fit", "--config", str(path), "--print_config")
    assert capsys.readouterr().out == path.read_text()


def test_what_a_printed_config_says(capsys):
    with pytest.raises(SystemExit):
        run("fit", "--ckpt.offload.keep_last=2", "--trainer.strategy=ckpt_offload", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["strategy"] == "ckpt_offload"
    assert printed["ckpt"]["offload"] == {
        "move": "hidden",
        "min_bytes": 262144,
        "keep_last": 2,
        "max_inflight_bytes": None,
        "prefetch_bytes": None,
        "host_budget": None,
    }


@pytest.mark.parametrize("name", WITHOUT_DEEPSPEED)
def test_every_strategy_from_a_config_by_name_and_by_class_path(tmp_path, name):
    cls, _ = STRATEGIES[name]
    path = tmp_path / "config.yaml"
    path.write_text(f"trainer:\n  strategy: {name}\n")
    assert flags(run("--config", str(path), run=False)) == (cls, OffloadOptions(), False)
    path.write_text(
        "trainer:\n"
        "  strategy:\n"
        f"    class_path: lightning_ckpt.{cls.__name__}\n"
        "    init_args:\n"
        "      keep_last: 2\n"
        "      host_budget: 8GB\n"
        "      move: all\n"
        "ckpt:\n"
        "  offload:\n"
        "    min_bytes: 1MiB\n"
    )
    options = OffloadOptions("all", keep_last=2, host_budget=8 * 10**9)
    cli = run("--config", str(path), run=False)
    assert flags(cli) == (cls, options, OffloadOptions(min_bytes=2**20))
    cli = run("--config", str(path), "--trainer.strategy.keep_last=5", "--ckpt.offload=false", run=False)
    assert flags(cli) == (cls, OffloadOptions("all", keep_last=5, host_budget=8 * 10**9), False)


@pytest.mark.parametrize("name", WITHOUT_DEEPSPEED)
def test_every_strategy_from_flags(name):
    cls, _ = STRATEGIES[name]
    assert flags(run("--trainer.strategy", name, run=False)) == (cls, OffloadOptions(), False)
    path = ["--trainer.strategy", f"lightning_ckpt.{cls.__name__}", "--trainer.strategy.keep_last", "2"]
    assert flags(run(*path, run=False)) == (cls, OffloadOptions(keep_last=2), False)


def test_arguments_of_the_base_are_flags_too():
    cli = run(
        "--trainer.strategy=lightning_ckpt.OffloadDDPStrategy",
        "--trainer.strategy.keep_last=2",
        "--trainer.strategy.find_unused_parameters=true",
        "--trainer.strategy.process_group_backend=gloo",
        run=False,
    )
    assert cli.trainer.strategy._ddp_kwargs["find_unused_parameters"] is True
    assert cli.trainer.strategy.process_group_backend == "gloo"
    assert cli.trainer.strategy.offload_options == OffloadOptions(keep_last=2)


@needs_no_deepspeed
def test_deepspeed_from_flags_is_lightnings_own_error():
    with pytest.raises(Exception, match="must have DeepSpeed installed"):
        run("--trainer.strategy=ckpt_offload_deepspeed", run=False)


def test_a_config_trains(said, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n"
        "  strategy:\n"
        "    class_path: lightning_ckpt.OffloadStrategy\n"
        "    init_args:\n"
        "      keep_last: 2\n"
        "ckpt:\n"
        "  offload: true\n"
    )
    without = weights(run("fit"))
    said()
    cli = run("fit", "--config", str(path))
    assert flags(cli) == (OffloadStrategy, OffloadOptions(keep_last=2), True)
    assert len(said()) == 2
    assert all(torch.equal(weights(cli)[name], value) for name, value in without.items())


def test_the_help_shows_offload(capsys):
    with pytest.raises(SystemExit):
        run("fit", "--help")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--ckpt.offload OFFLOAD Set to true to keep the inputs of recomputed layers in pinned host memory" in text
    assert "--ckpt.offload.help" in text
    with pytest.raises(SystemExit):
        run("fit", "--ckpt.offload.help")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for option, words in {
        "move": "``hidden``: ",
        "min_bytes": "Tensors below this size",
        "keep_last": "Layers at the end of the model",
        "max_inflight_bytes": "Bytes that may be on their way",
        "prefetch_bytes": "Bytes that are brought back",
        "host_budget": "Host memory that may be locked",
    }.items():
        assert re.search(rf"--ckpt\.offload\.{option} \S+ {re.escape(words)}", text), option


BAD = [
    (["--ckpt.offload", "maybe"], "maybe"),
    (["--ckpt.offload.move", "some"], "some"),
    (["--ckpt.offload.nothing", "1"], "'nothing'"),
    (["--trainer.strategy=lightning_ckpt.OffloadStrategy", "--trainer.strategy.move=some"], "some"),
    (["--trainer.strategy=lightning_ckpt.OffloadStrategy", "--trainer.strategy.nothing=1"], "'nothing'"),
]
BAD_VALUES = [
    (["--ckpt.offload.keep_last", "-1"], "`keep_last=-1` must be a number of layers"),
    (["--ckpt.offload.min_bytes", "8G"], "`min_bytes='8G'`: '8G' has an unknown unit. Write '8GB'"),
    (["--ckpt.offload.host_budget", "many"], "`host_budget='many'`: 'many' is not a size"),
    (
        ["--trainer.strategy=lightning_ckpt.OffloadStrategy", "--trainer.strategy.keep_last=-1"],
        "`keep_last=-1` must be a number of layers",
    ),
    (
        ["--trainer.strategy=lightning_ckpt.OffloadStrategy", "--trainer.strategy.host_budget=many"],
        "`host_budget='many'`: 'many' is not a size",
    ),
]


@pytest.mark.parametrize(("arguments", "words"), [*BAD, *BAD_VALUES], ids=written)
def test_a_bad_value_is_quoted(arguments, words, capsys):
    with pytest.raises((SystemExit, ValueError)) as stop:
        run("fit", *arguments)
    assert words in str(stop.value) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *BAD,
        *BAD_VALUES,
    ],
    ids=written,
)
def test_a_bad_value_ends_without_a_traceback(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        run("fit", *arguments)
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert words in errors.split("error: ")[-1]


def test_an_unknown_strategy_on_the_command_line_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="`strategy='ckpt_offlod'`"):
        run("fit", "--trainer.strategy", "ckpt_offlod")


# ---------------------------------------------------------------- below Lightning


@pytest.mark.slow
def test_offload_imports_without_lightning():
    done = run_python(
        WITHOUT_LIGHTNING.replace('"measure")', '"measure", "offload")')
        + "from lightning_ckpt.offload import OffloadOptions\n"
        + "import lightning_ckpt\n"
        + "print(lightning_ckpt.OffloadOptions(keep_last=2) == OffloadOptions(keep_last=2))\n"
        + "print(any(name.split('.')[0] == 'lightning' for name, m in sys.modules.items() if m is not None))\n"
        + "lightning_ckpt.OffloadStrategy"
    )
    *imported, options_work, lightning_is_there = done.stdout.split()
    assert (options_work, lightning_is_there) == ("True", "False")
    modules = {"admission", "engine", "groups", "host_memory", "options", "schedule", "transfers"}
    assert {f"lightning_ckpt.offload.{module}" for module in modules} <= set(imported)
    assert "lightning_ckpt.selection.select" in imported
    assert done.returncode != 0, "a strategy needs Lightning"
    assert "lightning" in done.stderr.splitlines()[-1]
