"""Checkpointing that somebody else put on a model: a layer must not be recomputed twice over."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

_CHECKPOINT_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.", "non_reentrant_checkpoint.")


def find_wrapped(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Names of those `layers` that PyTorch's `checkpoint_wrapper` recomputes already, as a whole or in part."""
    wrapped: set[int] = set()
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            wrapped.update(id(part) for part in module.modules())
    return [name for name, layer in layers.items() if any(id(part) in wrapped for part in layer.modules())]


def is_switched_on(module: nn.Module) -> bool:
    """True for a Hugging Face module on which `activation_checkpointing_enable()` has acted.

    The flag alone means nothing on modules that only hold layers; a layer was also given a function to call.
    """
    return bool(getattr(module, "gradient_checkpointing", False)) and hasattr(module, "_gradient_checkpointing_func")


def runs_inside_checkpoint() -> bool:
    """True where somebody else's checkpoint function runs what is being called now: the model has called it so.

    PyTorch's own shows by its saved-tensor hooks. The reentrant kind (also DeepSpeed's, and adjoint methods) runs
    forward without gradients, and again with gradients in the midst of a backward.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    # A kind that nobody knows has not seen this layer save anything in forward, so it must not in backward.
    if hooks is not None and not getattr(hooks[0], "__module__", "").startswith("lightning_ckpt."):
        return getattr(hooks[0], "__qualname__", "").startswith(_CHECKPOINT_HOOKS)
    return torch._C._current_graph_task_id() != -1
