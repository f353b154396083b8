"""A memory budget in runs that are not simple: equal to the plain run, or an error that says what to do."""

import random
import re
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.planning import BudgetError
from lightning_ckpt.planning.make import make_plan
from lightning_ckpt.planning.treatment import Treatment
from lightning_ckpt.selection import SelectionError
from tests.monitor.support import read
from tests.planning.models import Mlp
from tests.support import Run, Training, assert_equal, fit, heard, trainer
from tests.treatments import note_gradients

WIDTH = 32


def stack(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Mlp(WIDTH, 4 * WIDTH) for _ in range(layers)])


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Module(Training):
    """A stack, with AdamW."""

    def __init__(self, model: nn.Module | None = None, **settings: Any) -> None:
        super().__init__(stack() if model is None else model, **{"optimizer": adamw, **settings})


def rows(*counts: int, make: Callable[[Tensor], Any] = lambda x: x) -> DataLoader[Any]:
    """Batches with these numbers of rows."""
    generator = torch.Generator().manual_seed(3)
    made = [make(torch.randn(count, WIDTH, generator=generator)) for count in counts]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


ALIKE = [128] * 8


@dataclass
class Result:
    run: Run
    said: list[str]
    callback: ActivationCheckpointing
    module: pl.LightningModule
    plans: list[Any]

    @property
    def own_words(self) -> list[str]:
        return [line for line in self.said if line.startswith("ActivationCheckpointing")]


class Watch(pl.Callback):
    """Plans of every batch; names of layers that are treated."""

    def __init__(self, callback: ActivationCheckpointing) -> None:
        self.callback = callback
        self.plans: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        keeper = self.callback.budget_keeper
        self.plans.append(None if keeper is None else keeper.plan)


def leftovers(module: pl.LightningModule) -> list[str]:
    """What is still attached."""
    found = [name for name, part in module.named_modules() if "forward" in vars(part)]
    return found + [name for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks]


