"""ActivationCheckpointing: the one object most users touch."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_ckpt.monitor import StepMonitor, Summary
from lightning_ckpt.monitor.trainer import callbacks_of, offload_engine_of
from lightning_ckpt.offload import Boundaries, OffloadEngine, OffloadOptions, why_not
from lightning_ckpt.recompute import Recompute, attach, attached, detach
from lightning_ckpt.recompute.foreign import find_wrapped
from lightning_ckpt.recompute.inspection import CHECKPOINTS_ITSELF, KEEPS_CACHE
from lightning_ckpt.selection import Selection, SelectionError, select_layers
from lightning_ckpt.selection.select import check_every_n_layers
from lightning_ckpt.selection.summary import shorten_names
from lightning_ckpt.setup_shim import before_setup, forget
from lightning_ckpt.strategies import has_stepped, local_ranks, note_step


class ActivationCheckpointing(pl.Callback):
    r"""Train the same model in less memory: recompute chosen layers in backward instead of keeping their activations.

    Nothing in the model changes: no wrapper modules, no renamed parameters, nothing left behind after ``fit``, and
    checkpoints load with and without the callback. Losses, gradients and weights equal those of the plain run bit for
    bit. What was chosen is printed once when ``fit`` starts.

    Layers are looked up after ``LightningModule.setup`` and ``configure_model``, so they may be built anywhere. Hugging
    Face layers are recomputed in eval mode too, and their key-value caches are replayed; their own checkpointing, where
    it is on, is off meanwhile. A layer in PyTorch's ``checkpoint_wrapper`` is left to it, with a warning.

    Where a recompute cannot be exact, an error names the layer and says what to do. As a net under everything else,
    saved tensors are compared with those of the recompute by fingerprints (``verify``).

    A ``StepMonitor`` comes along unless the Trainer has one. It logs one point per optimizer step, of memory
    (``memory/peak_MiB``, ``memory/after_forward_MiB``, ``memory/saved_MiB``, ``memory/avoided_MiB``,
    ``memory/offloaded_MiB``, ``memory/reserved_MiB`` or ``memory/process_MiB``, in MiB; ``memory/peak_phase`` and
    ``memory/alloc_retries``, numbers) and of time (``time/step_ms``, ``time/data_ms``, ``time/forward_ms``,
    ``time/backward_ms``, ``time/recompute_ms``, ``time/optimizer_ms``, ``time/copy_wait_ms``, in ms;
    ``time/tokens_per_s`` or ``time/samples_per_s``, per second), and prints a summary at the end of ``fit``. What they
    mean is said there; give the Trainer a monitor of your own to set its options.

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

    Raises:
        SelectionError: A ``ValueError``: ``every_n_layers`` is no integer of at least 1, both ``layers`` and
            ``check_fn`` are given, or, when ``fit`` starts, nothing was found or a pattern matches nothing.
        MisconfigurationException: When ``fit`` starts: two callbacks chose the same layer.

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
        #: The layers that are recomputed, once ``fit`` has started.
        self.selection: Selection | None = None
        #: What moves the inputs of recomputed layers, while ``fit`` runs and this callback has one of its own.
        self.offload_engine: OffloadEngine | None = None
        self._monitor: StepMonitor | None = None
        self._boundaries: Boundaries | None = None
        self._recomputed: list[Recompute] = []
        self._arm: Callable[[], None] | None = None
        self._reported = False
        self._given_up: set[str] = set()

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in ("every_n_layers", "layers", "check_fn", "enabled")}
        given = {name: value for name, value in shown.items() if value is not None and value is not True}
        if self.offload is not False:
            given["offload"] = self.offload
        return f"ActivationCheckpointing({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._add_monitor(trainer)
        if not self.enabled:
            rank_zero_info(f"{self!r}: off, no layer is recomputed.")
            return
        self._reported = False
        # `configure_model` has not run yet, and `on_fit_start` is too late: the strategy has wrapped the model by then,
        # and BatchSizeFinder has made its trials.
        self._arm = lambda: self._attach(trainer, pl_module)
        before_setup(trainer.strategy, self._arm)

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

    def _attach(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        chosen = select_layers(pl_module, self.layers, check_fn=self.check_fn, every_n_layers=self.every_n_layers)
        self._refuse_overlap(trainer, chosen)
        wrapped = find_wrapped(pl_module, chosen.layers)
        if wrapped:
            rank_zero_warn(
                f"{self!r}: {len(wrapped)} of {len(chosen)} chosen layers are checkpointed already, as a whole or in "
                f"part, by PyTorch's `checkpoint_wrapper`, and are left to it: {shorten_names(wrapped)}. Do not wrap "
                "them, to have them recomputed exactly here."
            )
        own = {name: layer for name, layer in chosen.layers.items() if name not in wrapped}
        silencers = [_SilentLog(trainer)]
        for name, layer in own.items():
            detach(layer)  # a deep copy of a model in training brings its attachment along
            self._recomputed.append(attach(layer, name, self.verify, silencers))
        self.selection = Selection(own, chosen.matched)
        self._print(self.selection)

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
                f"`fit`, since they are recomputed here: {_names(taken_over)}."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.offload is not False and self._recomputed:
            self._start_offload(trainer, pl_module)

    def _start_offload(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the inputs of recomputed layers travel, by the strategy's engine if it has one."""
        layers = {recompute.name: recompute.layer for recompute in self._recomputed}
        engine = offload_engine_of(trainer)
        if engine is None:
            device = trainer.strategy.root_device
            reason = why_not(device)
            if reason is not None:
                rank_zero_info(f"{self!r}: nothing is moved: {reason}. Layers are recomputed all the same.")
                return
            options = OffloadOptions() if self.offload is True else self.offload
            assert isinstance(options, OffloadOptions)
            engine = OffloadEngine(device, options, local_ranks=local_ranks(trainer), say=rank_zero_warn)
            engine.learn(pl_module)
            self.offload_engine = engine
        elif isinstance(self.offload, OffloadOptions):
            rank_zero_warn(
                f"{self!r}: the inputs of recomputed layers travel with everything else that the strategy moves, so "
                f"`offload={self.offload!r}` has no effect beyond `offload=True`. Give the options to the strategy."
            )
        followed = {id(layer) for layer in getattr(trainer.strategy, "offloaded_layers", {}).values()}
        new = {name: layer for name, layer in layers.items() if id(layer) not in followed}
        self._boundaries = Boundaries(pl_module, new, engine)
        for recompute in self._recomputed:
            recompute.keep = engine.pack
        rank_zero_info(f"{self!r}: the inputs of recomputed layers travel to host memory.")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.offload_engine is not None:
            self.offload_engine.begin()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = not trainer.fit_loop._should_accumulate() and has_stepped(trainer)
        if self.offload_engine is not None and stepped:
            note_step(repr(self), self.offload_engine)
        if self._recomputed and not self._reported:
            self._reported = True
            self._report_first_batch()
        if any(recompute.given_up for recompute in self._recomputed):
            self._report_given_up()

    def _report_first_batch(self) -> None:
        idle = [recompute.name for recompute in self._recomputed if not recompute.called]
        if idle:
            rank_zero_warn(
                f"{self!r}: {len(idle)} of {len(self._recomputed)} layers were not called with gradients in the first "
                f"training batch, so nothing is saved there: {shorten_names(idle)}. If the model calls a method of "
                "theirs other than `forward`, choose the modules inside them."
            )
        nested = self._with_finding(CHECKPOINTS_ITSELF)
        if nested:
            classes = ", ".join(dict.fromkeys(type(recompute.layer).__name__ for recompute in nested))
            rank_zero_warn(
                f"{self!r}: {classes} layers checkpoint a part of themselves (`torch.utils.checkpoint` in their "
                f"forward), and that part now runs three times: {_names(nested)}. Switch one of the two off."
            )
        compiled = [recompute for recompute in self._recomputed if recompute.compiled]
        if compiled and self.offload_engine is not None:
            rank_zero_warn(
                f"{self!r}: {len(compiled)} layers run in compiled code, which keeps their inputs itself, so "
                f"they stay on the device: {_names(compiled)}. `Trainer(strategy='ckpt_offload')` moves them."
            )
        caching = self._with_finding(KEEPS_CACHE)
        if caching:
            rank_zero_info(
                f"{self!r}: {len(caching)} layers fill a key-value cache in training (`use_cache=True`). It is "
                "replayed exactly, but its keys and values stay in memory; pass `use_cache=False` to save them."
            )

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

    def _with_finding(self, finding: str) -> list[Recompute]:
        return [recompute for recompute in self._recomputed if finding in recompute.findings]

    def treatments(self) -> list[str]:
        """How layers are treated while ``fit`` runs, a line for each class of layers."""
        if not self._recomputed or self.selection is None:
            return []
        how = "recomputed, inputs in host memory" if self._boundaries is not None else "recomputed"
        return [f"{how}: {line}" for line in str(self.selection).splitlines()]

    def spare_more(self, device: torch.device) -> str | None:
        """The setting that would make the same model need less memory, or None where there is none left."""
        if not self.enabled:
            return "`enabled=True` (`--ckpt.enabled true`): no layer is recomputed."
        if self.every_n_layers > 1:
            return f"`every_n_layers=1` instead of `every_n_layers={self.every_n_layers}`, which recomputes all layers."
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
                "layer that changes its own state cannot be recomputed inside a compiled graph: put "
                "`@torch.compiler.disable` on its `forward` to have it recomputed exactly outside of the graph, or "
                "leave it out with `layers=` or `check_fn=`."
            )
        self._detach(trainer)  # `teardown` does not run after an exception

    def _detach(self, trainer: pl.Trainer) -> None:
        if self._arm is not None:
            forget(trainer.strategy, self._arm)
            self._arm = None
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


class _SilentLog:
    """Keeps `self.log` of the LightningModule from counting twice when a layer calls it.

    It is stopped where the Trainer collects it: a layer may hold `self.log` itself, bound before.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        results = self._trainer._results
        if results is None or "log" in results.__dict__:
            yield
            return
        results.__dict__["log"] = _do_not_log
        try:
            yield
        finally:
            del results.__dict__["log"]


def _do_not_log(*args: Any, **kwargs: Any) -> None:
    """`self.log` in a replay."""


def _names(recomputed: Iterable[Recompute]) -> str:
    return shorten_names([recompute.name for recompute in recomputed])
