"""What tests of the monitor share: modules that log a loss, and the rows that a run has written."""

import csv
import functools

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_ckpt import StepMonitor
from lightning_ckpt.recompute.watch import watched
from tests.support import Training, batches, blocks, trainer

BACKWARD = frozenset({"memory/after_forward_MiB", "memory/saved_MiB", "memory/avoided_MiB"})  # of steps that have one
PEAK = frozenset({"memory/peak_MiB", "memory/peak_phase"})
TIMES = frozenset(f"time/{name}_ms" for name in ("step", "data", "forward", "backward", "recompute", "optimizer"))
METRICS = BACKWARD | PEAK | TIMES | {"memory/process_MiB", "time/samples_per_s"}


class Logged(Training):
    """Logs its loss."""

    def __init__(self, model=None, **settings):
        super().__init__(blocks(2) if model is None else model, **settings)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Validated(Logged):
    """Logs a figure of validation, too."""

    def validation_step(self, batch, batch_idx):
        self.log("val", self.model(batch).square().mean())


class TwoOptimizers(Logged):
    """Manual optimization: two backward passes through one graph, two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        output = self.model(batch)
        loss = output.square().mean()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(output.abs().mean())
        first.step()
        second.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:4], lr=0.1), torch.optim.Adam(parameters[4:], lr=0.01)


class AccumulatesByHand(Logged):
    """Manual optimization: steps after every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.model(batch).square().mean()
        self.manual_backward(loss)
        self.log("loss", loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def lbfgs():
    """Its optimizer calls the closure several times in every step."""
    return Logged(optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=4))


def quiet(**settings):
    """A monitor that prints no table."""
    return StepMonitor(table=False, **settings)


def read(logger):
    """The rows of a CSV logger, in their order, without what is empty."""
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def rows_of(module, folder, callbacks=None, data=None, **settings):
    """Fit a module, and read the rows that a CSV logger has written."""
    logger = CSVLogger(folder)
    loop = trainer([quiet()] if callbacks is None else callbacks, logger=logger, **settings)
    loop.fit(module, batches(6) if data is None else data)
    return read(logger)


def layout(rows):
    """What every row holds, after its step; all metrics that the monitor logs of a plain step count as one."""
    return [(int(row["step"]), _names(row)) for row in rows]


def _names(row):
    names = row.keys() - {"step"}
    if names >= METRICS:
        names = names - METRICS | {"monitor"}
    return " ".join(sorted(names))


def monitored(rows):
    """Rows of the monitor."""
    return [row for row in rows if "time/step_ms" in row]


def samples(row):
    """Samples in a step, from their rate."""
    return round(row["time/samples_per_s"] * row["time/step_ms"] / 1e3, 6)


def leftovers(loop, module):
    """What the monitor has put into others."""
    owners = {"strategy": loop.strategy, "profiler": loop.profiler, "connector": loop._logger_connector}
    owners |= {f"logger {i}": logger for i, logger in enumerate(loop.loggers)}
    found = [
        f"{owner}.{name}"
        for owner, value in owners.items()
        for name, attribute in vars(value).items()
        if isinstance(attribute, functools.partial)
    ]
    hooks = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return sorted(found) + ["hooks"] * hooks + ["watcher"] * watched()


#: What `leftovers` finds at least while a run with one logger goes on.
WHILE_IT_RUNS = {
    *(f"strategy.{name}" for name in ("training_step", "backward", "optimizer_step", "batch_to_device")),
    *("profiler.start", "profiler.stop", "connector.log_metrics", "hooks", "watcher"),
}


class After(pl.Callback):
    """Calls a function at the end of every batch; behind the monitor in the list, it comes after it."""

    def __init__(self, function):
        self.function = function

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.function(trainer, pl_module, batch_idx)
