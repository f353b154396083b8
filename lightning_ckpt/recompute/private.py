"""Every private call of PyTorch that the replay needs, where nothing public serves. Each has a test that guards it."""

from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set how often a tensor counts as changed in place."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def function_modes() -> list[TorchFunctionMode]:
    """The `TorchFunctionMode`s that are entered now, outermost first."""
    if not torch._C._len_torch_function_stack():
        return []
    return list(_get_current_function_mode_stack())


def dispatch_modes() -> list[TorchDispatchMode]:
    """The `TorchDispatchMode`s that are entered now, outermost first."""
    if not torch._C._len_torch_dispatch_stack():
        return []
    return list(_get_current_dispatch_mode_stack())


def autocast_nesting() -> int:
    """How many autocast contexts are entered; the cache of cast weights is cleared when the last one is left."""
    depth = int(torch.autocast_increment_nesting()) - 1
    torch.autocast_decrement_nesting()
    return depth


def set_autocast_nesting(depth: int) -> None:
    """Make it look as if `depth` autocast contexts were entered."""
    while autocast_nesting() < depth:
        torch.autocast_increment_nesting()
    while autocast_nesting() > depth:
        torch.autocast_decrement_nesting()


_RUNNING = "lightning_ckpt.running"


def get_running() -> frozenset[int]:
    """The layers whose forward runs in this thread, or in the one that waits for this thread's backward."""
    # Unlike context variables, this is handed on to the threads that autograd uses for devices.
    return torch._C._get_obj_in_tls(_RUNNING) if torch._C._is_key_in_tls(_RUNNING) else frozenset()


def set_running(layers: frozenset[int]) -> None:
    """Note which layers' forward runs in this thread."""
    torch._C._stash_obj_in_tls(_RUNNING, layers)


def get_sdp_priority() -> Any:
    """The order in which kernels of scaled dot product attention are tried."""
    return torch._C._get_sdp_priority_order()


def set_sdp_priority(order: Any) -> None:
    """Set the order in which kernels of scaled dot product attention are tried."""
    torch._C._set_sdp_priority_order(order)


def get_parametrization_cache() -> tuple[int, dict[Any, Any]]:
    """Whether `torch.nn.utils.parametrize.cached()` is entered, and what it holds."""
    return parametrize._cache_enabled, dict(parametrize._cache)  # never compare: it holds tensors


def set_parametrization_cache(state: tuple[int, dict[Any, Any]]) -> None:
    """Set what `torch.nn.utils.parametrize.cached()` holds."""
    parametrize._cache_enabled, content = state
    parametrize._cache.clear()
    parametrize._cache.update(content)
