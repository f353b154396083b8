"""Attach recompute to a layer without wrapping it, and take it away without a trace."""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils.checkpoint import checkpoint

from lightning_ckpt.recompute.frame import Frame
from lightning_ckpt.recompute.inspection import inspect_call


class Recompute:
    """Instance-level `forward` of a layer.

    A module-level class that holds its layer: it deep-copies and pickles together with the layer, so an EMA copy runs
    its own weights, and it stays clear of `__call__`, so that hooks of the layer are outside of what is recomputed.

    Attributes:
        layer: the layer it is attached to.
        name: the layer's qualified name.
        called: whether the layer has run with gradients on, outside of compiled code.
        findings: what its first such call showed that a user should know (see `inspection`).
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer = layer
        self.name = name
        self.called = False
        self.findings: set[str] = set()
        # A forward that somebody else put on the instance before; it runs inside and comes back afterwards.
        self._previous = layer.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        if torch.compiler.is_compiling():  # PyTorch's own checkpoint is what the compiler can trace
            return checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        parameter = next(self.layer.parameters(), None)
        if isinstance(parameter, UninitializedTensorMixin):  # a lazy layer takes its shapes in this call
            return self._run(*args, **kwargs)
        frame = Frame(self.name, self._run, args, kwargs, None if parameter is None else parameter.device)
        output = frame.forward(args, kwargs)
        if not self.called:
            self.called = True
            self.findings = inspect_call(frame.arguments.tensors, args, kwargs, output)
        return output

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._previous is not None:
            return self._previous(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def detach(self) -> None:
        """Leave the layer as it was before."""
        del self.layer.__dict__["forward"]
        if self._previous is not None:
            self.layer.forward = self._previous


def attach(layer: nn.Module, name: str) -> Recompute:
    """Recompute `layer` in backward from now on, until `detach`.

    Args:
        layer: any module with a forward. It keeps its class, its parameters and their names, and its hooks.
        name: its qualified name, for messages.

    Returns:
        What was attached.

    Raises:
        ValueError: the layer has recompute attached already.

    Example::

        from lightning_ckpt.recompute import attach, detach

        attach(model.blocks[0], "blocks.0")
        model(x).sum().backward()   # blocks.0 ran twice
        detach(model.blocks[0])
    """
    current = attached(layer)
    if current is not None:
        raise ValueError(f"Layer {name!r} is recomputed already, attached as {current.name!r}. Detach it first.")
    recompute = Recompute(layer, name)
    layer.forward = recompute
    return recompute


def attached(layer: nn.Module) -> Recompute | None:
    """What is attached to `layer`, or None."""
    forward = layer.__dict__.get("forward")
    return forward if isinstance(forward, Recompute) else None


def detach(layer: nn.Module) -> None:
    """Leave `layer` as it was before `attach`; one without recompute is no error."""
    current = attached(layer)
    if current is not None:
        current.detach()
