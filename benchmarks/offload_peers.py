"""Activation offload side by side with its peers, on the simulated accelerator of the tests.

    python benchmarks/offload_peers.py [--what bytes,inputs,cost,chain,llama] [--layers 4] [--hidden 128]
                                       [--picture p.png] [--table t.md]

Peers: PyTorch's `save_on_cpu(pin_memory=True)`; `OffloadActivations` of torchtune and of TRL, if they are installed
(`pip install --no-deps torchtune trl`; only the one file of each is loaded, and torchtune's `torch.cuda` is made to
mean the accelerator at hand); and Hugging Face's `activation_checkpointing_enable(offload=True)`, which moves the
inputs of recomputed layers with `save_on_cpu`, against our recompute with `keep`. Every peer runs as its own trainer
runs it, with its own defaults.

`bytes` (and `inputs`, for recomputed layers) trains a Hugging Face Llama (random weights; SDPA, which is plain matrix
products on this device) and prints:

- out/saved: bytes copied to the host, to bytes that autograd saves in a plain run: every storage once and as a whole,
  parameters and what autocast makes of them left out (both found by following copies, not by any engine's own rule).
- out/moved: the same to the bytes of those storages of which anything was copied, each once. What an engine leaves on
  the device does not count here, what it copies twice does.
- parameters: MiB of parameters, and of what autocast makes of them, that were copied, and how many of all parameters
  these are. Not part of the two above.
- left: device memory taken from the start to the end of forward, to that of the plain run, when all copies are over.
- peak: the highest device memory in the step, to that of the plain run, both without what was there before.
- locked/live: pinned host memory that the process holds, to the most bytes that activations took up there at once.
  PyTorch's pinned allocator rounds up to a power of two and keeps what it has; ours is given in slabs, and the second
  figure is what it locks beyond one slab.
- pinned: requests for pinned memory in a step after three steps, and those that had to lock new memory.
- exact: losses and gradients of all steps equal those of the plain run bit for bit, under every schedule of the device.
- races: memory accesses that no event orders, found by the device under all schedules.

`cost` prints the host's microseconds per saved tensor: medians over the tensors of many forward passes, engines in
turn, on an otherwise idle device that runs everything at once. The time inside `Tensor.copy_` is taken off, for all
engines alike: it is the simulation's, which really copies. What remains is the same on any device: finding out what a
tensor is, asking for memory (PyTorch's pinned allocator answers from its cache), streams, events, tables. Ours does a
part of its work at the boundaries of layers, so that the second column has everything that happens in forward, divided
by the number of tensors. The third one has the unpack hooks, likewise; what torchtune and TRL do besides in hooks of
every backward node is not in there. Copies submitted per tensor are given beside it, since on a real device each costs
some microseconds more. The last column is everything: what forward
and backward cost the host beyond the plain run, submitting the copies and whatever hooks set off included, on a device
that only queues its work.

`chain` times layers that take 1 unit of time in forward and 2 in backward, and save four tensors each, on the
device's simulated clock, where a copy of what a layer saves takes x units each way, at the same time as the other way.
Printed is the time of a step in the steady state, in units of its computations (3 per layer), and the largest number of
layers whose activations are on the device at once. No engine can be faster than (max(1, x) + max(2, x)) / 3 if it moves
every layer; 1.00 is what `move="hidden"` aims at. The host costs nothing here, nor does pinned memory, which is in the
peers' favour.

In these chains every tensor is saved once, which is in the peers' favour as well. `llama` runs the Llama on the clock,
where operators take time by what they compute and by what they read and write, and x is the time in which the link
carries what a plain run saves, to the time of forward. Printed is the time of a step to that of the plain run, and the
peak of device memory to that of the plain run.
"""

import argparse
import contextlib
import gc
import importlib.util
import statistics
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_ckpt.offload.engine
from lightning_ckpt.offload import Boundaries, OffloadEngine, OffloadOptions, outbound
from lightning_ckpt.offload.host_memory import HostMemory
from lightning_ckpt.offload.transfers import Transfers
from lightning_ckpt.recompute import attach
from lightning_ckpt.selection import select_layers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "simdevice"))
import backend

MIB = 2**20
DEVICE = torch.device("sim", 0)
SLAB_BYTES = MIB  # instead of 64 MiB, since the models here are small; so are the parts in which they travel
PARTS_AS_SHIPPED = outbound._PART_BYTES
outbound._PART_BYTES = (4096, outbound._PART_BYTES[1])
WARM_UP = 3
SCHEDULES = [("eager", 0), ("lazy", 0), ("compute_first", 0), ("copy_first", 0), ("random", 1), ("random", 2)]

