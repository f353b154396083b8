"""The `--ckpt` flags of a real LightningCLI: parsing, files, environment, errors."""

import re

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_ckpt import ActivationCheckpointing, CheckpointCLI, CheckpointCLIMixin, add_checkpoint_arguments
from tests.support import Block, Training, batches, blocks

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(Training):
    """A model for the CLI.

    Args:
        count: how many blocks.
    """

    def __init__(self, count: int = 4):
        super().__init__(blocks(count))

    def train_dataloader(self):
        return batches(2)


class ModelWithCallbacks(Model):
    def configure_callbacks(self):
        return [ActivationCheckpointing(every_n_layers=3)]


def run(*args, cli=CheckpointCLI, model=Model, **kwargs):
    settings = {"save_config_callback": None, "seed_everything_default": 0, "trainer_defaults": QUIET, **kwargs}
    return cli(model, args=list(args), auto_configure_optimizers=False, **settings)


def callback_of(cli):
    (callback,) = [item for item in cli.trainer.callbacks if isinstance(item, ActivationCheckpointing)]
    return callback


def chosen(cli):
    return list(callback_of(cli).selection.layers)


ALL = [f"model.{i}" for i in range(1, 5)]


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ([], ALL),
        (["--ckpt.every_n_layers", "2"], ["model.1", "model.3"]),
        (["--ckpt.layers", "Block"], ALL),
        (["--ckpt.layers", "tests.support.Block", "--ckpt.every_n_layers=3"], ["model.1", "model.4"]),
        (["--ckpt.layers", "torch.nn.LayerNorm"], [f"{name}.norm" for name in ALL]),
        (["--ckpt.layers", "[model.1,model.2]"], ["model.1", "model.2"]),
        (
            ["--ckpt.layers+", "model.1", "--ckpt.layers+", "torch.nn.Dropout"],
            ["model.1", *[f"{n}.dropout" for n in ALL[1:]]],
        ),
        (["--ckpt.layers", "model.[34]"], ["model.3", "model.4"]),
        (["--ckpt.layers", r"model\.(2|3)"], ["model.2", "model.3"]),
        (["--ckpt.check_fn", "tests.test_cli.is_block"], ALL),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else None,
)
def test_flags_choose_the_layers(flags, layers):
    assert chosen(run("fit", *flags)) == layers


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def test_a_class_path_becomes_the_class():
    assert callback_of(run("fit", "--ckpt.layers", "tests.support.Block")).layers is Block
    assert callback_of(run("fit", "--ckpt.layers", "[tests.support.Block,Block]")).layers == [Block, "Block"]


def test_enabled_false_recomputes_nothing():
    assert callback_of(run("fit", "--ckpt.enabled", "false")).selection is None


def test_yaml_config_and_flags_after_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("fit:\n  ckpt:\n    every_n_layers: 2\n    layers: [tests.support.Block]\n  model:\n    count: 6\n")
    assert chosen(run("--config", str(path), "fit")) == ["model.1", "model.3", "model.5"]
    assert chosen(run("--config", str(path), "fit", "--ckpt.every_n_layers", "3")) == ["model.1", "model.4"]
    path.write_text("ckpt:\n  every_n_layers: 4\n")
    assert chosen(run("fit", "--config", str(path))) == ["model.1"]


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("PL_FIT__CKPT__EVERY_N_LAYERS", "3")
    monkeypatch.setenv("PL_FIT__CKPT__LAYERS", "Block")
    cli = run("fit", parser_kwargs={"default_env": True, "fit": {"default_env": True}})
    assert chosen(cli) == ["model.1", "model.4"]
    assert callback_of(cli).layers == "Block"


def test_print_config_round_trip(capsys, tmp_path):
    with pytest.raises(SystemExit):
        run("fit", "--ckpt.every_n_layers=2", "--ckpt.layers=[tests.support.Block,Block]", "--print_config")
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["ckpt"] == {
        "every_n_layers": 2,
        "layers": ["tests.support.Block", "Block"],
        "check_fn": None,
        "enabled": True,
        "monitor": True,
        "verify": "sample",
        "offload": False,
        "policy": None,
        "memory_budget": None,
        "plan": None,
    }
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    cli = run("fit", "--config", str(path))
    assert (callback_of(cli).every_n_layers, callback_of(cli).layers) == (2, [Block, "Block"])


def test_the_saved_config_gives_the_same_run(tmp_path):
    from lightning.pytorch.cli import SaveConfigCallback

    first = run(
        "fit",
        "--ckpt.every_n_layers=2",
        "--ckpt.layers=torch.nn.Linear",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.logger=true",
        save_config_callback=SaveConfigCallback,
    )
    (path,) = tmp_path.rglob("config.yaml")
    again = run("fit", "--config", str(path))
    assert callback_of(again).layers is nn.Linear
    assert chosen(again) == chosen(first)


