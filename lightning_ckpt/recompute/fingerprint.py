"""Fingerprints of saved tensors: the net under everything the replay does to be exact.

What nobody thought of (files, threads, other modules, settings) must not become a wrong gradient. So what autograd
saves in forward is fingerprinted and compared with what the replay saves. Always doing so can double the time of a
step; by default the first calls of every layer in every mode are verified and later a sample, below 1 % of the time.
"""

import functools
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_ckpt.recompute.tensors import as_integers

Verify = Literal["sample", "always", "off"]
SAMPLE_EVERY = 128


def is_verified(verify: Verify, calls: int, learning: bool) -> bool:
    """Whether the call with number `calls` is verified."""
    return verify == "always" or (verify == "sample" and (learning or calls % SAMPLE_EVERY == 0))


class Fingerprint:
    """Sums over the bits of a tensor, weighted by their places, and its norm for kernels that are not deterministic."""

    __slots__ = ("_norm", "_sums")

    def __init__(self, sums: Tensor, norm: Tensor | None) -> None:
        self._sums = sums
        self._norm = norm

    def matches(self, other: "Fingerprint") -> bool:
        """True if the bits are the same, or, on an accelerator, if the norms agree to 1e-3."""
        if torch.equal(self._sums, other._sums):
            return True
        if self._norm is None or other._norm is None:
            return False
        return bool(torch.isclose(self._norm, other._norm, rtol=1e-3, atol=1e-12, equal_nan=True))


_WIDTH = 1024


@functools.cache
def _weights(count: int, device: torch.device) -> Tensor:
    """Odd integers without a pattern, one for each place."""
    generator = torch.Generator().manual_seed(count)
    weights = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64)
    return (weights | 1).to(device)


def _weighted(values: Tensor, dim: int) -> Tensor:
    sums = values.sum(dim, dtype=torch.int64)
    places = torch.arange(1, sums.numel() + 1, device=sums.device) if sums.numel() > _WIDTH else None
    weights = _weights(sums.numel(), sums.device) if places is None else places * _weights(1, sums.device)
    return (sums * weights).sum()


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """The fingerprint of a saved tensor, or None for what cannot have one.

    The bits, as integers, are put in rows of 1024, and the sums of the rows and of the columns are added up with a
    weight for each: values that changed, changed places or changed signs in pairs do not cancel. A contiguous tensor is
    not copied for it. Workspaces of bytes (an LSTM's reserve) hold undefined values and have none.
    """
    base = tensor._base
    if isinstance(base, nn.Parameter) and base.numel() == tensor.numel():
        tensor = base  # a transposed weight
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype is torch.uint8 or tensor.numel() == 0:
        return None
    with torch.no_grad():
        bits = as_integers(tensor)
        if bits is None:
            return None
        whole = bits.numel() // _WIDTH * _WIDTH
        table, rest = bits[:whole].view(-1, _WIDTH), bits[whole:]
        sums = [_weighted(rest.view(-1, 1), 1)] if rest.numel() else []
        if whole:
            sums += [_weighted(table, 0), _weighted(table, 1)]
        norm = None
        if tensor.device.type != "cpu" and tensor.is_floating_point():
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
        return Fingerprint(torch.stack(sums), norm)
