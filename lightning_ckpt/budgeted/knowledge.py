"""What is known of a training step, and so which plans fit."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_ckpt.budgeted.surroundings import nothing_logged, surroundings
from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.monitor.trainer import callbacks_of, hands_out_iterator, model_tensors, optimizer_tensors
from lightning_ckpt.offload import OffloadOptions
from lightning_ckpt.planning.budget import Budget
from lightning_ckpt.planning.links import link_of, measured
from lightning_ckpt.planning.make import profile_by_preflight, rehearsal, step_of
from lightning_ckpt.planning.plan import Plan
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.preflight import Preflight, PreflightError
from lightning_ckpt.planning.profile import LayerProfile, Profile
from lightning_ckpt.planning.solver import Link
from lightning_ckpt.planning.treatment import Assignment, Treatment
from lightning_ckpt.recompute.policy import Operators
from lightning_ckpt.strategies import local_ranks


class Times(NamedTuple):
    """Measured times of a step, in seconds: of forward and of second runs by layer, and of all but second runs."""

    forward: Mapping[str, float]
    recompute: Mapping[tuple[str, Treatment], float]
    plain: float


class Knowledge:
    """What a training step takes and what it may take, as far as that has been found out.

    Args:
        trainer: the Trainer.
        module: the model.
        layers: its layers by qualified name.
        budget: the budget, or a plan that was made before.
        operators: whose results stay under the policy treatment; none for no such treatment.
        options: those of offload; None where nothing may be moved.

    Attributes:
        profile: what layers cost; None as long as that is not known.
        is_rehearsed: whether that comes from a rehearsal; else it was measured.
        limit: the budget in bytes, 0 as long as it is not known.
        others: bytes in use that the profile does not know of.
        link: the link to host memory, once it has been measured.
        times: measured times; None as long as they are those by formula.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        layers: Mapping[str, nn.Module],
        budget: Budget | Plan,
        operators: Operators,
        options: OffloadOptions | None,
    ) -> None:
        self.profile: Profile | None = None
        self.limit = budget.budget_bytes if isinstance(budget, Plan) else 0
        self.others = 0
        self.link: Link | None = None
        self.times: Times | None = None
        self._trainer = trainer
        self._module = module
        self._layers = layers
        self._budget = budget
        self._operators = operators
        self._options = options
        self._device: torch.device = trainer.strategy.root_device
        self._preflight: Preflight | None = None
        self._is_blind = False  # a later batch cannot be rehearsed

    # ---------------------------------------------------------------- rehearsals

    @property
    def is_rehearsed(self) -> bool:
        return self._preflight is not None

    def rehearse(self, batch: Any, tensors: Sequence[Tensor]) -> None:
        """Find out what layers cost with a batch, which holds these tensors.

        Raises:
            PreflightError: the step cannot be rehearsed.
        """
        preflight = self._make_preflight(batch)
        self.profile = self._profile_of(preflight)
        self._preflight = preflight
        self.others = self._unknown_bytes(tensors)

    def rehearse_no_more(self) -> None:
        """The step cannot be rehearsed any more: peaks are put together from parts from now on."""
        self._is_blind = True

    def forget(self) -> None:
        """Nothing is known: not all ranks can rehearse their step, or it is not the same any more."""
        self._preflight = self.profile = self.times = None
        self.others = 0

    def peak_with(self, assignment: Assignment, batch: Any) -> int | None:
        """The peak with another batch, None if it cannot be rehearsed; what layers cost with it, if it is too much."""
        if self._preflight is None or self._is_blind or self.profile is None:
            return None
        try:
            preflight = self._make_preflight(batch)
            moves = self.link is not None and any(treatment.moves for treatment in assignment.values())
            window = self.link.window_bytes if self.link is not None and moves else 0
            peak = preflight.run(assignment).peak + self.others + window  # at most: no more can be under way
            # As long as the plan holds, what layers cost may stay unknown, but for peaks, which are taken for exact.
            is_held = peak <= self.limit
            self.profile = replace(self.profile, peaks={}) if is_held else self._profile_of(preflight)
            self._preflight = preflight
        except PreflightError:
            self._is_blind = True
            return None
        if is_held:
            return peak
        planner = self.planner
        return planner.peak_of([assignment.get(layer.name, Treatment.KEEP) for layer in planner.profile.layers])

    def under_way(self, plan: Plan) -> int:
        """Bytes that may be on their way under a plan at once, and are counted as if they were."""
        return 0 if self.link is None else min(self.link.window_bytes, sum(layer.moved_bytes for layer in plan.layers))

    def correct(self, planned: int, peak: int) -> None:
        """A larger batch has had this peak instead of the planned one.

        A rehearsal knows what layers take, so that it must be others. What was scaled in proportion may grow faster.
        """
        assert self.profile is not None
        base = self.profile.base + self.others
        if self.is_rehearsed and not self._is_blind:
            self.others += max(0, peak - planned)
        elif planned > base:
            self.profile = self.profile.scaled(max(1.0, (peak - base) / (planned - base)))

    def _make_preflight(self, batch: Any) -> Preflight:
        trainer, module = self._trainer, self._module
        if not module.automatic_optimization:
            raise PreflightError("its optimization is manual")
        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            raise PreflightError("its weights are sharded")
        if hands_out_iterator(trainer):
            raise PreflightError("`training_step` fetches its batches itself")
        return Preflight(
            module,
            batch,
            self._layers,
            step_of(module),
            optimizers=trainer.optimizers,
            operators=self._operators,
            accumulates=will_accumulate(trainer),
            around_step=self._around_step,
            around=surroundings(trainer),
            min_bytes=int((self._options or OffloadOptions()).min_bytes),
        )

    @contextlib.contextmanager
    def _around_step(self) -> Iterator[None]:
        with nothing_logged(self._trainer), self._trainer.strategy.precision_plugin.train_step_context():
            yield

    def _profile_of(self, preflight: Preflight) -> Profile:
        return profile_by_preflight(preflight, bool(self._operators), self._options is not None)

    # ---------------------------------------------------------------- plans

    @property
    def planner(self) -> Planner:
        """Makes plans from what is known now; the limit follows."""
        assert self.profile is not None
        profile = self.profile
        if self.times is not None:
            profile = profile.with_times(self.times.forward, self.times.recompute)
            profile = replace(profile, step_s=self.times.plain)
        rehearse: Callable[[Assignment], int] | None = None
        if self._preflight is not None and not self._is_blind:
            rehearse = rehearsal(self._preflight)
        planner = Planner(profile, rehearse, self.link, self.others, self._operators, self.times is not None)
        budget = self._budget
        # Once, but for fractions, whose ends become better known.
        if isinstance(budget, Budget) and (not self.limit or budget.kind == "fraction"):
            self.limit = budget.bytes(planner.recomputed_bytes, planner.kept_bytes, self._device)
        return planner

    def describe(self, assignment: Assignment, otherwise: Treatment) -> Plan:
        """A plan with these treatments, some of which may have been measured on another rank only.

        Args:
            assignment: the treatments.
            otherwise: that of layers which are not among them.
        """
        assert self.profile is not None
        treatments = [assignment.get(layer.name, otherwise) for layer in self.profile.layers]
        layers = tuple(map(_with_bound, self.profile.layers, treatments))
        self.profile = replace(self.profile, layers=layers)
        return self.planner.describe(treatments, self.limit)

    # ---------------------------------------------------------------- memory

    def measure_link(self) -> None:
        """Find out what the link to host memory can carry, if anything may be moved."""
        if self._options is not None and self.profile is not None:
            link = link_of(self.profile, self._options, local_ranks=local_ranks(self._trainer))
            self.link = measured(link, self._device)

    def present(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What is in memory when a batch of these tensors begins."""
        parameters = model_tensors(self._module)
        gradients = [each.grad for each in parameters if each.grad is not None]
        return list(chain(parameters, gradients, optimizer_tensors(self._trainer), tensors))

    def _unknown_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes in use on the device that belong to nothing a rehearsal knows of."""
        if self._device.type == "cpu":
            return 0
        known = StorageSizes()
        known.add_all(tensor for tensor in self.present(tensors) if tensor.device == self._device)
        return max(0, torch.accelerator.memory_allocated(self._device) - known.bytes_without())


def will_accumulate(trainer: pl.Trainer) -> bool:
    """Whether gradients of several batches are added up before an optimizer step, in this epoch or in a later one."""
    schedules = [each for each in callbacks_of(trainer) if isinstance(each, GradientAccumulationScheduler)]
    return trainer.accumulate_grad_batches > 1 or any(each.going_to_accumulate_grad_batches() for each in schedules)


def _with_bound(layer: LayerProfile, treatment: Treatment) -> LayerProfile:
    """The layer with what it takes at most under a treatment."""
    if treatment in layer.costs:
        return layer
    bound = replace(layer.costs[Treatment.KEEP], recompute_s=layer.costs[Treatment.RECOMPUTE].recompute_s)
    return replace(layer, costs={**layer.costs, treatment: bound})