def test_every_argument_has_help(capsys):
    with pytest.raises(SystemExit):
        run("fit", "--help")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for argument, words in {
        "every_n_layers EVERY_N_LAYERS": "Recompute the first layer and every n-th after it",
        "layers+ LAYERS": "What a layer is: a class name",
        "check_fn CHECK_FN": "A predicate on modules instead of",
        "enabled {true,false}": "Set to false to train plainly",
        "monitor {true,false}": "Set to false to log no metrics",
        "verify {sample,always,off}": "Which calls of a layer compare what the recompute saves",
    }.items():
        assert f"--ckpt.{argument} {words}" in text
    assert "recompute chosen layers in backward" in text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--ckpt.every_n_layers", "0"], "`every_n_layers=0` must be an integer of at least 1"),
        (["--ckpt.every_n_layers", "-1"], "`every_n_layers=-1` must be an integer of at least 1"),
        (["--ckpt.every_n_layers", "1.5"], "1.5"),
        (["--ckpt.every_n_layers", "true"], "True"),
        (["--ckpt.layers", "Blok"], "`layers='Blok'` matches no module of Model. Did you mean 'Block'?"),
        (["--ckpt.layers", "torch.nn.Conv2d"], "`layers='Conv2d'` matches no module of Model."),
        (["--ckpt.layers", "tests.support.Nothing"], "`layers='tests.support.Nothing'` matches no module of Model."),
        (["--ckpt.layers", "model.7*"], "`layers='model.7*'` matches no module of Model."),
        (["--ckpt.layers", "Block", "--ckpt.check_fn", "tests.test_cli.is_block"], "either `layers` or `check_fn`"),
        (["--ckpt.no_such_flag", "1"], "no_such_flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values_end_with_one_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        run("fit", *flags)
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert sentence in errors.split("error: ")[-1]


def test_a_flag_and_the_same_callback_in_the_trainer_are_reported():
    with pytest.raises(Exception, match=r"Two callbacks recompute layer 'model\.1'.*--ckpt\.enabled false"):
        run("fit", "--trainer.callbacks+=lightning_ckpt.ActivationCheckpointing")
    cli = run("fit", "--trainer.callbacks+=lightning_ckpt.ActivationCheckpointing", "--ckpt.enabled=false")
    callbacks = [item for item in cli.trainer.callbacks if isinstance(item, ActivationCheckpointing)]
    assert [callback.selection is not None for callback in callbacks].count(True) == 1


def test_configure_callbacks_that_replaces_the_flags_is_reported():
    with pytest.warns(
        UserWarning, match=r"ModelWithCallbacks\.configure_callbacks.*every_n_layers=3.*replaces.*every_n_layers=2"
    ):
        cli = run("fit", "--ckpt.every_n_layers=2", model=ModelWithCallbacks)
    assert chosen(cli) == ["model.1", "model.4"]


def test_other_callbacks_of_the_model_are_no_reason_to_warn(recwarn):
    class Harmless(Model):
        def configure_callbacks(self):
            from lightning.pytorch.callbacks import Timer

            return [Timer()]

    assert chosen(run("fit", model=Harmless)) == ALL
    assert not any("replaces" in str(warning.message) for warning in recwarn)


class OwnCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--notes", default="none")


class MixedCLI(CheckpointCLIMixin, OwnCLI):
    pass


class FunctionCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        add_checkpoint_arguments(parser)


@pytest.mark.parametrize("cli", [MixedCLI, FunctionCLI])
def test_the_mixin_and_the_function_serve_other_clis(cli):
    built = run("fit", "--ckpt.every_n_layers=2", cli=cli)
    assert chosen(built) == ["model.1", "model.3"]


def test_without_run_the_callback_is_in_the_trainer():
    cli = run("--ckpt.every_n_layers=2", run=False)
    assert callback_of(cli).every_n_layers == 2
    cli.trainer.fit(cli.model)
    assert chosen(cli) == ["model.1", "model.3"]


def test_other_subcommands_take_the_flags_and_change_nothing(monkeypatch):
    class Validated(Model):
        def validation_step(self, batch, batch_idx):
            assert not any("forward" in part.__dict__ for part in self.modules())

        def val_dataloader(self):
            return batches(1)

    cli = run("validate", "--ckpt.every_n_layers=2", model=Validated)
    assert callback_of(cli).selection is None
    assert torch.is_grad_enabled()
