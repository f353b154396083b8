"""`python train.py plan`: what to keep, recompute and offload, before a single step is trained."""

import contextlib
import itertools
import os
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.utilities import _parse_loop_limits
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.budgeted.knowledge import will_accumulate
from lightning_ckpt.budgeted.surroundings import nothing_logged
from lightning_ckpt.callback import ActivationCheckpointing
from lightning_ckpt.measure.work import tensors_of
from lightning_ckpt.monitor.trainer import callbacks_of
from lightning_ckpt.offload import OffloadOptions
from lightning_ckpt.offload.budget import parse_bytes
from lightning_ckpt.planning import Budget, BudgetError, Plan, PlanFileError, parse_budget, save_plan
from lightning_ckpt.planning.links import BYTES_PER_S
from lightning_ckpt.planning.make import layers_to_plan, planner_by_preflight, step_of
from lightning_ckpt.planning.picture import draw_frontier
from lightning_ckpt.planning.plan import size
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.preflight import Preflight, PreflightError, map_tensors
from lightning_ckpt.planning.rates import Rates, rates_of
from lightning_ckpt.planning.table import frontier_table, plan_table
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.weightless import weights_without_memory

#: Callbacks by which a step takes another amount of memory. All others are left out.
CHANGING_STEPS = (BaseFinetuning, GradientAccumulationScheduler)


