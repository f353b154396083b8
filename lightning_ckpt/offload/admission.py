"""Which saved tensors may leave the device."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

# Forms of a parameter that cost no memory of their own, or that autocast makes of it and keeps.
_FORMS = {
    "AliasBackward0",
    "AsStridedBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsafeSplitBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
_AUTOCAST_TYPES = (torch.bfloat16, torch.float16)
_DEPTH = 8  # forms on top of each other


class Admission:
    """Says why a tensor stays, or that it may leave.

    Args:
        device: the device whose memory is to be saved.
        min_bytes: the least size that is worth a copy.
    """

    def __init__(self, device: torch.device, min_bytes: int) -> None:
        self._device = device
        self._min_bytes = min_bytes
        self._present: set[int] = set()
        self._types: set[torch.dtype] = set()
        self._frozen_shapes: set[torch.Size] = set()

    def learn(self, model: nn.Module | None) -> None:
        """Note what `model` keeps in memory anyway."""
        tensors = [] if model is None else [*model.parameters(), *model.buffers()]
        self._present = {identity for tensor in tensors for identity in _identities(tensor)}
        self._types = {tensor.dtype for tensor in tensors}
        frozen = [tensor for tensor in tensors if tensor.dim() > 1 and not tensor.requires_grad]
        self._frozen_shapes = {
            shape
            for tensor in frozen
            if tensor.dtype not in _AUTOCAST_TYPES
            for shape in (tensor.shape, torch.Size(reversed(tensor.shape)))
        }

    def reason_to_stay(self, tensor: Tensor) -> str | None:
        """Why a plain tensor stays on the device, None if it may leave."""
        if tensor.device != self._device:
            return "other device"
        if tensor.is_leaf and tensor.requires_grad:  # a parameter, or an input that somebody takes gradients of
            return "parameter"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return "layout"
        if tensor.is_conj() or tensor.is_neg():
            return "layout"
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or tensor.numel() == 0:
            return "small"
        if storage._cdata in self._present or self._is_form_of_parameter(tensor):
            return "parameter"
        return None

    def _is_form_of_parameter(self, tensor: Tensor) -> bool:
        base = tensor._base
        if base is None:
            base = tensor
        elif isinstance(base, nn.Parameter):
            return True
        if tensor.dtype in self._types:  # no cast, so it would have been a view
            return False
        node = tensor.grad_fn
        for _ in range(_DEPTH):
            if node is None:
                break
            kind = type(node).__name__
            if kind == "AccumulateGrad":
                return isinstance(getattr(node, "variable", None), nn.Parameter)
            if kind not in _FORMS:
                return False
            node = node.next_functions[0][0]
        # What autocast makes of a frozen weight leaves no trace but its shape.
        return base.dtype in _AUTOCAST_TYPES and not base.requires_grad and base.shape in self._frozen_shapes


def _identities(tensor: Tensor) -> Iterator[int]:
    names: Iterable[str] = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    for name in names:
        yield from _identities(getattr(tensor, name))
    if not names:
        try:
            yield tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors and lazy parameters have none
            return
