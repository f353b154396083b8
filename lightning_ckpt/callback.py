"""ActivationCheckpointing: the one object most users touch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_ckpt.agreement import Setting, Settings, agree, as_text
from lightning_ckpt.budgeted import BudgetKeeper
from lightning_ckpt.compiler import refuse_memory_budget
from lightning_ckpt.findings import names_of, report_first_batch
from lightning_ckpt.monitor import StepMonitor, Summary
from lightning_ckpt.monitor.trainer import callbacks_of, offload_engine_of
from lightning_ckpt.offload import Boundaries, OffloadEngine, OffloadOptions, why_not
from lightning_ckpt.planning import Budget, Plan, Treatment, check_layers, load_plan, parse_budget
from lightning_ckpt.recompute import Recompute, attach, attached, detach
from lightning_ckpt.recompute.foreign import find_wrapped
from lightning_ckpt.recompute.policy import Operators, resolve_policy
from lightning_ckpt.selection import Selection, SelectionError, select_layers
from lightning_ckpt.selection.select import check_every_n_layers
from lightning_ckpt.selection.summary import shorten_names
from lightning_ckpt.setup_shim import Action, around_setup, forget
from lightning_ckpt.silent_log import SilentLog
from lightning_ckpt.strategies import has_stepped, local_ranks, note_step

# What has to be the same on all ranks.
_COMPARED = ("every_n_layers", "layers", "check_fn", "enabled", "verify", "offload", "policy", "memory_budget", "plan")


class ActivationCheckpointing(pl.Callback):
    r"""Train the same model in less memory: recompute chosen layers in backward instead of keeping their activations.

    Nothing in the model changes: no wrapper modules, no renamed parameters, nothing left behind after ``fit``, and
    checkpoints load with and without the callback. Losses, gradients and weights equal those of the plain run bit for
    bit. What was chosen is printed once when ``fit`` starts.

    Layers are looked up after ``LightningModule.setup`` and ``configure_model``, so they may be built anywhere. Hugging
    Face layers are recomputed in eval mode too, and their key-value caches are replayed; their own checkpointing, where
    it is on, is off meanwhile. A layer that somebody else checkpoints (PyTorch's ``checkpoint_wrapper``,
    ``FSDPStrategy(activation_checkpointing_policy=...)``, a checkpoint function that the model calls, also DeepSpeed's)
    is left to them, with a warning.

    On several ranks, the arguments and the chosen layers are compared when ``fit`` starts.

    Where a recompute cannot be exact, an error names the layer and says what to do. As a net under everything else,
    saved tensors are compared with those of the recompute by fingerprints (``verify``).

    A ``StepMonitor`` comes along unless the Trainer has one. It logs one point per optimizer step, of memory
    (``memory/peak_MiB``, ``memory/after_forward_MiB``, ``memory/saved_MiB``, ``memory/avoided_MiB``,
    ``memory/offloaded_MiB``, ``memory/planned_MiB``, ``memory/reserved_MiB`` or ``memory/process_MiB``, in MiB;
    ``memory/peak_phase`` and ``memory/alloc_retries``, numbers) and of time (``time/step_ms``, ``time/data_ms``,
    ``time/forward_ms``, ``time/backward_ms``, ``time/recompute_ms``, ``time/optimizer_ms``, ``time/copy_wait_ms``, in
    ms; ``time/tokens_per_s`` or ``time/samples_per_s``, per second), and prints a summary at the end of ``fit``. What
    they mean is said there; give the Trainer a monitor of your own to set its options.

    Args:
        every_n_layers: Recompute the first layer and every n-th after it, in the order of ``model.modules()``:
            1 saves most memory, larger values recompute less. The count of Hugging Face's
            ``activation_checkpointing_enable(every_n_layers=n)``.
        layers: What a layer is: a class name (``GPTNeoXLayer``), a module class or its import path, a module's
            qualified name, a glob on qualified names (``model.layers.*``), a regular expression that matches a
            whole qualified name, or a list of these. Default: Hugging Face's layers, else the repeated blocks of
            the model.
        check_fn: A predicate on modules instead of ``layers``, as for PyTorch's ``apply_activation_checkpointing``.
        enabled: Set to false to train plainly, for example to compare the curves.
        monitor: Set to false to log no metrics, and to say nothing but the error when memory runs out.
        verify: Which calls of a layer compare what the recompute saves with what forward saved, by fingerprints of
            the tensors: ``sample``, the first ones in every mode and one in 128; ``always``, which can double the
            time of a step; or ``off``.
        offload: Set to true to keep the inputs of recomputed layers in pinned host memory until backward, under any
            strategy; or give options of the copies (``--ckpt.offload.keep_last 2``). Without an accelerator nothing is
            moved. A strategy such as ``ckpt_offload`` moves everything else that is saved, too.
        policy: Operators whose results a layer keeps, so that only the rest is recomputed: ``matmul`` for matrix
            products and attention, which take most of the time and a part of the memory; or a list of operators, such
            as ``[matmul, aten.convolution]``. In compiled code, PyTorch's selective checkpointing keeps them. Default:
            none, everything is recomputed; with ``memory_budget``, ``matmul`` where that is the best choice.
        memory_budget: Have each layer treated so that a step is as fast as this much memory allows: ``20GiB``, or a
            number of bytes; ``80%`` of the device's memory; a fraction between all layers recomputed (0.0) and all kept
            (1.0); or ``auto``, what is free on the device but for a tenth of it. With ``offload``, activations
            may wait in host memory, too.
        plan: A plan that was made before, or the file of one (``python train.py plan --save``): layers are treated as
            it says.

    Raises:
        SelectionError: A ``ValueError``: ``every_n_layers`` is no integer of at least 1, both ``layers`` and
            ``check_fn`` are given, or, when ``fit`` starts, nothing was found or a pattern matches nothing.
        BudgetError: A ``ValueError``: ``memory_budget`` has no meaning, or, at the first batch, is below what a step
            needs at least; the message says what that is.
        PlanFileError: A ``ValueError``: ``plan`` cannot be read, or is for other layers.
        PolicyError: A ``ValueError``: ``policy`` names no operator, or one whose result cannot be kept.
        MisconfigurationException: When ``fit`` starts: two callbacks chose the same layer, ranks differ in the
            arguments or the chosen layers, or the compiler recomputes by a memory budget of its own.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lightning_ckpt import ActivationCheckpointing
        >>> trainer = Trainer(callbacks=[ActivationCheckpointing(every_n_layers=4)])
    """

    def __init__(
        self,
        every_n_layers: int = 1,
        layers: list[type[nn.Module] | str] | type[nn.Module] | str | None = None,
        check_fn: Callable[[nn.Module], bool] | None = None,
        enabled: bool = True,
        monitor: bool = True,
        verify: Literal["sample", "always", "off"] = "sample",
        offload: bool | OffloadOptions = False,
        policy: list[Any] | str | None = None,
        memory_budget: int | float | str | None = None,
        plan: str | Plan | None = None,
    ) -> None:
        check_every_n_layers(every_n_layers)
        if layers is not None and check_fn is not None:
            raise SelectionError("Give either `layers` or `check_fn`, not both.")
        if verify not in ("sample", "always", "off"):
            raise SelectionError(f"`verify={verify!r}` must be 'sample', 'always' or 'off'.")
        if not isinstance(offload, (bool, OffloadOptions)):
            raise SelectionError(
                f"`offload={offload!r}` must be True, False or options, for example `OffloadOptions(keep_last=2)`."
            )
        self.every_n_layers = every_n_layers
        self.layers = layers
        self.check_fn = check_fn
        self.enabled = enabled
        self.monitor = monitor
        self.verify: Literal["sample", "always", "off"] = verify
        self.offload = offload
        self.policy = policy
        self._operators = frozenset() if policy is None else resolve_policy(policy)
        self.memory_budget = memory_budget
        self.plan = plan
        self._budget = self._read_budget()
        #: What treats the layers as a plan says, while ``fit`` runs with a memory budget or a plan.
        self.budget_keeper: BudgetKeeper | None = None
        #: The layers that are recomputed, once ``fit`` has started.
        self.selection: Selection | None = None
        #: What moves the inputs of recomputed layers, while ``fit`` runs and this callback has one of its own.
        self.offload_engine: OffloadEngine | None = None
        self._monitor: StepMonitor | None = None
        self._boundaries: Boundaries | None = None
        self._recomputed: list[Recompute] = []
        self._arm: Action | None = None
        self._reported = False
        self._given_up: set[str] = set()

    def _read_budget(self) -> Budget | Plan | None:
        if self.memory_budget is None and self.plan is None:
            return None
        given = "memory_budget" if self.plan is None else "plan"
        if self.memory_budget is not None and self.plan is not None:
            raise SelectionError("Give either `memory_budget` or `plan`, which was made for a budget, not both.")
        if self.every_n_layers != 1:
            raise SelectionError(
                f"`every_n_layers={self.every_n_layers}` has no effect with `{given}`, which says what is done with "
                "every layer. Leave it out."
            )
        if self.memory_budget is not None:
            return parse_budget(self.memory_budget)
        assert self.plan is not None
        plan = self.plan if isinstance(self.plan, Plan) else load_plan(self.plan)
        if any(layer.treatment is Treatment.POLICY for layer in plan.layers):
            own = {str(operator.overloadpacket) for operator in self._operators}
            if self.policy is not None and own != set(plan.operators):
                raise SelectionError(
                    f"`policy={self.policy!r}` has no effect with `plan`, which says itself what results stay: "
                    f"{', '.join(plan.operators)}. Leave it out, or make a plan with it."
                )
            self._operators = resolve_policy(list(plan.operators))
        return plan

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in ("every_n_layers", "layers", "check_fn", "enabled")}
        if self._budget is not None:
            del shown["every_n_layers"]
        given = {name: value for name, value in shown.items() if value is not None and value is not True}
        if self.offload is not False:
            given["offload"] = self.offload
        if self.policy is not None:
            given["policy"] = self.policy
        if self.memory_budget is not None:
            given["memory_budget"] = self.memory_budget
        if self.plan is not None:
            given["plan"] = self.plan if isinstance(self.plan, str) else f"{len(self.plan.layers)} layers"
        return f"ActivationCheckpointing({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._add_monitor(trainer)
        if not self.enabled:
            rank_zero_info(f"{self!r}: off, no layer is recomputed.")
        self._reported = False
        # `configure_model` has not run yet, and `on_fit_start` is too late: the strategy has wrapped the model by then,
        # and BatchSizeFinder has made its trials.
        self._arm = lambda: self._attached(trainer, pl_module)
        around_setup(trainer.strategy, self._arm)

    def _add_monitor(self, trainer: pl.Trainer) -> None:
        callbacks = callbacks_of(trainer)
        self._monitor = next((callback for callback in callbacks if isinstance(callback, StepMonitor)), None)
        if self.monitor and self._monitor is None:
            self._monitor = StepMonitor()
            # Right behind this callback: the Trainer is about to call `setup` of whatever follows.
            callbacks.insert(callbacks.index(self) + 1, self._monitor)

    def summary(self) -> Summary | None:
        """What the Trainer's ``StepMonitor`` has measured so far, or None without one: see ``StepMonitor.summary``."""
        return None if self._monitor is None else self._monitor.summary()

    @contextlib.contextmanager
    def _attached(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
        """Recompute layers from before `strategy.setup` on; what that gave to others is theirs."""
        agree(trainer, type(self).__name__, lambda: self._attach(trainer, pl_module))
        yield
        self._leave(
            find_wrapped(trainer.strategy.model or pl_module, {each.name: each.layer for each in self._recomputed}),
            f"`{type(trainer.strategy).__name__}(activation_checkpointing_policy=...)`",
            "Take the policy out",
        )
        if self.selection is not None and self._budget is None:
            self._print(self.selection)

    def _attach(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Settings:
        """Attach recompute to the chosen layers; what all ranks have to agree on."""
        others = [callback for callback in callbacks_of(trainer) if isinstance(callback, ActivationCheckpointing)]
        settings: dict[str, Setting] = {
            "the number of these callbacks": str(len(others)),
            **{f"`{name}`": as_text(getattr(self, name)) for name in _COMPARED},
        }
        if isinstance(self._budget, Plan):  # ranks may have read different files of one name
            settings["`plan`"] = "; ".join(self._budget.lines())
        if not self.enabled:
            return settings
        refuse_memory_budget(repr(self))
        chosen = select_layers(pl_module, self.layers, check_fn=self.check_fn, every_n_layers=self.every_n_layers)
        self._refuse_overlap(trainer, chosen)
        silencers = [SilentLog(trainer)]
        wrapped = find_wrapped(pl_module, chosen.layers)
        for name, layer in chosen.layers.items():
            if name not in wrapped:
                detach(layer)  # a deep copy of a model in training brings its attachment along
                operators = self._operators if self._budget is None else Operators()
                self._recomputed.append(attach(layer, name, self.verify, silencers, operators))
        self.selection = chosen
        self._leave(wrapped, "PyTorch's `checkpoint_wrapper`", "Do not wrap them")
        return {**settings, "the chosen layers": list(chosen.layers)}

    def _leave(self, names: list[str], to: str, cure: str) -> None:
        """Do not recompute some of the chosen layers."""
        if not names or self.selection is None:
            return
        rank_zero_warn(
            f"{self!r}: {len(names)} of {len(self.selection)} chosen layers are checkpointed already, as a whole or in "
            f"part, by {to}, and are left to it: {shorten_names(names)}. {cure}, to have them recomputed exactly here."
        )
        for recompute in self._recomputed:
            if recompute.name in names:
                recompute.detach()
        self._recomputed = [recompute for recompute in self._recomputed if recompute.name not in names]
        own = {name: layer for name, layer in self.selection.layers.items() if name not in names}
        self.selection = Selection(own, self.selection.matched)

    def _refuse_overlap(self, trainer: pl.Trainer, selection: Selection) -> None:
        others = [callback for callback in callbacks_of(trainer) if isinstance(callback, ActivationCheckpointing)]
        taken = {
            id(part): (other, recompute.name)
            for other in others
            if other is not self
            for recompute in other._recomputed
            for part in recompute.layer.modules()
        }
        outer = {id(recompute.layer) for other in others for recompute in other._recomputed}
        for name, layer in selection.layers.items():
            if id(layer) in taken:
                other, other_name = taken[id(layer)]
            elif inside := next((part for part in layer.modules() if id(part) in outer), None):
                other, other_name = taken[id(inside)]
            else:
                continue
            raise MisconfigurationException(
                f"Two callbacks recompute layer {name!r}: {self!r}, and {other!r} as {other_name!r}. Remove one of "
                "them, or give each layers of its own with `layers=` or `check_fn=`. With a CLI, `--ckpt.enabled "
                "false` switches off the one that comes from the flags."
            )

    def _print(self, selection: Selection) -> None:
        if len(selection):
            lines = str(selection).splitlines()
            head = f"{self!r} recomputes in backward (all of them: `print(callback.selection.table())`)"
            rank_zero_info("\n  ".join([head, *lines]))
        taken_over = [recompute for recompute in self._recomputed if recompute.taken_over]
        if taken_over:
            rank_zero_info(
                f"{self!r}: Hugging Face's own checkpointing of {len(taken_over)} layers is off until the end of "
                f"`fit`, since they are recomputed here: {names_of(taken_over)}."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._budget is not None and self._recomputed:
            self._start_keeper(trainer, pl_module, self._budget)
        elif self.offload is not False and self._recomputed:
            self._start_offload(trainer, pl_module)

    def _start_keeper(self, trainer: pl.Trainer, pl_module: pl.LightningModule, budget: Budget | Plan) -> None:
        """Have a budget or a plan kept from the first batch on."""
        if offload_engine_of(trainer) is not None:
            raise MisconfigurationException(
                f"{self!r}: a plan says what is moved to host memory, but `{type(trainer.strategy).__name__}` moves "
                "everything. Use the plain strategy, with `ActivationCheckpointing(offload=True)`."
            )
        options: OffloadOptions | None = None
        moves = isinstance(budget, Plan) and any(layer.treatment.moves for layer in budget.layers)
        if self.offload is not False or moves:
            reason = why_not(trainer.strategy.root_device)
            if reason is None:
                options = self.offload if isinstance(self.offload, OffloadOptions) else OffloadOptions()
                if (options.move, options.keep_last) != (OffloadOptions.move, OffloadOptions.keep_last):
                    rank_zero_warn(
                        f"{self!r}: a plan says which layers travel, so `move={options.move!r}` and "
                        f"`keep_last={options.keep_last}` have no effect. Leave them out."
                    )
            else:
                rank_zero_info(f"{self!r}: nothing is moved: {reason}.")
        if isinstance(budget, Plan):
            check_layers(budget, [each.name for each in self._recomputed])
        is_free = self.policy is None and not isinstance(budget, Plan)
        operators = resolve_policy("matmul") if is_free else self._operators
        self.budget_keeper = BudgetKeeper(
            repr(self),
            trainer,
            pl_module,
            self._recomputed,
            budget,
            operators,
            options,
            lambda options: self._start_engine(trainer, pl_module, options),
        )

    def _start_engine(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, options: OffloadOptions
    ) -> OffloadEngine:
        """An engine of this callback's own, told about the layers."""
        engine = OffloadEngine(
            trainer.strategy.root_device, options, local_ranks=local_ranks(trainer), say=rank_zero_warn
        )
        engine.learn(pl_module)
        self.offload_engine = engine
        self._boundaries = Boundaries(pl_module, {each.name: each.layer for each in self._recomputed}, engine)
        return engine

    def _start_offload(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the inputs of recomputed layers travel, by the strategy's engine if it has one."""
        engine = offload_engine_of(trainer)
        if engine is None:
            reason = why_not(trainer.strategy.root_device)
            if reason is not None:
                rank_zero_info(f"{self!r}: nothing is moved: {reason}. Layers are recomputed all the same.")
                return
            options = self.offload if isinstance(self.offload, OffloadOptions) else OffloadOptions()
            engine = self._start_engine(trainer, pl_module, options)
        else:
            if isinstance(self.offload, OffloadOptions):
                rank_zero_warn(
                    f"{self!r}: the inputs of recomputed layers travel with everything else that the strategy moves, "
                    f"so `offload={self.offload!r}` has no effect beyond `offload=True`. Give the options to the "
                    "strategy."
                )
            followed = {id(layer) for layer in getattr(trainer.strategy, "offloaded_layers", {}).values()}
            new = {each.name: each.layer for each in self._recomputed if id(each.layer) not in followed}
            self._boundaries = Boundaries(pl_module, new, engine)
        for recompute in self._recomputed:
            recompute.keep = engine.pack
        rank_zero_info(f"{self!r}: the inputs of recomputed layers travel to host memory.")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.budget_keeper is not None:
            self.budget_keeper.batch_begins(batch)
        if self.offload_engine is not None:
            self.offload_engine.begin()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.budget_keeper is not None:
            self.budget_keeper.backward_ends()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.budget_keeper is not None:
            self.budget_keeper.optimizer_begins()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = not trainer.fit_loop._should_accumulate()
        if self.budget_keeper is not None:
            self.budget_keeper.batch_ends(stepped)
        if self.offload_engine is not None and stepped and has_stepped(trainer):
            note_step(repr(self), self.offload_engine)
        if self._recomputed and not self._reported:
            self._reported = True
            moves_inputs = self.offload_engine is not None
            policy = self.policy if self._budget is None else None
            report_first_batch(repr(self), self._recomputed, policy, moves_inputs, trainer.precision)
        if any(recompute.given_up for recompute in self._recomputed):
            self._report_given_up()

    def _report_given_up(self) -> None:
        """Say what cannot be photographed, also where it grows too large later."""
        given_up = [
            recompute.name + (place if place.startswith(".") else f": {place}")
            for recompute in self._recomputed
            for place in recompute.given_up
        ]
        new = [place for place in given_up if place not in self._given_up]
        if new:
            self._given_up.update(new)
            rank_zero_warn(
                f"{self!r}: cannot be kept for the recompute: {shorten_names(new)}. If a layer changes it, or reads "
                "what changes in it, its recompute may differ; all its calls are verified from now on (`verify`), so "
                "that this would be an error."
            )

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.budget_keeper is not None:
            self.budget_keeper.drop()

    def treatments(self) -> list[str]:
        """How layers are treated while ``fit`` runs, a line for each class of layers."""
        if not self._recomputed or self.selection is None:
            return []
        if self._budget is not None:
            plan = None if self.budget_keeper is None else self.budget_keeper.plan
            return [] if plan is None else plan.lines()
        how = "recomputed" if self.policy is None else f"recomputed but for {as_text(self.policy)}"
        if self._boundaries is not None:
            how += ", inputs in host memory" if self.policy is None else ", what it keeps in host memory"
        return [f"{how}: {line}" for line in str(self.selection).splitlines()]

    def spare_more(self, device: torch.device) -> str | None:
        """The setting that would make the same model need less memory, or None where there is none left."""
        if not self.enabled:
            return "`enabled=True` (`--ckpt.enabled true`): no layer is recomputed."
        if self._budget is not None:
            cure = "a plan for a smaller budget"
            if self.memory_budget is not None:
                cure = f"a smaller `memory_budget` than {self.memory_budget!r}"
            if self.offload is False and why_not(device) is None:
                cure += ", or `offload=True`, which lets activations wait in host memory"
            return f"{cure}."
        if self.every_n_layers > 1:
            return f"`every_n_layers=1` instead of `every_n_layers={self.every_n_layers}`, which recomputes all layers."
        if self.policy is not None:
            return "no `policy`, so that layers keep nothing but their inputs."
        if self.offload is False and why_not(device) is None:
            return "`offload=True`, which keeps the inputs of recomputed layers in host memory."
        return None

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._recomputed and type(exception).__module__ == "torch._dynamo.exc":
            rank_zero_warn(
                f"{self!r}: `torch.compile` cannot trace a recomputed layer; the error below shows which line of it. A "
                "layer with a graph break, or that changes its own state, cannot be recomputed in a compiled one: put "
                "`@torch.compiler.disable` on its `forward` to have it recomputed exactly outside of the graph, or "
                "leave it out with `layers=` or `check_fn=`."
            )
        self._detach(trainer)  # `teardown` does not run after an exception

    def _detach(self, trainer: pl.Trainer) -> None:
        if self._arm is not None:
            forget(trainer.strategy, self._arm)
            self._arm = None
        if self.budget_keeper is not None:
            self.budget_keeper.close()
            self.budget_keeper = None
        if self._boundaries is not None:
            self._boundaries.remove()
            self._boundaries = None
        if self.offload_engine is not None:
            self.offload_engine.close()
            self.offload_engine = None
        for recompute in self._recomputed:
            if attached(recompute.layer) is recompute:
                recompute.detach()
        self._recomputed.clear()
