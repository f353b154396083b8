"""Importing this builds the simulated device and registers it as `sim`, for the whole process.

Tensors on the device `sim` work, whatever the model; what they compute is only computed once something waits for it,
and unordered accesses to the same memory are reported by `races`.
"""

import contextlib
import importlib.util
import pickle
import types
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from build import NAME, library
from simulated_clock import SimulatedClock
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

NO_LIMIT = 1 << 40


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    extension = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend("sim")
    spec.loader.exec_module(extension)
    return extension


_extension = _load(library())
clock = SimulatedClock(_extension)

# ---------------------------------------------------------------- control


def configure(policy: str = "lazy", seed: int = 0, *, poison: bool = True, strict_free: bool = False) -> None:
    """Chooses the schedule: when the device runs what has been queued.

    Args:
        policy: "lazy" (when something waits), "eager" (at once), "copy_first" and "compute_first" (one kind at once,
            the other when something waits; the default stream is the one that computes), "random" (now and then, by
            `seed`), "thread" (a thread in the background, not repeatable).
        seed: of the schedule "random".
        poison: fill new memory, and memory that a pending copy will fill, with NaN.
        strict_free: take the end of a tensor's life for a write to its memory by its stream, so that a missing
            `record_stream` is found even if nothing reuses the memory.
    """
    _extension.configure(policy, seed, poison, strict_free)


def reset() -> None:
    """Runs everything, gives all cached memory back, forgets what was found; the clock is off."""
    _extension.reset()


def set_limit(bytes: int = NO_LIMIT) -> None:
    """Size of the device's memory; beyond it, `torch.OutOfMemoryError`."""
    _extension.set_limit(bytes)


def set_pinned_limit(bytes: int = NO_LIMIT) -> None:
    """How much pinned memory the system gives; beyond it, a RuntimeError."""
    _extension.set_pinned_limit(bytes)


# ---------------------------------------------------------------- findings


def races() -> list[str]:
    """One line for every pair of accesses to the same bytes that nothing orders."""
    return _extension.races()


def clear_races() -> None:
    _extension.clear_races()


def counts() -> dict[str, int]:
    """Counters since the last reset.

    - `bytes_out`, `bytes_in`, `copies_out`, `copies_in`: copies from the device to the host and back;
    - `pageable_copies_out`, `pageable_copies_in`: those that were not between contiguous pinned memory and the device;
    - `pageable_nonblocking_d2h`, `pageable_nonblocking_h2d`: those that should not have blocked, and did;
    - `pinned_requests`: allocations of pinned memory;
    - `pinned_os_allocations`, `pinned_os_bytes`: those that no cached memory could serve;
    - `sync:` and an operator: calls that made the host wait, since their results' shapes depend on values, say.
    """
    return _extension.counts()


def clear_counts() -> None:
    _extension.clear_counts()


def pinned_bytes() -> tuple[int, int]:
    """Pinned memory in use, now and at most; allocations count as the next power of two, as on CUDA."""
    return _extension.pinned_bytes()


def pinned_held() -> int:
    """Pinned memory got from the system, in use or cached."""
    return _extension.pinned_held()


def pending() -> dict[int, int]:
    """How many tasks every stream has queued."""
    return _extension.pending()


def trace(on: bool) -> list[str]:
    """Starts or stops a record of what is submitted and run; returns what was recorded since the last call."""
    return _extension.trace(on)


def host_unsynced(pointer: int, bytes: int | None = None, write: bool = True) -> list[str]:
    """What the device does to pinned memory that the host has not waited for, as "W name on stream n" or "R ...".

    Args:
        pointer: an address in pinned memory.
        bytes: how many bytes from there; default: the whole allocation.
        write: would the host write? One that reads need not wait for the device's reads.
    """
    return _extension.host_unsynced(pointer, bytes, write)


def check_host_access(pointer: int, bytes: int, write: bool, name: str) -> None:
    """Reports a race if the host, now, may not touch these bytes."""
    _extension.check_host_access(pointer, bytes, write, name)


# ---------------------------------------------------------------- torch.sim.memory


class _Recording(TorchDispatchMode):
    """Notes births and deaths of the device's storages as operators return them, and where memory ran out."""

    supports_higher_order_operators = True

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.entries: deque[dict[str, Any]] = deque(maxlen=max_entries)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            output = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self.entries.append({"action": "oom", "operator": str(func)})
            for observer in _memory_observers:
                observer(0, 0, torch.accelerator.memory_allocated(), 0)
            raise
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "sim":
                self._born(tensor.untyped_storage(), str(func))
        return output

    def _born(self, storage: torch.UntypedStorage, operator: str) -> None:
        key, entry = storage._cdata, {"addr": storage.data_ptr(), "size": storage.nbytes()}
        if key in self._alive or not storage.nbytes():
            return

        def died(_: Any) -> None:
            del self._alive[key]
            self.entries.append({"action": "free_completed", **entry})

        self._alive[key] = weakref.ref(storage, died)
        self.entries.append({"action": "alloc", "operator": operator, **entry})


_memory_observers: list[Callable[..., object]] = []
_recording: _Recording | None = None


def recording() -> bool:
    """Whether `torch.sim.memory` records allocations."""
    return _recording is not None


def _record_memory_history(enabled: str | None = "all", max_entries: int = 1 << 20) -> None:
    global _recording
    if _recording is not None:
        assert _get_current_dispatch_mode() is _recording, "another mode was entered and not left"
        _recording.__exit__(None, None, None)
        _recording = None
    if enabled is not None:
        _recording = _Recording(max_entries)
        _recording.__enter__()


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    trace = [] if _recording is None else list(_recording.entries)
    with open(filename, "wb") as file:
        pickle.dump({"segments": [], "device_traces": [trace]}, file)


def attach_out_of_memory_observer(observer: Callable[..., object]) -> None:
    """As `torch._C._cuda_attach_out_of_memory_observer`; told while allocations are recorded."""
    _memory_observers.append(observer)


def _memory_module() -> types.ModuleType:
    module = types.ModuleType("torch.sim.memory")
    module._record_memory_history = _record_memory_history  # type: ignore[attr-defined]
    module._dump_snapshot = _dump_snapshot  # type: ignore[attr-defined]
    return module


# ---------------------------------------------------------------- torch.sim


class DeviceProperties:
    """What `torch.sim.get_device_properties` returns."""

    name = "simulated"
    is_integrated = False
    multi_processor_count = 1

    @property
    def total_memory(self) -> int:
        return torch.accelerator.get_memory_info()[1]


_properties = DeviceProperties()


def _module() -> types.ModuleType:
    """What torch wants to find under the name of a device; random numbers are those of the CPU."""
    accelerator = torch.accelerator
    module = types.ModuleType("torch.sim")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device=None: contextlib.nullcontext(),
        "get_device_properties": lambda device=None: _properties,
        "get_device_name": lambda device=None: _properties.name,
        "synchronize": lambda device=None: accelerator.synchronize(),
        "current_stream": lambda device=None: accelerator.current_stream(),
        "default_stream": lambda device=None: _default_stream,
        "set_stream": accelerator.set_stream,
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "empty_cache": accelerator.empty_cache,
        "mem_get_info": accelerator.get_memory_info,
        "memory": _memory_module(),
    }
    statistics = (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_stats",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    )
    functions.update({name: getattr(accelerator, name) for name in statistics})
    for name, function in functions.items():
        setattr(module, name, function)
    return module


torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend()
_default_stream = torch.accelerator.current_stream()
