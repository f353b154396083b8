"""What surrounds a layer call and decides its values: random streams and autocast."""

import contextlib
from collections.abc import Iterable, Iterator

import torch


class Ambient:
    """The random streams of the CPU and of `devices`, and autocast, as they are now.

    Args:
        devices: the devices that the layer computes on.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._streams = _get_streams(self._devices)
        cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
            for kind in dict.fromkeys(["cpu", *(device.type for device in self._devices)])
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything as it was; afterwards put it back as it is just before."""
        now = _get_streams(self._devices)
        with contextlib.ExitStack() as stack:
            stack.callback(_set_streams, now)
            _set_streams(self._streams)
            for kind, enabled, dtype, cache in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            yield


def _get_streams(devices: Iterable[torch.device]) -> list[tuple[torch.device | None, torch.Tensor]]:
    states: list[tuple[torch.device | None, torch.Tensor]] = [(None, torch.get_rng_state())]
    return states + [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]


def _set_streams(states: Iterable[tuple[torch.device | None, torch.Tensor]]) -> None:
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
