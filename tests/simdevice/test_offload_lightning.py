"""Lightning with both doors to offload, on the device: the same losses and weights, and the curves."""

import contextlib
import copy
import csv
import gc

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_support import SimAccelerator, precision_plugin
from scenarios import DEVICE, Model
from schedules import SCHEDULES
from torch.nn import functional

from lightning_ckpt import ActivationCheckpointing, OffloadOptions, OffloadStrategy, StepMonitor

pytestmark = pytest.mark.usefixtures("sim")
SMALL = {"min_bytes": 64}


class Training(pl.LightningModule):
    """A small language model, and everything it went through."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()
        self.losses = []

    def loss(self, batch):
        return functional.cross_entropy(self.model(batch).flatten(0, 1).float(), batch.flatten())

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Training):
    """Two optimizers, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach())

    def configure_optimizers(self):
        half = len(list(self.parameters())) // 2
        groups = list(self.parameters())[:half], list(self.parameters())[half:]
        return [torch.optim.SGD(group, lr=0.1) for group in groups]


class Lbfgs(Training):
    """A closure that is called several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Skipping(Training):
    """Some batches have no backward."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss if index % 2 else None


class Retaining(Training):
    """The graph is kept, and gone through twice."""

    def backward(self, loss):
        loss.backward(retain_graph=True)
        loss.backward()


def strategy(**options):
    return OffloadStrategy(device=DEVICE, **{**SMALL, **options})


def fit(module, strategy=None, callbacks=(), precision="32-true", rows=None, batch_size=2, **settings):
    generator = torch.Generator().manual_seed(1)
    rows = rows or [torch.randint(0, 40, (8,), generator=generator) for _ in range(8)]
    batches = torch.utils.data.DataLoader(rows, batch_size=batch_size)
    settings = {"max_epochs": 1, "limit_val_batches": 1, "logger": False, **settings}
    trainer = pl.Trainer(
        accelerator=SimAccelerator(),
        devices=1,
        strategy=strategy or SingleDeviceStrategy(device=DEVICE),
        plugins=[precision_plugin(precision)],
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    torch.manual_seed(0)
    trainer.fit(module, batches, batches)
    return module


def assert_same(one, other):
    assert torch.equal(torch.stack(one.losses).cpu(), torch.stack(other.losses).cpu())
    weights, others = one.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name].cpu(), others[name].cpu()) for name in weights)


WAYS = {
    "strategy": lambda: {"strategy": strategy(move="all")},
    "strategy, what the link hides": lambda: {"strategy": strategy()},
    "callback": lambda: {"callbacks": [ActivationCheckpointing(offload=OffloadOptions(**SMALL))]},
    "callback with a policy": lambda: {
        "callbacks": [ActivationCheckpointing(offload=OffloadOptions(**SMALL), policy="matmul")]
    },
    "both": lambda: {
        "strategy": strategy(move="all"),
        "callbacks": [ActivationCheckpointing(every_n_layers=2, offload=True)],
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
def test_training_is_that_of_the_plain_run(sim, way, policy, seed):
    expected = fit(Training())
    sim.configure(policy, seed)
    assert_same(fit(Training(), **WAYS[way]()), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_every_precision(sim, way, precision):
    expected = fit(Training(), precision=precision)
    sim.configure("random", 1)
    assert_same(fit(Training(), precision=precision, **WAYS[way]()), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [Manual, Lbfgs, Skipping, Retaining])
def test_every_way_to_optimize(sim, way, make):
    expected = fit(make())
    sim.configure("random", 2)
    assert_same(fit(make(), **WAYS[way]()), expected)


@pytest.mark.parametrize("way", WAYS)
def test_accumulation_clipping_and_validation_in_between(sim, way):
    settings = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "val_check_interval": 2, "max_epochs": 2}
    expected = fit(Training(), **settings)
    sim.configure("copy_first")
    assert_same(fit(Training(), **settings, **WAYS[way]()), expected)


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_and_another_fit(way):
    class Failing(Training):
        failing = True

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if self.failing and index == 2:
                raise ZeroDivisionError
            return loss

    def run(**settings):
        module = Failing()
        with contextlib.suppress(ZeroDivisionError):
            fit(module, **settings)
        module.failing = False
        again = {key: copy.deepcopy(value) if key == "callbacks" else value for key, value in WAYS[way]().items()}
        return fit(module, **(again if settings else {}))

    assert_same(run(**WAYS[way]()), run())


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_on_the_model_and_on_the_device(way):
    def attributes(module):
        return {name: set(vars(part)) for name, part in module.named_modules()}

    module = fit(Training(), **WAYS[way]())
    assert attributes(module) == attributes(fit(Training()))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    settings = WAYS[way]()
    fit(module, **settings)
    engines = [settings.get("strategy"), *settings.get("callbacks", [])]
    assert all(getattr(owner, "offload_engine", None) is None for owner in engines)


@pytest.mark.parametrize("way", WAYS)
def test_the_curves(tmp_path, way):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fit(Training(), logger=logger, **{"callbacks": [StepMonitor()], **WAYS[way]()})
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["time/step_ms"]]
    assert len(rows) == 4
    assert not any(name.startswith("offload/") for name in rows[0])
    for row in rows:
        assert float(row["memory/offloaded_MiB"]) > 0
        assert float(row["time/copy_wait_ms"]) >= 0


@pytest.mark.parametrize("way", WAYS)
def test_the_engines_own_figures(way):
    settings = WAYS[way]()
    owners = [settings["strategy"]] if "strategy" in settings else settings["callbacks"]
    figures = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args):
            [owner] = owners
            taken = owner.offload_engine.take_statistics()
            torch.accelerator.synchronize()
            figures.append(taken.figures())

    fit(Training(), **{**settings, "callbacks": [*settings.get("callbacks", []), Look()]})
    assert len(figures) == 4
    for figure in figures:
        assert figure["out_MiB"] > 0
        assert figure["out_MiB"] >= figure["in_MiB"]
        assert figure["resident_MiB"] > 0
        assert 0 < figure["host_MiB"] <= figure["host_locked_MiB"]
    assert figures[-1]["late_allocations"] == 0


