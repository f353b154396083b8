"""Finds CPU kernels that touch pinned memory which the device has not finished with."""

from typing import Any

import torch
from backend import host_unsynced
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostGuard(TorchDispatchMode):
    """While active, `races` collects what operators of the CPU do to pinned memory too early."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and func._schema.name not in _TOUCH_NOTHING:
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple, kwargs: dict) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return  # a copy to or from the device: the device itself watches those
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.is_pinned():
                    self._check_tensor(func, tensor, writes)

    def _check_tensor(self, func: Any, tensor: torch.Tensor, writes: bool) -> None:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for unsynced in host_unsynced(tensor.data_ptr(), (last + 1) * tensor.element_size(), writes):
            self.races.append(
                f"host {func} {'writes' if writes else 'reads'} pinned memory not synchronised with {unsynced}"
            )


_TOUCH_NOTHING = {"aten::detach", "aten::is_pinned", "aten::set_", "aten::empty_like", "aten::record_stream"}
