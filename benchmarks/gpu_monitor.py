"""What only an accelerator can tell about StepMonitor.

    python benchmarks/gpu_monitor.py [--steps 40] [--width 512] [--layers 8]

A GPT-NeoX with random weights trains in Lightning on the accelerator, every second layer recomputed. Printed are:

- peak: whether the logged `memory/peak_MiB` of every step equals what the allocator's counters say when a callback
  resets and reads them around the batch, in a run without the monitor;
- counters: whether the user reads the same peak after `fit` with and without the monitor;
- time: the median of `time/step_ms` to that of a run whose host waits for the device around every step;
- cost: time of a whole run with the monitor to that of a run without, alternating, medians with quartiles;
- out of memory: what is printed when the device is full, and whether PyTorch's memory snapshot was written.

Exit status 1 if a peak differs.
"""

import argparse
import csv
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from lightning_ckpt import ActivationCheckpointing, StepMonitor

MIB = 2**20
WARM_UP = 5


class Training(pl.LightningModule):
    """A GPT-NeoX."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPTNeoXConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            vocab_size=1024,
        )
        self.model = GPTNeoXForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Counters(pl.Callback):
    """Resets and reads the allocator's counters around every batch."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def on_train_batch_end(self, *args: Any) -> None:
        self.peaks.append(torch.accelerator.max_memory_allocated())


class Waiting(pl.Callback):
    """Waits for the device around every batch, and takes the time."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        torch.accelerator.synchronize()
        self._since = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        torch.accelerator.synchronize()
        self.milliseconds.append((time.perf_counter() - self._since) * 1e3)


class Check:
    """Runs of the same training; `make_settings` gives settings of the Trainer that are new for each."""

    def __init__(
        self, steps: int, width: int, layers: int, folder: str, make_settings: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._steps, self._width, self._layers, self._folder = steps, width, layers, folder
        self._make_settings = make_settings

    def fit(self, callbacks: Iterable[pl.Callback], logger: Logger | bool = False, rows: int = 8) -> float:
        """Seconds of a fit."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 1024, (self._steps * rows, 512), generator=generator)
        trainer = pl.Trainer(
            devices=1,
            max_epochs=1,
            logger=logger,
            callbacks=[ActivationCheckpointing(every_n_layers=2, monitor=False), *callbacks],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"accelerator": "auto", **self._make_settings()},
        )
        gc.collect()  # what earlier fits have left in cycles would count
        torch.accelerator.empty_cache()
        torch.accelerator.synchronize()
        since = time.perf_counter()
        trainer.fit(Training(self._width, self._layers), DataLoader(tokens, batch_size=rows))
        torch.accelerator.synchronize()
        return time.perf_counter() - since

    def monitored(self) -> list[dict[str, float]]:
        """Logged rows."""
        logger = CSVLogger(self._folder)
        self.fit([StepMonitor(table=False)], logger)
        with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]

    def peaks(self) -> bool:
        """Compare peaks, and what the user reads afterwards; whether they are equal."""
        counters = Counters()
        self.fit([counters])
        read = counters.peaks
        del counters  # Lightning binds a callback to the model, which would stay in memory
        logged = [round(row["memory/peak_MiB"] * MIB) for row in self.monitored()]
        same = logged == read
        print(f"peak: {'equal' if same else 'DIFFERENT'} in {len(logged)} steps; the last {logged[-1] / MIB:.2f} MiB")
        if not same:
            print(f"  logged {logged}\n  read   {read}")
        after = []
        for callbacks in ([], [StepMonitor(table=False)]):
            gc.collect()
            torch.accelerator.reset_peak_memory_stats()
            self.fit(callbacks, CSVLogger(self._folder))
            after.append(torch.accelerator.max_memory_allocated())
        print(f"counters: the user reads {after[0] / MIB:.2f} MiB without and {after[1] / MIB:.2f} with the monitor")
        return same and after[0] == after[1]

    def times(self) -> None:
        """Compare step times."""
        waiting = Waiting()
        self.fit([waiting])
        logged = [row["time/step_ms"] for row in self.monitored()]
        ours, theirs = (statistics.median(values[WARM_UP:]) for values in (logged, waiting.milliseconds))
        print(f"time: {ours:.3f} ms logged, {theirs:.3f} ms with a host that waits: ratio {ours / theirs:.4f}")

    def cost(self, rounds: int) -> None:
        """Compare times of whole runs."""
        ratios = []
        for i in range(rounds + 1):
            seconds = {}
            for with_monitor in (True, False) if i % 2 else (False, True):
                callbacks = [StepMonitor(table=False)] if with_monitor else []
                seconds[with_monitor] = self.fit(callbacks, CSVLogger(self._folder))
            if i:  # the first round warms up
                ratios.append(seconds[True] / seconds[False])
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"cost: {middle:.4f} (quartiles {low:.4f} to {high:.4f}, {len(ratios)} rounds)")

    def out_of_memory(self) -> None:
        """Fill the device, then train."""
        free, _ = torch.accelerator.get_memory_info()
        hold = torch.empty(max(0, free - 2**30), dtype=torch.uint8, device=torch.accelerator.current_accelerator())
        snapshots = Path(self._folder) / "snapshots"
        try:
            self.fit([StepMonitor(memory_snapshot=snapshots)], CSVLogger(self._folder), rows=256)
            print("out of memory: the device was large enough; nothing to see")
        except torch.OutOfMemoryError:
            files = [f"{path.name}, {path.stat().st_size / MIB:.1f} MiB" for path in snapshots.glob("*")]
            print(f"out of memory: see above; snapshots: {files or 'none'}")
        del hold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--width", type=int, default=512, help="size of the hidden states, a multiple of 64")
    parser.add_argument("--layers", type=int, default=8, help="number of layers")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs that the cost is measured with")
    arguments = parser.parse_args()
    if torch.accelerator.current_accelerator() is None:
        parser.error("there is no accelerator here")
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        check = Check(arguments.steps, arguments.width, arguments.layers, folder)
        same = check.peaks()
        check.times()
        check.cost(arguments.rounds)
        check.out_of_memory()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
