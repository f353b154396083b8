"""The stages of a training run with a memory budget."""

import enum
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_ckpt.budgeted.ranks import Ranks, communicates
from lightning_ckpt.budgeted.watch import StepWatch
from lightning_ckpt.measure.clock import make_clock
from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.measure.work import tensors_of
from lightning_ckpt.monitor.trainer import hands_out_iterator, model_tensors, optimizer_tensors
from lightning_ckpt.offload import OffloadOptions
from lightning_ckpt.planning.budget import Budget, BudgetError
from lightning_ckpt.planning.links import link_of, measured
from lightning_ckpt.planning.make import profile_by_preflight, rehearsal, step_of
from lightning_ckpt.planning.plan import Plan, size
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.preflight import Preflight, PreflightError
from lightning_ckpt.planning.probing import choose_probes, profile_of_cheapest, with_policy
from lightning_ckpt.planning.profile import LayerProfile, Profile
from lightning_ckpt.planning.solver import Link
from lightning_ckpt.planning.times import LayerTimes
from lightning_ckpt.planning.treatment import Assignment, Treatment, treat
from lightning_ckpt.recompute import Recompute
from lightning_ckpt.recompute.arguments import Keep
from lightning_ckpt.recompute.policy import Operators
from lightning_ckpt.strategies import local_ranks

_WARM_UP = 2  # optimizer steps in which the optimizer's state is made, and the first calls of layers are looked at
_GROWTH = 0.1  # room that is left for batches that are longer still, as a part of what activations take


class Stage(enum.Enum):
    """What an optimizer step of a run is used for."""

    WARM_UP = enum.auto()
    MEMORY = enum.auto()  # the peak is measured; layer by layer, if there was no rehearsal
    PROBE = enum.auto()  # single layers have an operator policy, if there was no rehearsal
    TIMES = enum.auto()
    CHECK = enum.auto()  # the peak under the final plan is measured
    SETTLED = enum.auto()


