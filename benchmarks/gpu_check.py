"""Everything that only an accelerator can tell about this package, in one run of a few minutes.

    python benchmarks/gpu_check.py [--minutes 8] [--json report.json] [--small]

Needs one accelerator and `transformers`; CUDA, XPU and whatever else `torch.accelerator` knows will do. The report is
printed as it comes. A section that fails does not keep the others from running, and what there is no time for is named
as skipped. Exit status 1: a section failed, or results were not equal. `--small` runs everything on tiny sizes, to see
that it runs.

- machine: the device, its memory, the host's memory, versions.
- allocation: what it takes to get pinned memory: a size for the first time, once more, again after it was given back,
  and while the device computes (does it wait for the device?).
- link: what copies between device and host carry, each way alone and both at once, from pinned and pageable memory.
- equality: a small Llama is trained many times, plainly and in every way that the package offers, each time on other
  data; losses and gradients are compared with the plain run bit for bit. In half of the trainings the link is kept busy
  by other copies, so that those of the package come late, and in half of them new memory is filled with NaN.
- host: the host's time to submit a step, and microseconds for each saved tensor beyond the plain step.
- inputs: recompute of every layer with the inputs of the layers in host memory, ours against Hugging Face's.
- everything: all saved activations in host memory, against recompute of every layer and against the plain run.

In the last two, a Llama with bf16 autocast is trained, of hidden size 1024 and 4096 on 4096 and 32768 tokens, with as
many layers as the memory allows. All ways to train share one model and take turns, in an order that is reversed every
round, after a warm-up. Printed are medians of:

- step, forward, backward: milliseconds until the device was through; the optimizer is left out.
- host: milliseconds until everything was submitted; near those of the step, the host has waited for the device.
- peak, kept: device memory in MiB, the highest in the step, and what forward left, both without what was there before.
- out, in: MiB copied to the host and back.
- waits: milliseconds for which the device waited for copies, in forward and in backward.
- locked: MiB of pinned memory set aside; late allocations: how often it had to grow after the first steps.
- stayed: MiB that were large enough to travel and stayed on the device, and how many layers that was decided for.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_ckpt
from lightning_ckpt.offload import Boundaries, OffloadEngine, OffloadOptions, why_not
from lightning_ckpt.offload.budget import default_host_budget
from lightning_ckpt.offload.host_memory import HostMemory
from lightning_ckpt.offload.statistics import StepStatistics
from lightning_ckpt.recompute import attach
from lightning_ckpt.selection import select_layers

KIB, MIB, GIB = 2**10, 2**20, 2**30
SAVED_PER_TOKEN = 30  # bf16 values, to a value of the hidden state, that a Llama layer saves under autocast

Row = dict[str, Any]


# ---------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Case:
    """A Llama and its batch; as many layers as fit, up to `layers`."""

    hidden: int
    batch: int
    length: int
    layers: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def __str__(self) -> str:
        return f"hidden {self.hidden}, {self.tokens} tokens"


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    link_bytes: tuple[int, ...] = tuple(size * MIB for size in (1, 4, 16, 64, 256, 1024))
    link_traffic: int = 512 * MIB  # bytes for each figure, at least three copies
    slab_bytes: tuple[int, ...] = (64 * MIB, 256 * MIB)
    busy_matrix: int = 4096
    trainings: int = 50
    training_steps: int = 5
    training: Case = Case(hidden=256, batch=8, length=256, layers=4)
    noise_bytes: int = 64 * MIB
    host: Case = Case(hidden=256, batch=2, length=64, layers=8)
    host_rounds: int = 20
    cases: tuple[Case, ...] = (
        Case(hidden=1024, batch=1, length=4096, layers=24),
        Case(hidden=1024, batch=8, length=4096, layers=24),
        Case(hidden=4096, batch=1, length=4096, layers=16),
        Case(hidden=4096, batch=8, length=4096, layers=12),
    )
    warm_up: int = 4  # steps: host memory grows, layers are learned, the second step is measured to plan the third
    rounds: int = 7
    vocabulary: int = 8192
    min_bytes: int = OffloadOptions().min_bytes  # type: ignore[assignment]


SMALL = Sizes(
    link_bytes=(64 * KIB, MIB),
    link_traffic=2 * MIB,
    slab_bytes=(64 * KIB, 256 * KIB),
    busy_matrix=64,
    trainings=4,  # with and without noise, with and without NaN
    training_steps=4,
    training=Case(hidden=32, batch=2, length=32, layers=3),
    noise_bytes=64 * KIB,
    host=Case(hidden=32, batch=2, length=16, layers=2),
    host_rounds=1,
    cases=(Case(hidden=64, batch=2, length=256, layers=8),),
    warm_up=2,
    rounds=2,
    vocabulary=128,
    min_bytes=KIB,
)


# ---------------------------------------------------------------- the report


@dataclass
class Section:
    """What one part of the report says; printed as it comes."""

    status: Literal["ok", "failed", "skipped"] = "ok"
    seconds: float = 0.0
    tables: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        self.tables[title] = list(rows)
        print(f"{title}:\n{format_table(rows)}\n", flush=True)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            print(f"  {text}", flush=True)

    def skip(self, what: str) -> None:
        self.skipped.append(what)
        print(f"  skipped, the time is up: {what}", flush=True)

    def fail(self, what: str) -> None:
        self.status = "failed"
        self.note(f"FAILED: {what}")


class Report:
    """All sections, the time that is left for them, and the file they are kept in."""

    def __init__(self, minutes: float, path: Path | None) -> None:
        self.sections: dict[str, Section] = {}
        self._end = time.perf_counter() + minutes * 60
        self._path = path

    @property
    def seconds_left(self) -> float:
        return self._end - time.perf_counter()

    def run(self, name: str, work: Callable[[Section], None]) -> None:
        """One section. Whatever goes wrong in it is its own affair."""
        print(f"\n=== {name} ===", flush=True)
        section = self.sections[name] = Section()
        start = time.perf_counter()
        if self.seconds_left <= 0:
            section.status = "skipped"
            section.skip(name)
        else:
            try:
                work(section)
            except Exception as error:
                traceback.print_exc(file=sys.stdout)
                section.fail(describe(error))
        section.seconds = time.perf_counter() - start
        tidy()
        self._save()

    def _save(self) -> None:
        """After every section, so that a crash of the driver costs only what comes later."""
        if self._path is not None:
            sections = {name: dataclasses.asdict(section) for name, section in self.sections.items()}
            self._path.write_text(json.dumps({"sections": sections}, indent=1) + "\n")

    def summarize(self) -> None:
        print("\n=== summary ===")
        for name, section in self.sections.items():
            skipped = f", skipped: {'; '.join(section.skipped)}" if section.skipped else ""
            print(f"{name:<12} {section.status:<8} {section.seconds:6.1f} s{skipped}")
            for note in section.notes:
                if note.startswith("FAILED"):
                    print(f"             {note}")


def format_table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([format_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [any(isinstance(row.get(name), (int, float)) for row in rows) for name in columns]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def tidy() -> None:
    """Give memory back to the device."""
    gc.collect()
    with contextlib.suppress(Exception):  # after a fault of the device nothing works any more
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()


# ---------------------------------------------------------------- the machine


@dataclass(frozen=True)
class Machine:
    """The device, and the memory that there was before anything was taken."""

    device: torch.device
    device_bytes: int | None
    host_bytes: int

    @classmethod
    def find(cls) -> "Machine | None":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            return None
        device = torch.device(found.type, torch.accelerator.current_device_index())
        total = getattr(properties_of(device), "total_memory", None)
        if total is None and hasattr(torch.accelerator, "get_memory_info"):
            total = torch.accelerator.get_memory_info(device)[1]
        return cls(device, total, default_host_budget(1, fraction=1.0))

    def mark(self, stream: torch.Stream | None = None) -> torch.Event:
        """An event at the end of what was submitted, which knows its time once it has passed."""
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(stream or torch.accelerator.current_stream(self.device))
        return event


def properties_of(device: torch.device) -> Any:
    get_properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if get_properties is None else get_properties(device)


def check_machine(section: Section, machine: Machine) -> None:
    properties = properties_of(machine.device)
    facts = {
        "device": f"{getattr(properties, 'name', machine.device.type)} ({machine.device})",
        "device memory, GiB": machine.device_bytes and machine.device_bytes / GIB,
        "shares memory with the host": bool(getattr(properties, "is_integrated", False)),
        "host memory available, GiB": machine.host_bytes / GIB,
        "offload would take at most, GiB": default_host_budget(1) / GIB,
        "memory that may be locked": locked_memory_limit(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "Python, torch": f"{platform.python_version()}, {torch.__version__}",
        "CUDA, HIP, XPU of torch": [getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")],
        "driver and link": driver_and_link(),
        "package": lightning_ckpt.__version__,
    }
    section.table("this machine", [{"what": name, "value": format_cell(value)} for name, value in facts.items()])
    reason = why_not(machine.device)
    if reason is not None:
        section.note(f"The package moves nothing on this machine: {reason}.")


def locked_memory_limit() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / MIB:.0f} MiB"


def driver_and_link() -> str:
    """What the vendor's tool says, which PyTorch does not."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    names = "driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return describe(error)
    return " | ".join(found.stdout.split("\n")).strip(" |") or "unknown"


