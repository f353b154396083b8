"""Draw memory and time of several runs side by side, as one picture: `python -m lightning_ckpt.report logs`."""

import argparse
import csv
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ReportError", "Run", "draw", "read_runs", "summary"]

_PEAK, _SAVED = "memory/peak_MiB", "memory/saved_MiB"
_STEP, _RECOMPUTE = "time/step_ms", "time/recompute_ms"
_METRICS = (_PEAK, _SAVED, _STEP, _RECOMPUTE)
_CSV, _EVENTS = "metrics.csv", "events.out.tfevents."

_WARM_UP = 5
_MOST_POINTS = 1000  # a panel is not many more pixels wide
_logger = logging.getLogger(__name__)

Series = Mapping[int, float]


class ReportError(Exception):
    """Says in a sentence why runs cannot be read or drawn, and what to do."""


@dataclass(frozen=True)
class Run:
    """What one run has logged.

    Attributes:
        name: What it is called in picture and table.
        folder: Where its logs are.
        metrics: Values by step, by name of the metric; a step that was logged twice has its last value.
    """

    name: str
    folder: Path
    metrics: Mapping[str, Series]

    def values(self, metric: str) -> list[float]:
        """The values of a metric in the order of steps; none if it was not logged."""
        return [value for _, value in sorted(self.metrics.get(metric, {}).items())]

    def steady(self, metric: str) -> list[float]:
        """The values after the first five steps, which are slower; all of them if there are no more than five."""
        values = self.values(metric)
        return values[_WARM_UP:] or values


# ---------------------------------------------------------------- reading


def read_runs(*logdirs: str | Path) -> list[Run]:
    """Read every run in these folders and the folders below, the one with the highest peak of memory first.

    A run is a folder with the ``metrics.csv`` of a ``CSVLogger`` or event files of TensorBoard; if it has both, the
    former is read. It is named by its path relative to the folder that all runs are in. One without any of the metrics
    that are drawn is left out with a warning.

    Args:
        logdirs: Folders to search.

    Raises:
        ReportError: If a folder does not exist or holds no run, or if no run has any of the metrics.

    Example::

        >>> from lightning_ckpt.report import read_runs
        >>> for run in read_runs("lightning_logs"):
        ...     print(run.name, max(run.values("memory/peak_MiB")))
    """
    tops = [Path(os.path.abspath(logdir)) for logdir in logdirs]
    # The same folder may be below several of them, or be reached through links.
    folders = list({os.path.realpath(folder): folder for top in tops for folder in _find_runs(top)}.values())
    runs = [Run(name, folder, _read(folder)) for name, folder in zip(_names(folders, tops), folders, strict=True)]
    without = [str(run.folder) for run in runs if not run.metrics]
    cure = f"none of {', '.join(_METRICS)} was logged; add `StepMonitor()` to the callbacks of the Trainer"
    if len(without) == len(runs):
        raise ReportError(f"There is nothing to draw: in {', '.join(without)}, {cure}.")
    for folder in without:
        _logger.warning("%s is left out: in it, %s.", folder, cure)
    return sorted((run for run in runs if run.metrics), key=lambda run: -max(run.values(_PEAK), default=0))


def _find_runs(top: Path) -> list[Path]:
    if not top.is_dir():
        raise ReportError(f"There is no folder {top}.")
    runs = [folder for folder, files in _walk(top) if any(name == _CSV or name.startswith(_EVENTS) for name in files)]
    if not runs:
        raise ReportError(f"{top} holds no run: there is no {_CSV} and no {_EVENTS}* in it or in a folder below.")
    return runs