def budgeted(
    make_module: Callable[[], pl.LightningModule] = Module,
    data: Any = None,
    budget: float | str = 0.3,
    settings: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Result:
    """Fit under a budget."""
    callback = ActivationCheckpointing(memory_budget=budget, **{"monitor": False, **options})
    watch, said, made = Watch(callback), list[str](), list[pl.LightningModule]()
    chosen = settings()
    callbacks = [callback, watch, *chosen.pop("callbacks", [])]
    with heard(said):
        run = fit(lambda: made.append(make_module()) or made[0], data or rows(*ALIKE), callbacks, **chosen)
    return Result(run, said, callback, made[0], watch.plans)


def assert_exact(
    make_module: Callable[[], pl.LightningModule] = Module,
    data: Any = None,
    settings: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Result:
    """Equal to the plain run; nothing said twice, nothing left behind."""
    chosen = settings()
    plain = fit(make_module, data or rows(*ALIKE), chosen.pop("callbacks", []), **chosen)
    result = budgeted(make_module, data, settings=settings, **options)
    assert_equal(result.run, plain)
    assert len(result.own_words) == len(set(result.own_words)), result.own_words
    assert leftovers(result.module) == []
    return result


# ---------------------------------------------------------------- shapes


GROWING = {
    "grows": [64, 64, 64, 64, 128, 128, 256, 256],
    "shrinks": [256, 256, 64, 64, 32, 32, 256, 256],
    "grows while measured": [64, 64, 96, 128, 160, 192, 224, 256],
    "first is small": [8, 256, 256, 256, 256, 256, 256, 256],
    "one row": [128, 128, 128, 128, 1, 1, 128, 128],
}


@pytest.mark.parametrize("counts", GROWING.values(), ids=GROWING)
def test_shapes(counts, tmp_path):
    budget = "1300KiB"
    result = assert_exact(
        data=rows(*counts), budget=budget, monitor=True, settings=lambda: {"logger": CSVLogger(tmp_path)}
    )
    assert not any("above the budget" in line or "below the" in line for line in result.own_words), result.own_words
    assert max(counts) < 256 or set(result.plans[-1].assignment.values()) != {Treatment.KEEP}
    for row in read_last(tmp_path):
        if "memory/peak_MiB" in row and row["step"] > 1:
            assert row["memory/peak_MiB"] <= 1300 / 1024 * 1.001, row


def read_last(folder: Any) -> list[Any]:
    logger = CSVLogger(folder)
    logger._version = logger.version - 1
    return read(logger)


def test_a_batch_that_no_plan_can_hold_is_said_once_and_trained():
    result = assert_exact(data=rows(64, 64, 64, 64, 64, 64, 1024, 1024, 2048), budget="1000KiB")
    assert sum("Training goes on with the least memory" in line for line in result.own_words) in (1, 2)


class Pairwise(nn.Module):
    """Every word with every other one: what it saves grows with the square of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x + (x @ x.transpose(1, 2) / 64).softmax(-1) @ x


def test_batches_of_the_same_bytes_that_need_more(tmp_path):
    shapes = [(16, 8)] * 6 + [(1, 128)] * 4
    data = [torch.randn(*shape, WIDTH) for shape in shapes]
    result = assert_exact(
        lambda: Module(nn.Sequential(*[Pairwise() for _ in range(4)])),
        data=DataLoader(data, batch_size=None),  # type: ignore[arg-type]
        budget="450KiB",
        monitor=True,
        settings=lambda: {"logger": CSVLogger(tmp_path)},
    )
    for row in read_last(tmp_path):
        assert row.get("memory/peak_MiB", 0.0) <= 450 / 1024 * 1.001, (row, result.own_words)


# ---------------------------------------------------------------- Trainers


class Validated(Module):
    """Validates with its layers, in eval mode, in the middle of an epoch."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.model(batch).square().mean())

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch)

    def val_dataloader(self) -> DataLoader[Any]:
        return rows(256, 512)


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulates": {"accumulate_grad_batches": 2},
    "accumulates, odd": {"accumulate_grad_batches": 3, "max_epochs": 2},
    "clips": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "bf16 throughout": {"precision": "bf16-true"},
    "double": {"precision": "64-true"},
    "epochs": {"max_epochs": 4, "limit_train_batches": 2},
    "one batch": {"limit_train_batches": 1},
    "fast_dev_run": {"fast_dev_run": True},
    "barebones": {"barebones": True, "logger": None},
    "anomaly": {"detect_anomaly": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_trainers(settings):
    make = Module if settings.get("precision") != "64-true" else Double
    assert_exact(make, settings=lambda: dict(settings))


class Double(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch.double()).square().mean()


def test_validation_in_between():
    assert_exact(Validated, settings=lambda: {"val_check_interval": 2, "num_sanity_val_steps": 1})


def test_monitor_without_a_logger():
    result = assert_exact(monitor=True)
    assert any("final plan" in line or "the peak is" in line for line in result.own_words)


def test_two_fits_with_one_callback():
    callback = ActivationCheckpointing(memory_budget=0.3, monitor=False)
    plain, runs = fit(Module, rows(*ALIKE)), []
    for _ in range(2):
        runs.append(fit(Module, rows(*ALIKE), [callback]))
        assert callback.budget_keeper is None
    for run in runs:
        assert_equal(run, plain)


class Fails(Module):
    """Fails once, in a given batch."""

    fails_in = 4

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.fails_in:
            raise RuntimeError("once")
        return loss


@pytest.mark.parametrize("batch", [0, 2, 3, 4])  # a rehearsal, the step that is measured, the one that is timed
def test_exception_then_fit_again(batch):
    callback = ActivationCheckpointing(memory_budget=0.3, monitor=False)
    torch.manual_seed(0)
    module = Fails()
    module.fails_in = batch
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="once"):
        trainer([callback]).fit(module, rows(*ALIKE))
    assert leftovers(module) == []
    assert callback.budget_keeper is None
    module.load_state_dict(before)
    module.fails_in = -1
    assert_equal(fit(lambda: module, rows(*ALIKE), [callback]), fit(Module, rows(*ALIKE)))


def test_resume_from_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "half.ckpt"
    torch.manual_seed(0)
    loop = trainer(max_epochs=1)
    loop.fit(Module(), rows(*ALIKE))
    loop.save_checkpoint(checkpoint)
    results = []
    for callbacks in ([], [ActivationCheckpointing(memory_budget=0.3, monitor=False)]):
        run = Run()
        torch.manual_seed(0)
        module = Module()
        torch.manual_seed(1)
        trainer([*callbacks, run], max_epochs=2).fit(module, rows(*ALIKE), ckpt_path=checkpoint)
        results.append(run)
    assert_equal(results[1], results[0])


def test_without_training_there_is_no_plan():
    callback = ActivationCheckpointing(memory_budget="1B", monitor=False)
    module = Validated()
    trainer([callback]).validate(module, verbose=False)
    trainer([callback]).predict(module, rows(8), return_predictions=False)
    assert leftovers(module) == []


@pytest.mark.parametrize("finder", ["batch size", "learning rate"])
def test_finders(finder):
    class Sized(Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.lr = 2, 0.1

        def train_dataloader(self) -> DataLoader[Any]:
            generator = torch.Generator().manual_seed(3)
            return DataLoader(torch.randn(64, WIDTH, generator=generator), batch_size=self.batch_size)  # type: ignore[arg-type]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def settings() -> dict[str, Any]:
        if finder == "batch size":
            return {"callbacks": [BatchSizeFinder(mode="power", max_trials=2, steps_per_trial=2)]}
        return {"callbacks": [LearningRateFinder(num_training_steps=5, early_stop_threshold=None)]}

    found = []
    for with_budget in (False, True):
        callbacks = [ActivationCheckpointing(memory_budget=0.3, monitor=False)] * with_budget
        torch.manual_seed(0)
        module, run = Sized(), Run()
        torch.manual_seed(1)
        trainer([*settings()["callbacks"], *callbacks, run], enable_checkpointing=False).fit(module)
        found.append((run, module.batch_size, module.lr))
    assert found[0][1:] == found[1][1:]
    assert_equal(found[1][0], found[0][0])


# ---------------------------------------------------------------- modules


class ByHand(Module):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.model(batch).square().mean())
        note_gradients(self, optimizer)
        optimizer.step()


class TwoByHand(Module):
    """Manual optimization, two optimizers, two backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for i, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.model(batch + i).square().mean())
            note_gradients(self, optimizer)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:6], lr=0.1), torch.optim.AdamW(parameters[6:])


class LogsAndMeasures(Module):
    """Logs in all ways, and has metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.all = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        output = self.model(batch)
        loss = output.square().mean()
        self.mean(loss.detach())
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        self.log_dict({"mean": self.mean, "largest": output.max()})
        self.log_dict(self.all(output, batch), on_step=True, on_epoch=True)
        return {"loss": loss, "output": output.detach()}


CLASSES = {"task": "multiclass", "num_classes": WIDTH}

# Metrics that read numbers of tensors, and so cannot be computed in a rehearsal; and one that can.
METRICS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor], Any]]] = {
    "mean": (torchmetrics.MeanMetric, lambda metric, output, words: metric(output.mean())),
    "updated, then computed": (
        lambda: torchmetrics.ConfusionMatrix(**CLASSES),
        lambda metric, output, words: (metric.update(output, words), metric.compute().trace())[1],
    ),
    "updated only": (
        lambda: torchmetrics.AUROC(**CLASSES, thresholds=8),
        lambda metric, output, words: metric.update(output, words),
    ),
    "several": (
        lambda: torchmetrics.MetricCollection(
            [torchmetrics.Accuracy(**CLASSES), torchmetrics.CohenKappa(**CLASSES), torchmetrics.F1Score(**CLASSES)]
        ),
        lambda metric, output, words: metric(output, words),
    ),
    "tracked": (
        lambda: torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), window=3),
        lambda metric, output, words: metric(output.mean()),
    ),
    "computable": (
        lambda: torchmetrics.Accuracy(**CLASSES),
        lambda metric, output, words: metric(output, words),
    ),
}