# ---------------------------------------------------------------- host memory and link


def pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def milliseconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1e3, result


def check_allocation(section: Section, machine: Machine, sizes: Sizes) -> None:
    rows = []
    for nbytes in sizes.slab_bytes:
        first, *later = (milliseconds(lambda size=nbytes: pinned(size)) for _ in range(4))
        held = [first, *later]
        busy_ms, was_busy, still_busy = allocate_while_computing(machine, nbytes, sizes.busy_matrix, held)
        del held
        again_ms, _ = milliseconds(lambda size=nbytes: pinned(size))
        once_more = statistics.median(took for took, _ in later)
        rows.append(
            {
                "slab": format_bytes(nbytes),
                "first ms": first[0],
                "one more ms": once_more,
                "one more, ms per GiB": once_more * GIB / nbytes,
                "again, ms": again_ms,
                "while computing, ms": busy_ms,
                "waits for the device": "unknown" if not was_busy else "no" if still_busy else "yes, or it was longer",
            }
        )
        del first, later
    section.table("pinned memory", rows)


def allocate_while_computing(machine: Machine, nbytes: int, width: int, held: list[Any]) -> tuple[float, bool, bool]:
    """Milliseconds, and whether the device was at work before and after."""
    matrix = torch.ones(width, width, device=machine.device)

    def compute(times: int) -> torch.Event:
        for _ in range(times):
            torch.mm(matrix, matrix)
        return machine.mark()

    compute(2).synchronize()
    took, _ = milliseconds(lambda: compute(5).synchronize())
    end = compute(max(5, min(500, int(5 * 200 / max(took, 0.1)))))  # about 200 ms
    was_busy = not end.query()
    took, slab = milliseconds(lambda: pinned(nbytes))
    still_busy = not end.query()
    held.append(slab)
    end.synchronize()
    return took, was_busy, still_busy


