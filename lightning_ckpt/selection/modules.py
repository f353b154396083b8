"""Walking a model: names, what can be a layer at all, and which layers lie inside others."""

import sys
from collections.abc import Iterable, Iterator

from torch import nn

_COMPILED_PREFIX = "_orig_mod."


def clean_name(name: str) -> str:
    """The qualified name as the user knows it, without what `torch.compile` puts in front of a compiled module."""
    return name.replace(_COMPILED_PREFIX, "")


def named_candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be a layer, in the order of `model.modules()`: not the model itself, no metrics.

    A module compiled with `torch.compile(module)` appears once, as the original module under its own name.
    """
    skipped: set[int] = {id(part) for metric in _metrics_in(model) for part in metric.modules()}
    for name, module in model.named_modules():
        is_wrapper = hasattr(module, "_orig_mod")
        if module is not model and name != "_orig_mod" and not is_wrapper and id(module) not in skipped:
            yield clean_name(name), module


def _metrics_in(model: nn.Module) -> Iterator[nn.Module]:
    # torchmetrics states must be updated once per user forward; a model without torchmetrics need not import it.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
        yield from (module for module in model.modules() if isinstance(module, kinds))


def has_forward(module: nn.Module) -> bool:
    """False for `ModuleList`, `ModuleDict` and other modules that are never called themselves."""
    own = type(module).forward
    return own is not nn.Module.forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def outermost(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Drop every layer that lies inside another one of `layers`; the order stays."""
    layers = list(layers)
    inside = {id(part) for _, layer in layers for part in layer.modules() if part is not layer}
    return {name: layer for name, layer in layers if id(layer) not in inside}


def class_names(cls: type) -> set[str]:
    """Short and full names of a class and its bases: FSDP2 puts a class of its own in front of the user's."""
    bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    return {base.__name__ for base in bases} | {f"{base.__module__}.{base.__qualname__}" for base in bases}