Hook = Callable[[Any], Any]


# ---------------------------------------------------------------- the engines


class Engine:
    """No offload, and the interface of the others.

    Attributes:
        covers_backward: whether the context of `forward` is left after backward only.
        around_pack: is given the hook on what autograd saves, and returns the one to use. To look at it.
        around_unpack: the same for what backward asks for.
    """

    covers_backward = False

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.around_pack: Callable[[Hook], Hook] = lambda hook: hook
        self.around_unpack: Callable[[Hook], Hook] = lambda hook: hook

    def forward(self) -> AbstractContextManager[Any]:
        """What is around the forward pass."""
        return contextlib.nullcontext()

    def step_done(self) -> None:
        """After the optimizer's step."""


class Hooks(Engine):
    """An engine that is nothing but a pair of hooks."""

    hooks: saved_tensors_hooks | None = None

    def make_hooks(self) -> saved_tensors_hooks:
        assert self.hooks is not None
        return self.hooks

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        hooks = self.make_hooks()
        with (
            mock.patch.object(hooks, "pack_hook", self.around_pack(hooks.pack_hook)),
            mock.patch.object(hooks, "unpack_hook", self.around_unpack(hooks.unpack_hook)),
            hooks,
        ):
            yield


class SaveOnCpu(Hooks):
    """PyTorch's own context, on the stream that computes."""

    def make_hooks(self) -> saved_tensors_hooks:
        return save_on_cpu(pin_memory=True, device_type=DEVICE.type)


class Torchtune(Hooks):
    """`torchtune.training.OffloadActivations`, as its recipes make it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        module = load_torchtune()
        module.torch = WithCuda(device)
        self.hooks = module.OffloadActivations()


class Trl(Hooks):
    """TRL's descendant of it, as its trainers make it: around the whole training step, the output head left out."""

    covers_backward = True

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        module = torch.get_device_module(device)
        for name, value in {"Stream": torch.Stream, "stream": lambda stream: stream}.items():
            if not hasattr(module, name):
                setattr(module, name, value)
        self.hooks = load_trl().get_act_offloading_ctx_manager(model, warn_if_no_head=False)


class Ours(Engine):
    """`lightning_ckpt.offload`."""

    options = OffloadOptions(move="all", min_bytes=1024)

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self.engine = OffloadEngine(
            device, self.options, say=lambda message: None, host=HostMemory(budget=None, slab_bytes=SLAB_BYTES)
        )
        self.engine.learn(model)
        self.layers = select_layers(model).layers
        self.boundaries = Boundaries(model, self.layers, self.engine)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        unpack = lightning_ckpt.offload.engine._unpack
        with (
            mock.patch.object(self.engine, "pack", self.around_pack(self.engine.pack)),
            mock.patch.object(lightning_ckpt.offload.engine, "_unpack", self.around_unpack(unpack)),
            self.engine.forward(),
        ):
            yield

    def step_done(self) -> None:
        self.engine.step_done()


class OursEverything(Ours):
    """Nothing kept back for backward to begin with, nothing under way."""

    options = OffloadOptions(move="all", min_bytes=1024, keep_last=0, max_inflight_bytes=1)


class OursHidden(Ours):
    """As many layers as the link can hide."""

    options = OffloadOptions(min_bytes=1024)


class Recompute(Engine):
    """Hugging Face's recompute of every layer; nothing moves."""

    offload = False

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        model.activation_checkpointing_enable(offload=self.offload)


class HuggingFaceInputs(Recompute):
    """And the inputs of the layers on the host."""

    offload = True


class OurRecompute(Engine):
    """Our recompute of every layer; nothing moves."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        for name, layer in select_layers(model).layers.items():
            attach(layer, name)


class OursInputs(Ours):
    """And the inputs of the layers on the host."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        for name, layer in self.layers.items():
            attach(layer, name).keep = self.engine.pack

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self.engine.begin()
        yield


ENGINES: dict[str, type[Engine]] = {
    "none": Engine,
    "save_on_cpu": SaveOnCpu,
    "torchtune": Torchtune,
    "trl": Trl,
    "ours": Ours,
    "ours, everything": OursEverything,
    "ours, hidden": OursHidden,
    "recompute": Recompute,
    "HF inputs": HuggingFaceInputs,
    "our recompute": OurRecompute,
    "ours inputs": OursInputs,
}


# ---------------------------------------------------------------- peers that are single files


class MissingPeerError(ImportError):
    """A peer that is not installed."""


