"""Plan a model's training step without training it."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.offload import OffloadOptions
from lightning_ckpt.offload.budget import parse_bytes
from lightning_ckpt.planning.budget import BudgetError, parse_budget
from lightning_ckpt.planning.links import BYTES_PER_S, link_of
from lightning_ckpt.planning.plan import Plan
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.preflight import Preflight, PreflightError, Step
from lightning_ckpt.planning.profile import Profile, make_profile
from lightning_ckpt.planning.treatment import Assignment, Treatment
from lightning_ckpt.recompute.foreign import find_wrapped
from lightning_ckpt.recompute.policy import Operators, resolve_policy
from lightning_ckpt.selection import SelectionError, select_layers
from lightning_ckpt.selection.match import LayerPattern


def make_plan(
    module: nn.Module,
    batch: Any,
    budget: int | float | str = "auto",
    *,
    layers: list[LayerPattern] | LayerPattern | None = None,
    check_fn: Callable[[nn.Module], bool] | None = None,
    policy: Any = "matmul",
    offload: bool | OffloadOptions = False,
    step: Step | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | Callable[[nn.Module], Any] | None = None,
    device: torch.device | str | None = None,
    device_bytes: int | str | None = None,
) -> Plan:
    """Work out what to keep, recompute and offload, so that a training step is as fast as a memory budget allows.

    The step is rehearsed on fake tensors, which have shapes but no numbers: bytes are exact, no memory is taken, no
    weight, gradient or random stream is touched, and the weights may be on the `meta` device. Times are calculated from
    numbers of operations and bytes.

    Args:
        module: the model. With a `training_step`, that gives the loss, and `configure_optimizers` the optimizers.
        batch: a batch as the step gets it; its shapes matter, its numbers do not.
        budget: the most memory that the step may take: `"20GiB"` or bytes, `"80%"` of the device, a fraction between
            all layers recomputed (0.0) and all kept (1.0), or `"auto"`, what the device has but for a tenth.
        layers: what a layer is, as for `ActivationCheckpointing`. Default: found.
        check_fn: a predicate on modules instead of `layers`.
        policy: operators whose results a layer may keep while the rest is recomputed; None for none. Default:
            `"matmul"`, matrix products and attention.
        offload: whether activations may wait in host memory; or options of the copies. Default: no.
        step: gives the loss of a module and a batch. Default: `module.training_step(batch, 0)`, or
            `module(**batch).loss`.
        optimizers: those of the module, or a function that makes one or several of it. Default: what
            `configure_optimizers` returns, else none.
        device: where the step is meant to run. Default: where the weights are, the CPU for `meta`.
        device_bytes: the memory of that device, a number or `"80GiB"`, for budgets that are shares of it. Default:
            asked of the device.

    Returns:
        The plan.

    Raises:
        BudgetError: a `ValueError`: the budget has no meaning, or is below what the step needs at least.
        SelectionError: a `ValueError`: no layers were found, or `layers` matches none.
        PolicyError: a `ValueError`: `policy` names no operator.
        PreflightError: the step cannot be rehearsed, since it reads numbers, for example by `.item()`.

    Example::

        plan = make_plan(model, {"input_ids": ids, "labels": ids}, budget="20GiB")
        print(plan)
    """
    wanted = parse_budget(budget, "budget")
    operators = frozenset() if policy is None else resolve_policy(policy)
    options = OffloadOptions() if offload is True else (offload or None)
    preflight = Preflight(
        module,
        batch,
        layers_to_plan(module, layers, check_fn),
        step or step_of(module),
        optimizers=_optimizers(module, optimizers),
        operators=operators,
        device=None if device is None else torch.device(device),
        min_bytes=int((options or OffloadOptions()).min_bytes),
    )
    planner = planner_by_preflight(preflight, operators, options)
    memory = None if device_bytes is None else parse_bytes(device_bytes)
    limit = wanted.bytes(planner.recomputed_bytes, planner.kept_bytes, preflight.device, memory)
    try:
        return planner.plan(limit)
    except BudgetError as error:
        raise BudgetError(f"`budget={budget!r}`: {error}") from None


def layers_to_plan(
    module: nn.Module,
    layers: list[LayerPattern] | LayerPattern | None,
    check_fn: Callable[[nn.Module], bool] | None,
) -> dict[str, nn.Module]:
    """The layers that are chosen, less those that PyTorch's `checkpoint_wrapper` recomputes already.

    Args:
        module: the model.
        layers: see `make_plan`.
        check_fn: see `make_plan`.

    Raises:
        SelectionError: there are none.
    """
    chosen = select_layers(module, layers, check_fn=check_fn).layers
    wrapped = find_wrapped(module, chosen)
    if len(wrapped) == len(chosen):
        raise SelectionError(
            f"all of the {len(chosen)} chosen layers are checkpointed already by PyTorch's `checkpoint_wrapper`, so "
            "that there is nothing to plan. Do not wrap them."
        )
    return {name: layer for name, layer in chosen.items() if name not in wrapped}


def planner_by_preflight(
    preflight: Preflight,
    operators: Operators,
    options: OffloadOptions | None,
    link_bytes_per_s: float = BYTES_PER_S,
) -> Planner:
    """A planner of a step that is rehearsed under every treatment.

    Args:
        preflight: rehearses it.
        operators: whose results may stay; none for no such treatment.
        options: those of offload; None where nothing may be moved.
        link_bytes_per_s: how fast the link to host memory is, each way.
    """
    profile = profile_by_preflight(preflight, bool(operators), options is not None)
    link = None if options is None else link_of(profile, options, link_bytes_per_s)
    return Planner(profile, rehearsal(preflight), link, operators=operators)


def profile_by_preflight(preflight: Preflight, with_policy: bool, with_offload: bool) -> Profile:
    """Costs of all layers under all treatments, from one rehearsal for each."""
    treatments = [Treatment.KEEP]
    if with_policy:
        treatments.append(Treatment.POLICY)
    treatments.append(Treatment.RECOMPUTE)
    if with_offload:
        treatments += [Treatment.OFFLOAD, Treatment.RECOMPUTE_OFFLOAD]
    traces = {each: preflight.run(dict.fromkeys(preflight.layers, each)) for each in treatments}
    if len({frozenset(call.name for call in trace.calls) for trace in traces.values()}) > 1:
        raise PreflightError("it runs other layers every time")
    return make_profile(preflight.layers, traces)


def rehearsal(preflight: Preflight) -> Callable[[Assignment], int]:
    """What counts the peak of a step under an assignment."""
    return lambda assignment: preflight.run(assignment).peak


def step_of(module: nn.Module) -> Step:
    """How a module gives its loss: by a `training_step`, or as Hugging Face's models do.

    Raises:
        PreflightError: its optimization is manual.
    """
    training_step = getattr(module, "training_step", None)
    if training_step is None:
        return _loss_of_model
    if not getattr(module, "automatic_optimization", True):
        raise PreflightError("its optimization is manual, so `training_step` steps the optimizers itself")

    def step(module: nn.Module, batch: Any) -> Any:
        run: Any = module.training_step
        takes_index = len(inspect.signature(run).parameters) > 1
        with _unlogged(module):
            return run(batch, 0) if takes_index else run(batch)

    return step


def _loss_of_model(module: nn.Module, batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        kind = "Tensor" if isinstance(batch, Tensor) else type(batch).__name__
        raise PreflightError(
            f"the batch is a {kind}, and {type(module).__name__} has no `training_step`: give `step=lambda module, "
            "batch: ...`, which returns the loss"
        )
    return module(**batch).loss


@contextlib.contextmanager
def _unlogged(module: nn.Module) -> Iterator[None]:
    """What the step logs is dropped: it holds no numbers."""
    for name in ("log", "log_dict"):
        module.__dict__[name] = _do_not_log
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            module.__dict__.pop(name, None)


def _do_not_log(*args: Any, **kwargs: Any) -> None:
    """`self.log` in a rehearsal."""


def optimizers_of(module: nn.Module) -> Callable[[nn.Module], Iterable[Optimizer]]:
    """How a module makes its optimizers: by `configure_optimizers`, else not at all."""
    configure = getattr(module, "configure_optimizers", None)
    return (lambda module: ()) if configure is None else lambda module: find_optimizers(configure())


def _optimizers(module: nn.Module, given: Any) -> Sequence[Optimizer] | Callable[[nn.Module], Iterable[Optimizer]]:
    if given is None:
        return optimizers_of(module)
    if callable(given):
        return lambda module: find_optimizers(given(module))
    found = list(find_optimizers(given))
    if not found and not isinstance(given, (list, tuple)):
        raise BudgetError(
            f"`optimizers={given!r}` is no optimizer: give those of the module, or a function that makes them of it."
        )
    return found


def find_optimizers(configured: Any) -> Iterator[Optimizer]:
    """The optimizers in whatever `configure_optimizers` returns."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from find_optimizers(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from find_optimizers(item)
