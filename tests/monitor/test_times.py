"""The logged times are those of what happened: each phase shows its own time and no other phase does."""

import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BatchEncoding

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.monitor.test_truth import neox, rows_of, tokens
from tests.support import Block, Training, batches, blocks, trainer

NAP = 0.06
ELSE = 0.05  # what a phase without a nap takes in at least one step, even on a busy machine
PHASES = ("data", "forward", "backward", "optimizer")


def nap():
    time.sleep(NAP)


class Rows(Dataset):
    def __init__(self, count, sleeps=True):
        self.count = count
        self.sleeps = sleeps

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.sleeps and index % 4 == 0:  # once a batch
            nap()
        return torch.full((8,), float(index))


class Stream(IterableDataset):
    """Rows, one after another; how many there are is not known beforehand."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for index in range(self.count):
            if index % 4 == 0:
                nap()
            yield torch.full((8,), float(index))


class Napping(Training):
    """Sleeps in one place."""

    def __init__(self, where=None):
        super().__init__(blocks(2), optimizer=Sleeping if where == "optimizer" else None)
        self.where = where

    def nap_in(self, where):
        if self.where == where:
            nap()

    def transfer_batch_to_device(self, batch, device, index):
        self.nap_in("transfer_batch_to_device")
        return super().transfer_batch_to_device(batch, device, index)

    def on_before_batch_transfer(self, batch, index):
        self.nap_in("on_before_batch_transfer")
        return batch

    def on_after_batch_transfer(self, batch, index):
        self.nap_in("on_after_batch_transfer")
        return batch

    def training_step(self, batch, index):
        self.nap_in("training_step")
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        nap()

    def on_after_backward(self):
        self.nap_in("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.nap_in("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer):
        self.nap_in("on_before_zero_grad")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.nap_in("clipping")
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, outputs, batch, index):
        self.nap_in("on_train_batch_end")


class ByHand(Napping):
    """The same, with its own optimization."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.nap_in("training_step")
        self.manual_backward(self.loss(self.model, batch))
        optimizer.step()


class Sleeping(torch.optim.SGD):
    """Sleeps in its step."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        loss = super().step(closure)
        nap()
        return loss


class SleepsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        nap()
        return gradient


class InBackward(Napping):
    def training_step(self, batch, index):
        return self.loss(lambda batch: SleepsBackward.apply(self.model(batch)), batch)


class InHook(Napping):
    def __init__(self):
        super().__init__()
        self.model[0].register_full_backward_hook(lambda *_: nap())


class Ends(pl.Callback):
    """Sleeps at the end of every batch."""

    def on_train_batch_end(self, *args):
        nap()


def fit(module, folder, data=None, callbacks=(), **settings):
    """The rows, without that of the first step, which does things for the first time."""
    logger = CSVLogger(folder, name="run")
    loop = trainer([*callbacks, StepMonitor(table=False)], logger=logger, **settings)
    loop.fit(module, batches(5) if data is None else data)
    return rows_of(logger)[1:]


def least(rows, name):
    """The shortest time of all steps: no noise, and still with whatever happened in each of them."""
    return min(row[f"time/{name}_ms"] for row in rows) / 1e3


def assert_sleeps_in(rows, phases, naps=1):
    """Only these phases show the sleep; everything that happened in the step is in one of them."""
    assert len(rows) >= 3
    for name in PHASES:
        times = [row[f"time/{name}_ms"] / 1e3 for row in rows]
        if name in phases:
            assert all(naps * NAP <= time for time in times), name
            assert least(rows, name) < naps * NAP + ELSE, name
        else:
            assert least(rows, name) < ELSE, name
    assert least(rows, "step") < len(phases) * naps * NAP + ELSE


class Batches:
    """What a Trainer takes for a loader, too."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            nap()
            yield torch.ones(4, 8)


DATA = {
    "rows": lambda: DataLoader(Rows(20), batch_size=4),
    "stream": lambda: DataLoader(Stream(20), batch_size=4),
    "no loader": lambda: Batches(5),
}


