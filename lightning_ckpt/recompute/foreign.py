"""Find checkpointing that somebody else put on a model, so that no layer is recomputed twice over."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

HUGGING_FACE = "Hugging Face's `activation_checkpointing_enable()`"
WRAPPER = "PyTorch's `checkpoint_wrapper`"


def find_foreign(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Those of `layers` that are recomputed already, as a whole or in part, with who does it."""
    owners: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            owners.update((id(part), WRAPPER) for part in module.modules())
        # The flag alone means nothing on modules that only hold layers; a layer was also given a function to call.
        elif getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
            owners[id(module)] = HUGGING_FACE
    found = {}
    for name, layer in layers.items():
        owner = next((owners[id(part)] for part in layer.modules() if id(part) in owners), None)
        if owner is not None:
            found[name] = owner
    return found