class Measured(Module):
    """Has a metric in its step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make, self.use = METRICS[name]
        self.metric = make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.model(batch)
        value = self.use(self.metric, output.detach(), batch.argmax(-1))
        if isinstance(value, dict):
            self.log_dict(value)
        elif value is not None:
            self.log("value", value)
        return output.square().mean()


@pytest.mark.parametrize("name", METRICS)
def test_a_step_with_metrics_is_rehearsed(name):
    result = assert_exact(lambda: Measured(name))
    assert result.plans[0] is not None, result.own_words
    plain: list[Measured] = []
    fit(lambda: plain.append(Measured(name)) or plain[0], rows(*ALIKE))
    assert set(vars(result.module.metric)) == set(vars(plain[0].metric)), "something of a rehearsal is left"
    values = [each.metric.compute() for each in (result.module, plain[0])]
    torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)


def test_an_error_of_a_metric_is_not_hidden():
    class Wrong(Measured):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.metric(self.model(batch))
            return super().training_step(batch, batch_idx)

    with pytest.raises(TypeError, match="target"):
        budgeted(lambda: Wrong("several"))


class EndsEpoch(Validated):
    """Ends an epoch in the middle, before a step is made of its batch."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.current_epoch % 3 + 1 else None


def test_epochs_that_end_before_their_time():
    modes = []

    class Modes(pl.Callback):
        def on_validation_start(self, *_: Any) -> None:
            modes.append(len(_get_current_dispatch_mode_stack()))

    assert_exact(EndsEpoch, settings=lambda: {"max_epochs": 6, "callbacks": [Modes()]})
    assert not any(modes), f"something watches validation: {modes}"
    assert _get_current_dispatch_mode_stack() == []