def _walk(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders in the order of their names, and the files in them; links are followed, but not in circles."""

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for folder, subfolders, files in os.walk(top, onerror=fail, followlinks=True):
        subfolders.sort()
        if os.path.realpath(folder) in seen:
            subfolders.clear()
        else:
            seen.add(os.path.realpath(folder))
            yield Path(folder), files


def _names(folders: Sequence[Path], tops: Sequence[Path]) -> list[str]:
    common = Path(os.path.commonpath(tops))
    if common in folders:  # a run needs a name itself
        common = common.parent
    return [folder.relative_to(common).as_posix() for folder in folders]


def _read(folder: Path) -> dict[str, Series]:
    table = folder / _CSV
    metrics = _read_csv(table) if table.exists() else _read_events(folder)
    finite = {
        metric: {step: value for step, value in series.items() if math.isfinite(value)}
        for metric, series in metrics.items()
    }
    return {metric: series for metric, series in finite.items() if series}


def _read_csv(table: Path) -> dict[str, Series]:
    metrics: dict[str, dict[int, float]] = {metric: {} for metric in _METRICS}
    unreadable = []
    with open(table, newline="") as file:
        for row in (reader := csv.DictReader(file)):
            try:
                for metric, series in metrics.items():
                    if value := row.get(metric):  # rows of other metrics leave ours empty
                        series[int(row["step"])] = float(value)
            except (KeyError, TypeError, ValueError):
                unreadable.append(reader.line_num)
    if unreadable:  # such as the last line of a run that was killed
        _logger.warning("%s has rows that cannot be read: %d, first line %d.", table, len(unreadable), unreadable[0])
    return dict(metrics)


def _read_events(folder: Path) -> dict[str, Series]:
    events = _need("tensorboard.backend.event_processing.event_accumulator", f"{folder} has event files of TensorBoard")
    accumulator = events.EventAccumulator(str(folder), size_guidance={events.SCALARS: 0})  # 0: all points
    accumulator.Reload()
    logged = set(accumulator.Tags()[events.SCALARS])
    return {
        metric: {event.step: event.value for event in accumulator.Scalars(metric)}
        for metric in _METRICS
        if metric in logged
    }


def _need(module: str, why: str) -> Any:
    """Import an optional dependency."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ReportError(f"{why}, which needs `pip install 'lightning_ckpt[report]'` ({error}).") from error


# ---------------------------------------------------------------- the table


def summary(runs: Sequence[Run]) -> str:
    """A table of the runs, a line each.

    Memory is the largest of all steps. Time is the median after the first five steps, and recompute its share of that;
    a run of no more than five steps has them all counted.
    """
    rows = [("run", "steps", "peak MiB", "saved MiB", "step ms", "recompute"), *map(_summary_row, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for name, *cells in rows
    )


def _summary_row(run: Run) -> tuple[str, ...]:
    steps = len(set(chain.from_iterable(run.metrics.values())))
    memory = [f"{max(values):.1f}" if (values := run.values(metric)) else "-" for metric in (_PEAK, _SAVED)]
    step, recompute = (median(run.steady(metric) or [0.0]) for metric in (_STEP, _RECOMPUTE))
    has_recompute = step and _RECOMPUTE in run.metrics
    times = [f"{step:.1f}" if step else "-", f"{recompute / step:.0%}" if has_recompute else "-"]
    return run.name, str(steps), *memory, *times


# ---------------------------------------------------------------- the picture

_ColoredRuns = Sequence[tuple[Run, Any]]


@dataclass(frozen=True)
class _Line:
    metric: str
    label: str
    style: str

    def of(self, run: Run) -> Series:
        """What to draw of a run: no line along the axis for one that recomputes nothing."""
        series = run.metrics.get(self.metric, {})
        return series if self.metric != _RECOMPUTE or any(series.values()) else {}


_MEMORY = (_Line(_PEAK, "peak", "--"), _Line(_SAVED, "saved activations", "-"))
_TIME = (_Line(_STEP, "whole step", "-"), _Line(_RECOMPUTE, "recompute", ":"))


def draw(*logdirs: str | Path, output: str | Path = "report.png") -> list[Run]:
    """Draw memory and time of every run in these folders as one picture.

    Both axes begin at 0. The axis of time covers the steps after the first five, which are slower, and no more than
    twice what 99 % of them take; steps above it are marked at its top and counted below. Of more than 1000 steps,
    lines show medians of bins, as many steps each as is written below, and a shade from the least to the most of them.

    Args:
        logdirs: Folders to search for runs, as for :func:`read_runs`.
        output: The picture to write; its suffix chooses the format (png, svg, pdf).

    Returns:
        The runs, in the order of the legend.

    Raises:
        ReportError: If there is nothing to draw, matplotlib is missing, or it cannot write such a picture.

    Example::

        >>> from lightning_ckpt.report import draw, summary
        >>> print(summary(draw("lightning_logs", output="report.png")))
    """
    # Not through pyplot: there is no window to open, and no global state to leave behind.
    figure: Figure = _need("matplotlib.figure", "The report is a picture").Figure(dpi=150, layout="constrained")
    output = Path(output)
    if output.suffix.lower()[1:] not in figure.canvas.get_supported_filetypes():
        raise ReportError(f"{output} should end in .png, .svg, .pdf or another format of matplotlib.")
    runs = read_runs(*logdirs)  # after what can go wrong at once: many steps take a while
    _fill(figure, runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return runs


def _fill(figure: "Figure", runs: Sequence[Run]) -> None:
    names_per_row = max(1, 110 // (8 + max(len(run.name) for run in runs)))
    figure.set_size_inches(9, 3.7 + 0.2 * math.ceil(len(runs) / names_per_row))
    colors = _colors(len(runs))
    colored = list(zip(runs, colors, strict=True))
    memory, time = figure.subplots(1, 2)
    _fill_panel(memory, "Memory (MiB)", _MEMORY, colored, _top_of_memory(runs))
    _fill_panel(time, "Time of a step (ms)", _TIME, colored, _top_of_time(runs))
    keys = [memory.plot([], [], color=color, linewidth=4)[0] for color in colors]
    names = [run.name.replace("$", r"\$") for run in runs]  # no formulas
    figure.legend(keys, names, loc="outside lower center", ncols=names_per_row, frameon=False)


def _colors(count: int) -> list[Any]:
    if count <= 10:
        return [f"C{number}" for number in range(count)]
    rainbow = import_module("matplotlib").colormaps["turbo"]
    return [rainbow(0.05 + 0.9 * number / (count - 1)) for number in range(count)]


def _top_of_memory(runs: Iterable[Run]) -> float:
    return 1.05 * max((value for run in runs for metric in (_PEAK, _SAVED) for value in run.values(metric)), default=0)


def _top_of_time(runs: Iterable[Run]) -> float:
    times = [sorted(run.steady(_STEP)) for run in runs if _STEP in run.metrics]
    longest = max((values[-1] for values in times), default=0)
    usual = max((values[int(0.99 * (len(values) - 1))] for values in times), default=0)
    return 1.05 * min(longest, 2 * usual)


def _fill_panel(axes: "Axes", title: str, lines: Sequence[_Line], runs: _ColoredRuns, top: float) -> None:
    axes.set_title(title, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    shown = [line for line in lines if any(line.of(run) for run, _ in runs)]
    if not shown:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no run has logged this", transform=axes.transAxes, color="gray", ha="center")
        return
    size = math.ceil(max(len(line.of(run)) for line in shown for run, _ in runs) / _MOST_POINTS)
    for line in shown:
        axes.plot([], [], line.style, color="gray", label=line.label)
        for run, color in runs:
            _plot(axes, line.of(run), line.style, color, size, top)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize="small", borderpad=0)
    axes.margins(x=0.02)
    axes.set_ylim(0, top or None)
    axes.locator_params(axis="x", integer=True)
    notes = ["optimizer step"]
    if size > 1:
        notes.append(f"line: median of {size} steps, shade: least to most")
    notes += _mark_above(axes, lines[0], runs, top)
    axes.set_xlabel("\n".join(notes), fontsize=9)


def _plot(axes: "Axes", series: Series, style: str, color: Any, size: int, top: float) -> None:
    """Plot a line through the medians of bins of `size` steps, and a shade over what is in the bins up to `top`."""
    points = sorted(series.items())
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    steps = [inside[len(inside) // 2][0] for inside in bins]
    values = [[value for _, value in inside] for inside in bins]
    marker = "o" if len(bins) == 1 else None  # a single point is no line
    axes.plot(steps, list(map(median, values)), style, color=color, linewidth=1.6, marker=marker)
    if size > 1:
        low, high = ([limit((v for v in inside if v <= top), default=top) for inside in values] for limit in (min, max))
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)


def _mark_above(axes: "Axes", line: _Line, runs: _ColoredRuns, top: float) -> list[str]:
    """Mark the steps that do not fit below `top`; what to say about them."""
    above: list[float] = []
    for run, color in runs:
        if steps := {step: value for step, value in line.of(run).items() if value > top}:
            axes.plot(list(steps), [top] * len(steps), "^", color=color, markersize=4, clip_on=False)
            above += steps.values()
    count = sum(len(line.of(run)) for run, _ in runs)
    return [f"▲ {len(above)} of {count} steps are above the axis, up to {max(above):,.0f} ms"] if above else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what the command line asks for, and print a table of it."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ckpt.report", description=__doc__)
    parser.add_argument(
        "logdirs", metavar="LOGDIR", nargs="+", type=Path, help="searched for metrics.csv and TensorBoard's event files"
    )
    parser.add_argument("--output", type=Path, default=Path("report.png"), help="the picture; default: report.png")
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        runs = draw(*args.logdirs, output=args.output)
    except (ReportError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(summary(runs))
    print(f"\nLargest memory, median time after the first {_WARM_UP} steps. Drawn: {args.output}")


if __name__ == "__main__":
    main()
