"""What torchmetrics asks of numbers that a rehearsal does not have."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torchmetrics import Metric

_METHODS = ("forward", "update", "compute")


@contextlib.contextmanager
def excused_metrics(module: nn.Module) -> Iterator[None]:
    """Metrics of the module that read numbers of tensors, to check or to count them, come to what they begin with."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    before = [{name: vars(metric)[name] for name in _METHODS if name in vars(metric)} for metric in metrics]
    for metric in metrics:
        _Excused(metric)
    try:
        yield
    finally:
        for metric, methods in zip(metrics, before, strict=True):
            for name in _METHODS:
                vars(metric).pop(name, None)
            vars(metric).update(methods)


class _Excused:
    """Stands in for the methods of one metric; once it misses numbers, it may fail at whatever follows from them."""

    def __init__(self, metric: Metric) -> None:
        self._misses_numbers = False
        for name in _METHODS:
            vars(metric)[name] = self._excused(getattr(metric, name))

    def _excused(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                self._misses_numbers = True
            except Exception:
                if not self._misses_numbers:
                    raise
            return torch.zeros(())

        return run
