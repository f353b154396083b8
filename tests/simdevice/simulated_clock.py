"""The clock of the simulated device: exact and repeatable, whatever the schedule.

A queued task starts at the latest of the time of its stream, the times of the events that the stream was told to wait
for, the time of the host at the call and, for a copy between host and device, the time at which its link is free (one
link per direction, first submitted first served). Waiting moves the host's time; otherwise the host is infinitely fast.
While the clock is on, simulated time also decides what the host can see: `event.query()`, the reuse of memory that
`record_stream` has marked, and the reuse of pinned memory.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class SimulatedClock:
    """See the module; all times are in seconds.

    Args:
        extension: the compiled half of the device.
    """

    def __init__(self, extension: ModuleType) -> None:
        self._extension = extension

    def configure(
        self,
        *,
        out_bytes_per_s: float | None = None,
        in_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        pageable_factor: float = 1.0,
        operator_s: float = 0.0,
        flops_per_s: float | None = None,
        memory_bytes_per_s: float | None = None,
        submit_s: float = 0.0,
        pinned_alloc_s: float = 0.0,
        pinned_alloc_bytes_per_s: float | None = None,
    ) -> None:
        """Turns the clock on, at time zero. What has no rate takes no time.

        Args:
            out_bytes_per_s: bandwidth of the link from the device to the host.
            in_bytes_per_s: bandwidth of the link from the host to the device.
            latency_s: what every copy between host and device takes besides.
            pageable_factor: bandwidth to and from pageable memory, as a part of that to and from pinned memory.
            operator_s: what every operator takes.
            flops_per_s: rate of matrix products and convolutions, in addition to `operator_s`.
            memory_bytes_per_s: rate at which operators read and write their tensors, each counted once, in addition.
            submit_s: what the host takes to submit an operator, a copy or a delay.
            pinned_alloc_s: what the host takes to get pinned memory from the system (none, if it is cached).
            pinned_alloc_bytes_per_s: rate of the same, in addition.
        """
        rates = {
            "out_bytes_per_s": out_bytes_per_s,
            "in_bytes_per_s": in_bytes_per_s,
            "flops_per_s": flops_per_s,
            "memory_bytes_per_s": memory_bytes_per_s,
            "pinned_alloc_bytes_per_s": pinned_alloc_bytes_per_s,
        }
        times = {
            "latency_s": latency_s,
            "operator_s": operator_s,
            "submit_s": submit_s,
            "pinned_alloc_s": pinned_alloc_s,
        }
        for name, rate in rates.items():
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be positive, or None for no cost, and is {rate}")
        for name, time in times.items():
            if not time >= 0:
                raise ValueError(f"{name} must not be negative and is {time}")
        if not pageable_factor > 0:
            raise ValueError(f"pageable_factor must be positive and is {pageable_factor}")
        no_cost = {name: rate or 0.0 for name, rate in rates.items()}
        self._extension.clock_configure({**no_cost, **times, "pageable_factor": pageable_factor})

    def off(self) -> None:
        """Nothing takes time, and nothing is decided by it."""
        self._extension.clock_off()

    def reset(self) -> None:
        """Time zero everywhere, with the same settings."""
        self._extension.clock_reset()

    @property
    def is_on(self) -> bool:
        return self._extension.clock_is_on()

    def now(self) -> float:
        """When everything submitted so far is over."""
        return self._extension.clock_now()

    def host(self) -> float:
        """The time of the host."""
        return self._extension.clock_host()

    def stream(self, stream: torch.Stream | None = None) -> float:
        """When everything submitted to a stream (default: the current one) is over."""
        return self._extension.clock_stream(self._id(stream))

    def stalled(self, stream: torch.Stream | None = None) -> float:
        """How long a stream stood idle for events alone: not for want of work, nor for want of the link."""
        return self._extension.clock_stalled(self._id(stream))

    def busy(self, direction: str) -> float:
        """How long the link "out" or "in" was busy."""
        return {"out": self._extension.clock_busy_out, "in": self._extension.clock_busy_in}[direction]()

    def log(self, on: bool) -> list[tuple[int, str, float, float]]:
        """Starts or stops logging; returns what was logged since the last call: (stream, name, start, end)."""
        return self._extension.clock_log(on)

    def spend(self, seconds: float, name: str = "spend") -> None:
        """Queues a delay on the current stream."""
        if not seconds >= 0:
            raise ValueError(f"a delay must not be negative and is {seconds}")
        self._extension.clock_spend(seconds, name)

    def timed(self, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """The same tensor, after a delay; the backward pass takes a delay there too, and nothing is saved for it.

        What a layer computes before this point is ready only after the delay in forward; in backward, its tensors are
        asked for after the delay. `layer` puts the delays where the time of a layer is spent.
        """
        return _Timed.apply(tensor, self, forward_s, backward_s)

    def layer(self, call: Callable[..., Any], forward_s: float, backward_s: float) -> "TimedLayer":
        """A module that calls `call` and takes these times."""
        return TimedLayer(self, call, forward_s, backward_s)

    @staticmethod
    def _id(stream: torch.Stream | None) -> int:
        return (stream or torch.accelerator.current_stream()).stream_id


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.spend(forward_s, "forward")
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.spend(ctx.backward_s, "backward")
        return gradient, None, None, None


class TimedLayer(torch.nn.Module):
    """A layer that takes time: its saved tensors are there when its forward time begins, and asked for before its
    backward time begins. It costs the time once per call, at the first tensor of its arguments and of its results.
    """

    def __init__(self, clock: SimulatedClock, call: Callable[..., Any], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.call = call
        self._clock, self._forward_s, self._backward_s = clock, forward_s, backward_s

    def forward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensor = self._clock.timed(tensor, 0.0, self._backward_s)
        return self._clock.timed(self.call(tensor, *args, **kwargs), self._forward_s, 0.0)
