"""What the first call of a recomputed layer shows that its user should know."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_ckpt.measure.graph import graph_nodes, is_checkpoint_holder, packed_values

#: The layer's own forward recomputes a part of itself with `torch.utils.checkpoint` or DeepSpeed's.
CHECKPOINTS_ITSELF = "checkpoints itself"
#: The model runs the layer inside such a function.
IS_CHECKPOINTED = "is checkpointed"
#: The layer was given a Hugging Face key-value cache, which stays alive for the replay.
KEEPS_CACHE = "keeps a cache"
#: An operator of the layer (RReLU) fills a tensor after autograd has saved it.
FILLS_LATE = "fills late"


def inspect_call(inputs: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> set[str]:
    """What a call from `inputs` (all tensors in the arguments) to `output` shows: some of the constants above."""
    findings = set()
    if any(map(_is_hf_cache, (*args, *kwargs.values()))):
        findings.add(KEEPS_CACHE)
    for node in graph_nodes(_tensors_in(output), stop_at=inputs):
        if node.name().startswith("RreluWithNoise"):
            findings.add(FILLS_LATE)
        is_reentrant = node.name().startswith("CheckpointFunction")
        if is_reentrant or any(is_checkpoint_holder(packed) for packed, _ in packed_values(node)):
            findings.add(CHECKPOINTS_ITSELF)
    return findings


def _is_hf_cache(value: Any) -> bool:
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors_in(item)
    elif isinstance(output, dict):
        yield from _tensors_in(list(output.values()))
