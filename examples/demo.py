"""Trains one model plainly and with two kinds of checkpointing, and compares memory, time and loss."""

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

RUNS = {
    "plain": ["--ckpt.enabled", "false"],
    "every_n_layers=1": ["--ckpt.every_n_layers", "1"],
    "every_n_layers=2": ["--ckpt.every_n_layers", "2"],
}
WARM_UP = 5
COLUMNS = ["run", "saved MiB", "avoided MiB", "peak MiB", "step ms", "recompute ms", "final loss"]


def train(flags: list[str], tensorboard: Path, table: Path) -> None:
    """Run `train.py fit` with these flags, and log to a folder for TensorBoard and to one for `metrics.csv`."""
    loggers = [
        {
            "class_path": f"lightning.pytorch.loggers.{logger}",
            "init_args": {"save_dir": str(folder.parent), "name": "", "version": folder.name},
        }
        for logger, folder in (("TensorBoardLogger", tensorboard), ("CSVLogger", table))
    ]
    settings = [
        *("--trainer.logger", json.dumps(loggers)),
        *("--trainer.enable_checkpointing", "false"),
        *("--trainer.enable_progress_bar", "false"),
    ]
    script = str(Path(__file__).with_name("train.py"))
    command = [sys.executable, script, "fit", "--seed_everything", "0", *settings, *flags]
    # One thread: several would wait for each other wherever other programs use the processor too.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n`{sys.executable} {script}` ended with {done.returncode}.")


def read_metrics(folder: Path) -> dict[str, dict[int, float]]:
    """Read the values of every metric by step from the `metrics.csv` that a CSVLogger wrote."""
    metrics: dict[str, dict[int, float]] = {}
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for name, value in row.items():
                if value:
                    metrics.setdefault(name, {})[step] = float(value)
    return metrics


def table_row(run: str, metrics: dict[str, dict[int, float]]) -> list[str]:
    """Sum up a run: the largest figures of memory, medians of the times after the warm-up, and the last loss."""
    memory = [max(metrics[f"memory/{name}_MiB"].values()) for name in ("saved", "avoided", "peak")]
    times = [
        median(value for step, value in metrics[f"time/{name}_ms"].items() if step >= WARM_UP)
        for name in ("step", "recompute")
    ]
    return [run, *(f"{value:.1f}" for value in memory + times), repr(final_loss(metrics))]


def final_loss(metrics: dict[str, dict[int, float]]) -> float:
    """The loss of the last step."""
    return metrics["loss"][max(metrics["loss"])]


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))


def main() -> None:
    """Train, compare, and say where to look at the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="All other flags go to train.py: --model.width 256", allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps per run")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="where demo/ and demo-csv/ are (over)written")
    args, flags = parser.parse_known_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} steps of the warm-up")

    tensorboard, tables = args.logs / "demo", args.logs / "demo-csv"
    for folder in (tensorboard, tables):
        if folder.exists():
            shutil.rmtree(folder)
    runs = {}
    for run, choice in RUNS.items():
        print(f"Training {args.steps} steps: {run} ...", flush=True)
        train([*choice, "--trainer.max_steps", str(args.steps), *flags], tensorboard / run, tables / run)
        runs[run] = read_metrics(tables / run)

    print("\nActivations kept for backward (saved), not kept (avoided), peak memory, and median times of a step:\n")
    print_table([COLUMNS, *(table_row(run, metrics) for run, metrics in runs.items())])
    print()
    losses = {run: final_loss(metrics) for run, metrics in runs.items()}
    if len(set(losses.values())) > 1:
        sys.exit(f"The final losses differ: {losses}")
    print("The final losses are equal to the last bit.")
    python = os.path.relpath(sys.executable)
    print("See the curves:", shlex.join([python, "-m", "tensorboard.main", "--logdir", str(tensorboard)]))
    print("Or draw them to report.png:", shlex.join([python, "-m", "lightning_ckpt.report", str(tables)]))


if __name__ == "__main__":
    main()
