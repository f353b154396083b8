"""Tell somebody where layers begin and end in forward, without wrapping them."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Follower(Protocol):
    """Told about every boundary of a layer that is passed with gradients on."""

    def boundary(self, name: str, starts_layer: bool) -> None: ...


class _Boundary:
    """A forward hook. Copies of the module, such as an average of its weights, have nothing to tell."""

    def __init__(self, follower: Follower, name: str, starts_layer: bool) -> None:
        self._follower = follower
        self._name = name
        self._starts_layer = starts_layer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._follower.boundary(self._name, self._starts_layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()

    @property
    def __name__(self) -> str:
        """Only `torch.jit.script` asks for it, which cannot compile this."""
        raise AttributeError(
            f"Layer {self._name!r} is watched by the `StepMonitor` until the end of `fit`, and `torch.jit.script` "
            "cannot compile that. Call it after `fit`, or use `torch.jit.trace` or `torch.export.export`."
        )


class _Nothing:
    """What a boundary becomes in a copy of the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to tell."""


class _CompiledCall:
    """In the place of what `Module.compile` made, whose hooks run inside the compiled code."""

    def __init__(self, call: Any, before: _Boundary, after: _Boundary) -> None:
        self.call = call
        self._before = before
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        try:
            return self.call(*args, **kwargs)
        finally:
            self._after()


class Boundaries:
    """The boundaries of some layers, until `remove`."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], follower: Follower) -> None:
        self._handles: list[Any] = []
        self._compiled: list[nn.Module] = []
        # `torch.compile(layer)` puts a module around the layer: hooks of that one run outside of the compiled code.
        around = {id(module._orig_mod): module for module in model.modules() if hasattr(module, "_orig_mod")}
        for name, layer in layers.items():
            layer = around.get(id(layer), layer)
            before, after = _Boundary(follower, name, True), _Boundary(follower, f"after {name}", False)
            call = layer._compiled_call_impl
            if call is not None:
                layer._compiled_call_impl = _CompiledCall(call, before, after)
                self._compiled.append(layer)
            else:
                self._handles.append(layer.register_forward_pre_hook(before))
                self._handles.append(layer.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Leave the layers as they were."""
        for handle in self._handles:
            handle.remove()
        for layer in self._compiled:
            if isinstance(layer._compiled_call_impl, _CompiledCall):
                layer._compiled_call_impl = layer._compiled_call_impl.call
        self._handles.clear()
        self._compiled.clear()


def find_compiled_whole(model: nn.Module, layers: Iterable[nn.Module]) -> str | None:
    """Name of a module that is compiled as one piece with several of `layers` inside, if there is one."""
    inside = {id(layer) for layer in layers}
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            contained = [part for part in module.modules() if id(part) in inside and part is not module]
            if len(contained) > 1:
                return name or type(module).__name__
    return None
