"""Rehearse a training step on fake tensors: exact bytes, no memory, nothing of the model touched.

Fake tensors have shapes, types and a device, but no numbers. The step, its backward and the optimizer's step run on
them through the very code that recomputes and moves activations in training, and every storage is counted.
"""

import contextlib
import contextvars
import copy
import dataclasses
import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    is_fake,
)
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ckpt.measure.storage import PLAIN
from lightning_ckpt.measure.work import parts_of
from lightning_ckpt.planning.ghost import GhostHost
from lightning_ckpt.planning.huggingface import unpacked_sequences
from lightning_ckpt.planning.leaks import StorageReference, refuse_leaks
from lightning_ckpt.planning.metrics import excused_metrics
from lightning_ckpt.planning.rates import Rates, rates_of
from lightning_ckpt.planning.trace import StepRecorder, StepTrace, Stretch
from lightning_ckpt.planning.treatment import Assignment, Treatment, treat
from lightning_ckpt.recompute import Recompute, attached
from lightning_ckpt.recompute.foreign import is_switched_on
from lightning_ckpt.recompute.policy import Operators
from lightning_ckpt.recompute.untouched import UntouchableError, untouched
from lightning_ckpt.recompute.watch import unwatched

#: Runs forward: a module and a batch give the loss.
Step = Callable[[nn.Module, Any], Any]


class PreflightError(RuntimeError):
    """A step cannot be rehearsed on fake tensors; the message says why."""


class FakeMode(FakeTensorMode):
    """Leaves real tensors as they are: they are not written to, and the gradients that they get are taken back."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}  # before, of real tensors that were met

    def __deepcopy__(self, memo: Any) -> "FakeMode":
        return self  # copies of its weak references would be freed twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        real = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and not is_fake(value)]
        for tensor in real:
            if tensor.requires_grad and tensor.is_leaf:
                self._gradients.setdefault(id(tensor), (tensor, tensor.grad))
        writes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if real and writes:  # which the mode would really do where all arguments are real
            args, kwargs = tree_map(self._without_numbers, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _without_numbers(self, value: Any) -> Any:
        return self.from_tensor(value) if isinstance(value, Tensor) and not is_fake(value) else value

    @contextlib.contextmanager
    def without_gradients_left(self) -> Iterator[None]:
        """Afterwards, real tensors have the gradients that they had."""
        try:
            yield
        finally:
            for tensor, gradient in self._gradients.values():
                if tensor.grad is not gradient:
                    tensor.grad = gradient
            self._gradients.clear()


class _Faker:
    """Makes fake twins of tensors, one of each.

    Args:
        device: where all of them are; None for where the tensors are, the CPU for `meta`.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.mode = FakeMode()
        self._device = device
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        known = self._twins.get(id(tensor))
        if known is None:
            known = self._twins[id(tensor)] = tensor, self._twin(tensor)
        return known[1]

    def made(self) -> list[Tensor]:
        """All twins so far."""
        return [twin for _, twin in self._twins.values()]

    def _twin(self, tensor: Tensor) -> Tensor:
        if (type(tensor) in PLAIN or is_fake(tensor)) and tensor.layout is torch.strided and not tensor.is_nested:
            device = self._device or _real(tensor.device)
            with self.mode:
                twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            for name, value in vars(tensor).items():  # marks such as `weight.no_decay`, by which optimizers group
                vars(twin).setdefault(name, value)
            return twin.requires_grad_(tensor.requires_grad)
        return self.mode.from_tensor(tensor)


