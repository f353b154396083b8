"""The stages of a training run with a memory budget."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_ckpt.budgeted.changes import StepChanges
from lightning_ckpt.budgeted.knowledge import Knowledge, Times, will_accumulate
from lightning_ckpt.budgeted.ranks import Ranks, communicates
from lightning_ckpt.budgeted.sizes import BatchSizes, bytes_of
from lightning_ckpt.budgeted.watch import StepWatch
from lightning_ckpt.measure.clock import make_clock
from lightning_ckpt.measure.work import tensors_of
from lightning_ckpt.monitor.trainer import hands_out_iterator
from lightning_ckpt.offload import OffloadEngine, OffloadOptions
from lightning_ckpt.planning.budget import Budget, BudgetError
from lightning_ckpt.planning.plan import Plan, size
from lightning_ckpt.planning.preflight import PreflightError
from lightning_ckpt.planning.probing import choose_probes, profile_of_cheapest, with_policy
from lightning_ckpt.planning.times import LayerTimes
from lightning_ckpt.planning.treatment import Assignment, Treatment, treat
from lightning_ckpt.recompute import Recompute
from lightning_ckpt.recompute.policy import Operators

_WARM_UP = 2  # optimizer steps in which the optimizer's state is made, and the first calls of layers are looked at
_SKIPPED = 8  # optimizer steps that are not measured, since there was no backward, until any one is
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
    plan follows, and a step under it is compared with what was planned. A step that cannot be rehearsed begins with
    every layer recomputed, and an operator policy is tried on single layers as far as there is room.

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
        stage: what the present step is used for; None before the first batch.
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
        start_engine: Callable[[OffloadOptions], OffloadEngine],
    ) -> None:
        self.plan: Plan | None = None
        self.stage: Stage | None = None
        self._who = who
        self._trainer = trainer
        self._module = module
        self._recomputed = recomputed
        self._layers = {each.name: each.layer for each in recomputed}
        self._budget = budget
        self._operators = operators
        self._options = options
        self._start_engine = start_engine
        self._engine: OffloadEngine | None = None
        self._device: torch.device = trainer.strategy.root_device
        self._ranks = Ranks(trainer, who)
        self._communicates = communicates(self._layers.values())
        self._steps = 0
        self._has_stepped = False
        self._knowledge = Knowledge(trainer, module, self._layers, budget, operators, options)
        self._sizes: BatchSizes  # from the first batch on
        self._changes: StepChanges
        self._told_peak: int | None = None
        self._outgrown = 0  # the peak for which there was another plan: as far as all ranks can, it is planned for
        self._ran_backward = False
        self._has_skipped = False  # whether the step before had none
        self._skipped = 0  # steps that were not measured for that
        self._seen = 0  # bytes of the largest batch while memory is measured
        self._watch: StepWatch | None = None
        self._times: LayerTimes | None = None
        self._timed: list[tuple[dict[str, float], dict[str, float], float]] = []
        self._probes: list[str] = []
        self._elected: dict[str, Treatment] = {}  # by all ranks, also for layers that this one has not seen yet
        self._wanted: Plan | None = None  # for a batch that was larger than all before, until all ranks plan again
        self._all_steps = 0
        self._has_planned = self._replanned = self._has_grown = False
        self._is_least = False  # the budget cannot be kept any more, which has been said

    # ---------------------------------------------------------------- hooks

    def batch_begins(self, batch: Any) -> None:
        """A micro-batch begins; it is on the device."""
        tensors = [] if hands_out_iterator(self._trainer) else tensors_of(batch)
        if self.stage is None:
            self._sizes = BatchSizes(tensors)
            self._changes = StepChanges(self._trainer, self._module, self._recomputed)
            self._start(batch, tensors)
        if self._has_stepped:  # a plan changes between steps, when everybody has seen what the last one was
            self._has_stepped = False
            self._all_steps += 1
            self._advance()
            if self._ranks.called(self._all_steps):
                self._plan_again()
        is_rehearsed, profile = self._knowledge.is_rehearsed, self._knowledge.profile
        trains_others = self._changes.trains_others()
        runs_others = self._changes.runs_others(() if profile is None else profile.uncalled)
        is_larger = self._sizes.are_exceeded_by(tensors, by_shape=is_rehearsed)
        if trains_others and not is_rehearsed and not isinstance(self._budget, Plan):
            self._begin_again()
        elif is_larger or ((trains_others or runs_others) and is_rehearsed):
            self._grow(batch, bytes_of(tensors))
        elif trains_others or runs_others:
            self._sizes.check_from(self._all_steps + _WARM_UP, nbytes=0)
        measures = self.stage in (Stage.MEMORY, Stage.PROBE)
        if measures or self.stage is Stage.CHECK or self._watch is not None or self._checks_growth(tensors):
            if self._watch is None:
                traces = measures and not self._knowledge.is_rehearsed
                self._watch = StepWatch(self._device, self._layers, traces)
                self._seen = 0
            self._seen = max(self._seen, bytes_of(tensors))
            self._watch.begin(self._knowledge.present(tensors))
        elif self.stage is Stage.TIMES:
            self._times = LayerTimes(self._recomputed, make_clock(self._device), self._engine)

    def backward_ends(self) -> None:
        """There was a backward in this optimizer step."""
        self._ran_backward = True

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

    def peak_was(self, nbytes: int | None) -> None:
        """Somebody has measured what the optimizer step has taken that has just ended."""
        self._told_peak = nbytes

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
        self.stage = Stage.WARM_UP
        if isinstance(self._budget, Plan):
            if any(layer.treatment.moves for layer in self._budget.layers):
                self._start_moving()
            self._apply(self._budget)
            return
        failure = None
        try:
            self._knowledge.rehearse(batch, tensors)
        except PreflightError as error:
            failure = str(error)
        failure, plan = self._ranks.failure(failure), None
        if failure is None:
            self._knowledge.measure_link()
            try:
                plan = self._first_plan()
            except PreflightError as error:
                failure = str(error)
        if plan is None:
            self._knowledge.forget()
            self._start_moving()
            self._treat(dict.fromkeys(self._layers, self._cheapest))
            rank_zero_info(
                f"{self._who}: the step cannot be rehearsed without data ({failure}), so its first batches are "
                "measured, with every layer recomputed."
            )
            return
        self._start_moving()
        self._apply(self._elect(plan))

    def _advance(self) -> None:
        """An optimizer step is over: what it has shown, and what the next one is for."""
        stage = self.stage
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        ran_backward, self._ran_backward = self._ran_backward, False
        peak, self._told_peak = self._told_peak, None
        if stage in (Stage.MEMORY, Stage.PROBE, Stage.TIMES) and self._is_skipped(ran_backward):
            return
        self._steps += 1
        if stage is Stage.WARM_UP and self._steps == _WARM_UP:
            is_final = isinstance(self._budget, Plan) or self._knowledge.times is not None
            self.stage = Stage.CHECK if is_final else Stage.MEMORY
        elif stage is Stage.MEMORY:
            assert watch is not None
            if self._knowledge.is_rehearsed:
                self._correct(watch)
                self.stage = Stage.TIMES
            else:
                self._learn_cheapest(watch)
        elif stage is Stage.PROBE:
            assert watch is not None
            if watch.trace is not None and self._knowledge.profile is not None:
                self._knowledge.profile = with_policy(
                    self._knowledge.profile, watch.trace, self._probes, self._sizes.beyond(self._seen)
                )
            self._plan_measured()
        elif stage is Stage.TIMES:
            self._learn_times()
        elif stage is Stage.CHECK:
            assert watch is not None
            self._check(watch)
        elif watch is not None:
            self._check_growth(watch.peak)
        elif stage is Stage.SETTLED and peak is not None and peak > self._outgrown:
            self._check_growth(peak)

    def _begin_again(self) -> None:
        """What was measured is not true any more."""
        if self.stage is Stage.WARM_UP and self.plan is None:
            return
        rank_zero_info(
            f"{self._who}: other weights are trained from now on, so batches are measured again, with every layer "
            "recomputed."
        )
        self.close()
        self._knowledge.forget()
        self._timed.clear()
        self.plan, self._elected, self._replanned = None, {}, False
        self._treat(dict.fromkeys(self._layers, self._cheapest))
        self._steps, self.stage = 0, Stage.WARM_UP

    def _is_skipped(self, ran_backward: bool) -> bool:
        """Whether a later step has to be measured: this one, or the one before, had no backward on some rank.

        A step after one without a backward begins without gradients, and so takes less than others.
        """
        skipped = self._ranks.failure(None if ran_backward else "skipped") is not None
        waits = skipped or self._has_skipped
        self._has_skipped = skipped
        self._skipped += waits
        if waits:
            self._timed.clear()
        return waits and self._skipped <= _SKIPPED

    def _correct(self, watch: StepWatch) -> None:
        """The rehearsal does not know of workspaces, fragments, buffers of a strategy."""
        assert self.plan is not None
        if watch.peak is not None:
            excess = watch.peak - self.plan.peak_bytes
            if excess < 0:  # what was not under way, though it might have been, makes no room for plans that move less
                excess = min(0, excess + self._knowledge.under_way(self.plan))
            # A smaller step than that of the plan must not make room for more than there is.
            accumulates = self._trainer.accumulate_grad_batches > 1
            is_whole = self._seen >= self._sizes.planned_for and accumulates == will_accumulate(self._trainer)
            self._knowledge.others += excess if is_whole else max(0, excess)

    def _learn_cheapest(self, watch: StepWatch) -> None:
        unknown = watch.trace is None or watch.peak is None
        if self._ranks.failure("unknown" if unknown else None) is not None:
            rank_zero_warn(
                f"{self._who}: what layers take cannot be measured here, since the backward holds an operator that "
                "computes otherwise while it is watched. All of them are recomputed."
            )
            self.stage = Stage.SETTLED
            return
        assert watch.trace is not None
        assert watch.peak is not None
        knowledge = self._knowledge
        profile = profile_of_cheapest(self._layers, watch.trace, self._cheapest.moves)
        knowledge.profile = profile.scaled(self._sizes.beyond(self._seen))  # there have been larger batches
        knowledge.others = watch.peak - watch.trace.peak
        knowledge.measure_link()
        if not self._has_planned:
            self._first_plan()  # an error if even this does not fit
        own = choose_probes(knowledge.planner, knowledge.limit) if self._operators else []
        self._probes = self._ranks.common(own)
        if self._probes:
            self.stage = Stage.PROBE
            self._treat({name: Treatment.POLICY if name in self._probes else self._cheapest for name in self._layers})
        else:
            self._plan_measured()

    def _plan_measured(self) -> None:
        """What layers take is known as far as it can be: a plan, whose times are still those by formula."""
        self._apply(self._elect(self._later_plan()))
        self.stage = Stage.TIMES

    def _learn_times(self) -> None:
        assert self.plan is not None
        forward = {name: sum(each[0].get(name, 0.0) for each in self._timed) for name in self._layers}
        again = {name: sum(each[1].get(name, 0.0) for each in self._timed) for name in self._layers}
        whole = sum(each[2] for each in self._timed)
        assignment = self.plan.assignment
        seconds = {(name, assignment[name]): again[name] for name in assignment if assignment[name].recomputes}
        self._knowledge.times = Times(
            {name: value for name, value in forward.items() if value},  # compiled layers do not tell
            {key: value for key, value in seconds.items() if value},
            whole - sum(again.values()),
        )
        self._timed.clear()
        elected = self._elected
        plan = self._elect(self._later_plan())
        is_new = self._elected != elected  # the same on all ranks, so that they go on with the same stage
        self._apply(plan, announce=is_new)
        if not is_new:
            rank_zero_info(f"{self._who}: the plan stays as it is, {plan.totals()[-1]}.")
        # Layers that are treated anew make copies until they have learned what changes in a call.
        self._steps, self.stage = 0, Stage.WARM_UP if is_new else Stage.CHECK

    def _check(self, watch: StepWatch) -> None:
        assert self.plan is not None
        self.stage = Stage.SETTLED
        own, limit = watch.peak, self._knowledge.limit
        excess = self._ranks.most(0 if own is None else own - limit)
        if excess <= 0:
            if own is not None:
                rank_zero_info(f"{self._who}: the peak is {size(own)}, planned were {size(self.plan.peak_bytes)}.")
            return
        above = f"{self._who}: the peak is {size(limit + excess)}, above the budget of {size(limit)}"
        is_least = bool(self._ranks.most(int(self._is_least)))
        if self._replanned or is_least or self._knowledge.profile is None:
            cure = "The plan was made for another step, or edited: make a new one"
            if isinstance(self._budget, Budget):
                cure = "A plan cannot do more here: give a smaller batch, or a larger budget if there is the memory"
            rank_zero_warn(f"{above}. {cure}.")
            return
        self._replanned = True
        if own is not None:
            self._knowledge.others += max(0, own - self.plan.peak_bytes)
        rank_zero_info(f"{above}, so the plan is made again.")
        self._plan_again()
        self._steps, self.stage = 0, Stage.WARM_UP

    def _plan_again(self) -> None:
        """One plan for all ranks, from what each knows now."""
        self._apply(self._elect(self._wanted or self._later_plan()))

    def _grow(self, batch: Any, nbytes: int) -> None:
        """A batch is larger than all before: the plan must hold for it."""
        ratio = self._sizes.grow(nbytes)
        knowledge = self._knowledge
        if knowledge.profile is None:
            return
        peak = None if self.plan is None else knowledge.peak_with(self.plan.assignment, batch)
        if peak is None:
            knowledge.profile = knowledge.profile.scaled(ratio)
        else:
            self._sizes.planned_for = nbytes
        if self.plan is None:
            return
        if peak is not None and peak <= knowledge.limit:
            self.plan = replace(self.plan, peak_bytes=max(self.plan.peak_bytes, peak))
            return
        room = int(_GROWTH * max(0, self.plan.peak_bytes - knowledge.profile.base))
        try:
            plan = knowledge.planner.plan(knowledge.limit - room)  # so that the next longer batch needs no other one
            self._sizes.grow(int(nbytes * (1 + _GROWTH)))
        except (BudgetError, PreflightError):
            plan = self._later_plan()
        self._change(replace(plan, budget_bytes=knowledge.limit), announce=not self._has_grown)
        self._has_grown = True
        self._sizes.check_from(self._all_steps + _WARM_UP, nbytes)

    def _checks_growth(self, tensors: Sequence[Tensor]) -> bool:
        return self.stage is Stage.SETTLED and self._sizes.are_checked_by(tensors, self._all_steps)

    def _check_growth(self, peak: int | None) -> None:
        """What a step has really taken, which may have been larger than those before, or another one."""
        knowledge = self._knowledge
        if self.plan is None or peak is None or peak <= knowledge.limit or self._is_least:
            return
        self._outgrown = peak
        above = (
            f"{self._who}: after a change of the step the peak is {size(peak)}, above the budget of "
            f"{size(knowledge.limit)}"
        )
        if knowledge.profile is None:
            self._is_least = True
            rank_zero_warn(f"{above}. The plan was made for another step: make a new one, or give `memory_budget`.")
            return
        rank_zero_info(f"{above}, so the plan is made again.")
        knowledge.correct(self.plan.peak_bytes, peak)
        self._change(self._later_plan(), announce=True)

    def _change(self, plan: Plan, announce: bool) -> None:
        """This rank needs another plan; all have the same as soon as everybody can know of it."""
        if self._ranks.several:
            self._wanted = plan
            self._ranks.call(self._all_steps)
        if not self._ranks.several or not self._communicates:
            self._apply(plan, announce)

    # ---------------------------------------------------------------- parts

    @property
    def _cheapest(self) -> Treatment:
        return Treatment.RECOMPUTE if self._engine is None else Treatment.RECOMPUTE_OFFLOAD

    def _first_plan(self) -> Plan:
        plan = failure = unknown = None
        try:
            planner = self._knowledge.planner
            plan = planner.plan(self._knowledge.limit)
        except PreflightError as error:
            unknown = str(error)
        except BudgetError as error:
            failure = str(error)
        unknown = self._ranks.failure(unknown)
        if unknown is not None:
            raise PreflightError(unknown)
        failure = self._ranks.failure(failure)
        if plan is None or failure is not None:
            assert isinstance(self._budget, Budget)
            raise BudgetError(f"`memory_budget={self._budget.written!r}`: {failure}")
        return plan

    def _later_plan(self) -> Plan:
        """A plan in the middle of training, which goes on with the least that can be had."""
        planner = self._knowledge.planner
        try:
            return planner.plan(self._knowledge.limit)
        except PreflightError:
            self._knowledge.rehearse_no_more()
            return self._later_plan()
        except BudgetError as error:
            if not self._is_least:
                self._is_least = True
                rank_zero_warn(f"{self._who}: {error} Training goes on with the least memory that can be had.")
            return planner.least(self._knowledge.limit)

    def _apply(self, plan: Plan, announce: bool = True) -> None:
        self.plan, self._has_planned = plan, True
        profile = self._knowledge.profile
        called = set() if profile is None else {layer.name for layer in profile.layers}
        uncalled = {name: treatment for name, treatment in self._elected.items() if name not in called}
        self._treat({**plan.assignment, **uncalled})
        if announce:
            what = "final plan" if plan.measured else "plan"
            rank_zero_info("\n  ".join([f"{self._who}: {what}", *str(plan).splitlines()]))

    def _treat(self, assignment: Assignment) -> None:
        pack = None if self._engine is None else self._engine.pack
        for each in self._recomputed:
            treat(each, assignment.get(each.name, Treatment.KEEP), self._operators, pack)

    def _start_moving(self) -> None:
        """Start what moves activations, if anything may be: all that it is told to, since the plan has chosen."""
        if self._options is None or self._engine is not None:
            return
        options = replace(self._options, move="all", keep_last=0)
        windows = self._budget if isinstance(self._budget, Plan) else self._knowledge.link
        if windows is not None:  # else nothing is known of what will be moved
            options = replace(options, max_inflight_bytes=windows.inflight_bytes, prefetch_bytes=windows.prefetch_bytes)
        self._engine = self._start_engine(options)

    def _elect(self, plan: Plan) -> Plan:
        """One plan for all ranks: that of the rank that needs most."""
        self._wanted = None
        knowledge = self._knowledge
        assert knowledge.profile is not None
        own = {layer.name: str(plan.assignment[layer.name]) for layer in knowledge.profile.layers}
        # Peaks would not do: whoever needs little keeps much, and may fill its budget just as well.
        chosen = self._ranks.elect(plan.kept_bytes - knowledge.limit, own)
        self._elected = {name: Treatment(treatment) for name, treatment in chosen.items()}
        return plan if chosen == own else knowledge.describe(self._elected, self._cheapest)
