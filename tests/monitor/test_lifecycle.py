"""A monitored training is the plain one, and once it is over, however it ends, nothing of the monitor is left."""

import copy
import gc
import time
import weakref

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.monitor.support import (
    WHILE_IT_RUNS,
    AccumulatesByHand,
    Logged,
    TwoOptimizers,
    Validated,
    layout,
    lbfgs,
    leftovers,
    monitored,
    quiet,
    read,
    rows_of,
)
from tests.support import Training, assert_equal, batches, blocks, fit, trainer

# ---------------------------------------------------------------- the same training


@pytest.mark.parametrize("callback", [quiet, ActivationCheckpointing])
@pytest.mark.parametrize("make", [Training, TwoOptimizers, AccumulatesByHand, lbfgs])
def test_monitored_training_is_that_of_the_plain_run(make, callback, tmp_path):
    assert_equal(fit(make, callbacks=[callback()], logger=CSVLogger(tmp_path)), fit(make))


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01},
        {"precision": "bf16-mixed"},
        {"max_epochs": 2, "limit_train_batches": 2},
        {"fast_dev_run": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_it_is_that_of_the_plain_run_with_settings_of_trainer_and_monitor(settings, tmp_path):
    plain = fit(Training, **settings)
    monitor = quiet(every_n_steps=2, flops=True, progress_bar=True)
    assert_equal(fit(Training, callbacks=[monitor], logger=CSVLogger(tmp_path), **settings), plain)


def make_averaging():
    class Every(WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return step_idx is not None

    return Every()


@pytest.mark.parametrize("make", [lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1), make_averaging])
def test_averaging_of_weights_is_that_of_the_plain_run(make, tmp_path):
    def make_module():
        return Validated(torch.nn.Sequential(blocks(1), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)))

    def averaged(callbacks, **settings):
        module = None

        def remember():
            nonlocal module
            module = make_module()
            return module

        run = fit(remember, batches(3), [make(), *callbacks], max_epochs=3, **settings)
        run.state = copy.deepcopy(module.state_dict())  # after the average has taken the place of the weights
        return run

    logger = CSVLogger(tmp_path)
    assert_equal(averaged([quiet()], logger=logger, log_every_n_steps=1), averaged([]))
    rows = read(logger)
    assert [int(row["step"]) for row in monitored(rows)] == [int(row["step"]) for row in rows if "loss" in row]
    assert [int(row["step"]) for row in monitored(rows)][:6] == list(range(6))


def test_a_torch_func_transform_outside_of_layers_works_monitored(tmp_path):
    class Physics(Logged):
        def training_step(self, batch, batch_idx):
            def energy(x):
                return self.model[0](x).square().sum()

            return torch.func.grad(energy)(batch).square().mean() + super().training_step(batch, batch_idx)

    assert len(rows_of(Physics(), tmp_path, [ActivationCheckpointing()])) == 6


# ---------------------------------------------------------------- the end of it


