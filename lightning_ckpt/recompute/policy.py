"""Which operators' results a recomputed layer keeps: what a user writes, and the operators that it means."""

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload, OpOverloadPacket

#: The operators that do nearly all of a transformer's arithmetic, for every kind of device; what `"matmul"` means.
MATMUL = (
    *(
        "mm",
        "addmm",
        "_addmm_activation",
        "bmm",
        "baddbmm",
        "_int_mm",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
    ),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)


#: Operators whose results are kept.
Operators = frozenset[OpOverload]


class PolicyError(ValueError):
    """A policy names no operator whose result can be kept."""


def resolve_policy(policy: Any) -> Operators:
    """The operators that a policy names.

    Args:
        policy: ``"matmul"``, an operator, or a list of these. An operator is written ``"aten.mm"``,
            ``"aten.mm.default"``, ``"aten::mm"`` or ``"mm"``, or given as an object,
            ``torch.ops.aten.mm`` or one of its overloads.

    Returns:
        The overloads of all of them.

    Raises:
        PolicyError: a name is unknown; an operator is taken apart before it runs, so that it is never seen; it has no
            result of its own, since it changes an argument or returns a view of one; or it is a cast, whose calls
            depend on what autocast has cast before.

    Example::

        resolve_policy(["matmul", "aten.convolution"])
    """
    items = list(policy) if isinstance(policy, (list, tuple, set, frozenset)) else [policy]
    if not items:
        raise PolicyError(
            f"`policy={policy!r}` names no operator. Leave it out to keep none, or write `policy='matmul'`."
        )
    operators: set[OpOverload] = set()
    for item in items:
        operators |= _matmul() if item == "matmul" else set(_operators(item))
    return frozenset(operators)


def _matmul() -> set[OpOverload]:
    packets = [packet for name in MATMUL if (packet := getattr(torch.ops.aten, name, None)) is not None]
    return {overload for packet in packets for overload in _overloads(packet) if _objection(overload) is None}


def _operators(item: Any) -> list[OpOverload]:
    found = _find(item) if isinstance(item, str) else item
    if isinstance(found, OpOverloadPacket):
        candidates = list(_overloads(found))
    elif isinstance(found, OpOverload):
        candidates = [found]
    else:
        raise PolicyError(
            f"`policy` holds {item!r}, which is no operator. Write `policy='matmul'`, or names such as 'aten.mm' or "
            "objects such as `torch.ops.aten.mm`."
        )
    objections = [_objection(candidate) for candidate in candidates]
    usable = [candidate for candidate, objection in zip(candidates, objections, strict=True) if objection is None]
    if not usable:
        shown = item if isinstance(item, str) else str(item)
        raise PolicyError(f"The result of operator {shown!r} cannot be kept (`policy`): {objections[0]}")
    return usable


def _overloads(packet: OpOverloadPacket) -> Iterable[OpOverload]:
    overloads = (getattr(packet, name) for name in packet.overloads())
    # Some exist in TorchScript alone.
    return (overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name()))


def _find(name: str) -> OpOverload | OpOverloadPacket:
    plain = name.removeprefix("torch.ops.").replace("::", ".")
    parts = plain.split(".")
    if len(parts) == 1:
        parts = ["aten", *parts]
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None) if part.isidentifier() else None
    if isinstance(found, (OpOverload, OpOverloadPacket)):
        return found
    raise PolicyError(
        f"`policy` names {name!r}, which is no operator of PyTorch or of an imported library. Did you mean "
        f"{' or '.join(map(repr, _nearest('.'.join(parts))))}?"
    )


def _nearest(name: str) -> list[str]:
    known = {full.split(".")[0].replace("::", ".") for full in torch._C._dispatch_get_all_op_names()}
    close = difflib.get_close_matches(name, [*known, "aten.matmul"], n=12, cutoff=0.6)
    usable = ["matmul" if option == "aten.matmul" else option for option in close if _is_usable(option)]
    return usable[:3] or ["matmul", "aten.mm"]


def _is_usable(name: str) -> bool:
    found = getattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1])
    return name == "aten.matmul" or any(_objection(overload) is None for overload in _overloads(found))


def _objection(operator: OpOverload) -> str | None:
    """Why the result of `operator` cannot be kept, if so."""
    schema = operator._schema
    if operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return (
            "it is made of other operators and is never seen itself. Name those: 'matmul' for matrix products and "
            "attention, 'aten.convolution' for convolutions."
        )
    if schema.is_mutable:
        return "it changes an argument instead of returning something new."
    if any(result.alias_info is not None for result in schema.returns):
        return "it returns a view of its argument, which takes no memory."
    if not schema.returns:
        return "it returns nothing."
    if "batch_norm" in operator.overloadpacket.__name__ and "running_mean" in {each.name for each in schema.arguments}:
        return "it changes running statistics, which its schema does not say."
    if operator.overloadpacket is torch.ops.aten._to_copy:
        return "autocast casts a weight once, in whichever layer comes first, so its calls differ in the recompute."
    return None
