"""Walk an autograd graph and see what it keeps, without unpacking anything.

Reading the graph instead of setting saved-tensor hooks leaves the training step alone: hooks would switch off
autograd's check for in-place changes and forbid `torch.func` transforms.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

_raw_names: dict[type, list[str]] = {}


def graph_nodes(outputs: Iterable[Tensor], stop_at: Iterable[Tensor] = ()) -> Iterator[Node]:
    """Every node that the backward of `outputs` would run, except those of `stop_at` and before."""
    seen = {tensor.grad_fn for tensor in stop_at}
    stack = [tensor.grad_fn for tensor in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions)


def packed_values(node: Node) -> Iterator[tuple[Any, Callable[[Any], Tensor] | None]]:
    """What `node` holds for its backward: each a tensor, or what a pack hook returned with the hook that unpacks it."""
    kind = type(node)
    names = _raw_names.get(kind)
    if names is None:
        names = _raw_names[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in names:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # released by an earlier backward
            continue
        for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
            if saved is not None:
                yield saved.data, saved.unpack_hook
    if hasattr(node, "__dict__"):  # a Python function may keep tensors as attributes of its context
        yield from ((value, None) for value in vars(node).values() if isinstance(value, Tensor))


def is_checkpoint_holder(packed: Any) -> bool:
    """True for the empty holder that PyTorch's own non-reentrant checkpoint puts in the place of a saved tensor."""
    return type(packed).__name__ == "_Holder" and type(packed).__module__ == "torch.utils.checkpoint"