class BudgetKeeper:
    """Keeps a training run within its budget.

    Before the first batch, the step is rehearsed on fake tensors and a plan is made from what that shows, with times by
    formula. The third optimizer step shows what memory it really takes, the fourth one what time layers take; a final
    plan follows, and the step after it is compared with what was planned. A step that cannot be rehearsed begins with
    every layer recomputed, and layers are tried out with other treatments as far as there is room.

    Args:
        who: the callback, for messages.
        trainer: the Trainer.
        module: the model.
        recomputed: what is attached to its layers.
        budget: the budget, or a plan that was made before.
        operators: whose results stay under the policy treatment; none for no such treatment.
        options: those of offload; None where nothing may be moved.
        start_engine: starts what moves activations, with these options.

    Attributes:
        plan: what is done with the layers; None before the first batch, and while nothing is known.
    """

    def __init__(
        self,
        who: str,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        recomputed: list[Recompute],
        budget: Budget | Plan,
        operators: Operators,
        options: OffloadOptions | None,
        start_engine: Callable[[OffloadOptions], Keep],
    ) -> None:
        self.plan: Plan | None = None
        self._who = who
        self._trainer = trainer
        self._module = module
        self._recomputed = recomputed
        self._layers = {each.name: each.layer for each in recomputed}
        self._budget = budget
        self._operators = operators
        self._options = options
        self._start_engine = start_engine
        self._pack: Keep | None = None
        self._device: torch.device = trainer.strategy.root_device
        self._ranks = Ranks(trainer, who)
        self._communicates = communicates(self._layers.values())
        self._stage: Stage | None = None
        self._steps = 0
        self._has_stepped = False
        self._preflight: Preflight | None = None
        self._profile: Profile | None = None
        self._link: Link | None = None
        self._limit = 0
        self._others = 0
        self._largest = 0  # bytes of a batch that the plan holds for
        self._longest: list[int] = []  # the longest of all dimensions in batches that it holds for
        self._planned_for = 0  # of the batch that it was made from
        self._seen = 0  # of the largest one while memory is measured
        self._measured: tuple[dict[str, float], dict[tuple[str, Treatment], float], float] | None = None
        self._watch: StepWatch | None = None
        self._times: LayerTimes | None = None
        self._timed: list[tuple[dict[str, float], dict[str, float], float]] = []
        self._probes: list[str] = []
        self._elected: dict[str, Treatment] = {}  # by all ranks, also for layers that this one has not seen yet
        self._wanted: Plan | None = None  # for a batch that was larger than all before, until all ranks plan again
        self._all_steps = 0
        self._replanned = self._has_grown = False
        self._is_blind = False  # a later batch cannot be rehearsed

    # ---------------------------------------------------------------- hooks

    def batch_begins(self, batch: Any) -> None:
        """A micro-batch begins; it is on the device."""
        tensors = [] if hands_out_iterator(self._trainer) else tensors_of(batch)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self._stage is None:
            self._largest = self._planned_for = nbytes
            self._longest = _dimensions(tensors)
            self._start(batch, tensors)
        if self._has_stepped:  # a plan changes between steps, when everybody has seen what the last one was
            self._has_stepped = False
            self._all_steps += 1
            self._advance()
            if self._ranks.called(self._all_steps):
                self._plan_again()
        longest = list(map(max, zip_longest(self._longest, _dimensions(tensors), fillvalue=0)))
        if nbytes > self._largest or (longest != self._longest and self._preflight is not None):
            self._longest = longest
            self._grow(batch, nbytes)
        if self._stage in (Stage.MEMORY, Stage.PROBE, Stage.CHECK):
            if self._watch is None:
                traces = self._preflight is None and self._stage is not Stage.CHECK
                self._watch = StepWatch(self._device, self._layers, traces)
                self._seen = 0
            self._seen = max(self._seen, nbytes)
            self._watch.begin(self._present(tensors))
        elif self._stage is Stage.TIMES:
            self._times = LayerTimes(self._recomputed, make_clock(self._device))

    def optimizer_begins(self) -> None:
        """The gradients are there."""
        if self._watch is not None:
            self._watch.optimizer_begins()

    def batch_ends(self, stepped: bool) -> None:
        """A micro-batch is over; `stepped` tells whether the optimizer has made its step."""
        if self._watch is not None:
            self._watch.end()
        if self._times is not None:
            self._timed.append(self._times.finish())
            self._times = None
        self._has_stepped = self._has_stepped or stepped

    def drop(self) -> None:
        """Forget a micro-batch that has begun and does not end: `on_train_batch_start` has returned -1."""
        if self._watch is not None:
            self._watch.drop()
        if self._times is not None:
            self._times.finish()
            self._times = None

    def close(self) -> None:
        """Leave the layers alone."""
        self.drop()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # ---------------------------------------------------------------- stages

    def _start(self, batch: Any, tensors: list[Tensor]) -> None:
        self._stage = Stage.WARM_UP
        if isinstance(self._budget, Plan):
            self._limit = self._budget.budget_bytes
            self._move_if(any(layer.treatment.moves for layer in self._budget.layers), None)
            self._apply(self._budget)
            return
        failure = None
        try:
            self._preflight = self._make_preflight(batch)
            self._profile = self._rehearse(self._preflight)
        except PreflightError as error:
            self._preflight, failure = None, str(error)
        failure = self._ranks.failure(failure)
        if failure is not None:
            self._preflight = self._profile = None
            self._move_if(self._options is not None, None)
            self._treat(dict.fromkeys(self._layers, self._cheapest))
            rank_zero_info(
                f"{self._who}: the step cannot be rehearsed without data ({failure}), so its first batches are "
                "measured, with every layer recomputed."
            )
            return
        assert self._profile is not None
        self._others = self._unknown_bytes(tensors)
        self._find_link(self._profile)
        planner = self._planner(self._profile)
        self._apply(self._elect(self._first_plan(planner), planner))

    def _advance(self) -> None:
        """An optimizer step is over: what it has shown, and what the next one is for."""
        stage = self._stage
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._steps += 1
        if stage is Stage.WARM_UP and self._steps == _WARM_UP:
            is_final = isinstance(self._budget, Plan) or self._measured is not None
            self._stage = Stage.CHECK if is_final else Stage.MEMORY
        elif stage is Stage.MEMORY:
            assert watch is not None
            if self._preflight is not None:
                self._correct(watch)
                self._stage = Stage.TIMES
            else:
                self._learn_cheapest(watch)
        elif stage is Stage.PROBE:
            assert watch is not None
            if watch.trace is not None and self._profile is not None:
                self._profile = with_policy(self._profile, watch.trace, self._probes)
            self._plan_measured()
        elif stage is Stage.TIMES:
            self._learn_times()
        elif stage is Stage.CHECK:
            assert watch is not None
            self._check(watch)

    def _correct(self, watch: StepWatch) -> None:
        """The rehearsal does not know of workspaces, fragments, buffers of a strategy."""
        assert self.plan is not None
        if watch.peak is not None:
            excess = watch.peak - self.plan.peak_bytes
            # A smaller batch than that of the plan must not make room for more than there is.
            self._others += excess if self._seen >= self._planned_for else max(0, excess)

    def _learn_cheapest(self, watch: StepWatch) -> None:
        unknown = watch.trace is None or watch.peak is None
        if self._ranks.failure("unknown" if unknown else None) is not None:
            rank_zero_warn(
                f"{self._who}: what layers take cannot be measured here, since the backward holds an operator that "
                "computes otherwise while it is watched. All of them are recomputed."
            )
            self._stage = Stage.SETTLED
            return
        assert watch.trace is not None
        assert watch.peak is not None
        self._profile = profile_of_cheapest(self._layers, watch.trace, self._cheapest.moves)
        self._others = watch.peak - watch.trace.peak
        self._find_link(self._profile)
        planner = self._planner(self._profile)
        self._first_plan(planner)  # an error if even this does not fit
        self._probes = self._ranks.common(choose_probes(planner, self._limit)) if self._operators else []
        if self._probes:
            self._stage = Stage.PROBE
            self._treat({name: Treatment.POLICY if name in self._probes else self._cheapest for name in self._layers})
        else:
            self._plan_measured()

    def _plan_measured(self) -> None:
        """What layers take is known as far as it can be: a plan, whose times are still those by formula."""
        assert self._profile is not None
        planner = self._planner(self._profile)
        self._apply(self._elect(self._later_plan(planner), planner))
        self._stage = Stage.TIMES

    def _learn_times(self) -> None:
        assert self.plan is not None
        assert self._profile is not None
        forward = {name: sum(each[0].get(name, 0.0) for each in self._timed) for name in self._layers}
        again = {name: sum(each[1].get(name, 0.0) for each in self._timed) for name in self._layers}
        whole = sum(each[2] for each in self._timed)
        assignment = self.plan.assignment
        seconds = {(name, assignment[name]): again[name] for name in assignment if assignment[name].recomputes}
        known = {name: value for name, value in forward.items() if value}  # compiled layers do not tell
        self._measured = known, {key: value for key, value in seconds.items() if value}, whole - sum(again.values())
        self._timed.clear()
        planner = self._planner(self._profile)
        elected = self._elected
        plan = self._elect(self._later_plan(planner), planner)
        is_new = self._elected != elected  # the same on all ranks, so that they go on with the same stage
        self._apply(plan, again=is_new)
        # Layers that are treated anew make copies until they have learned what changes in a call.
        self._steps, self._stage = 0, Stage.WARM_UP if is_new else Stage.CHECK

    def _check(self, watch: StepWatch) -> None:
        assert self.plan is not None
        self._stage = Stage.SETTLED
        own = watch.peak
        excess = self._ranks.most(0 if own is None else own - self._limit)
        if excess <= 0:
            if own is not None:
                rank_zero_info(f"{self._who}: the peak is {size(own)}, planned were {size(self.plan.peak_bytes)}.")
            return
        peak = self._limit + excess
        if self._replanned or self._profile is None:
            rank_zero_warn(
                f"{self._who}: the peak is {size(peak)}, above the budget of {size(self._limit)}. A plan cannot do "
                "more here: give a smaller budget, or a smaller batch."
            )
            return
        self._replanned = True
        if own is not None:
            self._others += max(0, own - self.plan.peak_bytes)
        rank_zero_info(
            f"{self._who}: the peak is {size(peak)}, above the budget of {size(self._limit)}, so the plan is made "
            "again."
        )
        self._plan_again()
        self._steps, self._stage = 0, Stage.WARM_UP

    def _plan_again(self) -> None:
        """One plan for all ranks, from what each knows now."""
        assert self._profile is not None
        planner = self._planner(self._profile)
        self._apply(self._elect(self._wanted or self._later_plan(planner), planner))

    def _grow(self, batch: Any, nbytes: int) -> None:
        """A batch is larger than all before: the plan must hold for it."""
        ratio, self._largest = nbytes / max(1, self._largest), max(nbytes, self._largest)
        if self.plan is None or self._profile is None:
            return
        fits = self._rehearse_larger(batch, nbytes)
        if fits:
            return
        if fits is None:
            self._profile = self._profile.scaled(ratio)
        planner = self._planner(self._profile)
        room = int(_GROWTH * max(0, self.plan.peak_bytes - self._profile.base))
        try:
            plan = planner.plan(self._limit - room)  # so that the next longer batch needs no other one
            self._largest = max(self._largest, int(nbytes * (1 + _GROWTH)))
        except BudgetError:
            plan = self._later_plan(planner)
        if self._ranks.several:
            self._wanted = plan
            self._ranks.call(self._all_steps)
        if not self._ranks.several or not self._communicates:
            self._apply(plan, again=not self._has_grown)
        self._has_grown = True

    def _rehearse_larger(self, batch: Any, nbytes: int) -> bool | None:
        """Whether the plan holds for a larger batch, None if it cannot be rehearsed."""
        if self._preflight is None or self._is_blind:
            return None
        assert self.plan is not None
        known = self._profile
        try:
            preflight = self._make_preflight(batch)
            if preflight.run(self.plan.assignment).peak + self._others > self._limit:
                self._profile = self._rehearse(preflight)
            self._preflight, self._planned_for = preflight, nbytes
        except PreflightError:
            self._is_blind = True
            return None
        return self._profile is known

    # ---------------------------------------------------------------- parts

    @property
    def _cheapest(self) -> Treatment:
        return Treatment.RECOMPUTE if self._pack is None else Treatment.RECOMPUTE_OFFLOAD

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
            accumulates=trainer.accumulate_grad_batches > 1,
            around_step=trainer.strategy.precision_plugin.train_step_context,
            min_bytes=int((self._options or OffloadOptions()).min_bytes),
        )

    def _rehearse(self, preflight: Preflight) -> Profile:
        return profile_by_preflight(preflight, bool(self._operators), self._options is not None)

    def _planner(self, profile: Profile) -> Planner:
        measured = self._measured
        if measured is not None:
            forward, again, whole = measured
            profile = replace(profile.with_times(forward, again), step_s=whole)
        rehearse = None if self._preflight is None or self._is_blind else rehearsal(self._preflight)
        return Planner(profile, rehearse, self._link, self._others, self._operators, measured is not None)

    def _find_limit(self, planner: Planner) -> None:
        """What the budget comes to: once, but for fractions, whose ends become better known."""
        if isinstance(self._budget, Budget) and (not self._limit or self._budget.kind == "fraction"):
            self._limit = self._budget.bytes(planner.recomputed_bytes, planner.kept_bytes, self._device)

    def _first_plan(self, planner: Planner) -> Plan:
        self._find_limit(planner)
        plan = failure = None
        try:
            plan = planner.plan(self._limit)
        except BudgetError as error:
            failure = str(error)
        failure = self._ranks.failure(failure)
        if plan is None or failure is not None:
            assert isinstance(self._budget, Budget)
            raise BudgetError(f"`memory_budget={self._budget.written!r}`: {failure}")
        return plan

    def _later_plan(self, planner: Planner) -> Plan:
        """A plan in the middle of training, which goes on with the least that can be had."""
        self._find_limit(planner)
        try:
            return planner.plan(self._limit)
        except BudgetError as error:
            rank_zero_warn(f"{self._who}: {error} Training goes on with the least memory that can be had.")
            return planner.least(self._limit)

    def _apply(self, plan: Plan, again: bool = True) -> None:
        self.plan = plan
        called = set() if self._profile is None else {layer.name for layer in self._profile.layers}
        uncalled = {name: treatment for name, treatment in self._elected.items() if name not in called}
        self._treat({**plan.assignment, **uncalled})
        if again:
            what = "final plan" if plan.measured else "plan"
            rank_zero_info("\n  ".join([f"{self._who}: {what}", *str(plan).splitlines()]))

    def _treat(self, assignment: Assignment) -> None:
        for each in self._recomputed:
            treat(each, assignment.get(each.name, Treatment.KEEP), self._operators, self._pack)

    def _find_link(self, profile: Profile) -> None:
        if self._options is None:
            return
        self._link = measured(link_of(profile, self._options, local_ranks=local_ranks(self._trainer)), self._device)
        self._move_if(True, self._link)

    def _move_if(self, moves: bool, link: Link | None) -> None:
        """Start what moves activations: all that it is told to, since the plan has chosen."""
        if not moves or self._options is None or self._pack is not None:
            return
        half = 0 if link is None else link.window_bytes // 2  # one for each way, since both may be on their way at once
        window = {} if link is None else {"max_inflight_bytes": half, "prefetch_bytes": half}
        self._pack = self._start_engine(replace(self._options, move="all", keep_last=0, **window))

    def _elect(self, plan: Plan, planner: Planner) -> Plan:
        """One plan for all ranks: that of the rank that needs most."""
        self._wanted = None
        own = {layer.name: str(plan.assignment[layer.name]) for layer in planner.profile.layers}
        # Peaks would not do: whoever needs little keeps much, and may fill its budget just as well.
        chosen = self._ranks.elect(plan.kept_bytes - self._limit, own)
        self._elected = {name: Treatment(treatment) for name, treatment in chosen.items()}
        if chosen == own:
            return plan
        assert self._profile is not None
        treatments = [self._elected.get(layer.name, self._cheapest) for layer in planner.profile.layers]
        layers = tuple(map(_with_bound, self._profile.layers, treatments))
        self._profile = replace(self._profile, layers=layers)
        return self._planner(self._profile).describe(treatments, self._limit)

    def _present(self, tensors: list[Tensor]) -> list[Tensor]:
        parameters = model_tensors(self._module)
        gradients = [each.grad for each in parameters if each.grad is not None]
        return list(chain(parameters, gradients, optimizer_tensors(self._trainer), tensors))

    def _unknown_bytes(self, tensors: list[Tensor]) -> int:
        """Bytes in use on the device that belong to nothing a rehearsal knows of."""
        if self._device.type == "cpu":
            return 0
        known = StorageSizes()
        known.add_all(tensor for tensor in self._present(tensors) if tensor.device == self._device)
        return max(0, torch.accelerator.memory_allocated(self._device) - known.bytes_without())


def _dimensions(tensors: list[Tensor]) -> list[int]:
    return [length for tensor in tensors for length in tensor.shape]


def _with_bound(layer: LayerProfile, treatment: Treatment) -> LayerProfile:
    """The layer with what it takes at most under a treatment, which may have been measured on another rank only."""
    if treatment in layer.costs:
        return layer
    bound = replace(layer.costs[Treatment.KEEP], recompute_s=layer.costs[Treatment.RECOMPUTE].recompute_s)
    return replace(layer, costs={**layer.costs, treatment: bound})