class Restless(Module):
    """Counts, collects, and draws from every stream."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.drawn = 0, [], []
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ema", torch.zeros(WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        self.seen.append(len(batch))
        self.drawn.append((random.random(), float(numpy.random.rand())))
        self.count += 1
        scale = 1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand())
        output = self.model(batch * scale + torch.rand_like(batch))
        self.ema.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output.square().mean()

    def on_train_start(self) -> None:
        random.seed(0)
        numpy.random.seed(0)

    def on_train_end(self) -> None:
        assert self.calls == len(self.seen) == len(self.drawn) == int(self.count)


class Shared(nn.Module):
    """One layer runs three times, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(WIDTH, 4 * WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 0, 1, 0):
            x = self.layers[i](x)
        return x


class AlwaysOneLayer(nn.Module):
    """Only one of its layers is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(WIDTH, 4 * WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](x)


class NoLayerRuns(AlwaysOneLayer):
    """None of its layers is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x)


class Alternating(nn.Module):
    """Other layers in every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(WIDTH, 4 * WIDTH) for _ in range(4)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers[self.calls % 2 :: 2]:
            x = layer(x)
        return x


def frozen() -> pl.LightningModule:
    module = Module(optimizer=lambda parameters: adamw([each for each in parameters if each.requires_grad]))
    module.model[:3].requires_grad_(False)
    return module


class Late(Module):
    """Builds its model when it is configured."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            self.model = stack()


class Skips(Module):
    """Skips a batch now and then."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class SkipsFirst(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if batch_idx else None


class ReadsLoss(Module):
    """Reads its loss in every step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


class AsksTrainer(Module):
    """Uses what the Trainer knows, and its optimizer's learning rate."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        return super().training_step(batch, batch_idx) * (1 + rate + self.global_step + self.current_epoch)


class Lbfgs(Module):
    """Its optimizer runs the closure several times."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))


class WithScheduler(Module):
    """A scheduler wraps its optimizer's step."""

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _decay(optimizer), "interval": "step"}}


def _decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


class Norms(Module):
    """Layers with running statistics."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(4)]
        super().__init__(nn.Sequential(*layers))


class Tied(Module):
    """Two layers of it share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.model[3].up.weight = self.model[1].up.weight