@pytest.mark.parametrize("make", [Napping, ByHand])
@pytest.mark.parametrize("data", DATA)
def test_waiting_for_data_is_data(data, make, tmp_path):
    rows = fit(make(), tmp_path, DATA[data]())
    assert len(rows) == 4
    if data != "rows":  # the end of a stream is noticed when one more is asked for ahead
        rows = rows[:-1]
    assert_sleeps_in(rows, ["data"])


@pytest.mark.parametrize("data", ["rows", "stream"])
@pytest.mark.parametrize("where", ["transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"])
def test_moving_a_batch_is_data(where, data, tmp_path):
    class Quick(Stream):
        def __iter__(self):
            yield from (torch.ones(8) for _ in range(self.count))

    rows = fit(Napping(where), tmp_path, batches(5) if data == "rows" else DataLoader(Quick(20), batch_size=4))
    assert len(rows) == 4
    assert_sleeps_in(rows[:-1], ["data"])


CASES = {
    "training_step": (lambda: Napping("training_step"), "forward"),
    "training_step by hand": (lambda: ByHand("training_step"), "forward"),
    "on_after_backward": (lambda: Napping("on_after_backward"), "backward"),
    "on_after_backward by hand": (lambda: ByHand("on_after_backward"), "backward"),
    "a function's backward": (InBackward, "backward"),
    "a hook in backward": (InHook, "backward"),
    "optimizer": (lambda: Napping("optimizer"), "optimizer"),
    "optimizer by hand": (lambda: ByHand("optimizer"), "optimizer"),
    "on_before_optimizer_step": (lambda: Napping("on_before_optimizer_step"), "optimizer"),
    "on_before_zero_grad": (lambda: Napping("on_before_zero_grad"), "optimizer"),
    "clipping": (lambda: Napping("clipping"), "optimizer"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_phase_shows_its_own_time(case, tmp_path):
    make, phase = CASES[case]
    rows = fit(make(), tmp_path, batches(4))
    assert_sleeps_in(rows, [phase])
    assert all(row["time/recompute_ms"] == 0 for row in rows)


class SlowBlock(Block):
    def forward(self, x):
        nap()
        return super().forward(x)


def test_a_recomputed_layer_is_in_recompute_and_backward(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), SlowBlock(), SlowBlock(), nn.Linear(8, 8))
    rows = fit(Training(model), tmp_path, batches(4), [ActivationCheckpointing()])
    for row in rows:
        assert 2 * NAP <= row["time/recompute_ms"] / 1e3 <= row["time/backward_ms"] / 1e3
        assert row["time/forward_ms"] / 1e3 >= 2 * NAP
    assert least(rows, "data") < ELSE
    assert least(rows, "optimizer") < ELSE
    assert least(rows, "recompute") < 2 * NAP + ELSE
    assert least(rows, "backward") < 2 * NAP + ELSE


def test_accumulation_sums_the_times_of_the_micro_batches(tmp_path):
    rows = fit(Napping("training_step"), tmp_path, DataLoader(Rows(48), batch_size=4), accumulate_grad_batches=3)
    assert_sleeps_in(rows, ["data", "forward"], naps=3)


def test_an_optimizer_is_not_asked_in_every_micro_batch(tmp_path):
    rows = fit(Napping("optimizer"), tmp_path, batches(12), accumulate_grad_batches=3)
    assert_sleeps_in(rows, ["optimizer"])


def between(tmp_path, callbacks=(), module=None, data=None, **settings):
    start = time.perf_counter()
    rows = fit(module or Napping(), tmp_path, batches(5) if data is None else data, callbacks, **settings)
    assert time.perf_counter() - start > 4 * NAP  # it did sleep
    for name in ("step", *PHASES):
        assert least(rows, name) < ELSE, name


@pytest.mark.parametrize("order", [1, -1], ids=["before the monitor", "after it"])
def test_callbacks_at_the_end_of_a_batch_are_between_steps(order, tmp_path):
    logger = CSVLogger(tmp_path)
    trainer([Ends(), StepMonitor(table=False)][::order], logger=logger).fit(Napping(), batches(4))
    rows = rows_of(logger)
    assert all(least(rows, name) < ELSE for name in ("step", *PHASES))


def test_the_models_own_end_of_a_batch_is_between_steps(tmp_path):
    between(tmp_path, module=Napping("on_train_batch_end"))


def test_validation_is_between_steps(tmp_path):
    module = Napping()
    logger = CSVLogger(tmp_path)
    loop = trainer([StepMonitor(table=False)], logger=logger, val_check_interval=1)
    loop.fit(module, batches(5), batches(1))
    rows = rows_of(logger)
    assert len(rows) == 5
    assert all(least(rows, name) < ELSE for name in ("step", *PHASES))


def test_saving_a_checkpoint_is_between_steps(tmp_path):
    class Slow(Napping):
        def on_save_checkpoint(self, checkpoint):
            nap()

    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    between(tmp_path, [saving], Slow(), enable_checkpointing=True)


def test_validation_and_checkpoints_between_micro_batches_are_not_in_the_step(tmp_path):
    logger = CSVLogger(tmp_path)
    loop = trainer([StepMonitor(table=False), Ends()], logger=logger, val_check_interval=1, accumulate_grad_batches=2)
    loop.fit(Napping(), batches(8), batches(1))
    rows = rows_of(logger)
    assert len(rows) == 4
    assert all(least(rows, name) < ELSE for name in ("step", *PHASES))


def test_the_phases_sum_up_to_the_step(tmp_path):
    model = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 4096, "max_position_embeddings": 128}
    rows = fit(neox(**model), tmp_path, tokens(12, 4, 128))
    rows = rows[4:]  # those in which allocations are not counted
    shares = sorted(sum(row[f"time/{name}_ms"] for name in PHASES) / row["time/step_ms"] for row in rows)
    assert max(shares) <= 1
    assert shares[-1] > 0.98  # the one that was disturbed least
    assert all(row["time/step_ms"] > 50 for row in rows)