class Breaks(Validated):
    """Asks what the monitor has put in place, and fails in one of its hooks."""

    def __init__(self, error, where):
        super().__init__()
        self.error, self.where, self.found = error, where, []

    def _maybe(self, where, batch_idx=2):
        if self.where == where and batch_idx == 2:
            self.found = leftovers(self.trainer, self)
            raise self.error

    def on_train_batch_start(self, batch, batch_idx):
        self._maybe("batch start", batch_idx)

    def training_step(self, batch, batch_idx):
        self._maybe("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self._maybe("backward", self.trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._maybe("batch end", batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.trainer.fit_loop.batch_idx == 2:
            self._maybe("validation")

    def on_train_epoch_end(self):
        self._maybe("epoch end")

    def on_train_end(self):
        if self.where == "train end":
            raise self.error


@pytest.mark.parametrize(
    ("where", "steps"),
    [
        ("batch start", 2),
        ("training_step", 2),
        ("backward", 2),
        ("batch end", 3),
        ("validation", 3),
        ("epoch end", 3),
        ("train end", 3),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_rows_so_far_are_written_and_nothing_is_left_after_an_error(where, steps, error, tmp_path):
    module, logger = Breaks(error, where), CSVLogger(tmp_path)
    loop = trainer([quiet()], logger=logger, val_check_interval=3)
    with pytest.raises((RuntimeError, SystemExit)):
        loop.fit(module, batches(3), batches(1))
    if where != "train end":
        assert set(module.found) >= WHILE_IT_RUNS
    assert leftovers(loop, module) == []
    assert layout(monitored(read(logger))) == [(step, "monitor") for step in range(steps)]


def test_the_next_fit_after_an_error_is_the_plain_one_with_all_rows(tmp_path):
    monitor = quiet()
    with pytest.raises(RuntimeError, match="broken"):
        trainer([monitor], logger=CSVLogger(tmp_path)).fit(Breaks(RuntimeError("broken"), "backward"), batches(3))
    logger = CSVLogger(tmp_path)
    assert_equal(fit(Logged, callbacks=[monitor], logger=logger), fit(Logged))
    assert layout(read(logger)) == [(step, "monitor") for step in range(3)]


@pytest.mark.parametrize("make", [Logged, TwoOptimizers, lbfgs])
def test_nothing_is_left_after_a_fit(make, tmp_path):
    module = make()
    loop = trainer([quiet()], logger=CSVLogger(tmp_path))
    loop.fit(module, batches(2))
    assert leftovers(loop, module) == []
    names = {name for owner in (loop.strategy, loop.profiler, loop.logger) for name in vars(owner)}
    assert not {"training_step", "backward", "optimizer_step", "start", "stop", "log_metrics"} & names


def test_what_others_have_put_in_place_stays(tmp_path):
    seen = []

    class Own(PassThroughProfiler):
        pass

    profiler = Own()
    profiler.start = seen.append
    start = profiler.start
    loop = trainer([quiet()], logger=CSVLogger(tmp_path), profiler=profiler)
    loop.fit(Logged(), batches(1))
    assert profiler.start is start
    assert "run_training_batch" in seen


class Full(CSVLogger):
    """A logger whose disk is full after its second row."""

    def log_metrics(self, metrics, step=None):
        if step is not None and step >= 2:
            raise OSError(f"{self.name}: no space left")
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("log_every", [1, 50])
def test_the_error_of_loggers_is_the_users_own_and_nothing_is_left(log_every, tmp_path):
    module, loggers = Logged(), [Full(tmp_path, name="one"), Full(tmp_path, name="two")]
    loop = trainer([quiet()], logger=loggers, log_every_n_steps=log_every)
    with pytest.raises(OSError, match="one: no space left"):
        loop.fit(module, batches(5))
    assert leftovers(loop, module) == []
    assert [[int(row["step"]) for row in read(logger)] for logger in loggers] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("ending", ["well", "badly"])
def test_a_monitor_that_is_kept_keeps_neither_module_nor_trainer(ending, tmp_path):
    monitor = quiet()

    def run():
        module = Breaks(RuntimeError("broken"), "backward") if ending == "badly" else Logged()
        loop = trainer([monitor], logger=CSVLogger(tmp_path))
        if ending == "badly":
            with pytest.raises(RuntimeError, match="broken"):
                loop.fit(module, batches(3))
        else:
            loop.fit(module, batches(3))
        return weakref.ref(module), weakref.ref(loop)

    references = run()
    del monitor.log, monitor.log_dict  # the module's own methods, which the Trainer gives every callback
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert monitor.summary().steps >= 2


def test_a_monitor_can_be_copied_before_and_after_fit(tmp_path):
    monitor = quiet(every_n_steps=2)
    for _ in range(2):
        assert copy.deepcopy(monitor).summary() == monitor.summary()
        trainer([monitor], logger=CSVLogger(tmp_path)).fit(Logged(), batches(2))


# ---------------------------------------------------------------- profilers


def of_the_trainer(durations):
    """Actions and how often they ran, without the callbacks'."""
    return {action: len(times) for action, times in durations.items() if "[Callback]" not in action}


def test_the_report_of_a_simple_profiler_is_that_of_the_plain_run(tmp_path):
    def report(callbacks):
        profiler = SimpleProfiler()
        loop = trainer(callbacks, logger=CSVLogger(tmp_path), profiler=profiler, max_epochs=2)
        loop.fit(Validated(), batches(3), batches(2))
        return of_the_trainer(profiler.recorded_durations)

    plain = report([])
    assert plain["[_TrainingEpochLoop].train_dataloader_next"] == 6
    assert report([quiet()]) == plain


def test_a_profiler_may_be_told_by_keyword(tmp_path):
    class Profiles(Logged):
        def training_step(self, batch, batch_idx):
            self.trainer.profiler.start(action_name="mine")
            self.trainer.profiler.stop(action_name="mine")
            return super().training_step(batch, batch_idx)

    profiler = SimpleProfiler()
    loop = trainer([quiet()], logger=CSVLogger(tmp_path), profiler=profiler)
    loop.fit(Profiles(), batches(2))
    assert len(profiler.recorded_durations["mine"]) == 2


# ---------------------------------------------------------------- trials inside of training


class Slow(Dataset):
    """Takes its time while it is told to."""

    seconds = 0.0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(8)


def test_trials_inside_of_training_are_not_told_as_the_next_step(tmp_path):
    class Tuned(Logged):
        lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    class EachEpoch(LearningRateFinder):
        """As in Lightning's documentation: trials at the start of chosen epochs."""

        def on_fit_start(self, *args, **kwargs):
            pass

        def on_train_epoch_start(self, trainer, pl_module):
            data.seconds = 0.2
            self.lr_find(trainer, pl_module)
            data.seconds = 0.0

    data, logger = Slow(), CSVLogger(tmp_path)
    finder = EachEpoch(num_training_steps=3, early_stop_threshold=None)
    loop = trainer([quiet(), finder], logger=logger, log_every_n_steps=1, default_root_dir=tmp_path)
    loop.fit(Tuned(), DataLoader(data, batch_size=4))
    rows = read(logger)
    assert layout(rows) == [(step, "epoch loss monitor") for step in range(3)]
    assert all(row["time/data_ms"] < 1500 for row in rows)  # a trial waits 2.4 s for its three batches


def test_a_trainer_inside_of_a_training_has_rows_of_its_own(tmp_path):
    inner = CSVLogger(tmp_path, version="inner")

    class Nested(pl.Callback):
        def on_train_epoch_end(self, *args):
            trainer([quiet()], logger=inner, log_every_n_steps=1).fit(Logged(), batches(2))

    outer = CSVLogger(tmp_path, version="outer")
    trainer([quiet(), Nested()], logger=outer, log_every_n_steps=1).fit(Logged(), batches(3))
    for logger, count in ((inner, 2), (outer, 3)):
        assert layout(read(logger)) == [(step, "epoch loss monitor") for step in range(count)]


def test_a_trainer_without_epochs_has_nothing_to_measure(tmp_path):
    monitor = StepMonitor()
    module, loop = Logged(), trainer([monitor], logger=CSVLogger(tmp_path), max_epochs=0)
    loop.fit(module, batches(2))
    assert monitor.summary().steps == 0
    assert leftovers(loop, module) == []
