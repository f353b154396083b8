"""Models whose weights have no memory, made by code that knows nothing of that."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ckpt.planning import PreflightError

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
}


@contextlib.contextmanager
def weights_without_memory() -> Iterator[None]:
    """Weights that modules are given are on the `meta` device; all else that a model makes has its numbers.

    Raises:
        PreflightError: the model reads numbers of its weights.
    """
    handle = register_module_parameter_registration_hook(_give_up_memory)
    try:
        with _AssignedData(), _SpreadingMeta(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*to a meta parameter in the current model, which is a no-op")
            yield
    finally:
        handle.remove()


def _give_up_memory(module: nn.Module, name: str, parameter: Any) -> None:
    if type(parameter) in (nn.Parameter, nn.UninitializedParameter) and not parameter.is_meta:
        if isinstance(parameter, nn.UninitializedParameter):
            make: Any = nn.UninitializedParameter
            twin = make(parameter.requires_grad, "meta", parameter.dtype)
        else:
            twin = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, twin)  # the same object, for whoever else holds it


class _AssignedData(TorchFunctionMode):
    """What is assigned to the `data` of a weight without memory gives up its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__ and args[0].is_meta:  # type: ignore[attr-defined]
            args = (args[0], _on_meta(args[1]))
        return func(*args, **(kwargs or {}))


class _SpreadingMeta(TorchDispatchMode):
    """What is computed from weights without memory has none either, whatever else goes into it, whatever its device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(value, Tensor) and value.is_meta for value in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func in _READS:
            raise PreflightError(
                "the model reads numbers of its weights (`.item()`, `if`) while it is made, and `plan` makes it "
                "without them. Training plans with the weights: `fit --ckpt.memory_budget`"
            )
        if func is not torch.ops.aten.copy_.default:  # which knows what to do with both
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value