class StepOfItsOwn(Module):
    """Replaced `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)


class NoIndex(Module):
    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(self.model, batch)


MODULES: dict[str, Callable[[], pl.LightningModule]] = {
    "manual": ByHand,
    "manual, two optimizers": TwoByHand,
    "logs and measures": LogsAndMeasures,
    "restless": Restless,
    "shared": lambda: Module(Shared()),
    "one of three layers runs": lambda: Module(AlwaysOneLayer()),
    "other layers every time": lambda: Module(Alternating()),
    "frozen": frozen,
    "late": Late,
    "skips": Skips,
    "skips the first": SkipsFirst,
    "reads its loss": ReadsLoss,
    "asks the Trainer": AsksTrainer,
    "LBFGS": Lbfgs,
    "scheduler": WithScheduler,
    "BatchNorm": Norms,
    "tied": Tied,
    "optimizer_step": StepOfItsOwn,
    "no index": NoIndex,
}


@pytest.mark.parametrize("make_module", MODULES.values(), ids=MODULES)
def test_modules(make_module):
    assert_exact(make_module)


@pytest.mark.parametrize("make_step", [Module, lambda model: ReadsLoss(model)], ids=["rehearsed", "measured"])
def test_a_model_whose_layers_never_run_says_which_should_be_named(make_step):
    said = []
    try:
        said = assert_exact(lambda: make_step(NoLayerRuns())).own_words
    except ValueError as error:
        said = [str(error)]
    assert any("`layers=`" in line for line in said), said


def test_restless_module_is_as_after_the_plain_run():
    plain, made = Restless(), []
    torch.manual_seed(0)
    trainer().fit(plain, rows(*ALIKE))
    result = budgeted(Restless)
    made.append(result.module)
    assert (made[0].calls, made[0].seen, made[0].drawn) == (plain.calls, plain.seen, plain.drawn)


@dataclass
class Sample:
    x: Tensor
    name: str = "a"


Pair = namedtuple("Pair", ["x", "name"])

BATCHES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Sample, lambda batch: batch.x),
    "namedtuple": (lambda x: Pair(x, "a"), lambda batch: batch.x),
    "nested": (lambda x: {"a": [(x, None)], "n": 3}, lambda batch: batch["a"][0][0]),
}


@pytest.mark.parametrize(("make", "find"), BATCHES.values(), ids=BATCHES)
def test_batches_of_many_kinds_that_grow(make, find):
    result = assert_exact(
        lambda: Module(loss=lambda model, batch: model(find(batch)).square().mean()),
        data=rows(*GROWING["grows"], make=make),
        budget="1300KiB",
    )
    assert len({tuple(plan.assignment.values()) for plan in result.plans}) > 1, "no plan for larger batches"


def test_a_longer_batch_that_takes_more_than_it_was_scaled_to_is_planned_for_again(tmp_path):
    shapes = [(4, 64)] * 9 + [(4, 128)] * 8
    result = assert_exact(
        lambda: ReadsLoss(nn.Sequential(*[Pairwise() for _ in range(6)])),
        data=DataLoader([torch.randn(*shape, WIDTH) for shape in shapes], batch_size=None),  # type: ignore[arg-type]
        budget="1400KiB",
        monitor=True,
        settings=lambda: {"logger": CSVLogger(tmp_path)},
    )
    assert sum("after a change of the step the peak is 1.9 MiB, above" in line for line in result.own_words) == 1
    peaks = {int(row["step"]): row["memory/peak_MiB"] * 1024 for row in read_last(tmp_path)}
    assert peaks[9] > 1400  # twice the length is more than twice the bytes
    planned = result.plans[-1].peak_bytes / 1024
    assert all(0.97 * planned <= peaks[step] <= planned <= 1400 for step in range(12, 17)), (peaks, planned)


class Embeds(Module):
    """Batches are numbers of words; the model has no input with a gradient."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(16, WIDTH), *stack()[1:]))


