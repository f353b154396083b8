"""What a run has needed and taken, in a few lines: as an object and as a table."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ckpt.monitor.metrics import MIB, PEAK_PHASE, PHASES, StepFigures

_WARM_UP = 5
_STEPS = 1000  # latest ones that medians are taken of


@dataclass(frozen=True)
class Summary:
    """Memory and time of a run so far; what is not known is None.

    Memory figures are maxima over all logged steps; times are medians over the latest 1000 of them, without the first 5
    where there are more. On several ranks, they are those of all ranks, as logged.

    Attributes:
        steps: logged optimizer steps.
        treatments: which layers are treated how, a line each.
        peak_bytes: the most memory in use at once.
        peak_phase: where that was: ``forward``, ``backward``, ``optimizer`` or ``elsewhere``.
        saved_bytes: activations kept for backward on the device.
        plain_bytes: activations that the plain run would keep for backward.
        offloaded_bytes: activations that waited in host memory.
        step_ms: time of a step.
        shares: part of the step's time, from 0 to 1, by phase: ``data``, ``forward``, ``backward``, ``recompute`` (a
            part of backward) and ``optimizer``.
        hidden_share: part of the copies' time, from 0 to 1, for which the device did not wait.
        model_flops: floating-point operations of a step, as the plain run needs them.
        recompute_flops: those of layers that ran again.
    """

    steps: int
    treatments: tuple[str, ...]
    peak_bytes: int | None = None
    peak_phase: str | None = None
    saved_bytes: int | None = None
    plain_bytes: int | None = None
    offloaded_bytes: int | None = None
    step_ms: float | None = None
    shares: dict[str, float] | None = None
    hidden_share: float | None = None
    model_flops: float | None = None
    recompute_flops: float | None = None

    def rows(self) -> list[tuple[str, str]]:
        """What is known, as pairs of a name and a text."""
        if not self.steps:
            return []
        rows = [("layers", line) for line in self.treatments or ["all kept, as in the plain run"]]
        if self.peak_bytes is not None:
            rows.append(("peak memory", f"{_size(self.peak_bytes)}, in {self.peak_phase}"))
        if self.saved_bytes is not None:
            rows.append(("saved for backward", self._saved(self.saved_bytes)))
        if self.offloaded_bytes:
            hidden = "" if self.hidden_share is None else f"; {self.hidden_share:.0%} of the copies' time is hidden"
            rows.append(("in host memory", f"{_size(self.offloaded_bytes)}{hidden}"))
        if self.step_ms is not None and self.shares is not None:
            parts = [f"{name} {share:.0%}" for name, share in self.shares.items() if name != "recompute"]
            rows.append(("time of a step", f"{self.step_ms:,.1f} ms: {', '.join(parts)}"))
            if self.shares["recompute"]:
                rows.append(("recompute", f"{self.shares['recompute']:.0%} of the step, as a part of backward"))
        if self.model_flops is not None:
            again = f" and {self.recompute_flops / 1e12:.4g} in recompute" if self.recompute_flops else ""
            rows.append(("operations of a step", f"{self.model_flops / 1e12:.4g} TFLOP{again}"))
        return rows

    def _saved(self, saved: int) -> str:
        if not self.plain_bytes or saved == self.plain_bytes:
            return _size(saved)
        return f"{_size(saved)} instead of {_size(self.plain_bytes)} in a plain run ({saved / self.plain_bytes:.0%})"

    @property
    def title(self) -> str:
        """One line that says what the figures are of."""
        return f"lightning_ckpt, {self.steps} step{'' if self.steps == 1 else 's'}"

    def __str__(self) -> str:
        """A plain table."""
        rows = self.rows()
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([f"{self.title}:", *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def __rich__(self) -> Any:
        """A table for `rich`."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", show_header=False)
        for name, text in self.rows():
            table.add_row(name, Text(text))  # names of layers may hold what would be markup
        return table


def show(summary: Summary) -> None:
    """Print a summary: by `rich` where that is installed, as Lightning's own tables are."""
    if find_spec("rich") is None:
        rank_zero_info(str(summary))
    else:
        from rich.console import Console

        Console().print(summary)


class History:
    """Keeps what a summary needs of the logged steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._latest: deque[StepFigures] = deque(maxlen=_STEPS)
        self._largest: dict[str, int] = {}
        self._peak_phase = 0

    def add(self, figures: StepFigures) -> None:
        """A step was logged."""
        self._steps += 1
        if self._steps == _WARM_UP + 1:  # there are others now
            self._latest.clear()
        self._latest.append(figures)
        sizes = {name: figures.metrics.get(f"memory/{name}_MiB") for name in ("peak", "saved", "offloaded")}
        known = {name: round(size * MIB) for name, size in sizes.items() if size is not None}
        if known.get("peak", 0) > self._largest.get("peak", 0):
            self._peak_phase = int(figures.metrics[PEAK_PHASE])
        if figures.plain_bytes is not None:
            known["plain"] = figures.plain_bytes
        for name, size in known.items():
            self._largest[name] = max(self._largest.get(name, 0), size)

    def summary(self, treatments: Sequence[str]) -> Summary:
        """What is known so far."""
        if not self._steps:
            return Summary(0, tuple(treatments))
        largest = self._largest
        names = ("data", "forward", "backward", "recompute", "optimizer")
        times = {name: self._median(f"time/{name}_ms") for name in ("step", *names)}
        model = [figures.model_flops for figures in self._latest if figures.model_flops is not None]
        again = [figures.recompute_flops for figures in self._latest if figures.recompute_flops is not None]
        return Summary(
            self._steps,
            tuple(treatments),
            peak_bytes=largest.get("peak"),
            peak_phase=["elsewhere", *PHASES][self._peak_phase] if "peak" in largest else None,
            saved_bytes=largest.get("saved"),
            plain_bytes=largest.get("plain"),
            offloaded_bytes=largest.get("offloaded"),
            step_ms=times["step"],
            shares={name: times[name] / times["step"] for name in names} if times["step"] else None,
            hidden_share=self._hidden_share(),
            model_flops=median(model) if model else None,
            recompute_flops=median(again) if again else None,
        )

    def _median(self, name: str) -> float:
        return median(figures.metrics[name] for figures in self._latest)

    def _hidden_share(self) -> float | None:
        known = [figures for figures in self._latest if figures.copy_ms]
        copied = sum(figures.copy_ms for figures in known if figures.copy_ms)
        if not copied:
            return None
        waited = sum(figures.metrics["time/copy_wait_ms"] for figures in known)
        return max(0.0, 1 - waited / copied)


def _size(size: int) -> str:
    return f"{size / MIB:,.1f} MiB" if size >= MIB else f"{size / 1024:,.1f} KiB"
