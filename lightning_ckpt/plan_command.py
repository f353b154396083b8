"""`python train.py plan`: what to keep, recompute and offload, before a single step is trained."""

import textwrap
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ckpt.callback import ActivationCheckpointing
from lightning_ckpt.measure.work import tensors_of
from lightning_ckpt.offload import OffloadOptions
from lightning_ckpt.offload.budget import parse_bytes
from lightning_ckpt.planning import Budget, BudgetError, Plan, parse_budget, save_plan
from lightning_ckpt.planning.links import BYTES_PER_S
from lightning_ckpt.planning.make import optimizers_of, planner_by_preflight, rehearsal, step_of
from lightning_ckpt.planning.picture import draw_frontier
from lightning_ckpt.planning.plan import size
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.preflight import Preflight, map_tensors
from lightning_ckpt.planning.rates import Rates, rates_of
from lightning_ckpt.planning.table import frontier_table, plan_table
from lightning_ckpt.planning.treatment import Treatment
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.selection import select_layers


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
        elif isinstance(self._rows, int):
            batch = with_rows(batch, self._rows)
        preflight = self._preflight(batch)
        planner = planner_by_preflight(preflight, self._operators, self._options, self._link_bytes_per_s)
        limit = self._limit(self._budget, planner)
        try:
            plan = planner.plan(limit)
        except BudgetError as error:
            raise BudgetError(f"`memory_budget={self._budget.written!r}`: {error}") from None
        frontier = planner.frontier(planner.rules())
        print("\n\n".join([self._head(batch), plan_table(plan), frontier_table(frontier), self._caveats()]))
        if self._save is not None:
            classes = {name: type(layer).__name__ for name, layer in preflight.layers.items()}
            save_plan(plan, self._save, classes)
            print(f"\nThe plan is in {self._save}: train with `--ckpt.plan {self._save}`.")
        if self._picture is not None:
            draw_frontier(frontier, plan.budget_bytes, self._picture)
        return plan

    # ---------------------------------------------------------------- model and data

    def _prepare(self) -> Any:
        """Everything that `fit` does before the first step, as far as it takes no memory; the first batch."""
        self._model.trainer = self._trainer
        source: Any = self._model
        if self._datamodule is not None:
            source = self._datamodule
            source.trainer = self._trainer
            source.prepare_data()
            source.setup("fit")
        with torch.device("meta"):
            self._model.setup("fit")
            self._model.configure_model()
        self._trainer.strategy.precision_plugin.convert_module(self._model)
        self._model.train()
        batch = next(iter(source.train_dataloader()))
        return self._trainer.strategy.precision_plugin.convert_input(batch)

    def _preflight(self, batch: Any) -> Preflight:
        return Preflight(
            self._model,
            batch,
            select_layers(self._model, self._callback.layers, check_fn=self._callback.check_fn).layers,
            step_of(self._model),
            optimizers=optimizers_of(self._model),
            operators=self._operators,
            min_bytes=int((self._options or OffloadOptions()).min_bytes),
            accumulates=self._trainer.accumulate_grad_batches > 1,
            rates=self._rates,
            around_step=self._trainer.strategy.precision_plugin.train_step_context,
        )

    def _limit(self, budget: Budget, planner: Planner) -> int:
        return budget.bytes(
            planner.recomputed_bytes, planner.kept_bytes, self._trainer.strategy.root_device, self._device_bytes
        )

    def _largest(self, batch: Any) -> Any:
        """The batch with the most rows that fits, every layer treated for the least memory."""
        if self._budget.kind == "fraction":
            raise BudgetError(
                f"`memory_budget={self._budget.written!r}` grows with the batch, so any batch fits. Give a size, or a "
                "share of the device's memory, with `--batch_size max`."
            )
        limit = self._budget.bytes(0, 0, self._trainer.strategy.root_device, self._device_bytes)
        cheapest = Treatment.RECOMPUTE if self._options is None else Treatment.RECOMPUTE_OFFLOAD
        peaks: dict[int, int] = {}

        def peak(rows: int) -> int:
            if rows not in peaks:
                preflight = self._preflight(with_rows(batch, rows))
                peaks[rows] = rehearsal(preflight)(dict.fromkeys(preflight.layers, cheapest))
            return peaks[rows]

        if peak(1) > limit:
            raise BudgetError(
                f"`memory_budget={self._budget.written!r}`: a batch of one row takes {size(peak(1))}, more than the "
                f"{size(limit)} that there are."
            )
        most, too_many = 1, 0
        while too_many != most + 1:  # over rows, the peak is nearly a straight line: few trials find the end of it
            other = too_many or 2 * most
            slope = max(1, (peak(other) - peak(most)) // (other - most))
            ahead = max(1, (limit - peak(most)) // slope)
            rows = most + (min(ahead, too_many - most - 1) if too_many else ahead)
            if peak(rows) <= limit:
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
            "several ranks add buffers or shard weights.",
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


def with_rows(batch: Any, rows: int) -> Any:
    """The batch with another number of rows, and no numbers."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    old = tensors[0].shape[0] if tensors else 0

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return map_tensors(batch, resized)
