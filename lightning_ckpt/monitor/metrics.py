"""The logged metrics: their names, and how a measured step gives them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_ckpt.measure.phases import Phases
from lightning_ckpt.measure.step import StepRecord
from lightning_ckpt.offload.statistics import StepStatistics

MIB = 2**20
PHASES = ("forward", "backward", "optimizer")  # numbered from 1 in `memory/peak_phase`; 0 is everything else

_MEMORY = ("peak", "planned", "reserved", "process", "after_forward", "saved", "avoided", "offloaded")
_TIMES = ("step", "data", "forward", "backward", "recompute", "optimizer", "copy_wait")
PEAK = "memory/peak_MiB"
PEAK_PHASE = "memory/peak_phase"
RETRIES = "memory/alloc_retries"
STEP_TIME = "time/step_ms"
TIMES = tuple(f"time/{name}_ms" for name in _TIMES)
RATES = ("time/tokens_per_s", "time/samples_per_s")
FLOPS = ("flops/model_TFLOP_per_s", "flops/hardware_TFLOP_per_s")
NAMES = (*(f"memory/{name}_MiB" for name in _MEMORY), PEAK_PHASE, RETRIES, *TIMES, *RATES, *FLOPS)


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step in plain numbers.

    Attributes:
        step: the Trainer's step.
        metrics: values of the logged metrics that are known.
        plain_bytes: activations that the step would have saved without any treatment, None where that is not known.
        model_flops: floating-point operations of the step, as the plain run needs them; None unless counted.
        recompute_flops: those of layers that ran again; None unless counted.
        copy_ms: time that offload's copies took on the link, whether hidden or not; None where that is not known.
    """

    step: int
    metrics: Mapping[str, float]
    plain_bytes: int | None = None
    model_flops: int | None = None
    recompute_flops: int | None = None
    copy_ms: float | None = None


def figures(step: int, record: StepRecord, offload: StepStatistics | None) -> StepFigures:
    """Sums over the micro-batches of a step for times, maxima for memory. The clock must have passed its end."""
    seconds = record.phases.seconds()
    metrics = {f"time/{name}_ms": seconds.get(name, 0.0) * 1e3 for name in _TIMES if name != "copy_wait"}
    metrics |= _memory(record) | _rates(record, seconds["step"])
    saved_is_known = bool(record.saved) and all(item.complete for item in record.saved)
    plain = None
    if saved_is_known:
        metrics["memory/saved_MiB"] = max(item.saved for item in record.saved) / MIB
        metrics["memory/avoided_MiB"] = max(item.avoided for item in record.saved) / MIB
        plain = max(item.plain for item in record.saved)
    copy_ms = None
    if offload is not None:
        metrics["memory/offloaded_MiB"] = offload.host_bytes / MIB
        waits = offload.figures()
        metrics["time/copy_wait_ms"] = waits["forward_wait_ms"] + waits["backward_wait_ms"]
        copy_ms = offload.copy_ms()
    model, again = _flops(record)
    if model is not None and again is not None and seconds["step"] > 0:
        metrics["flops/model_TFLOP_per_s"] = model / 1e12 / seconds["step"]
        metrics["flops/hardware_TFLOP_per_s"] = (model + again) / 1e12 / seconds["step"]
    return StepFigures(step, metrics, plain, model, again, copy_ms)


def _memory(record: StepRecord) -> dict[str, float]:
    known = [memory for memory in record.memory if memory is not None]
    metrics: dict[str, float] = {}
    if known and len(known) == len(record.memory):
        peaks = _largest(memory.peaks for memory in known)
        phase = max((*PHASES, *peaks), key=lambda name: peaks.get(name, 0))  # the first of several equal ones
        metrics[PEAK] = peaks[phase] / MIB
        metrics[PEAK_PHASE] = float(PHASES.index(phase) + 1 if phase in PHASES else 0)
        after_forward = [memory.after_forward for memory in known if memory.after_forward is not None]
        if after_forward:
            metrics["memory/after_forward_MiB"] = max(after_forward) / MIB
        reserved = [memory.peak_reserved for memory in known if memory.peak_reserved is not None]
        if reserved:
            metrics["memory/reserved_MiB"] = max(reserved) / MIB
            metrics[RETRIES] = float(record.retries)
    if record.planned_bytes is not None:
        metrics["memory/planned_MiB"] = record.planned_bytes / MIB
    if record.process_bytes is not None:
        metrics["memory/process_MiB"] = record.process_bytes / MIB
    return metrics


def _largest(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    largest: dict[str, int] = {Phases.REST: 0}
    for peaks in several:
        for phase, peak in peaks.items():
            largest[phase] = max(largest.get(phase, 0), peak)
    return largest


def _rates(record: StepRecord, seconds: float) -> dict[str, float]:
    tokens = [work.tokens for work in record.work]
    samples = [work.samples for work in record.work]
    for name, counts in (("time/tokens_per_s", tokens), ("time/samples_per_s", samples)):
        known = [count for count in counts if count is not None]
        if known and len(known) == len(counts) and seconds > 0:
            return {name: sum(known) / seconds}
    return {}


def _flops(record: StepRecord) -> tuple[int | None, int | None]:
    known = [flops for flops in record.flops if flops is not None]
    if not known or len(known) < len(record.flops):
        return None, None
    return sum(flops.model for flops in known), sum(flops.recompute for flops in known)
