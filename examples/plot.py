"""Draws memory and time of several runs side by side: `python examples/plot.py logs/demo-csv demo.png`."""

import argparse
from pathlib import Path

import matplotlib
from demo import read_metrics
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

matplotlib.use("agg")


def draw(logs: Path, picture: Path) -> None:
    """Draw the runs in `logs`, one folder with a `metrics.csv` each, the one with the highest peak first."""
    runs = {table.parent.name: read_metrics(table.parent) for table in logs.glob("*/metrics.csv")}
    peaks = {run: max(metrics["memory/peak_MiB"].values()) for run, metrics in runs.items()}
    figure, (memory, time) = plt.subplots(1, 2, figsize=(9, 3.6), dpi=150, layout="constrained")
    legend = []
    for number, run in enumerate(sorted(runs, key=peaks.__getitem__, reverse=True)):
        color = f"C{number}"
        for axes, name, style in (
            (memory, "memory/saved_MiB", "-"),
            (memory, "memory/peak_MiB", "--"),
            (time, "time/step_ms", "-"),
        ):
            axes.plot(runs[run][name].keys(), runs[run][name].values(), style, color=color, linewidth=1.8)
        legend.append(Line2D([], [], color=color, linewidth=4, label=run))
    legend += [
        Line2D([], [], color="gray", linestyle=style, label=label)
        for style, label in (("--", "peak memory"), ("-", "saved activations"))
    ]
    for axes, title in ((memory, "Memory (MiB)"), (time, "Time of a step (ms)")):
        axes.set_title(title, loc="left")
        axes.set_xlabel("optimizer step")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.02)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, handlelength=2.2)
    figure.savefig(picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "logs", type=Path, help="folder with a folder per run, each with the `metrics.csv` of a CSVLogger"
    )
    parser.add_argument("picture", type=Path, help="the PNG to write")
    args = parser.parse_args()
    if not list(args.logs.glob("*/metrics.csv")):
        parser.error(f"no folder in {args.logs} has a metrics.csv")
    draw(args.logs, args.picture)