def test_saved_memory_is_what_is_on_the_device(tmp_path):
    resident = []

    class Look(pl.Callback):
        def on_before_backward(self, trainer, module, loss):
            engine = getattr(trainer.strategy, "offload_engine", None)
            resident.append(0 if engine is None else engine.resident_bytes / 2**20)

    def saved(name, **settings):
        logger = CSVLogger(tmp_path, name=name, flush_logs_every_n_steps=1)
        fit(
            Training(),
            logger=logger,
            **{**settings, "callbacks": [*settings.get("callbacks", [StepMonitor()]), Look()]},
        )
        with open(f"{logger.log_dir}/metrics.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["memory/saved_MiB"]]
        return float(rows[-1]["memory/saved_MiB"])

    plain = saved("plain")
    moved = saved("moved", strategy=strategy(move="all"))
    assert moved < plain
    small = moved - resident[-1]  # tensors too small to travel are saved, and not counted there
    assert 0 <= small < 0.02
    recomputed = saved("recomputed", callbacks=[ActivationCheckpointing()])
    options = OffloadOptions(**SMALL, keep_last=0, max_inflight_bytes=0)
    both = saved("both", callbacks=[ActivationCheckpointing(offload=options)])
    assert both < recomputed


@pytest.mark.parametrize("way", ["strategy", "strategy, what the link hides", "callback"])
def test_a_model_that_does_not_fit_trains(sim, way):
    class Long(Training):
        def __init__(self):
            super().__init__()
            self.model = Model(layers=10, width=64, length=64)

    def train(**settings):
        module = Long()
        gc.collect()  # what earlier fits have left in cycles would count
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randint(0, 40, (64,), generator=generator) for _ in range(24)]
        return fit(module, rows=rows, batch_size=8, limit_val_batches=0, **settings)

    sim.configure("copy_first")
    expected = train()
    plain = torch.accelerator.max_memory_allocated()
    train(**WAYS[way]())
    needed = torch.accelerator.max_memory_allocated()
    assert needed < 0.8 * plain
    torch.accelerator.empty_cache()
    sim.set_limit((needed + plain) // 2)
    with pytest.raises(torch.OutOfMemoryError):
        train()
    assert_same(train(**WAYS[way]()), expected)


def test_one_engine_serves_both_doors_and_nothing_is_moved_twice(tmp_path, recwarn):
    offloading = strategy(move="all", keep_last=0)
    callback = ActivationCheckpointing(every_n_layers=2, offload=OffloadOptions(keep_last=5))
    engines = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args):
            engines.append((offloading.offload_engine, callback.offload_engine))

    fit(Training(), strategy=offloading, callbacks=[callback, Look()])
    assert all(engine is not None and other is None for engine, other in engines)
    assert any("Give the options to the strategy" in str(warning.message) for warning in recwarn)


def test_a_device_that_shares_its_memory_with_the_host_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(torch.get_device_module("sim").get_device_properties(), "is_integrated", True, raising=False)
    expected = fit(Training())
    with caplog.at_level("INFO"):
        assert_same(fit(Training(), strategy=strategy()), expected)
        assert_same(fit(Training(), callbacks=[ActivationCheckpointing(offload=True)]), expected)
    said = [record.message for record in caplog.records if "shares its memory" in record.message]
    assert len(said) == 2


def test_what_offload_does_is_said_once(caplog):
    with caplog.at_level("INFO"):
        fit(Training(), strategy=strategy(), max_epochs=3)
    said = [record.message for record in caplog.records if "travel to the host and" in record.message]
    assert len(said) == 1
    assert said[0].startswith("OffloadStrategy: in a step, ")


def test_by_its_name(sim):
    sim.configure("random", 4)
    assert_same(fit(Training(), strategy="ckpt_offload"), fit(Training()))


def test_a_model_that_is_compiled_as_one_piece_is_reported(recwarn):
    module = Training()
    module.model.compile(backend="aot_eager")
    fit(module, strategy=strategy())
    assert any("compiled as one piece" in str(warning.message) for warning in recwarn)


def test_layers_that_are_recomputed_in_compiled_code_are_reported(recwarn):
    module = Training()
    for layer in module.model.layers:
        layer.dropout.p = 0.0
        layer.compile(backend="aot_eager")
    fit(module, callbacks=[ActivationCheckpointing(offload=OffloadOptions(**SMALL))])
    assert any("run in compiled code" in str(warning.message) for warning in recwarn)
