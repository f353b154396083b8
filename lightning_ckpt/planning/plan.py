"""A plan: what is done with every layer, and what that is expected to cost."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ckpt.planning.treatment import Treatment
from lightning_ckpt.selection.summary import shorten_names


@dataclass(frozen=True)
class LayerPlan:
    """What is done with one layer.

    Attributes:
        name: its qualified name.
        treatment: the treatment.
        saved_bytes: bytes that it holds on the device between its forward and its backward, what it returns included.
        input_bytes: bytes of the activations that it is given.
        moved_bytes: bytes that travel to host memory.
        forward_s: seconds of its forward.
        recompute_s: seconds of its second run, 0.0 if it has none.
    """

    name: str
    treatment: Treatment
    saved_bytes: int
    input_bytes: int
    moved_bytes: int
    forward_s: float
    recompute_s: float


@dataclass(frozen=True)
class Plan:
    """What is done with every layer of a model, and what a training step is expected to cost.

    Attributes:
        layers: the layers in the order of forward.
        budget_bytes: what the peak may be.
        peak_bytes: the most memory in use at once.
        binds: where in the step that is.
        extra_s: seconds of a step beyond the plain run: second runs, and waits for copies.
        step_s: seconds of forward and backward of the plain run.
        gap_s: seconds that another plan within the budget might save at most, as far as costs of layers tell; 0.0 where
            there is none that is faster.
        kept_bytes: the peak if every layer is kept.
        recomputed_bytes: the peak if every layer is recomputed.
        operators: names of the operators whose results stay under the policy treatment.
        measured: whether times were measured; else they are calculated from the numbers of operations and bytes.
        rehearsed: whether the peak was counted on a rehearsal of the whole plan; else it is put together from parts.
        inflight_bytes: bytes that may be on their way to the host at once; 0 if nothing is moved.
        prefetch_bytes: bytes that are brought back ahead of their use; 0 if nothing is moved.
    """

    layers: tuple[LayerPlan, ...]
    budget_bytes: int
    peak_bytes: int
    binds: str
    extra_s: float
    step_s: float
    gap_s: float
    kept_bytes: int
    recomputed_bytes: int
    operators: tuple[str, ...] = ()
    measured: bool = False
    rehearsed: bool = True
    inflight_bytes: int = 0
    prefetch_bytes: int = 0

    @property
    def assignment(self) -> dict[str, Treatment]:
        """The treatment of each layer."""
        return {layer.name: layer.treatment for layer in self.layers}

    def lines(self) -> list[str]:
        """A line for each treatment, with its layers."""
        return [f"{treatment}: {_described(layers)}" for treatment, layers in self._by_treatment()]

    def _by_treatment(self) -> list[tuple[Treatment, list[LayerPlan]]]:
        grouped = [(each, [layer for layer in self.layers if layer.treatment is each]) for each in Treatment]
        return [(treatment, layers) for treatment, layers in grouped if layers]

    def __str__(self) -> str:
        """A few lines: treatments, peak, time."""
        return "\n".join([*self.lines(), *self.totals()])

    def totals(self) -> list[str]:
        """Lines about the peak and the time of a step."""
        share = f", {self.extra_s / self.step_s:.0%} of forward and backward" if self.step_s else ""
        how = "measured" if self.measured else "by formula"
        gap = f", at most {self.gap_s * 1e3:,.1f} ms more than the fastest plan" if self.gap_s else ""
        return [
            f"peak memory {size(self.peak_bytes)} of {size(self.budget_bytes)}, in {self.binds}",
            f"(all layers recomputed: {size(self.recomputed_bytes)}, all kept: {size(self.kept_bytes)})",
            f"extra time {self.extra_s * 1e3:,.1f} ms a step ({how}{share}){gap}",
        ]


def _described(layers: Iterable[LayerPlan]) -> str:
    names = [layer.name for layer in layers]
    return f"{len(names)} layer{'s' if len(names) != 1 else ''} ({shorten_names(names)})"


def size(nbytes: int) -> str:
    """Bytes as people read them."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:,.2f} GiB"
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 1024:,.1f} KiB"
