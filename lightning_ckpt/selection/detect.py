"""Find the layers of a model nobody has named: Hugging Face's own, else the repeated blocks."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import nn

from lightning_ckpt.selection.modules import has_forward, named_candidates, outermost, unwrap


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` by qualified name, in the order of `model.modules()`; empty when there are none.

    Hugging Face models mark theirs with `GradientCheckpointingLayer`, and all of those are taken, nested ones
    included, so that counting every n-th gives what `activation_checkpointing_enable(every_n_layers=n)` gives.

    Otherwise the layers are the outermost modules with parts of their own whose class is repeated in `ModuleList`s,
    `Sequential`s or `ModuleDict`s, wherever in the model they are. A class whose instances all differ in shape and
    hold repeated blocks of several weight matrices themselves (the stages of a ResNet) is looked into, not taken. A
    model with one single block in a `ModuleList` (one layer, or ALBERT's shared one) gives that block.
    """
    candidates = dict(named_candidates(model))
    marked = {name: module for name, module in candidates.items() if is_hf_layer(module)}
    if marked:
        return marked
    return _repeated_blocks(model, candidates) or _single_blocks(candidates)


def is_hf_layer(module: nn.Module) -> bool:
    """True for a layer that Hugging Face's own activation checkpointing can switch on."""
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _held(container: nn.Module) -> Iterator[nn.Module]:
    """What a container holds, repeats included, that has parts of its own and a forward."""
    for child in container._modules.values():
        child = None if child is None else unwrap(child)
        if child is not None and has_forward(child) and next(child.children(), None) is not None:
            yield child


def _repeated_blocks(model: nn.Module, candidates: dict[str, nn.Module]) -> dict[str, nn.Module]:
    groups = [group for group in repeated_classes(model).values() if not _are_stages(group)]
    held = {id(block) for group in groups for block in group}
    repeated = outermost((name, module) for name, module in candidates.items() if id(module) in held)
    # A class of blocks is taken wherever it is; a plain `Sequential` may be anything, so only the repeated ones are.
    classes = {type(block) for block in repeated.values()} - {nn.Sequential}
    return outermost(
        (name, module) for name, module in candidates.items() if name in repeated or type(module) in classes
    )


def repeated_classes(model: nn.Module) -> dict[type, list[nn.Module]]:
    """Blocks held in containers of `model` by their class, for classes that occur more than once."""
    candidates = {id(module) for _, module in named_candidates(model)}
    groups: dict[type, list[nn.Module]] = defaultdict(list)
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            for block in _held(container):
                if id(block) in candidates:
                    groups[type(block)].append(block)
    return {cls: group for cls, group in groups.items() if len(group) > 1}


def _single_blocks(candidates: dict[str, nn.Module]) -> dict[str, nn.Module]:
    lists = [module for module in candidates.values() if isinstance(module, nn.ModuleList)]
    held = {id(block) for container in lists for block in _held(container)}
    return outermost((name, module) for name, module in candidates.items() if id(module) in held)


def _are_stages(group: list[nn.Module]) -> bool:
    distinct = list({id(block): block for block in group}.values())
    if len(distinct) < 2:
        return False
    shapes = Counter(tuple(parameter.shape for parameter in block.parameters()) for block in distinct)
    inner = [part for block in distinct for group in repeated_classes(block).values() for part in group]
    return max(shapes.values()) == 1 and any(map(_has_several_matrices, inner))


def _has_several_matrices(block: nn.Module) -> bool:
    # Tells a residual block from a convolution with its norm and activation, which many blocks repeat inside.
    return sum(parameter.dim() > 1 for parameter in block.parameters()) > 1
