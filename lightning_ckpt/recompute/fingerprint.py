"""Fingerprints of saved tensors: the net under everything the replay does to be exact.

What nobody thought of (files, threads, other modules, settings) must not become a wrong gradient. So what autograd
saves in forward is fingerprinted and compared with what the replay saves. Always doing so costs some percent of a step;
by default the first calls of every layer in every mode are verified and later a sample.
"""

from typing import Literal

import torch
from torch import Tensor, nn

Verify = Literal["sample", "always", "off"]
SAMPLE_EVERY = 64


def is_verified(verify: Verify, calls: int, learning: bool) -> bool:
    """Whether the call with number `calls` is verified."""
    return verify == "always" or (verify == "sample" and (learning or calls % SAMPLE_EVERY == 0))


class Fingerprint:
    """A hash and an integer sum over the bits of a tensor, and its norm for kernels that are not deterministic.

    A hash alone would miss changes that cancel (XOR of an even count of halved numbers), hence the sum.
    """

    __slots__ = ("_bits", "_norm")

    def __init__(self, bits: Tensor, norm: Tensor | None) -> None:
        self._bits = bits
        self._norm = norm

    def matches(self, other: "Fingerprint") -> bool:
        """True if the bits are the same, or, on an accelerator, if the norms agree to 1e-3."""
        if torch.equal(self._bits, other._bits):
            return True
        if self._norm is None or other._norm is None:
            return False
        return bool(torch.isclose(self._norm, other._norm, rtol=1e-3, atol=1e-12, equal_nan=True))


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """The fingerprint of a saved tensor, or None for what cannot have one.

    Parameters are not changed between forward and replay, or that is found by their version. Workspaces of bytes (an
    LSTM's reserve) hold undefined values.
    """
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return None
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    if tensor.dtype is torch.uint8 or tensor.numel() == 0 or tensor.is_quantized:
        return None
    with torch.no_grad():
        values = tensor.detach().contiguous().view(-1)
        raw = values.view(torch.uint8)
        if raw.numel() % 4 == 0:
            raw = raw.view(torch.int32)
        bits = torch.stack([torch.hash_tensor(raw).view(torch.int64), raw.sum(dtype=torch.int64)])
        norm = None
        if tensor.device.type != "cpu" and (tensor.is_floating_point() or tensor.is_complex()):
            norm = torch.linalg.vector_norm(values, dtype=torch.float32 if not tensor.is_complex() else None)
    return Fingerprint(bits, norm)
