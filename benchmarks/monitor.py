"""What StepMonitor costs a step at its default settings.

    python benchmarks/monitor.py [--steps 60] [--rounds 4]

Large model: the 12-layer GPT-NeoX of width 256 (batch 8 x 256, fp32, one CPU thread), every layer recomputed, in a
Trainer with a TensorBoard logger. One step in two is measured, in turn, so each has neighbours without: the ratio of
process CPU time of a measured step to the mean of its two neighbours. The first steps, which are counted closely, are
reported apart.

Tiny model: four blocks of width 8, in Trainers that take turns: without monitor, with it, and with a logger that drops
what it gets. Medians of process CPU time per step, so the difference is the monitor's own time, and the logger's.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from step_time import loss_of, make_model, report
from torch import Tensor, nn

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.measure.sampling import Sample

WARM_UP = 24


class Training(pl.LightningModule):
    """Any model with a function that gives its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(self.model)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class StepTimes(pl.Callback):
    """CPU time from one batch start to the next, everything in between included."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, *args: object) -> None:
        self.marks.append(time.process_time())

    def steps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]


def fit(module: pl.LightningModule, steps: int, callbacks: Iterable[pl.Callback], logger: Logger) -> list[float]:
    """CPU time of each step."""
    times = StepTimes()
    loop = pl.Trainer(
        accelerator="cpu",
        max_steps=steps + 1,
        callbacks=[times, *callbacks],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loop.fit(module, torch.utils.data.DataLoader(list(range(steps + 1)), batch_size=1))
    return times.steps()


def large(steps: int, folder: str) -> None:
    callbacks = [ActivationCheckpointing(), StepMonitor(every_n_steps=2, table=False)]
    times = fit(Training(make_model(), loss_of), steps, callbacks, TensorBoardLogger(folder))
    counted = Sample.WARM_UP * 2  # one in two is measured
    measured = range(counted + 1, len(times) - 1, 2)
    report("large: a step with the monitor, to its neighbours", [_to_neighbours(times, i) for i in measured])
    report("large: one of the first steps, counted closely", [_to_neighbours(times, i) for i in range(1, counted, 2)])
    print(f"(at most {Sample.BURST} batches and one in {Sample.BUDGET} are counted closely)")


def _to_neighbours(times: list[float], i: int) -> float:
    return 2 * times[i] / (times[i - 1] + times[i + 1])


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def tiny(steps: int, rounds: int, folder: str) -> None:
    loggers: dict[str, Callable[[], Any]] = {
        "a logger that drops everything": DummyLogger,
        "CSVLogger": lambda: CSVLogger(folder),
        "TensorBoardLogger": lambda: TensorBoardLogger(folder),
    }
    x = torch.randn(4, 8)
    for name, make_logger in loggers.items():
        medians: dict[bool, list[float]] = {True: [], False: []}
        for i in range(2 * rounds):
            monitored = bool(i % 2)
            module = Training(nn.Sequential(*[Block() for _ in range(4)]), lambda model: model(x).square().mean())
            callbacks = [StepMonitor(table=False)] if monitored else []
            times = fit(module, steps, callbacks, make_logger())[WARM_UP:]
            medians[monitored].append(statistics.median(times) * 1e3)
        plain, with_monitor = (statistics.median(medians[monitored]) for monitored in (False, True))
        print(
            f"tiny, {name:<31} {plain:.3f} ms a step, {with_monitor:.3f} with the monitor: {with_monitor - plain:.3f} more"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of the large model")
    parser.add_argument("--tiny-steps", type=int, default=400, help="steps of each run of the tiny model")
    parser.add_argument("--rounds", type=int, default=4, help="runs of the tiny model with and without, each")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny(arguments.tiny_steps, arguments.rounds, folder)
        large(arguments.steps, folder)


if __name__ == "__main__":
    main()