def format_bytes(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


Copy = tuple[Tensor, Tensor]  # to, from


def check_link(section: Section, machine: Machine, sizes: Sizes) -> None:
    streams = [torch.Stream(device=machine.device) for _ in range(2)]
    rows = []
    for nbytes in sizes.link_bytes:
        on_device = [torch.zeros(nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2)]
        on_host = [pinned(nbytes) for _ in range(2)]
        pageable = torch.zeros(nbytes, dtype=torch.uint8)
        out, into = (on_host[0], on_device[0]), (on_device[1], on_host[1])
        carry = functools.partial(bytes_per_s, machine, max(3, sizes.link_traffic // nbytes), streams)
        out_both, in_both = carry([out, into])
        rows.append(
            {
                "size": format_bytes(nbytes),
                "out GB/s": carry([out])[0],
                "in GB/s": carry([into])[0],
                "out, both": out_both,
                "in, both": in_both,
                "pageable out": pageable_bytes_per_s((pageable, on_device[0])),
                "pageable in": pageable_bytes_per_s((on_device[1], pageable)),
            }
        )
        del on_device, on_host, pageable, out, into
    section.table("copies", rows)


def bytes_per_s(machine: Machine, repeats: int, streams: list[torch.Stream], copies: list[Copy]) -> list[float | None]:
    """GB/s of each copy, all of them at once, on the device's clock; None if it has none."""
    ends: list[tuple[torch.Event, torch.Event]] = []
    for repeats_now in (1, repeats):  # the first time warms up
        torch.accelerator.synchronize()
        starts = [machine.mark(stream) for stream, _ in zip(streams, copies, strict=False)]
        for _ in range(repeats_now):
            for stream, (target, source) in zip(streams, copies, strict=False):
                with stream:
                    target.copy_(source, non_blocking=True)
        ends = [(start, machine.mark(stream)) for start, stream in zip(starts, streams, strict=False)]
        torch.accelerator.synchronize()
    took = [start.elapsed_time(end) for start, end in ends]
    return [
        target.nbytes * repeats / ms / 1e6 if ms > 0 else None for ms, (target, _) in zip(took, copies, strict=True)
    ]


def pageable_bytes_per_s(copy: Copy) -> float:
    target, source = copy

    def work() -> None:
        target.copy_(source)
        torch.accelerator.synchronize()

    work()
    return target.nbytes / statistics.median(milliseconds(work)[0] for _ in range(3)) / 1e6


# ---------------------------------------------------------------- ways to train


class NotOfferedError(Exception):
    """What is installed does not offer this way to train."""


class Plain:
    """Everything stays on the device, and the interface of the other ways.

    Args:
        model: a Llama.
        options: of offload.
        host: host memory of offload, None for memory of its own.
        say: is told what a user would be told.
    """

    engine: OffloadEngine | None = None

    def __init__(
        self, model: nn.Module, options: OffloadOptions, host: HostMemory | None, say: Callable[[str], None]
    ) -> None:
        self.model = model
        self.layers: Mapping[str, nn.Module] = select_layers(model).layers

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """While the model trains in this way; before and after, it is as it was."""
        yield

    def forward(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""
        return contextlib.nullcontext()

    def step_done(self) -> None:
        """After a step."""

    def close(self) -> None:
        """For good."""


class HuggingFace(Plain):
    """Hugging Face's own recompute of every layer."""

    offload: Mapping[str, bool] = {}

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the newer one first
        self._enable = next(getattr(model, name) for name in names if hasattr(model, name))
        self._disable = getattr(model, self._enable.__name__.replace("enable", "disable"))
        unknown = set(self.offload) - set(inspect.signature(self._enable).parameters)
        if unknown:
            raise NotOfferedError(f"transformers has no `{self._enable.__name__}({unknown.pop()}=True)`")

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        self._enable(**self.offload)
        try:
            yield
        finally:
            self._disable()


class HuggingFaceInputs(HuggingFace):
    """And the inputs of the layers in host memory."""

    offload = {"offload": True}


class Recompute(Plain):
    """`ActivationCheckpointing()`."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        self.recomputed = [attach(layer, name) for name, layer in self.layers.items()]
        for recompute in self.recomputed:
            recompute.detach()

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        # What was learned about the layers is in the objects, and comes back with them.
        for recompute in self.recomputed:
            recompute.layer.forward = recompute
        try:
            yield
        finally:
            for recompute in self.recomputed:
                recompute.detach()


class Everything(Plain):
    """`OffloadStrategy(move="all")`."""

    move: Literal["hidden", "all"] = "all"

    def __init__(
        self, model: nn.Module, options: OffloadOptions, host: HostMemory | None, say: Callable[[str], None]
    ) -> None:
        super().__init__(model, options, host, say)
        device = next(model.parameters()).device
        self.engine = OffloadEngine(device, dataclasses.replace(options, move=self.move), host=host, say=say)
        self.engine.learn(model)

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        with super().switched_on():
            boundaries = Boundaries(self.model, self.layers, self.engine)
            try:
                yield
            finally:
                boundaries.remove()

    def forward(self) -> AbstractContextManager[Any]:
        return self.engine.forward()

    def step_done(self) -> None:
        self.engine.step_done()

    def close(self) -> None:
        self.engine.close()


class Hidden(Everything):
    """`OffloadStrategy()`."""

    move = "hidden"


class RecomputeInputs(Hidden, Recompute):
    """`ActivationCheckpointing(offload=True)`."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        for recompute in self.recomputed:
            recompute.keep = self.engine.pack

    def forward(self) -> AbstractContextManager[Any]:
        self.engine.begin()
        return contextlib.nullcontext()


class RecomputeEverything(Everything, Recompute):
    """`OffloadStrategy(move="all")` and `ActivationCheckpointing(offload=True)`: what is outside of layers as well."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        for recompute in self.recomputed:
            recompute.keep = self.engine.pack


class Identity(Plain):
    """Python hooks that do nothing: what any engine in Python pays."""

    def forward(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


WAYS: dict[str, type[Plain]] = {
    "plain": Plain,
    "hooks that do nothing": Identity,
    "recompute": Recompute,
    "recompute, Hugging Face": HuggingFace,
    "inputs on host": RecomputeInputs,
    "inputs on host, Hugging Face": HuggingFaceInputs,
    "move hidden": Hidden,
    "move all": Everything,
    "recompute and move all": RecomputeEverything,
}


class Training:
    """A model, its batch, and the ways in which it is trained."""

    def __init__(self, machine: Machine, case: Case, sizes: Sizes, autocast: bool) -> None:
        # Here, because the sections about memory and link do without.
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        heads = max(2, case.hidden // 128)
        config = LlamaConfig(
            hidden_size=case.hidden,
            intermediate_size=case.hidden * 11 // 4,
            num_hidden_layers=case.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=sizes.vocabulary,
            max_position_embeddings=case.length,
            attn_implementation="sdpa",
        )
        with machine.device:
            self.model: nn.Module = LlamaForCausalLM(config).train()
        self.case = case
        self.tokens = self.make_tokens(0)
        self._machine = machine
        self._autocast = autocast

    def make_tokens(self, seed: int) -> Tensor:
        source = torch.Generator().manual_seed(seed)
        device = next(self.model.parameters()).device
        return torch.randint(0, self.model.config.vocab_size, (self.case.batch, self.case.length), generator=source).to(
            device
        )

    def forward(self, way: Plain) -> Tensor:
        """The loss."""
        with way.forward(), torch.autocast(self._machine.device.type, torch.bfloat16, enabled=self._autocast):
            return self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss

    def step(self, way: Plain) -> "Step":
        """Forward and backward, timed."""
        mark = self._machine.mark
        self.model.zero_grad(set_to_none=True)
        with way.switched_on():
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            start, marks = time.perf_counter(), [mark()]
            loss = self.forward(way)
            submitted_forward, kept = time.perf_counter(), torch.accelerator.memory_allocated() - before
            marks.append(mark())
            loss.backward()
            marks.append(mark())
            way.step_done()
            submitted = time.perf_counter()
            torch.accelerator.synchronize()
            end = time.perf_counter()
        return Step(
            step_ms=(end - start) * 1e3,
            forward_ms=marks[0].elapsed_time(marks[1]),
            backward_ms=marks[1].elapsed_time(marks[2]),
            host_forward_ms=(submitted_forward - start) * 1e3,
            host_ms=(submitted - start) * 1e3,
            peak=torch.accelerator.max_memory_allocated() - before,
            kept=kept,
            loss=loss.item(),
            offload=None if way.engine is None else way.engine.take_statistics(),
        )


@dataclass(frozen=True)
class Step:
    """What one step took: milliseconds and bytes."""

    step_ms: float
    forward_ms: float
    backward_ms: float
    host_forward_ms: float
    host_ms: float
    peak: int
    kept: int
    loss: float
    offload: StepStatistics | None


# ---------------------------------------------------------------- equality

EQUAL_WAYS = (
    "plain",
    "recompute",
    "inputs on host",
    "move hidden",
    "move all",
    "recompute and move all",
)


def check_equality(section: Section, machine: Machine, sizes: Sizes, report: Report) -> None:
    seconds = report.seconds_left / 3
    for precision in ("bf16-mixed", "fp32"):
        training = Training(machine, sizes.training, sizes, autocast=precision == "bf16-mixed")
        compare = functools.partial(compare_trainings, section, machine, sizes, training, precision)
        end = time.perf_counter() + seconds / 2
        try:
            with deterministic():
                compare(end)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            section.note(f"{precision}, deterministic as far as possible: {describe(error)}")
            with deterministic(as_far_as_possible=True):
                compare(end)


@contextlib.contextmanager
def deterministic(as_far_as_possible: bool = False) -> Iterator[None]:
    """Not only as far as possible, if possible: attention is deterministic only then."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=as_far_as_possible)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def compare_trainings(
    section: Section, machine: Machine, sizes: Sizes, training: Training, precision: str, end: float
) -> None:
    initial = [parameter.detach().clone() for parameter in training.model.parameters()]
    noise = LinkNoise(machine, sizes.noise_bytes)
    options = OffloadOptions(min_bytes=sizes.min_bytes)
    equal, moved = dict.fromkeys(EQUAL_WAYS, 0), dict.fromkeys(EQUAL_WAYS, 0)
    first_difference: dict[str, str] = {}
    done = 0
    for number in range(sizes.trainings):
        if time.perf_counter() > end:
            section.skip(f"{precision}: {sizes.trainings - number} of {sizes.trainings} trainings")
            break
        torch.utils.deterministic.fill_uninitialized_memory = number % 4 in (0, 3)
        run = functools.partial(train, training, initial, None if number % 2 else noise, number, sizes.training_steps)
        expected, _ = run(Plain(training.model, options, None, section.note))
        for name in EQUAL_WAYS:
            results, nbytes = run(WAYS[name](training.model, options, None, section.note))
            moved[name] += nbytes
            difference = find_difference(results, expected)
            if difference is None:
                equal[name] += 1
            else:
                first_difference.setdefault(name, f"training {number}: {difference}")
        done += 1
    noise.end()
    section.table(
        f"{precision}, {sizes.training_steps} steps each: equal to the plain run bit for bit",
        [
            {
                "way": name,
                "equal": f"{equal[name]} of {done}",
                "moved MiB a step": moved[name] / MIB / max(1, done * sizes.training_steps),
                "first difference": first_difference.get(name, "none"),
            }
            for name in EQUAL_WAYS
        ],
    )
    wrong = [name for name in EQUAL_WAYS if equal[name] < done]
    idle = [name for name in EQUAL_WAYS if issubclass(WAYS[name], Everything) and not moved[name]]
    if idle and done:
        section.fail(f"{precision}: nothing was moved, so this tells nothing about {', '.join(idle)}")
    if "plain" in wrong:
        section.fail(f"{precision}: the plain run does not even equal itself, so the rest tells nothing")
    elif wrong:
        section.fail(f"{precision}: not equal to the plain run: {', '.join(wrong)}")
    if not done:
        section.fail(f"{precision}: there was no time for a single training")


class LinkNoise:
    """Copies each way that keep the link busy for a while, so that other copies come late."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        self._streams = [torch.Stream(device=machine.device) for _ in range(2)]
        self._on_host = [pinned(nbytes) for _ in range(2)]
        self._on_device = [torch.zeros(nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2)]
        torch.accelerator.synchronize()

    def make(self) -> None:
        for _ in range(4):
            with self._streams[0]:
                self._on_host[0].copy_(self._on_device[0], non_blocking=True)
            with self._streams[1]:
                self._on_device[1].copy_(self._on_host[1], non_blocking=True)

    def end(self) -> None:
        """Before its memory may be given up."""
        for stream in self._streams:
            stream.synchronize()


def train(
    training: Training, initial: list[Tensor], noise: LinkNoise | None, number: int, steps: int, way: Plain
) -> tuple[list[tuple[str, Tensor]], int]:
    """Losses and gradients of all steps by name, and bytes moved. Nothing makes the host wait in between."""
    parameters = dict(training.model.named_parameters())
    results: list[tuple[str, Tensor]] = []
    with torch.no_grad():
        for parameter, value in zip(parameters.values(), initial, strict=True):
            parameter.copy_(value)
    moved = 0
    with way.switched_on():
        for i in range(steps):
            # Other data every time: what an earlier step has left behind in memory must not be right by chance.
            training.tokens = training.make_tokens(number * steps + i)
            training.model.zero_grad(set_to_none=True)
            if noise is not None:
                noise.make()
            loss = training.forward(way)
            if noise is not None:
                noise.make()
            loss.backward()
            results.append((f"loss of step {i}", loss.detach()))
            with torch.no_grad():
                for name, parameter in parameters.items():
                    assert parameter.grad is not None
                    results.append((f"gradient of {name} in step {i}", parameter.grad))
                    parameter.sub_(parameter.grad, alpha=0.05)
            way.step_done()
            if way.engine is not None:
                moved += way.engine.take_statistics().out_bytes
    way.close()
    training.model.zero_grad(set_to_none=True)
    return results, moved


def find_difference(results: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> str | None:
    for (name, ours), (_, theirs) in zip(results, expected, strict=True):
        if not torch.equal(ours, theirs):
            return f"{name} by up to {(ours - theirs).abs().max().item():.3g} of {theirs.abs().max().item():.3g}"
    return None


# ---------------------------------------------------------------- the host's time

HOST_WAYS = ("plain", "hooks that do nothing", "move hidden", "move all", "recompute", "inputs on host")


def check_host(section: Section, machine: Machine, sizes: Sizes) -> None:
    training = Training(machine, sizes.host, sizes, autocast=True)
    options = OffloadOptions(min_bytes=1)
    ways = {name: WAYS[name](training.model, options, None, section.note) for name in HOST_WAYS}
    tensors = count_saved(training)
    steps = take_turns(training, ways, sizes)
    plain_ms = statistics.median(step.host_ms for step in steps["plain"])
    rows = []
    for name, taken in steps.items():
        host, whole = (median_of(taken, what) for what in ("host_ms", "step_ms"))
        forward = median_of(taken, "host_forward_ms")
        rows.append(
            {
                "way": name,
                "host forward ms": forward,
                "host backward ms": host - forward,
                "host ms": host,
                "step ms": whole,
                "us per saved tensor": (host - plain_ms) / tensors * 1e3 if name != "plain" else None,
            }
        )
        if host < 0.8 * whole:
            section.note(f"{name}: the device is slower than the host here, which may have waited for it.")
    section.table(f"{sizes.host}, {sizes.host.layers} layers, {tensors} saved tensors", rows)
    for way in ways.values():
        way.close()


def count_saved(training: Training) -> int:
    """How many tensors autograd saves in a forward pass."""
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 1
        return tensor.detach()  # a graph that is dropped would hold the tensor itself for ever

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        training.forward(Plain(training.model, OffloadOptions(), None, print))
    return saved


def take_turns(training: Training, ways: Mapping[str, Plain], sizes: Sizes) -> dict[str, list[Step]]:
    for way in ways.values():
        for _ in range(sizes.warm_up):
            training.step(way)
    steps: dict[str, list[Step]] = {name: [] for name in ways}
    for i in range(sizes.host_rounds):
        for name in list(ways) if i % 2 else reversed(ways):
            steps[name].append(training.step(ways[name]))
    return steps


def median_of(steps: Sequence[Step], what: str) -> float:
    return statistics.median(getattr(step, what) for step in steps)


# ---------------------------------------------------------------- large cases

INPUT_WAYS = ("recompute, Hugging Face", "inputs on host, Hugging Face", "recompute", "inputs on host")
EVERYTHING_WAYS = ("plain", "recompute", "move hidden", "move all")


def check_cases(section: Section, machine: Machine, sizes: Sizes, report: Report, ways: Sequence[str]) -> None:
    for i, case in enumerate(sizes.cases):
        if report.seconds_left <= 0:
            section.skip(str(case))
            continue
        # What the first section of cases leaves unused, the second one has.
        seconds = report.seconds_left / (len(sizes.cases) - i + (len(sizes.cases) if ways is INPUT_WAYS else 0))
        try:
            LargeCase(section, machine, sizes, case, ways, seconds, report).run()
        except torch.OutOfMemoryError:
            section.note(f"{case}: the model itself does not fit.")
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            section.fail(f"{case}: {describe(error)}")
        tidy()


def layers_that_fit(case: Case, machine: Machine, vocabulary: int, ways: Sequence[str]) -> int:
    """As many layers as the device has room for, up to those of the case, and as the host can take."""
    weights = 12 * case.hidden**2 * (4 + 4 + 2)  # with gradients and what autocast makes of them
    saved = SAVED_PER_TOKEN * 2 * case.tokens * case.hidden
    outside = case.tokens * vocabulary * 16
    if ways is INPUT_WAYS:  # never more than the activations of one layer, so that there may be more layers
        outside += saved
        saved = 4 * case.tokens * case.hidden
    by_device = (0.75 * (machine.device_bytes or 16 * GIB) - outside) / (weights + saved)
    by_host = 0.8 * host_budget(machine) / saved
    return max(4, int(min(case.layers, by_device, by_host)))


def host_budget(machine: Machine) -> int:
    """What a training would take, told before this script had locked any memory."""
    return machine.host_bytes // 2


class LargeCase:
    """Some ways to train one model, taking turns. A way that does not fit drops out."""

    def __init__(
        self,
        section: Section,
        machine: Machine,
        sizes: Sizes,
        case: Case,
        ways: Sequence[str],
        seconds: float,
        report: Report,
    ) -> None:
        self.section = section
        self.case = dataclasses.replace(case, layers=layers_that_fit(case, machine, sizes.vocabulary, ways))
        self.report = report
        self._sizes = sizes
        self._end = time.perf_counter() + seconds
        self._outcome: dict[str, str] = {}
        self._steps: dict[str, list[Step]] = {name: [] for name in ways}
        self._training = Training(machine, self.case, sizes, autocast=True)
        self._ways: dict[str, Plain] = {}
        # All of them use the same host memory, in turn: locking it takes long, and together they might not fit.
        host = HostMemory(host_budget(machine), on_pageable=section.note)
        options = OffloadOptions(min_bytes=sizes.min_bytes)
        for name in ways:
            try:
                self._ways[name] = WAYS[name](
                    self._training.model, options, host, lambda text, name=name: section.note(f"{case}, {name}: {text}")
                )
            except NotOfferedError as error:
                self._outcome[name] = str(error)

    def run(self) -> None:
        for name in self._ways:
            for _ in range(self._sizes.warm_up):
                self._step(name)
        for i in range(self._sizes.rounds):
            if i >= 2 and time.perf_counter() > self._end:
                break
            for name in self._ways if i % 2 else reversed(self._ways):
                step = self._step(name)
                if step is not None:
                    self._steps[name].append(step)
        rows = [self._row(name) for name in self._steps]
        rounds = max((len(steps) for steps in self._steps.values()), default=0)
        self.section.table(f"{self.case}, {self.case.layers} layers, {rounds} rounds", rows)
        self._compare_losses()
        for way in self._ways.values():
            way.close()

    def _step(self, name: str) -> Step | None:
        if name in self._outcome:
            return None
        if self.report.seconds_left <= 0:
            if not self._steps[name]:
                self._outcome[name] = "no time"
                self.section.skip(f"{self.case}, {name}")
            return None
        try:
            return self._training.step(self._ways[name])
        except torch.OutOfMemoryError:
            self._outcome[name] = "does not fit"
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            self._outcome[name] = describe(error)
            self.section.fail(f"{self.case}, {name}: {describe(error)}")
        # Not closed yet: the others use its host memory.
        engine = self._ways[name].engine
        if engine is not None:
            engine.begin()
        self._training.model.zero_grad(set_to_none=True)
        tidy()
        return None

    def _row(self, name: str) -> Row:
        steps = self._steps[name]
        if name in self._outcome or not steps:
            return {"way": name, "result": self._outcome.get(name, "no time")}
        base = next((other for other in self._steps.values() if other), steps)
        row = {
            "way": name,
            "result": "ok",
            "step ms": median_of(steps, "step_ms"),
            "ratio": median_of(steps, "step_ms") / median_of(base, "step_ms"),
            "forward": median_of(steps, "forward_ms"),
            "backward": median_of(steps, "backward_ms"),
            "host": median_of(steps, "host_ms"),
            "peak MiB": max(step.peak for step in steps) / MIB,
            "kept MiB": median_of(steps, "kept") / MIB,
        }
        way, offload = self._ways[name], steps[-1].offload
        if way.engine is None or offload is None:
            return row
        metrics = [step.offload.figures() for step in steps if step.offload is not None]
        stayed = {key[0] for key in way.engine.staying} & set(way.layers)
        reasons = ", ".join(f"{reason} {format_cell(nbytes / MIB)}" for reason, nbytes in offload.stayed_bytes.items())
        return row | {
            "out MiB": metrics[-1]["out_MiB"],
            "in MiB": metrics[-1]["in_MiB"],
            "waits, forward": statistics.median(step["forward_wait_ms"] for step in metrics),
            "waits, backward": statistics.median(step["backward_wait_ms"] for step in metrics),
            "locked MiB": metrics[-1]["host_locked_MiB"],
            "late allocations": int(sum(step["late_allocations"] for step in metrics)),
            "stayed": f"{len(stayed)} layers, MiB: {reasons or 'none'}",
        }

    def _compare_losses(self) -> None:
        losses = {name: steps[0].loss for name, steps in self._steps.items() if steps}
        if len(set(losses.values())) > 1:
            self.section.note(f"{self.case}: the losses differ: {losses}. Deterministic algorithms are off here.")


# ---------------------------------------------------------------- all of it


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="what has not begun by then is skipped")
    parser.add_argument("--json", type=Path, help="where to keep the figures; written after every section")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    # Matrix products are deterministic with this, but only if it is there before the first one.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    machine = Machine.find()
    if machine is None:
        sys.exit("This script measures an accelerator, and torch finds none on this machine.")
    sizes = SMALL if arguments.small else Sizes()
    report = Report(arguments.minutes, arguments.json)
    report.run("machine", lambda section: check_machine(section, machine))
    report.run("allocation", lambda section: check_allocation(section, machine, sizes))
    report.run("link", lambda section: check_link(section, machine, sizes))
    report.run("equality", lambda section: check_equality(section, machine, sizes, report))
    report.run("host", lambda section: check_host(section, machine, sizes))
    report.run("inputs", lambda section: check_cases(section, machine, sizes, report, INPUT_WAYS))
    report.run("everything", lambda section: check_cases(section, machine, sizes, report, EVERYTHING_WAYS))
    report.summarize()
    return int(any(section.status == "failed" for section in report.sections.values()))


if __name__ == "__main__":
    sys.exit(main())
