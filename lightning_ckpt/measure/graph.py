"""Walk an autograd graph and see what it keeps, without unpacking anything.

Reading the graph instead of setting saved-tensor hooks leaves the training step alone: hooks would switch off
autograd's check for in-place changes and forbid `torch.func` transforms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


@dataclass(frozen=True)
class NodeKind:
    """What all nodes of one class have in common; asking each would take longer than everything else.

    Attributes:
        raw_names: attributes with what autograd has saved.
        has_attributes: whether it is a Python function, whose context may hold tensors.
        holds_nothing: whether nothing can be saved there.
        is_compiled: whether it stands for compiled code.
    """

    raw_names: tuple[str, ...]
    has_attributes: bool
    holds_nothing: bool
    is_compiled: bool


_kinds: dict[type, NodeKind] = {}


def kind_of(node: Node) -> NodeKind:
    """The kind of a node."""
    kind = _kinds.get(type(node))
    if kind is None:
        names = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
        has_attributes = hasattr(node, "__dict__")
        holds_nothing = not names and not has_attributes
        kind = NodeKind(names, has_attributes, holds_nothing, "CompiledFunction" in node.name())
        _kinds[type(node)] = kind
    return kind


def graph_nodes(outputs: Iterable[Tensor], stop_at: Iterable[Tensor] = ()) -> list[Node]:
    """Every node that the backward of `outputs` would run, except those of `stop_at` and before."""
    seen = {tensor.grad_fn for tensor in stop_at}
    nodes: list[Node] = []
    stack = [tensor.grad_fn for tensor in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        for parent, _ in node.next_functions:
            stack.append(parent)
    return nodes


def packed_values(node: Node) -> list[tuple[Any, Any]]:
    """What `node` holds for its backward: each a tensor, or what a pack hook returned, and autograd's record of it.

    The record is None for tensors that a Python function keeps as attributes of its context.
    """
    kind = kind_of(node)
    values = []
    for name in kind.raw_names:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # released by an earlier backward
            continue
        for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
            if saved is not None:
                values.append((saved.data, saved))
    if kind.has_attributes:
        values += [(value, None) for value in vars(node).values() if isinstance(value, Tensor)]
    return values


def is_checkpoint_holder(packed: Any) -> bool:
    """True for the empty holder that PyTorch's own non-reentrant checkpoint puts in the place of a saved tensor."""
    return type(packed).__name__ == "_Holder" and type(packed).__module__ == "torch.utils.checkpoint"