# ---------------------------------------------------------------- rates


def rate(batch, tmp_path):
    """The name of the rate, and tokens or samples of a batch by it."""

    def loss(model, _):
        nap()
        return model.weight.square().mean()

    data = DataLoader([0] * 3, batch_size=1, collate_fn=lambda _: batch)
    rows = fit(Training(nn.Linear(2, 2), loss), tmp_path, data)
    [name] = {name for row in rows for name in row if name.endswith("_per_s")}
    amounts = {round(row[name] * row["time/step_ms"] / 1e3, 6) for row in rows}
    assert len(amounts) == 1
    return name, amounts.pop()


IDS = torch.ones(3, 7, dtype=torch.int64)
TOKENS, SAMPLES = "time/tokens_per_s", "time/samples_per_s"
BATCHES = {
    "dict with input_ids": ({"mask": torch.ones(3, 7), "input_ids": IDS}, (TOKENS, 21)),
    "BatchEncoding": (BatchEncoding({"attention_mask": torch.ones(3, 1), "input_ids": IDS}), (TOKENS, 21)),
    "table of integers": (IDS, (TOKENS, 21)),
    "table of int32 in a list": ([IDS.int(), IDS], (TOKENS, 21)),
    "images and labels": ((torch.ones(5, 3, 4, 4), torch.ones(5, dtype=torch.int64)), (SAMPLES, 5)),
    "dict of images": ({"image": torch.ones(6, 3, 4, 4), "label": torch.ones(6)}, (SAMPLES, 6)),
    "nested": ({"pair": (torch.ones(2, 9), torch.ones(2))}, (SAMPLES, 2)),
    "a number first": ((torch.tensor(1.0), torch.ones(4, 2)), (SAMPLES, 4)),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_rates_are_what_the_batch_holds_by_the_time_of_the_step(kind, tmp_path):
    batch, expected = BATCHES[kind]
    assert rate(batch, tmp_path) == expected


def test_with_accumulation_the_rate_is_that_of_all_micro_batches(tmp_path):
    rows = fit(Napping("training_step"), tmp_path, batches(10, 4), accumulate_grad_batches=2)
    for row in rows:
        assert row[SAMPLES] * row["time/step_ms"] / 1e3 == pytest.approx(8)