def test_words():
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(0, 16, (4, 32), generator=generator) for _ in range(8)]
    assert_exact(Embeds, data=DataLoader(words, batch_size=None))  # type: ignore[arg-type]


# ---------------------------------------------------------------- options


OPTIONS: dict[str, dict[str, Any]] = {
    "class": {"layers": Mlp},
    "glob": {"layers": "model.*.up"},
    "predicate": {"check_fn": lambda module: isinstance(module, nn.Linear)},
    "one layer": {"layers": "model.2"},
    "whole model": {"layers": "model"},
    "verify": {"verify": "always"},
    "policy": {"policy": ["matmul", "aten.gelu"]},
    "offload": {"offload": True},
    "auto": {"budget": "auto"},
    "percent": {"budget": "80%"},
    "all kept": {"budget": 1.0},
    "number": {"budget": 1_200_000},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    assert_exact(**options)


def test_offload_that_moves_nothing_is_said_once():
    said = assert_exact(offload=True).own_words
    assert sum("nothing is moved" in line for line in said) == 1


def test_every_n_layers_is_refused():
    with pytest.raises(SelectionError, match=r"`every_n_layers=2` has no effect with `memory_budget`"):
        ActivationCheckpointing(every_n_layers=2, memory_budget="1GiB")


def test_switched_off():
    result = budgeted(enabled=False)
    assert_equal(result.run, fit(Module, rows(*ALIKE)))
    assert set(result.plans) == {None}


def test_a_plan_that_was_made_before(tmp_path):
    torch.manual_seed(0)
    plan = make_plan(Module(), torch.zeros(128, WIDTH), 0.3)
    assert set(plan.assignment.values()) != {Treatment.KEEP}
    callback, logger = ActivationCheckpointing(plan=plan), CSVLogger(tmp_path)
    run = fit(Module, rows(*ALIKE), [callback], logger=logger, log_every_n_steps=1)
    assert_equal(run, fit(Module, rows(*ALIKE)))
    peaks = {row["memory/peak_MiB"] * 2**20 for row in read(logger) if row["step"] > 2 and "memory/peak_MiB" in row}
    assert peaks == {plan.peak_bytes}


@pytest.mark.parametrize("other", [{"memory_budget": 0.5}, {}], ids=["a budget", "no budget"])
def test_two_callbacks_with_layers_of_their_own(other):
    def settings() -> dict[str, Any]:
        return {"callbacks": [ActivationCheckpointing(layers="model.1", monitor=False, **other)]}

    got = budgeted(settings=settings, layers=["model.2", "model.3"])
    assert_equal(got.run, fit(Module, rows(*ALIKE)))
    assert leftovers(got.module) == []


# ---------------------------------------------------------------- budgets that cannot be met


def test_below_the_floor_the_error_says_size_cause_and_cure():
    with pytest.raises(BudgetError) as caught:
        budgeted(budget="300KiB")
    text = str(caught.value)
    assert text.startswith("`memory_budget='300KiB'`: the budget of 300.0 KiB is below the ")
    found = re.search(r"below the ([\d.]+) KiB that the step needs whatever is recomputed, in (.+?)\. (.+)", text)
    assert found is not None, text
    assert "would help" in found[3]
    assert_exact(budget=f"{float(found[1]) + 0.1:.1f}KiB")


def test_below_the_floor_without_a_rehearsal():
    with pytest.raises(BudgetError, match=r"^`memory_budget='300KiB'`: the budget of 300.0 KiB is below the "):
        budgeted(ReadsLoss, budget="300KiB")


def test_the_optimizer_takes_more_than_the_budget():
    with pytest.raises(BudgetError, match=r"in the optimizer's step\. .*optimizer with less state"):
        budgeted(data=rows(*[1] * 8), budget="300KiB")


# ---------------------------------------------------------------- compiled layers


@pytest.mark.slow
def test_layers_that_are_compiled():
    def make() -> pl.LightningModule:
        module = Module()
        for layer in module.model[1:]:
            layer.dropout.p = 0.0
            layer.compile(backend="aot_eager")
        return module

    assert_exact(make)
