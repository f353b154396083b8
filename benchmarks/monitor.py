"""What StepMonitor costs a step at its default settings.

    python benchmarks/monitor.py [--steps 60] [--rounds 4]

Large model: the 12-layer GPT-NeoX of width 256 (batch 8 x 256, fp32, one CPU thread), every layer recomputed, in a
Trainer with a TensorBoard logger. One step in two is measured, in turn, so each has neighbours without: the ratio of
process CPU time of a measured step to the mean of its two neighbours. The first steps, which are counted closely, are
reported apart.

Tiny model: four blocks of width 8, in the same way, and beside it a callback that only logs as many numbers as the
monitor does: the difference of the two is the monitor's own time.
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
from lightning_ckpt.monitor.metrics import NAMES
from lightning_ckpt.monitor.patches import Patches
from lightning_ckpt.monitor.trainer import step_of

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


class Constants(pl.Callback):
    """Adds as many numbers as the monitor logs to what the Trainer logs, in every second step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def log(inner: Callable[..., Any], metrics: dict[str, Any], step: int | None = None) -> Any:
            row = dict.fromkeys(NAMES[:14], 1.0) if step_of(trainer) % 2 else {}
            return inner({**metrics, **row}, step=step)

        self._patches = Patches()
        self._patches.wrap(trainer._logger_connector, "log_metrics", log)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._patches.restore()


def tiny(steps: int, rounds: int, folder: str) -> None:
    loggers: dict[str, Callable[[], Any]] = {
        "no files": DummyLogger,
        "CSVLogger": lambda: CSVLogger(folder),
        "TensorBoardLogger": lambda: TensorBoardLogger(folder),
    }
    ways: dict[str, Callable[[], pl.Callback]] = {
        "as many constants": Constants,
        "the monitor": lambda: StepMonitor(every_n_steps=2, table=False),
    }
    x = torch.randn(4, 8)
    for name, make_logger in loggers.items():
        more: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, callback in ways.items():
                module = Training(nn.Sequential(*[Block() for _ in range(4)]), lambda model: model(x).square().mean())
                times = fit(module, steps, [callback()], make_logger())
                more[way] += [
                    (times[i] - (times[i - 1] + times[i + 1]) / 2) * 1e3 for i in range(WARM_UP + 1, len(times) - 1, 2)
                ]
        constants, monitor = (statistics.median(more[way]) for way in ways)
        plain = statistics.median(times[WARM_UP::2]) * 1e3
        print(
            f"tiny, {name:<18} a step takes {plain:.3f} ms; {constants:.3f} ms more with as many constants logged, "
            f"{monitor:.3f} ms more with the monitor: its own {monitor - constants:.3f} ms"
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
