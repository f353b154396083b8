"""Settings that choose which kernel runs, and with it the bits that come out."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_ckpt.recompute import private

_cuda = torch.backends.cuda
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (private.get_sdp_priority, private.set_sdp_priority),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: torch.backends.mkldnn.enabled, lambda on: setattr(torch.backends.mkldnn, "enabled", on)),
    (lambda: torch.backends.cudnn.enabled, lambda on: setattr(torch.backends.cudnn, "enabled", on)),
    (lambda: torch.backends.cudnn.deterministic, lambda on: setattr(torch.backends.cudnn, "deterministic", on)),
    (lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)),
]


def get_settings() -> list[Any]:
    """The settings as they are now."""
    return [*(get() for get, _ in _SETTINGS), private.get_parametrization_cache()]


def set_settings(values: list[Any]) -> None:
    """Set what differs from `values`."""
    *values, parametrization_cache = values
    for (get, put), value in zip(_SETTINGS, values, strict=True):
        if get() != value:
            put(value)
    private.set_parametrization_cache(parametrization_cache)