class Preflight:
    """Rehearses a training step under any treatment of its layers.

    A step is forward, with the gradients of the step before in memory, backward, and the optimizer's step.

    Args:
        module: the model; its parameters may be on any device, `meta` included.
        batch: a batch, whose shapes matter; tensors in containers of any kind.
        layers: the layers that may be treated, by qualified name.
        step: gives the loss of a module and a batch.
        optimizers: those of the module, or a function that makes them of it; none for forward and backward only.
        operators: whose results stay under `Treatment.POLICY`.
        min_bytes: storages below this size in bytes stay on the device under treatments that move. Default: 256 KiB.
        device: where the step is meant to run. Default: where the parameters are, the CPU for `meta`.
        accumulates: whether gradients of several batches are added up before the optimizer's step. Default: no.
        rates: give times by formula. Default: round figures for the kind of device.
        around_step: makes a context that is entered around forward, such as that of a precision. Default: none.
        around: objects beside the module and the batch that the step may change, by name; a rehearsal leaves them as
            they are, too.

    Raises:
        PreflightError: a weight is sharded, quantized or not initialized, the batch has tensors of a kind that cannot
            be without numbers, or the device is not there.

    Example::

        preflight = Preflight(model, batch, {"h.0": model.h[0]}, lambda module, batch: module(batch).mean())
        print(preflight.run({"h.0": Treatment.RECOMPUTE}).peak)
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        layers: Mapping[str, nn.Module],
        step: Step,
        *,
        optimizers: Sequence[Optimizer] | Callable[[nn.Module], Iterable[Optimizer]] = (),
        operators: Operators = frozenset(),
        min_bytes: int = 256 * 2**10,
        device: torch.device | None = None,
        accumulates: bool = False,
        rates: Rates | None = None,
        around_step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        around: Mapping[str, Any] | None = None,
    ) -> None:
        _refuse_special(module)
        _refuse_absent(device)
        self.layers = dict(layers)
        self._module = module
        try:
            self._batch = map_tensors(batch, _Faker(device))  # a real one would stay in memory
        except Exception as error:
            raise PreflightError(f"its batch cannot be without numbers ({_reason(error)})") from error
        self._step = step
        self._optimizers = optimizers
        self._operators = operators
        self._min_bytes = min_bytes
        self._given_device = device
        self.device = device or _device_of(module)
        self._accumulates = accumulates
        self._rates = rates or rates_of(self.device)
        self._around_step = around_step
        self._around = {**(around or {}), "the batch": self._batch}
        self._optimizer: Stretch | None = None
        self._unused: set[str] = set()  # weights that get no gradient
        self._state_bytes = 0
        self._born: list[StorageReference] = []  # storages of a rehearsal that were alive at its end

    def run(self, assignment: Assignment) -> StepTrace:
        """Rehearse one step.

        Args:
            assignment: the treatment of each layer; others are kept.

        Raises:
            PreflightError: the step reads numbers that fake tensors do not have, or does what cannot be rehearsed.
            LeakError: the step keeps a tensor where nothing can take it away again.
        """
        trace = None
        while trace is None:
            trace = contextvars.copy_context().run(self._attempt, assignment)
        return trace

    def _attempt(self, assignment: Assignment) -> StepTrace | None:
        """One step, or None if it has shown that weights which were taken for used are not: then it is too much."""
        trace = failure = None
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")  # they come in training, where they belong
            try:
                with (
                    untouched(self._module, self._around),
                    unwatched(),
                    unpacked_sequences(),
                    excused_metrics(self._module),
                    _eager(),
                    torch.enable_grad(),
                ):
                    trace = self._run(assignment)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # which must not be kept, since it keeps tensors
                failure = _reason(error)
        refuse_leaks(self._born)
        if failure is not None:
            raise PreflightError(failure)
        return trace

    def _run(self, assignment: Assignment) -> StepTrace | None:
        faker = _Faker(self._given_device)
        module = self._module
        named = dict(module.named_parameters(remove_duplicate=False))
        tensors = {**named, **dict(module.named_buffers(remove_duplicate=False))}
        swapped = {name: faker(tensor) for name, tensor in tensors.items()}
        batch = map_tensors(self._batch, faker)
        weights = {name: faker(weight) for name, weight in module.named_parameters() if weight.requires_grad}
        parameters = [weight for name, weight in weights.items() if name not in self._unused]
        recorder = StepRecorder(self.layers, self._rates)
        recorder.adopt(faker.made())
        host = GhostHost(module, self.device, self._min_bytes)
        # Those of a module with two names come back last first, or it would be left with a fake weight.
        reparametrized = _reparametrize_module(module, swapped, tie_weights=True, stack_weights=True)
        treated = _treated(module, self.layers, assignment, self._operators, host)
        with (
            self._noting(recorder),
            contextlib.closing(recorder),
            faker.mode.without_gradients_left(),
            reparametrized,
            treated,
            faker.mode,
        ):
            host.learn()
            made = list(self._fake_optimizers(module, faker))  # the step may ask for them
            recorder.adopt(state for optimizer in made for state in _state_of(optimizer))  # Adagrad has it at once
            groups = [group for optimizer in made for group in optimizer.param_groups]
            cleared = [weight for group in groups for weight in group["params"]] if groups else parameters
            with recorder:
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                # No treatment changes the optimizer's step: after one rehearsal of it, only its state matters.
                optimizers = made if self._optimizer is None else []
                state = None if self._optimizer is None else self._blank(self._state_bytes)
                self._optimize(recorder, optimizers)
                with self._around_step():
                    loss = _loss_of(self._step(module, batch))
                    if not self._accumulates:
                        for weight in cleared:
                            weight.grad = None
                    loss.backward()
                del loss
                unused = {name for name, weight in weights.items() if weight.grad is None} - self._unused
                self._optimize(recorder, optimizers)
                del state, made, optimizers
            trace = recorder.finish()
        if unused:  # they have no gradient and no state of the optimizer
            self._unused |= unused
            self._optimizer, self._state_bytes = None, 0
            return None
        if self._optimizer is None:
            self._optimizer = trace.optimizer
        return replace(trace, optimizer=self._optimizer)

    @contextlib.contextmanager
    def _noting(self, recorder: StepRecorder) -> Iterator[None]:
        self._born = []
        try:
            yield
        finally:
            self._born = recorder.alive()

    def _fake_optimizers(self, module: nn.Module, faker: _Faker) -> Iterator[Optimizer]:
        for optimizer in self._optimizers(module) if callable(self._optimizers) else self._optimizers:
            if all(is_fake(parameter) for group in optimizer.param_groups for parameter in group["params"]):
                yield optimizer
                continue
            yield _twin(optimizer, faker)

    def _blank(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _optimize(self, recorder: StepRecorder, optimizers: Iterable[Optimizer]) -> None:
        before = recorder.current
        recorder.optimizer_begins()
        for optimizer in optimizers:
            optimizer.step()
        recorder.optimizer_ends()
        self._state_bytes = max(self._state_bytes, recorder.current - before)


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _twin(optimizer: Optimizer, faker: _Faker) -> Optimizer:
    """The same optimizer for fake weights, those that it holds itself included."""
    twin = copy.copy(optimizer)
    twin.__dict__ = dict(optimizer.__dict__)
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            twin.__dict__[name] = _twin(value, faker)
        elif type(value) in (dict, list):
            twin.__dict__[name] = copy.copy(value)
    twin.__dict__.pop("step", None)  # a scheduler's, which belongs to the original
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = [
        {**group, "params": [faker(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    return twin


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs a traceback where an operator cannot run on fake tensors; the error says it already."""
    log = logging.getLogger(FakeTensorMode.__module__)
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def _eager() -> AbstractContextManager[Any]:
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance  # what compiled code keeps cannot be seen


