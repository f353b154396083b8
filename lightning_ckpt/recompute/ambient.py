"""What surrounds a layer call and decides its values: PyTorch's random streams, settings, autocast, modes, context."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lightning_ckpt.measure.live import LiveBytes
from lightning_ckpt.recompute import private
from lightning_ckpt.recompute.results import PolicyMode
from lightning_ckpt.recompute.settings import get_settings, set_settings


class Ambient:
    """Everything around a call, as it is now.

    Args:
        devices: the devices that the layer computes on; their random streams are kept beside the CPU's.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._streams = _get_streams(self._devices)
        self._settings = get_settings()
        cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
            for kind in dict.fromkeys(["cpu", *(device.type for device in self._devices)])
            if torch.amp.is_autocast_available(kind)
        ]
        self._function_modes = private.function_modes()
        self._dispatch_modes = private.dispatch_modes()
        self._context = contextvars.copy_context()

    def photograph_streams(self) -> Callable[[], None]:
        """A function that puts PyTorch's random streams back where they are now."""
        streams = _get_streams(self._devices)
        return lambda: _set_streams(streams)

    def run(self, function: Callable[[], Any]) -> None:
        """Call `function` with everything as it was; afterwards everything is as it is just before."""
        now, settings = _get_streams(self._devices), get_settings()
        _set_streams(self._streams)
        set_settings(self._settings)
        try:
            self._context.copy().run(self._run_in_modes, function)
        finally:
            set_settings(settings)
            _set_streams(now)

    def _run_in_modes(self, function: Callable[[], Any]) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_autocast_kept(self._autocast))
            for kind, enabled, dtype, cache in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            # Backward may run inside the modes still; those it has left are entered again.
            if not private.function_modes():
                for function_mode in self._function_modes:
                    stack.enter_context(function_mode)
            active = private.dispatch_modes()
            for dispatch_mode in self._dispatch_modes:
                if dispatch_mode not in active and not _stays_left(dispatch_mode):
                    stack.enter_context(dispatch_mode)
            function()


def _stays_left(mode: object) -> bool:
    # Modes that measure must not see a replay that happens outside of them; a policy's see one call of one layer each.
    return isinstance(mode, (LiveBytes, PolicyMode)) or type(mode).__module__ == "torch.utils.flop_counter"


@contextlib.contextmanager
def _autocast_kept(kinds: list[tuple[str, bool, torch.dtype, bool]]) -> Iterator[None]:
    """Whatever a layer does to autocast (it may enter what another layer leaves), it is as before afterwards."""
    depth = private.autocast_nesting()
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind, *_ in kinds]
    try:
        yield
    finally:
        if private.autocast_nesting() != depth:
            torch.clear_autocast_cache()
            private.set_autocast_nesting(depth)
        for kind, enabled, dtype in before:
            if torch.is_autocast_enabled(kind) != enabled:
                torch.set_autocast_enabled(kind, enabled)
            if torch.get_autocast_dtype(kind) != dtype:
                torch.set_autocast_dtype(kind, dtype)


def _get_streams(devices: Iterable[torch.device]) -> list[tuple[torch.device | None, torch.Tensor]]:
    states: list[tuple[torch.device | None, torch.Tensor]] = [(None, torch.get_rng_state())]
    return states + [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]


def _set_streams(states: Iterable[tuple[torch.device | None, torch.Tensor]]) -> None:
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