class WithCuda:
    """`torch`, but `torch.cuda` means an accelerator of any kind."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = types.SimpleNamespace(
            default_stream=lambda: torch.accelerator.current_stream(device),
            Stream=lambda: torch.Stream(device=device),
            stream=lambda stream: stream,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def load_torchtune() -> types.ModuleType:
    """Its one file: the package itself wants torchao, and more."""
    return load_file(
        "torchtune",
        "training/_activation_offloading.py",
        {
            "psutil": {"virtual_memory": lambda: types.SimpleNamespace(percent=0.0)},
            "torchao": {"__version__": "1"},
            "torchao.dtypes": {},
            "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
            "torchtune": {},
            "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
            "torchtune.utils": {"get_logger": mock.MagicMock()},
        },
        [('.to("cuda"', f'.to("{DEVICE.type}"')],
    )


def load_trl() -> types.ModuleType:
    """Its one file: the package itself wants accelerate, and more."""
    return load_file(
        "trl",
        "models/activation_offloading.py",
        {
            "psutil": {"virtual_memory": lambda: types.SimpleNamespace(percent=0.0)},
            "accelerate": {},
            "accelerate.logging": {"get_logger": mock.MagicMock()},
            "accelerate.utils": {},
            "accelerate.utils.versions": {"is_torch_version": lambda *_: True},
        },
        [],
    )


def load_file(
    package: str, file: str, stubs: dict[str, dict[str, Any]], changes: list[tuple[str, str]]
) -> types.ModuleType:
    """Run one file of an installed package, with stubs for what it imports and a few words changed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPeerError(f"{package} is not installed: pip install --no-deps {package}")
    path = Path(spec.submodule_search_locations[0]) / file
    source = path.read_text()
    for old, new in changes:
        if old not in source:
            raise MissingPeerError(f"{path} has no {old!r}: this script knows another version of {package}")
        source = source.replace(old, new)
    before = {name: sys.modules.get(name) for name in stubs}
    for name, values in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(values)
    try:
        module = types.ModuleType(f"{package}_offload")
        exec(compile(source, str(path), "exec"), module.__dict__)
    finally:
        for name, old_module in before.items():
            if old_module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old_module
    return module


def why_missing(name: str) -> str | None:
    """Why an engine cannot be run here, None if it can."""
    loaders = {Torchtune: load_torchtune, Trl: load_trl}
    try:
        loaders.get(ENGINES[name], lambda: None)()
    except MissingPeerError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- what is observed