@contextlib.contextmanager
def _treated(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    assignment: Assignment,
    operators: Operators,
    host: GhostHost,
) -> Iterator[None]:
    """Treat layers as in training, with attachments of their own: real ones must learn nothing from a rehearsal."""
    names = {id(layer): name for name, layer in layers.items()}
    taken_over = [part for layer in layers.values() for part in layer.modules() if is_switched_on(part)]
    for part in taken_over:
        setattr(part, "gradient_checkpointing", False)
    forwards = []
    for layer in module.modules():
        name, present = names.get(id(layer)), attached(layer)
        if name is None and present is None:
            continue
        forward = layer.__dict__.pop("forward", None)
        forwards.append((layer, forward))
        inner = forward if present is None else present.previous
        if inner is not None:
            layer.forward = inner
        if name is None:  # somebody else's
            assert present is not None
            twin = _attachment(layer, present.name)
            twin.recomputes, twin.policy = present.recomputes, present.policy
            twin.keep = None if present.keep is None else host.pack
        elif assignment.get(name, Treatment.KEEP) is not Treatment.KEEP:
            treat(_attachment(layer, name), assignment[name], operators, host.pack)
    try:
        yield
    finally:
        for part in taken_over:
            setattr(part, "gradient_checkpointing", True)
        for layer, forward in forwards:
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _attachment(layer: nn.Module, name: str) -> Recompute:
    recompute = Recompute(layer, name, "off", (), frozenset())
    recompute.inventory.learned.nothing_more()
    layer.forward = recompute
    return recompute


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with other tensors: containers, dataclasses and objects that hold a mapping are copied."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)
        mapped.update({key: map_tensors(item, change) for key, item in value.items()})
        return mapped
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin: Any = copy.copy(value)
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        for name in dict.fromkeys([*names, *getattr(value, "__dict__", ())]):
            object.__setattr__(twin, name, map_tensors(getattr(value, name), change))  # frozen, or with slots
        return twin
    parts = dict(vars(value)) if isinstance(value, Mapping) and hasattr(value, "__dict__") else parts_of(value)
    if parts:
        twin = copy.copy(value)
        vars(twin).update(map_tensors(parts, change))
        return twin
    return value


def _loss_of(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise TypeError(f"the step returned {type(output).__name__} instead of a loss with a gradient")
    return loss


def _refuse_special(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedTensorMixin):
            raise PreflightError(f"weight {name!r} has no shape before the first batch")
        if type(parameter) not in PLAIN or hasattr(parameter, "ds_numel"):
            raise PreflightError(f"weight {name!r} is a {type(parameter).__name__}, sharded or quantized")


def _device_of(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else _real(first.device)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _refuse_absent(device: torch.device | None) -> None:
    present = torch.accelerator.current_accelerator()
    if device is None or device.type in ("cpu", None if present is None else present.type):
        return
    raise PreflightError(  # autograd would end the process
        f"`device={str(device)!r}` is not there, and a step cannot be rehearsed on a device without its PyTorch"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, (PreflightError, UntouchableError)):
        return str(error)
    if isinstance(error, DataDependentOutputException):
        return "it reads a number of a tensor (`.item()`, `if loss > 0`), and there are none in a rehearsal"
    if isinstance(error, DynamicOutputShapeException):
        return f"the size of a result depends on numbers ({error}), and there are none in a rehearsal"
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
