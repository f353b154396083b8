"""How long an operator takes, by formula: the roofline model."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_ckpt.measure.flops import operator_flops
from lightning_ckpt.measure.live import tensors_among


@dataclass(frozen=True)
class Rates:
    """What a device can do at best.

    An operator takes the longer one of two times: that of its arithmetic and that of moving what it reads and writes
    (the roofline model, Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009).

    Attributes:
        flops_per_s: floating-point operations per second of matrix products.
        bytes_per_s: bytes per second between the device's memory and its processors.
    """

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, operator: Any, args: Any, kwargs: Any, output: Any) -> float:
        """Time of one call of an operator."""
        if getattr(operator, "is_view", False):
            return 0.0
        tensors = tensors_among((*args, *kwargs.values(), output))
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return max(operator_flops(operator, args, kwargs, output) / self.flops_per_s, moved / self.bytes_per_s)


def rates_of(device: torch.device) -> Rates:
    """Round figures for a kind of device: their ratio matters, until real times are known."""
    return Rates(1e11, 2e10) if device.type == "cpu" else Rates(2e14, 2e12)