class Copies(TorchDispatchMode):
    """Follows what is copied to the host during forward, and which of it comes from parameters.

    Attributes:
        bytes_out: bytes copied to the host, parameters left out.
        parameter_bytes: bytes of parameters, and of copies of them in another dtype, that were copied to the host.
        parameter_elements: their elements.
        moved: storages of which anything was copied to the host, parameters left out.
        saved: storages that autograd saved, parameters left out; only where `save` is a hook.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.bytes_out = 0
        self.parameter_bytes = 0
        self.parameter_elements = 0
        self.moved: dict[int, torch.UntypedStorage] = {}
        self.saved: dict[int, torch.UntypedStorage] = {}
        storages = [parameter.untyped_storage() for parameter in model.parameters()]
        self._parameters = {storage._cdata: storage for storage in storages}
        self._packed: Tensor | None = None
        self._all_packed: dict[int, torch.UntypedStorage] = {}

    def save(self, tensor: Tensor) -> Tensor:
        """A pack hook that only looks."""
        storage = tensor.untyped_storage()
        if tensor.device == DEVICE and storage._cdata not in self._parameters:
            self.saved[storage._cdata] = storage
        return tensor.detach()

    def around_pack(self, hook: Hook) -> Hook:
        """What `hook` copies comes from a tensor that was saved, or from a clone of the one that it is given."""

        def pack(tensor: Tensor) -> Any:
            self._packed = tensor
            self._all_packed[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            try:
                return hook(tensor)
            finally:
                self._packed = None

        return pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy", "aten::clone"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.device == DEVICE:
                self._note(source, result)
        return result

    def _note(self, source: Tensor, target: Tensor) -> None:
        storage = source.untyped_storage()
        from_parameter = storage._cdata in self._parameters
        if target.device == DEVICE:
            if from_parameter:
                made = target.untyped_storage()
                self._parameters[made._cdata] = made
        elif from_parameter:
            self.parameter_bytes += target.nbytes
            self.parameter_elements += target.numel()
        else:
            self.bytes_out += target.nbytes
            if self._packed is not None and storage._cdata not in self._all_packed:
                storage = self._packed.untyped_storage()
            self.moved[storage._cdata] = storage


class PinnedTensors:
    """Bytes of pinned tensors that are alive, as far as `torch.empty` or `torch.empty_like` made them."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with (
            mock.patch.object(torch, "empty", self._counting(torch.empty)),
            mock.patch.object(torch, "empty_like", self._counting(torch.empty_like)),
        ):
            yield

    def _counting(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counting(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if kwargs.get("pin_memory"):
                self._add(tensor.nbytes)
                weakref.finalize(tensor, self._add, -tensor.nbytes)
            return tensor

        return counting

    def _add(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


# ---------------------------------------------------------------- a training run


@dataclass(frozen=True)
class Shape:
    """Of the Llama that is trained."""

    layers: int = 4
    hidden: int = 128
    batch: int = 4
    length: int = 96
    autocast: bool = False


class Run:
    """A model on the device with an engine, and its data."""

    def __init__(self, name: str, shape: Shape) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.hidden * 11 // 4,
            num_hidden_layers=shape.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
            attn_implementation="sdpa",
        )
        self.shape = shape
        self.model = LlamaForCausalLM(config).train().to(DEVICE)
        self.tokens = torch.randint(0, 512, (shape.batch, shape.length)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, foreach=False)
        self.engine = ENGINES[name](self.model, DEVICE)

    def step(
        self,
        watch: AbstractContextManager[Any] | None = None,
        after_forward: Callable[[], None] = lambda: None,
        results: bool = True,
    ) -> list[Tensor]:
        """One optimizer step: the loss and the gradients, on the host."""
        with contextlib.ExitStack() as around:
            around.enter_context(self.engine.forward())
            with (
                watch or contextlib.nullcontext(),
                torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.shape.autocast),
            ):
                loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
            if not self.engine.covers_backward:
                around.close()
            after_forward()
            loss.backward()
        found = [loss.detach(), *(parameter.grad for parameter in self.model.parameters())] if results else []
        found = [result.cpu() for result in found]
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.accelerator.synchronize()  # as when a loss is logged
        self.engine.step_done()
        return found

    def results(self) -> Iterator[list[Tensor]]:
        """Of one step under every schedule."""
        for policy, seed in SCHEDULES:
            backend.configure(policy, seed, strict_free=True)
            yield self.step()
        backend.configure("eager")


def active_bytes(which: str = "current") -> int:
    """Device memory that is in use, or that a stream may still be using."""
    return torch.accelerator.memory_stats()[f"active_bytes.all.{which}"]


@dataclass
class Bytes:
    """One row of the table of bytes; see the head of the file."""

    engine: str
    precision: str
    out_per_saved: float
    out_per_moved: float | None
    in_per_saved: float
    parameter_mib: float
    parameter_share: float
    left: float
    peak: float
    locked_per_live: float | None
    beyond_slab: float | None
    requests: int
    allocations: int
    exact: bool
    races: list[str]


@dataclass
class Plain:
    """What the plain run needs, to compare with."""

    saved: int
    left: int
    peak: int
    results: list[list[Tensor]]


def measure_bytes(names: list[str], shape: Shape) -> Iterator[Bytes]:
    """A row for each engine; the first one is what the others are compared with."""
    plain: Plain | None = None
    for name in names:
        gc.collect()
        backend.reset()
        backend.configure("eager")
        plain, row = measure_engine(name, shape, plain)
        yield row


def measure_engine(name: str, shape: Shape, plain: Plain | None) -> tuple[Plain, Bytes]:
    run, pinned = Run(name, shape), PinnedTensors()
    with pinned.counted():
        results = [run.step() for _ in range(WARM_UP)]

        before = backend.counts()
        start, after_forward = active_bytes(), []
        torch.accelerator.reset_peak_memory_stats()
        results.append(run.step(after_forward=lambda: after_forward.append(settled_bytes())))
        left, peak = after_forward[0] - start, active_bytes("peak") - start
        done = {key: count - before.get(key, 0) for key, count in backend.counts().items()}

        copies = Copies(run.model)
        run.engine.around_pack = copies.around_pack
        with contextlib.ExitStack() as watch:
            if plain is None:
                watch.enter_context(saved_tensors_hooks(copies.save, lambda tensor: tensor))
            results.append(run.step(copies))
        run.engine.around_pack = lambda hook: hook

        results += run.results()
    if plain is None:
        saved = recomputed_inputs(run) if isinstance(run.engine, Recompute) else copies.saved
        plain = Plain(nbytes_of(saved), left, peak, results)
    moved = nbytes_of(copies.moved)
    host = getattr(getattr(run.engine, "engine", None), "host", None)
    live = pinned.peak if host is None else host.peak_booked_bytes
    locked = backend.pinned_held()
    exact = all(
        torch.equal(one, other)
        for step, expected in zip(results, plain.results, strict=True)
        for one, other in zip(step, expected, strict=True)
    )
    return plain, Bytes(
        engine=name,
        precision="bf16" if shape.autocast else "fp32",
        out_per_saved=copies.bytes_out / plain.saved,
        out_per_moved=copies.bytes_out / moved if moved else None,
        in_per_saved=done["bytes_in"] / plain.saved,
        parameter_mib=copies.parameter_bytes / MIB,
        parameter_share=copies.parameter_elements / sum(parameter.numel() for parameter in run.model.parameters()),
        left=left / plain.left,
        peak=peak / plain.peak,
        locked_per_live=locked / live if live else None,
        beyond_slab=max(0, locked - SLAB_BYTES) / live if host is not None and live else None,
        requests=done["pinned_requests"],
        allocations=done["pinned_os_allocations"],
        exact=exact,
        races=backend.races(),
    )


def nbytes_of(storages: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def settled_bytes() -> int:
    """Device memory in use once everything that is under way is over."""
    torch.accelerator.synchronize()
    return active_bytes()


def recomputed_inputs(run: Run) -> dict[int, torch.UntypedStorage]:
    """The storages that recompute keeps: the inputs of the layers that have a gradient."""
    found: dict[int, torch.UntypedStorage] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in args:
            if isinstance(value, Tensor):
                found[value.untyped_storage()._cdata] = value.untyped_storage()

    handles = [
        layer.register_forward_pre_hook(note, with_kwargs=True) for layer in select_layers(run.model).layers.values()
    ]
    run.step()
    for handle in handles:
        handle.remove()
    return found


# ---------------------------------------------------------------- what it costs the host


class Stopwatch:
    """Seconds of calls, without those in which the simulated device copies."""

    def __init__(self) -> None:
        self.packs: list[float] = []
        self.boundaries: list[float] = []
        self.unpacks: list[float] = []
        self.copies = 0
        self._copying = 0.0

    def around(self, seconds: list[float]) -> Callable[[Hook], Hook]:
        """Time a function, and append to `seconds`."""

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                copied, start = self._copying, time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    seconds.append(time.perf_counter() - start - (self._copying - copied))

            return call

        return timed

    @contextlib.contextmanager
    def without_copies(self) -> Iterator[None]:
        """Inside, copies are taken off."""

        def apart(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(*args: Any, **kwargs: Any) -> Tensor:
                start = time.perf_counter()
                try:
                    return copy(*args, **kwargs)
                finally:
                    self._copying += time.perf_counter() - start

            return call

        with (
            mock.patch.object(Tensor, "copy_", apart(Tensor.copy_)),
            mock.patch.object(Tensor, "to", apart(Tensor.to)),
        ):
            yield


@dataclass
class Cost:
    """Host time of an engine, in microseconds per saved tensor."""

    engine: str
    pack: float
    forward: float
    backward: float
    copies: float
    whole: float


def measure_cost(names: list[str], rounds: int, shape: Shape | None = None) -> list[Cost]:
    """The engines in turn, step by step, the order reversed every round."""
    gc.collect()
    backend.reset()
    backend.configure("eager", poison=False)
    shape = shape or Shape(layers=16, hidden=64, batch=2, length=32)
    # Slabs and parts as they are shipped: what is scaled down for small models elsewhere would cost time here.
    with mock.patch.object(outbound, "_PART_BYTES", PARTS_AS_SHIPPED), mock.patch(f"{__name__}.SLAB_BYTES", 64 * 2**20):
        return measure_cost_as_shipped(names, rounds, shape)


def measure_cost_as_shipped(names: list[str], rounds: int, shape: Shape) -> list[Cost]:
    runs = {name: Run(name, shape) for name in names}
    for run in runs.values():
        for _ in range(WARM_UP):
            run.step()
    watches: dict[str, list[Stopwatch]] = {name: [] for name in names}
    gc.disable()
    for i in range(rounds):
        for name in names if i % 2 else reversed(names):
            watches[name].append(timed_step(runs[name]))
    backend.configure("lazy", poison=False)
    plain = "none"
    runs.setdefault(plain, Run(plain, shape))
    for run in runs.values():
        run.engine.around_pack = run.engine.around_unpack = lambda hook: hook
    whole: dict[str, list[float]] = {name: [] for name in runs}
    # The simulated device works when it is asked whether an event has passed; a real one does that by itself.
    with mock.patch.object(Transfers, "has_passed", return_value=False):
        for i in range(rounds):
            for name in whole if i % 2 else reversed(whole):
                whole[name].append(host_seconds(runs[name]))
    gc.enable()
    base = statistics.median(whole[plain])
    return [cost_of(name, watches[name], statistics.median(whole[name]) - base) for name in names]


def timed_step(run: Run) -> Stopwatch:
    watch = Stopwatch()
    run.engine.around_pack, run.engine.around_unpack = watch.around(watch.packs), watch.around(watch.unpacks)
    with contextlib.ExitStack() as around:
        around.enter_context(watch.without_copies())
        if isinstance(run.engine, Ours):
            for name in ("begin", "boundary"):
                timed = watch.around(watch.boundaries)(getattr(run.engine.engine, name))
                around.enter_context(mock.patch.object(run.engine.engine, name, timed))
        before = backend.counts()["copies_out"]
        run.step(after_forward=lambda: setattr(watch, "copies", backend.counts()["copies_out"] - before))
    return watch


def cost_of(name: str, watches: list[Stopwatch], whole: float) -> Cost:
    def usual(seconds: Callable[[Stopwatch], list[float]]) -> list[float]:
        """Of every call in a step, the median over the rounds: what else the machine does is not in there."""
        return [1e6 * statistics.median(calls) for calls in zip(*(seconds(watch) for watch in watches), strict=True)]

    packs = usual(lambda watch: watch.packs)
    return Cost(
        engine=name,
        pack=statistics.median(packs),
        forward=(sum(packs) + sum(usual(lambda watch: watch.boundaries))) / len(packs),
        backward=sum(usual(lambda watch: watch.unpacks)) / len(packs),
        copies=watches[0].copies / len(packs),
        whole=1e6 * whole / len(packs),
    )


def host_seconds(run: Run) -> float:
    """The host's time for forward and backward on a device that lags behind: it only queues what it is given."""
    torch.accelerator.synchronize()
    with contextlib.ExitStack() as around:
        start = time.process_time()
        around.enter_context(run.engine.forward())
        loss = run.model(input_ids=run.tokens, labels=run.tokens, use_cache=False).loss
        if not run.engine.covers_backward:
            around.close()
        loss.backward()
        seconds = time.process_time() - start
    torch.accelerator.synchronize()
    run.optimizer.zero_grad()
    run.engine.step_done()
    return seconds


# ---------------------------------------------------------------- what it costs the step, on the simulated clock

PARTS = 4  # saved tensors of a layer
STEPS = 4  # that are timed


class Part(nn.Module):
    """Takes its share of a layer's time, and saves one tensor, which its backward needs first."""

    def forward(self, x: Tensor) -> Tensor:
        return backend.clock.timed(x, 1 / PARTS, 2 / PARTS).abs()


class Layer(nn.Module):
    """Takes 1 s in forward and 2 s in backward, on the simulated clock."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(Part() for _ in range(PARTS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def chain(layers: int, nbytes: int) -> tuple[nn.Module, Tensor]:
    """A model of timed layers that save `nbytes` each, and its input."""
    return nn.Sequential(*(Layer() for _ in range(layers))), torch.ones(nbytes // PARTS // 4, device=DEVICE)


@dataclass
class StepTime:
    """A step in the steady state.

    Attributes:
        engine: name of the engine.
        layers: of the chain.
        x: time of a copy of what a layer saves, each way, to the time of its forward.
        time: of a step, to that of its computations alone.
        resident: the most bytes on the device in a step, in layers.
        floor: the least time if all layers are moved.
    """

    engine: str
    layers: int
    x: float
    time: float
    resident: float
    floor: float


def step_time(name: str, layers: int, x: float, nbytes: int = MIB // 4, warm_up: int = 6) -> StepTime:
    """Train a chain; every step ends with the host waiting for the device, as when a loss is logged."""
    start_clock(out_bytes_per_s=nbytes / x, in_bytes_per_s=nbytes / x)
    model, batch = chain(layers, nbytes)
    batch.requires_grad_()
    engine = ENGINES[name](model, DEVICE)

    def step() -> None:
        with contextlib.ExitStack() as around:
            around.enter_context(engine.forward())
            loss = model(batch).sum()
            if not engine.covers_backward:
                around.close()
            loss.backward()
        batch.grad = None
        torch.accelerator.synchronize()  # as when a loss is logged
        engine.step_done()

    for _ in range(warm_up):
        step()
    torch.accelerator.reset_peak_memory_stats()
    start_bytes, start = active_bytes(), backend.clock.now()
    for _ in range(STEPS):
        step()
    seconds = (backend.clock.now() - start) / STEPS
    resident = (active_bytes("peak") - start_bytes) / nbytes
    backend.clock.off()
    return StepTime(name, layers, x, seconds / (3 * layers), resident, (max(1, x) + max(2, x)) / 3)


@dataclass
class Pace:
    """Of the plain run of a Llama on the clock: seconds of forward and of a step, and what the link has to carry."""

    forward: float
    step: float
    saved: int
    peak: int


# An accelerator far slower than any, so that nothing but their ratio matters.
RATES = {"flops_per_s": 20e9, "memory_bytes_per_s": 1e9}


def llama_pace(shape: Shape) -> Pace:
    """Time the plain run."""
    start_clock(**RATES)
    run = Run("none", shape)
    copies = Copies(run.model)
    run.step()
    with saved_tensors_hooks(copies.save, lambda tensor: tensor):
        run.step(copies)
    saved = nbytes_of(copies.saved)
    copies.saved.clear()
    torch.accelerator.reset_peak_memory_stats()
    start_bytes, start, middle = active_bytes(), backend.clock.now(), []
    run.step(after_forward=lambda: middle.append(backend.clock.now()), results=False)
    return Pace(middle[0] - start, backend.clock.now() - start, saved, active_bytes("peak") - start_bytes)


def llama_time(name: str, shape: Shape, x: float, pace: Pace, warm_up: int = 6) -> StepTime:
    """Train a Llama on a link that takes `x` times the time of forward for what forward saves, each way."""
    rate = pace.saved / (x * pace.forward)
    start_clock(**RATES, out_bytes_per_s=rate, in_bytes_per_s=rate)
    run = Run(name, shape)
    for _ in range(warm_up):
        run.step(results=False)
    torch.accelerator.reset_peak_memory_stats()
    start_bytes, start = active_bytes(), backend.clock.now()
    for _ in range(STEPS):
        run.step(results=False)
    seconds = (backend.clock.now() - start) / STEPS
    peak = active_bytes("peak") - start_bytes
    backend.clock.off()
    backward = (pace.step - pace.forward) / pace.forward
    floor = (max(1, x) + max(backward, x)) / (1 + backward)
    return StepTime(name, shape.layers, x, seconds / pace.step, peak / pace.peak, floor)


def start_clock(**rates: float) -> None:
    gc.collect()
    backend.reset()
    backend.configure("eager", poison=False)
    backend.clock.configure(**rates)


# ---------------------------------------------------------------- what is printed


class Report:
    """Prints tables, and keeps them as Markdown."""

    def __init__(self) -> None:
        self.markdown: list[str] = []

    def table(self, title: str, heads: list[str], rows: list[list[str]]) -> None:
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        print(f"\n{title}")
        for row in [heads, *rows]:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            print("  " + "  ".join(cells), flush=True)
        lines = [f"| {' | '.join(row)} |" for row in [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]]
        self.markdown += [f"**{title}**", "", *lines, ""]


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def report_bytes(report: Report, names: list[str], shape: Shape) -> None:
    for autocast in (False, True):
        rows = list(measure_bytes(names, replace(shape, autocast=autocast)))
        report.table(
            f"{shape.layers}-layer Llama of width {shape.hidden}, {shape.batch} x {shape.length} tokens, "
            f"{'bf16 autocast' if autocast else 'fp32'}; compared with {names[0]!r}",
            [
                "engine",
                "out/saved",
                "out/moved",
                "in/saved",
                "parameters, MiB",
                "left",
                "peak",
                "locked/live",
                "beyond a slab",
                "pinned requests",
                "of them new",
                "exact",
                "races",
            ],
            [
                [
                    row.engine,
                    number(row.out_per_saved),
                    number(row.out_per_moved),
                    number(row.in_per_saved),
                    f"{row.parameter_mib:.2f} ({row.parameter_share:.0%})",
                    number(row.left),
                    number(row.peak),
                    number(row.locked_per_live),
                    number(row.beyond_slab),
                    str(row.requests),
                    str(row.allocations),
                    "yes" if row.exact else "NO",
                    str(len(row.races)),
                ]
                for row in rows
            ],
        )
        for row in rows:
            for race in row.races[:3]:
                print(f"  {row.engine}: {race}")


def report_cost(report: Report, names: list[str], rounds: int) -> None:
    report.table(
        "Host time in microseconds per saved tensor; all but the last without the copies",
        ["engine", "its pack hook (median)", "forward", "backward", "copies out per tensor", "the whole step"],
        [
            [
                cost.engine,
                *(number(value, 1) for value in (cost.pack, cost.forward, cost.backward)),
                number(cost.copies),
                number(cost.whole, 1),
            ]
            for cost in measure_cost(names, rounds)
        ],
    )


def report_times(report: Report, title: str, results: list[StepTime], resident: str) -> None:
    xs = sorted({result.x for result in results})
    floors = {result.x: result.floor for result in results}
    for layers in sorted({result.layers for result in results}):
        found = {(result.engine, result.x): result for result in results if result.layers == layers}
        names = list(dict.fromkeys(name for name, _ in found))
        report.table(
            f"{title}, {layers} layers: step time ({resident})",
            ["engine", *(f"x = {x:g}" for x in xs)],
            [
                *(
                    [name, *(f"{found[name, x].time:.3f} ({found[name, x].resident:.2f})" for x in xs)]
                    for name in names
                ),
                ["the least, if all move", *(f"{floors[x]:.3f}" for x in xs)],
            ],
        )


def save_picture(path: str, results: list[StepTime], layers: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [result for result in results if result.layers == layers]
    figure, (times, memory) = plt.subplots(1, 2, figsize=(10, 4))
    styles = iter(["k-", "C1s--", "C2^--", "C3v:", "C0o-", "C4D-"])
    for name in dict.fromkeys(result.engine for result in results):
        style = next(styles)
        line = sorted((result for result in results if result.engine == name), key=lambda result: result.x)
        xs = [result.x for result in line]
        times.plot(xs, [result.time for result in line], style, label=name)
        memory.plot(xs, [result.resident for result in line], style, label=name)
    floors = sorted({(result.x, result.floor) for result in results})
    times.plot(*zip(*floors, strict=True), "k+", markersize=12, label="the least, if all layers move")
    times.set_ylabel("step time / its computations")
    memory.set_ylabel("layers on the device, at most")
    for axes in (times, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.set_xlabel("copy of a layer / its forward")
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
    times.legend(fontsize=8)
    figure.suptitle(f"Simulated: {layers} equal layers on a simulated accelerator with a simulated clock")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="bytes,inputs,cost,chain,llama", help="comma-separated: what to measure")
    parser.add_argument("--layers", type=int, default=4, help="of the Llama whose bytes are counted")
    parser.add_argument("--hidden", type=int, default=128, help="width of that Llama")
    parser.add_argument("--rounds", type=int, default=15, help="of the measurement of host time")
    parser.add_argument("--x", default="0.25,0.5,1,1.5,2,4", help="comma-separated ratios of a copy to a forward")
    parser.add_argument("--chains", default="8,16,32,48", help="comma-separated numbers of layers")
    parser.add_argument("--picture", help="save a picture of the chains' times here")
    parser.add_argument("--table", help="save all tables here, as Markdown")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    missing = {name: reason for name in ENGINES if (reason := why_missing(name))}
    for reason in missing.values():
        print(f"Left out: {reason}")
    peers = [name for name in ("save_on_cpu", "torchtune", "trl") if name not in missing]
    what, report, shape = arguments.what.split(","), Report(), Shape(arguments.layers, arguments.hidden)
    xs = [float(x) for x in arguments.x.split(",")]
    if "bytes" in what:
        report_bytes(report, ["none", *peers, "ours", "ours, everything"], shape)
    if "inputs" in what:
        names = ["recompute", "HF inputs", "our recompute", "ours inputs"]
        report_bytes(report, names, replace(shape, layers=3 * shape.layers, batch=2 * shape.batch))
    if "cost" in what:
        report_cost(report, [*peers, "ours"], arguments.rounds)
    if "chain" in what:
        results = [
            step_time(name, layers, x)
            for layers in (int(number) for number in arguments.chains.split(","))
            for name in ["none", *peers, "ours", "ours, hidden"]
            for x in xs
        ]
        report_times(report, "Chain of equal layers on the simulated clock", results, "layers on the device at most")
        if arguments.picture:
            save_picture(arguments.picture, results, results[-1].layers)
    if "llama" in what:
        small = Shape(layers=12, hidden=64, batch=2, length=64)
        pace = llama_pace(small)
        results = [llama_time(name, small, x, pace) for name in ["none", *peers, "ours", "ours, hidden"] for x in xs]
        report_times(report, "Llama on the simulated clock", results, "peak memory to the plain run's")
    if arguments.table:
        Path(arguments.table).write_text("\n".join(report.markdown))


if __name__ == "__main__":
    main()
