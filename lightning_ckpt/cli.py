"""`--ckpt.*` flags for any LightningCLI."""

import contextlib
import dataclasses
import re
from typing import Any

import lightning.pytorch as pl
from jsonargparse import class_from_function
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_ckpt.callback import ActivationCheckpointing
from lightning_ckpt.monitor.trainer import callbacks_of
from lightning_ckpt.offload import OffloadError, OffloadOptions
from lightning_ckpt.plan_command import CHANGING_STEPS, PlanCommand, PlanRun
from lightning_ckpt.planning import BudgetError, LeakError, PlanFileError, PreflightError
from lightning_ckpt.planning.picture import PictureError
from lightning_ckpt.recompute.policy import PolicyError
from lightning_ckpt.selection import SelectionError
from lightning_ckpt.weightless import weights_without_memory

_KEY = "ckpt"
_PLAN = "plan"
_OURS = (SelectionError, OffloadError, PolicyError, BudgetError, PlanFileError, PictureError)
_PLAIN_TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "logger": False,
    "profiler": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
}


def add_checkpoint_arguments(parser: LightningArgumentParser) -> None:
    """Add the flags of `ActivationCheckpointing` as `--ckpt.*` to a LightningCLI's parser, and the callback with them.

    `CheckpointCLI` and `CheckpointCLIMixin` call it; so can a CLI of your own, from `add_arguments_to_parser`.

    Args:
        parser: the parser that LightningCLI hands to `add_arguments_to_parser`.

    Example::

        class MyCLI(LightningCLI):
            def add_arguments_to_parser(self, parser):
                add_checkpoint_arguments(parser)
    """
    parser.add_lightning_class_args(ActivationCheckpointing, _KEY)


class CheckpointCLIMixin:
    """Put before `LightningCLI`, or a CLI of your own, among the bases: it adds the `--ckpt.*` flags.

    Subclasses are free to define `add_arguments_to_parser` without calling `super()`.

    Example::

        class MyCLI(CheckpointCLIMixin, LightningCLI):
            def add_arguments_to_parser(self, parser):
                parser.add_argument("--notes", type=str)
    """

    trainer_class: Any  # of LightningCLI

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except PreflightError as error:
            self.parser.error(f"the step cannot be rehearsed: {error}.")  # type: ignore[attr-defined]
        except LeakError as error:
            self.parser.error(str(error))  # type: ignore[attr-defined]
        except ValueError as error:  # a flag's value that cannot work ends with one sentence, not with a traceback
            sentence = str(error) if isinstance(error, _OURS) else _own_sentence(error)
            if sentence is None:
                raise
            self.parser.error(sentence)  # type: ignore[attr-defined]

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add LightningCLI's own arguments, then the `--ckpt.*` flags."""
        super().add_core_arguments_to_parser(parser)  # type: ignore[misc]
        add_checkpoint_arguments(parser)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Those of LightningCLI, and `plan`."""
        return {**LightningCLI.subcommands(), _PLAN: {"model", "datamodule"}}

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        # A subcommand has to be a method of the Trainer's class, of which no object needs it here.
        given = self.trainer_class
        plain = given if isinstance(given, type) else class_from_function(given)
        self.trainer_class = type(plain.__name__, (plain, PlanCommand), {"__doc__": plain.__doc__})
        try:
            super()._add_subcommands(parser, **kwargs)  # type: ignore[misc]
        finally:
            self.trainer_class = given
        plan = self._subcommand_parsers.get(_PLAN)  # type: ignore[attr-defined]
        if plan is not None:  # a subclass may have other subcommands
            kind = int | str | None
            plan.add_argument("--batch-size", dest="batch_size", type=kind, help="The same as `--batch_size`.")

    def instantiate_classes(self) -> None:
        """Instantiate everything; to plan, the model without memory for its weights."""
        with weights_without_memory() if self._plans else contextlib.nullcontext():
            super().instantiate_classes()  # type: ignore[misc]

    @property
    def _plans(self) -> bool:
        return bool(self.subcommand == _PLAN)  # type: ignore[attr-defined]

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand != _PLAN:
            super()._run_subcommand(subcommand)  # type: ignore[misc]
            return
        config = self.config_init[_PLAN]  # type: ignore[attr-defined]
        arguments = {name: config[name] for name in self._subcommand_method_arguments[_PLAN]}  # type: ignore[attr-defined]
        run = PlanRun(self.trainer, self.model, self.datamodule, config[_KEY], arguments)  # type: ignore[attr-defined]
        for each in (getattr(self, "before_plan", None), run.run, getattr(self, "after_plan", None)):
            if callable(each):
                each()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Instantiate the Trainer, and watch that a model's `configure_callbacks` does not replace the flags."""
        if self._plans:  # it may be meant for a machine that is not this one
            given = (self._get(self.config_init, "trainer") or {}).get("callbacks") or []  # type: ignore[attr-defined]
            callbacks = given if isinstance(given, list) else [given]
            kept = [callback for callback in callbacks if isinstance(callback, CHANGING_STEPS)]
            kwargs |= {**_PLAIN_TRAINER, "callbacks": kept or None}
        trainer: pl.Trainer = super().instantiate_trainer(**kwargs)  # type: ignore[misc]
        callback = self._get(self.config_init, _KEY)  # type: ignore[attr-defined]
        if is_overridden("configure_callbacks", self.model, pl.LightningModule):  # type: ignore[attr-defined]
            callbacks_of(trainer).insert(0, _ReplacedFlags(callback))
        return trainer


def _own_sentence(error: ValueError) -> str | None:
    """What an offload option has to say, out of the list of types that jsonargparse has tried."""
    options = "|".join(field.name for field in dataclasses.fields(OffloadOptions))
    found = re.search(rf"`(?:{options})=.*", str(error))
    return None if found is None else found[0].strip()


class _ReplacedFlags(pl.Callback):
    """Warns where `LightningModule.configure_callbacks` took the place of the callback that came from the flags."""

    def __init__(self, from_flags: ActivationCheckpointing) -> None:
        self.from_flags = from_flags

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        callbacks = callbacks_of(trainer)
        if stage == "fit" and self.from_flags not in callbacks:
            used = [callback for callback in callbacks if isinstance(callback, ActivationCheckpointing)]
            rank_zero_warn(
                f"`{type(pl_module).__name__}.configure_callbacks` returns {', '.join(map(repr, used))}, which "
                f"replaces {self.from_flags!r} from the `--{_KEY}` flags: they have no effect. Remove one of the two."
            )


class CheckpointCLI(CheckpointCLIMixin, LightningCLI):
    """A `LightningCLI` with the flags of `ActivationCheckpointing` under `--ckpt`.

    Example::

        # train.py
        from lightning_ckpt import CheckpointCLI

        CheckpointCLI(MyModel, MyData)

        # python train.py fit --ckpt.every_n_layers 4 --ckpt.layers GPTNeoXLayer
    """
