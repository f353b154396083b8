"""Dispatch modes that only watch, and the few formulas that compute otherwise while one is on.

Some of autograd's formulas take another way where a tensor may be more than its numbers, and a dispatch mode makes all
tensors look like that. Their gradients then differ in the last bit, so nothing may watch a backward that holds them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from lightning_ckpt.measure.graph import graph_nodes

# Found by comparing results and gradients of all of PyTorch's operators with and without a mode, bit for bit.
_SENSITIVE = ("ProdBackward", "MaskedFillBackward1", "OrmqrBackward")


@contextlib.contextmanager
def watching(mode: TorchDispatchMode, give_up: Callable[[], object]) -> Iterator[None]:
    """Enter `mode`, except for backward passes whose results it would change.

    Args:
        mode: only watches.
        give_up: called before such a backward: what the mode tells is not complete any more.
    """
    run_backward = torch.autograd._engine_run_backward  # what `backward` and `grad` come down to, inner ones included

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        if any(node.name().startswith(_SENSITIVE) for node in graph_nodes(tensors)):
            give_up()
            with _left(mode):
                return run_backward(outputs, *args, **kwargs)
        return run_backward(outputs, *args, **kwargs)

    setattr(torch.autograd, "_engine_run_backward", run)
    try:
        with mode:
            yield
    finally:
        setattr(torch.autograd, "_engine_run_backward", run_backward)


@contextlib.contextmanager
def _left(mode: TorchDispatchMode) -> Iterator[None]:
    entered = _get_current_dispatch_mode() is mode
    if entered:
        _pop_mode()
    try:
        yield
    finally:
        if entered:
            _push_mode(mode)