class PlanCommand:
    """The subcommand's arguments; the model and its data are made, but neither weights nor steps."""

    def plan(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        batch_size: int | str | None = None,
        device_memory: str | None = None,
        flops_per_s: float | None = None,
        bytes_per_s: float | None = None,
        link_bytes_per_s: float = BYTES_PER_S,
        save: str | None = None,
        picture: str | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Work out what to keep, recompute and offload for `--ckpt.memory_budget`, without training a step.

        Args:
            model: The model, without memory for its weights.
            datamodule: Its data, of which one batch is looked at.
            batch_size: Rows of the batch to plan for, or ``max`` for the largest batch that fits. Default: those of the
                batch that the data gives.
            device_memory: Memory of the device to plan for, such as ``80GiB``. Default: that of this machine's CPU.
            flops_per_s: Floating-point operations per second of that device, for the times.
            bytes_per_s: Bytes per second of that device's memory, for the times.
            link_bytes_per_s: Bytes per second between that device and its host, each way.
            save: File to write the plan to (YAML); train with it by ``--ckpt.plan``.
            picture: File to draw time against peak memory to (png, svg, pdf).
            ckpt_path: Of no use here; configurations of ``fit`` have it.
            weights_only: Of no use here; configurations of ``fit`` have it.
        """


class _NoLogger(DummyLogger):
    """Stands in for the user's, which setup and the step may use; nothing is written."""

    @property
    def save_dir(self) -> str:
        return os.getcwd()

    @property
    def log_dir(self) -> str:
        return os.path.join(self.save_dir, "lightning_logs", "version_0")


class PlanRun:
    """Plans for a model that has no weights yet.

    Args:
        trainer: gives the precision; it trains nothing.
        model: the model, on the `meta` device as far as it is built.
        datamodule: its data, or None if the model has them.
        callback: what the `--ckpt` flags say.
        arguments: those of `PlanCommand.plan`, by name.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None,
        callback: ActivationCheckpointing,
        arguments: dict[str, Any],
    ) -> None:
        if callback.plan is not None:
            raise BudgetError(
                f"`--ckpt.plan {callback.plan}` is a plan already: train with it, or leave it out and give "
                "`--ckpt.memory_budget`."
            )
        if not callback.enabled:
            raise BudgetError("`--ckpt.enabled false` leaves nothing to plan: leave it out.")
        if callback.every_n_layers != 1:
            raise BudgetError(
                f"`--ckpt.every_n_layers {callback.every_n_layers}` has no effect on a plan, which says what is done "
                "with every layer. Leave it out: the frontier shows such rules beside the plans."
            )
        for name in ("flops_per_s", "bytes_per_s", "link_bytes_per_s"):
            if arguments[name] is not None and not arguments[name] >= 1:
                raise BudgetError(f"`{name}={arguments[name]!r}` must be a number per second, 1 or more.")
        if arguments["link_bytes_per_s"] not in (None, BYTES_PER_S) and not callback.offload:
            raise BudgetError(
                f"`link_bytes_per_s={arguments['link_bytes_per_s']!r}` has no effect without `--ckpt.offload true`."
            )
        self._trainer = trainer
        self._model = model
        self._datamodule = datamodule
        self._callback = callback
        self._rows = _read_rows(arguments["batch_size"])
        self._device_bytes = _read_memory(arguments["device_memory"])
        default = rates_of(torch.device("cpu" if self._device_bytes is None else "cuda"))
        self._rates = Rates(
            arguments["flops_per_s"] or default.flops_per_s, arguments["bytes_per_s"] or default.bytes_per_s
        )
        self._link_bytes_per_s: float = arguments["link_bytes_per_s"]
        self._save: str | None = arguments["save"]
        self._picture: str | None = arguments["picture"]
        policy = callback.policy
        self._operators = resolve_policy("matmul" if policy is None else policy)
        offload = callback.offload
        self._options = OffloadOptions() if offload is True else (offload or None)
        self._budget = parse_budget("auto" if callback.memory_budget is None else callback.memory_budget)

    def run(self) -> Plan:
        """Print the plan and what it is compared with; write what is asked for."""
        batch = self._prepare()
        if self._rows == "max":
            batch = self._largest(batch)
        try:
            if isinstance(self._rows, int):
                batch = with_rows(batch, self._rows)
            preflight = self._preflight(batch)
            planner = self._planner(preflight)
        except (PreflightError, OverflowError) as error:
            if self._rows is None:
                raise
            raise BudgetError(f"`batch_size={self._rows!r}` cannot be planned for: {error}.") from None
        limit = self._limit(self._budget, planner)
        frontier = planner.frontier(planner.rules())  # first, so that a plan is never worse than a rule
        try:
            plan = planner.plan(limit)
        except BudgetError as error:
            raise BudgetError(f"`memory_budget={self._budget.written!r}`: {error}") from None
        print("\n\n".join([self._head(batch), plan_table(plan), frontier_table(frontier), self._caveats()]))
        if self._save is not None:
            classes = {name: type(layer).__name__ for name, layer in preflight.layers.items()}
            try:
                save_plan(plan, self._save, classes)
            except OSError as error:
                raise PlanFileError(f"`save={self._save!r}` cannot be written: {error.strerror}.") from None
            print(f"\nThe plan is in {self._save}: train with `--ckpt.plan {self._save}`.")
        if self._picture is not None:
            draw_frontier(frontier, plan.budget_bytes, self._picture)
        return plan

    # ---------------------------------------------------------------- model and data

    def _prepare(self) -> Any:
        """Everything that `fit` does before the first step, as far as it takes no memory; the first batch."""
        trainer, model = self._trainer, self._model
        trainer.state.fn, trainer.training = TrainerFn.FITTING, True
        trainer.logger = _NoLogger()
        trainer._data_connector.attach_data(model, datamodule=self._datamodule)
        trainer.strategy.connect(model)
        loop = trainer.fit_loop
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no limit will be said in training
            loop.min_epochs, loop.max_epochs = _parse_loop_limits(
                loop.min_steps, loop.max_steps, loop.min_epochs, loop.max_epochs, trainer
            )
        trainer._data_connector.prepare_data()
        if self._datamodule is not None:
            self._datamodule.setup("fit")
        for callback in callbacks_of(trainer):
            if isinstance(callback, CHANGING_STEPS):
                callback.setup(trainer, model, stage="fit")
        with weights_without_memory():
            model.setup("fit")
            _call_configure_model(trainer)
        trainer.precision_plugin.convert_module(model)
        loop.setup_data()
        loader = loop._combined_loader
        batch = None if loader is None else next(iter(loader), (None,))[0]
        if batch is None:
            raise BudgetError("the data gives no batch to plan for: give a `train_dataloader` with at least one.")
        batch = trainer.precision_plugin.convert_input(batch)
        return trainer.strategy.batch_to_device(model._on_before_batch_transfer(batch))

    def _make_optimizers(self, module: nn.Module) -> list[Optimizer]:
        """As in training, where a step may ask for `self.optimizers()` and `self.lr_schedulers()`."""
        self._trainer.strategy.setup_optimizers(self._trainer)
        return self._trainer.strategy.optimizers

    def _preflight(self, batch: Any) -> Preflight:
        return Preflight(
            self._model,
            batch,
            layers_to_plan(self._model, self._callback.layers, self._callback.check_fn),
            step_of(self._model),
            optimizers=self._make_optimizers,
            operators=self._operators,
            min_bytes=int((self._options or OffloadOptions()).min_bytes),
            accumulates=will_accumulate(self._trainer),
            rates=self._rates,
            around_step=self._around_step,
            around={"trainer.strategy": vars(self._trainer.strategy)},  # optimizers of a rehearsal are not kept
        )

    @contextlib.contextmanager
    def _around_step(self) -> Iterator[None]:
        self._model._current_fx_name = "training_step"
        with nothing_logged(self._trainer), self._trainer.precision_plugin.train_step_context():
            yield

    def _planner(self, preflight: Preflight) -> Planner:
        return planner_by_preflight(preflight, self._operators, self._options, self._link_bytes_per_s)

    def _limit(self, budget: Budget, planner: Planner) -> int:
        return budget.bytes(
            planner.recomputed_bytes, planner.kept_bytes, self._trainer.strategy.root_device, self._device_bytes
        )

    def _largest(self, batch: Any) -> Any:
        """The batch with the most rows for which there is a plan."""
        if self._budget.kind == "fraction":
            raise BudgetError(
                f"`memory_budget={self._budget.written!r}` grows with the batch, so any batch fits. Give a size, or a "
                "share of the device's memory, with `--batch_size max`."
            )
        limit = self._budget.bytes(0, 0, self._trainer.strategy.root_device, self._device_bytes)
        planners: dict[int, Planner] = {}

        def planner(rows: int) -> Planner:
            if rows not in planners:
                try:
                    planners[rows] = self._planner(self._preflight(with_rows(batch, rows)))
                except PreflightError as error:
                    raise PreflightError(f"with {rows} rows, {error}") from None
                except OverflowError:
                    raise BudgetError(
                        f"`memory_budget={self._budget.written!r}` is beyond what can be planned for: a batch of "
                        f"{rows} rows was tried."
                    ) from None
            return planners[rows]

        def peak(rows: int) -> int:
            return planner(rows).least(limit).peak_bytes

        def fits(rows: int) -> bool:
            try:
                planner(rows).plan(limit)
            except BudgetError:
                return False
            return True

        least = 1
        try:
            planner(1)
        except PreflightError:  # normalization over the batch, pairs of rows
            least = rows_of(batch)
        if not fits(least):
            raise BudgetError(
                f"`memory_budget={self._budget.written!r}`: a batch of {'one row' if least == 1 else f'{least} rows'} "
                f"takes {size(peak(least))}, more than the {size(limit)} that there are."
            )
        most, too_many = least, 0
        for trial in itertools.count():
            if too_many == most + 1:
                break
            other = too_many or 2 * most
            halfway = (most + too_many) // 2 if too_many else other
            # Over rows, the least peak is nearly a straight line, which mostly ends where nothing fits any more.
            slope = max(1, (peak(other) - peak(most)) // (other - most))
            ahead = most + max(1, (limit - peak(most)) // slope)
            rows = halfway if trial % 3 == 2 else min(ahead, too_many - 1) if too_many else ahead
            if fits(rows):
                most = rows
            else:
                too_many = rows
        print(f"The largest batch within {size(limit)} has {most} rows.\n")
        return with_rows(batch, most)

    # ---------------------------------------------------------------- words

    def _head(self, batch: Any) -> str:
        weights = sum(parameter.numel() for parameter in self._model.parameters())
        shapes = ", ".join(" x ".join(map(str, tensor.shape)) for tensor in tensors_of(batch))
        return (
            f"{type(self._model).__name__}, {weights / 1e6:,.1f} million weights, a batch of {shapes}, "
            f"precision {self._trainer.precision}, as rehearsed on fake tensors."
        )

    def _caveats(self) -> str:
        lines = [
            "Times are calculated (roofline model) from numbers of operations and bytes at "
            f"{self._rates.flops_per_s / 1e12:,.4g} TFLOP/s and {self._rates.bytes_per_s / 1e9:,.4g} GB/s. Training "
            "measures them, and plans again.",
            "Bytes are those of a CPU. On an accelerator other kernels run: dropout masks take a quarter there, "
            "attention may keep less or more, workspaces and fragments of the allocator come on top, and strategies of "
            "several ranks add buffers or shard weights. Callbacks are left out, but for those that freeze weights or "
            "accumulate gradients.",
        ]
        if self._options is not None:
            lines.append(f"Copies to host memory are planned at {self._link_bytes_per_s / 1e9:,.4g} GB/s each way.")
        return "\n".join(textwrap.fill(line, 120) for line in lines)


def _read_rows(written: int | str | None) -> int | str | None:
    if written is None or written == "max" or (isinstance(written, int) and written >= 1):
        return written
    raise BudgetError(f"`batch_size={written!r}` must be a number of rows, or 'max' for the most that fit.")


def _read_memory(written: str | None) -> int | None:
    try:
        return None if written is None else parse_bytes(written)
    except ValueError as error:
        raise BudgetError(f"`device_memory={written!r}`: {error}") from None


def rows_of(batch: Any) -> int:
    """How many rows a batch has, by its first tensor that has any."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise BudgetError(
        f"`batch_size` has no effect on a batch without tensors that have rows (`{type(batch).__name__}`): leave it "
        "out, and have the data give batches of the size to plan for."
    )


def with_rows(batch: Any, rows: int) -> Any:
    """The batch with another number of rows, and no numbers."""
    old = rows_of(batch)

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        try:
            return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        except (TypeError, RuntimeError, OverflowError):
            raise OverflowError(f"a batch of {rows} rows is larger than tensors can be") from None

    return map_tensors(batch, resized)
