"""Tensors compared, copied and put back bit for bit."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor | None:
    """The bits of a tensor as a flat tensor of integers, or None for kinds that do not lay them open."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return None
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """True if both hold the same bits; NaN equals itself, and 0.0 is not -0.0. False also where nobody can tell."""
    if (a.is_nested and a.layout is torch.strided) or (b.is_nested and b.layout is torch.strided):
        return False
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout or type(a) is not type(b):
        return False
    if hasattr(type(a), "__tensor_flatten__"):  # a quantized or sharded weight, which need not know any operator
        inner, other_inner = _inner_tensors(a), _inner_tensors(b)
        return len(inner) == len(other_inner) and all(map(bitwise_equal, inner, other_inner))
    if a.layout is torch.sparse_coo:
        pairs = [(a._indices(), b._indices()), (a._values(), b._values())]
    elif a.layout in (torch.sparse_csr, torch.sparse_bsr):
        pairs = [(a.crow_indices(), b.crow_indices()), (a.col_indices(), b.col_indices()), (a.values(), b.values())]
    elif a.layout in (torch.sparse_csc, torch.sparse_bsc):
        pairs = [(a.ccol_indices(), b.ccol_indices()), (a.row_indices(), b.row_indices()), (a.values(), b.values())]
    elif a.is_quantized:
        pairs = [(a.int_repr(), b.int_repr())]
    elif a.layout is torch.jagged:
        pairs = [(a.values(), b.values())]
    else:
        if is_fake(a) or is_fake(b):  # no bits at all: a rehearsal on shapes alone
            return True
        bits, other_bits = as_integers(a), as_integers(b)
        return bits is not None and other_bits is not None and torch.equal(bits, other_bits)
    return all(bitwise_equal(one, other) for one, other in pairs)


def _inner_tensors(tensor: Any) -> list[Tensor]:
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor may also list its mesh


def copy_exactly(tensor: Tensor) -> Tensor:
    """A copy with the strides of the original, which decide the order of sums over it."""
    tensor = tensor.detach()
    odd = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_contiguous()
    if not odd or 0 in tensor.stride() or tensor.is_quantized:
        return tensor.clone()
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Regrow(torch.autograd.Function):
    """A tensor that requires gradients and is no leaf, but hangs on no older graph."""

    @staticmethod
    def forward(ctx: Any, data: Tensor) -> Tensor:
        return data.data  # an alias that autograd does not take for a view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def regrow(data: Tensor) -> Tensor:
    """`data` as a tensor in the middle of a graph, for a replay that must see that it requires gradients."""
    if not (data.is_floating_point() or data.is_complex()):
        return data
    with torch.enable_grad():
        return _Regrow.apply(data.detach().requires_grad_())  # type: ignore[no-any-return]
