"""Walking a model: names, what can be a layer at all, and which layers lie inside others."""

import sys
from collections.abc import Iterable, Iterator

from torch import nn

# Modules that only stand around another one: `torch.compile(module)` and PyTorch's `checkpoint_wrapper(module)`.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """The qualified name as the user knows it, without the parts that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside `module`, or `module` itself."""
    for attribute in _WRAPPED:
        inner = module._modules.get(attribute)
        if inner is not None:
            return unwrap(inner)
    return module


def named_candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be a layer, in the order of `model.modules()`: not the model itself, no metrics.

    A wrapped module appears once, as the user's module under its own name.
    """
    skipped: set[int] = {id(part) for metric in _metrics_in(model) for part in metric.modules()}
    model_itself = unwrap(model)
    for name, module in model.named_modules():
        if unwrap(module) is module and module is not model_itself and id(module) not in skipped:
            yield clean_name(name), module


def _metrics_in(model: nn.Module) -> Iterator[nn.Module]:
    # torchmetrics states must be updated once per user forward; a model without torchmetrics need not import it.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
        yield from (module for module in model.modules() if isinstance(module, kinds))


def has_forward(module: nn.Module) -> bool:
    """False for `ModuleList`, `ModuleDict` and other modules that are never called themselves."""
    return type(module).forward is not nn.Module.forward


def outermost(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Drop every layer that lies inside another one of `layers`; the order stays."""
    layers = list(layers)
    inside = {id(part) for _, layer in layers for part in layer.modules() if part is not layer}
    return {name: layer for name, layer in layers if id(layer) not in inside}


def class_names(cls: type) -> set[str]:
    """Short and full names of a class and its bases: FSDP2 puts a class of its own in front of the user's."""
    bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    return {base.__name__ for base in bases} | {f"{base.__module__}.{base.__qualname__}" for base in bases}
