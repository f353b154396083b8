"""DeepSpeed's ZeRO-3, which gathers a module's weights in hooks and takes them away again: what a replay must know."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def gathers_weights(hook: Any) -> bool:
    """Whether a hook is one of DeepSpeed's: it has to run in the replay, too, though it looks as if it only watched."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == "deepspeed"


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether values of a parameter come and go without the layer writing it."""
    return hasattr(parameter, "ds_id")


@contextlib.contextmanager
def balanced_module_stack() -> Iterator[None]:
    """DeepSpeed keeps a stack of the modules that run; the stop ends a replay in the midst of some."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is None:
        yield
        return
    depth = len(offload.FWD_MODULE_STACK)
    try:
        yield
    finally:
        del offload.FWD_MODULE_STACK[depth:]
