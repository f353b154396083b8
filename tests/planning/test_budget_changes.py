"""The budget holds while a run changes: its batches, what is trained, how many batches a step has, which layers run."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, make_plan
from lightning_ckpt.budgeted.sizes import BatchSizes, bytes_of
from lightning_ckpt.planning.treatment import Treatment
from tests.planning.models import Mlp
from tests.planning.test_budgeted_hostile import (
    WIDTH,
    Module,
    Pairwise,
    ReadsLoss,
    Result,
    adamw,
    assert_exact,
    read_last,
    rows,
    stack,
)
from tests.support import fit, heard

KIB = 2**10


@dataclass
class Trained:
    """A fit under a budget that was equal to the plain one; the peak of every step in KiB."""

    result: Result
    peaks: dict[int, float]


def train(
    make_module: Callable[[], pl.LightningModule],
    data: Any,
    kib: int,
    folder: Any,
    settings: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Trained:
    """Train under a budget of so many KiB, and compare with the plain run.

    Args:
        make_module: makes the module.
        data: batches.
        kib: the budget.
        folder: an empty one.
        settings: those of the Trainer.
        options: those of the callback.
    """
    result = assert_exact(
        make_module,
        data,
        lambda: {"logger": CSVLogger(folder), **settings()},
        budget=f"{kib}KiB",
        monitor=True,
        **options,
    )
    found = {int(row["step"]): row["memory/peak_MiB"] * KIB for row in read_last(folder) if "memory/peak_MiB" in row}
    assert found, "no step has a peak"
    return Trained(result, found)


def assert_within(trained: Trained, kib: int) -> None:
    """No step has taken more than the budget, nor was that said."""
    words = trained.result.own_words
    above = {step: peak for step, peak in trained.peaks.items() if peak > kib}
    assert not above, (above, words)
    assert not any("above the budget" in line or "Training goes on" in line for line in words), words


def highest(trained: Trained, steps: range) -> float:
    """The highest peak of some steps."""
    return max(peak for step, peak in trained.peaks.items() if step in steps)


# ---------------------------------------------------------------- kinds of batches


@dataclass(slots=True)
class Slotted:
    x: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor

    def to(self, *args: Any, **options: Any) -> "Frozen":
        return Frozen(self.x.to(*args, **options))


class Moves:
    """A batch of a kind of its own, which can move itself."""

    def __init__(self, x: Tensor) -> None:
        self.parts = {"x": [x]}

    def to(self, *args: Any, **options: Any) -> "Moves":
        return Moves(self.parts["x"][0].to(*args, **options))


class HasAttribute:
    """Such a batch with the tensor as an attribute."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.name = x, "batch"

    def to(self, *args: Any, **options: Any) -> "HasAttribute":
        return HasAttribute(self.x.to(*args, **options))


def jagged(x: Tensor) -> Tensor:
    """Two texts of different lengths."""
    return torch.nested.nested_tensor([x[: len(x) // 4], x[len(x) // 4 :]], layout=torch.jagged)


GROWING = [64, 64, 64, 64, 128, 128, 256, 256, 256]

#: How a batch is made of a tensor, its loss, and whether its step is rehearsed.
KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[nn.Module, Any], Tensor], bool]] = {
    "dataclass with slots": (Slotted, lambda model, batch: model(batch.x), True),
    "frozen dataclass": (Frozen, lambda model, batch: model(batch.x), True),
    "object": (HasAttribute, lambda model, batch: model(batch.x), True),
    "object with containers": (Moves, lambda model, batch: model(batch.parts["x"][0]), True),
    "COO": (lambda x: x.to_sparse(), lambda model, batch: model(batch.to_dense()), True),
    "CSR": (lambda x: x.to_sparse_csr(), lambda model, batch: model(batch.to_dense()), True),
    "jagged": (jagged, lambda model, batch: model(batch).values(), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_other_kinds_that_grow(kind, tmp_path):
    make, output, is_rehearsed = KINDS[kind]
    kib = 1500 if kind in ("COO", "CSR") else 1300  # what is dense is there, too
    trained = train(
        lambda: Module(loss=lambda model, batch: output(model, batch).square().mean()),
        rows(*GROWING, make=make),
        kib,
        tmp_path,
    )
    assert (trained.result.plans[0] is not None) is is_rehearsed
    assert_within(trained, kib)
    assert max(trained.peaks.values()) > 1000
    treatments = [set(plan.assignment.values()) for plan in (trained.result.plans[4], trained.result.plans[-1])]
    assert treatments[0] == {Treatment.KEEP}
    assert treatments[1] != {Treatment.KEEP}, "no plan for larger batches"


def test_buckets_of_as_many_words(tmp_path):
    shapes = [(16, 64)] * 8 + [(1, 128)] + [(8, 128)] * 6
    trained = train(
        lambda: Module(nn.Sequential(*[Pairwise() for _ in range(4)])),
        DataLoader([torch.randn(*shape, WIDTH) for shape in shapes], batch_size=None),  # type: ignore[arg-type]
        2500,
        tmp_path,
    )
    assert trained.result.plans[0] is not None
    assert_within(trained, 2500)
    first, short, longer = (trained.result.plans[i].assignment for i in (7, 8, 14))
    assert first == short, "a short batch needs no other plan"
    assert first != longer, "as many bytes need more"


# ---------------------------------------------------------------- what is trained


class Unfreezes(BaseFinetuning):
    """Trains the last layer, and from the third epoch on the others, too."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model[:6])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.model[:6], optimizer, lr=1e-3)


class Finetuned(Module):
    def __init__(self) -> None:
        super().__init__(stack(6))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(each for each in self.parameters() if each.requires_grad)


EPOCHS, BATCHES = 4, 4  # something changes when the third epoch begins, with step 8
CHANGES = 8


def test_layers_that_are_unfrozen_later(tmp_path):
    trained = train(
        Finetuned,
        rows(*[128] * BATCHES),
        1300,
        tmp_path,
        lambda: {"callbacks": [Unfreezes()], "max_epochs": EPOCHS},
    )
    assert_within(trained, 1300)
    assert highest(trained, range(CHANGES)) < 600 < 1000 < highest(trained, range(CHANGES, 16))
    plans = [trained.result.plans[i].assignment for i in (CHANGES - 1, -1)]
    assert set(plans[0].values()) == {Treatment.KEEP}, "what is frozen saves nothing"
    assert set(plans[1].values()) != {Treatment.KEEP}


class AddsGroup(Module):
    """Gives two layers to its optimizer only when the third epoch begins; nobody uses their gradients before."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw([*self.model[0].parameters(), *self.model[3:].parameters()])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.optimizers().add_param_group({"params": list(self.model[1:3].parameters())})

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()


def test_weights_that_the_optimizer_is_given_later(tmp_path):
    trained = train(AddsGroup, rows(*[128] * BATCHES), 700, tmp_path, lambda: {"max_epochs": EPOCHS})
    assert_within(trained, 700)
    before, after = trained.result.plans[CHANGES - 1], trained.result.plans[-1]
    state = 2 * sum(each.nbytes for each in trained.result.module.model[1:3].parameters())
    assert after.peak_bytes <= 700 * KIB < before.peak_bytes + state, "the plan could have stayed as it was"


# ---------------------------------------------------------------- how many batches make a step


def test_batches_that_are_accumulated_from_some_epoch_on(tmp_path):
    def settings() -> dict[str, Any]:
        return {"callbacks": [GradientAccumulationScheduler({0: 1, 2: 4})], "max_epochs": EPOCHS}

    trained = train(Module, rows(*[128] * 6), 800, tmp_path, settings)
    assert_within(trained, 800)
    assert max(trained.peaks) == 15  # twelve steps of a batch each, and four of four or two
    plan = trained.result.plans[0]
    assert trained.peaks[15] == pytest.approx(plan.peak_bytes / KIB, rel=0.02), "the first plan knows of it"


# ---------------------------------------------------------------- layers that run at times


class Deepens(Module):
    """Runs four more layers from the third epoch on."""

    def __init__(self) -> None:
        super().__init__(stack(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.model[: 3 if self.current_epoch < 2 else 7]:
            batch = layer(batch)
        return batch.square().mean()


def test_layers_that_begin_to_run_in_a_later_epoch(tmp_path):
    trained = train(Deepens, rows(*[128] * BATCHES), 1200, tmp_path, lambda: {"max_epochs": EPOCHS})
    assert_within(trained, 1200)
    assert highest(trained, range(CHANGES)) < 900 < 1000 < highest(trained, range(CHANGES, 16))


class Dropped(nn.Module):
    """Leaves layers out at random."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Mlp(WIDTH, 4 * WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            if not self.training or random.random() >= self.rate:
                x = layer(x)
        return x


class Seeded(Module):
    def on_train_start(self) -> None:
        random.seed(1)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_layers_that_are_left_out_at_random(rate, tmp_path):
    # How many of them run in a step is not known before, so that single steps may take more than the budget.
    trained = train(lambda: Seeded(Dropped(rate)), rows(*[128] * 16), 1400, tmp_path)
    assert trained.result.plans[-1] is not None
    assert min(trained.peaks.values()) < 1400


# ---------------------------------------------------------------- steps without a backward


def skipping(base: type[Module], skipped: Sequence[int]) -> type[Module]:
    """A module that has no loss, and does not come to forward, in some batches."""

    class Skips(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    return Skips


@pytest.mark.parametrize("base", [Module, ReadsLoss], ids=["rehearsed", "measured"])
@pytest.mark.parametrize("skipped", [(2,), (3,), (2, 3)], ids=str)
def test_batches_without_a_loss_while_a_step_is_measured(base, skipped, tmp_path):
    trained = train(skipping(base, skipped), rows(*[128] * 10), 762, tmp_path)
    assert (trained.result.plans[0] is not None) is (base is Module)
    assert_within(trained, 762)
    final = trained.result.plans[-1]
    assert final.measured
    assert trained.peaks[9] == pytest.approx(final.peak_bytes / KIB, rel=0.02), "what was measured was not a whole step"


# ---------------------------------------------------------------- sizes of batches


def zeros(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def test_a_batch_is_larger_by_its_bytes():
    sizes = BatchSizes(zeros((16, 64)))
    assert not sizes.are_exceeded_by(zeros((16, 64)), by_shape=False)
    assert not sizes.are_exceeded_by(zeros((1, 128)), by_shape=False)
    assert sizes.are_exceeded_by(zeros((16, 65)), by_shape=False)
    assert sizes.grow(16 * 65 * 4) == 65 / 64
    assert not sizes.are_exceeded_by(zeros((65, 16)), by_shape=False)
    assert sizes.planned_for == 16 * 64 * 4


def test_a_batch_is_larger_by_its_shape():
    sizes = BatchSizes(zeros((16, 64)))
    assert not sizes.are_exceeded_by(zeros((16, 64)), by_shape=True)
    assert not sizes.are_exceeded_by(zeros((8, 64)), by_shape=True)
    assert sizes.are_exceeded_by(zeros((1, 128)), by_shape=True)
    assert not sizes.are_exceeded_by(zeros((1, 128)), by_shape=True), "it is known now"
    assert sizes.are_exceeded_by(zeros((8, 128)), by_shape=True), "in between two that are known, but within none"
    assert not sizes.are_exceeded_by(zeros((4, 128)), by_shape=True)
    assert not sizes.are_exceeded_by(zeros((16, 64)), by_shape=True), "the first one is still known"
    assert sizes.are_exceeded_by(zeros((4, 64), (1, 1)), by_shape=True), "another tensor"
    assert not sizes.are_exceeded_by([], by_shape=True)


def test_shapes_are_noted_where_only_bytes_count():
    sizes = BatchSizes(zeros((16, 64)))
    assert not sizes.are_exceeded_by(zeros((1, 128)), by_shape=False)
    assert not sizes.are_exceeded_by(zeros((1, 128)), by_shape=True)


def test_what_has_grown_never_shrinks():
    sizes = BatchSizes(zeros((4, 8)))
    assert sizes.beyond(4 * 8 * 4) == 1
    assert sizes.beyond(4 * 8) == 4
    assert sizes.beyond(10**6) == 1
    assert sizes.grow(4 * 8 * 4 * 3) == 3
    assert sizes.grow(4 * 8) == 1
    assert sizes.beyond(4 * 8 * 4) == 3


def test_batches_without_bytes():
    sizes = BatchSizes([])
    assert sizes.beyond(0) == 1
    assert sizes.are_exceeded_by(zeros((1,)), by_shape=False)
    assert sizes.grow(4) == 4
    assert sizes.beyond(0) == 4


def test_the_first_batch_that_is_large_enough_is_checked_once():
    sizes = BatchSizes(zeros((4, 8)))
    assert not sizes.are_checked_by(zeros((64, 8)), step=100)
    sizes.check_from(step=5, nbytes=1024)
    assert not sizes.are_checked_by(zeros((32, 8)), step=4)
    assert not sizes.are_checked_by(zeros((31, 8)), step=5)
    assert sizes.are_checked_by(zeros((32, 8)), step=6)
    assert not sizes.are_checked_by(zeros((32, 8)), step=7)


def test_bytes_of_sparse_and_nested_tensors():
    dense = torch.eye(16)
    assert bytes_of([dense]) == 16 * 16 * 4
    assert bytes_of([dense.to_sparse()]) == 16 * 4 + 2 * 16 * 8
    by_rows = torch.sparse_csr_tensor(torch.arange(17), torch.arange(16), torch.ones(16), (16, 16))
    assert bytes_of([by_rows]) == 17 * 8 + 16 * 8 + 16 * 4
    assert bytes_of([jagged(torch.zeros(64, 8))]) >= 64 * 8 * 4
    longer, shorter = jagged(torch.zeros(64, 8)), jagged(torch.zeros(32, 8))
    sizes = BatchSizes([longer])
    assert not sizes.are_exceeded_by([shorter], by_shape=True)
    assert BatchSizes([shorter]).are_exceeded_by([longer], by_shape=True)


def test_a_plan_that_a_changed_step_outgrows_is_said():
    data = rows(*[128] * 8)
    plan = make_plan(Unfrozen(), next(iter(data)), "1000KiB")
    callback, said = ActivationCheckpointing(plan=plan, monitor=False), list[str]()
    with heard(said):
        fit(Unfrozen, data, [callback], max_epochs=3)
    assert sum("The plan was made for another step" in line for line in said) == 1, said
    assert callback.budget_keeper is None


@pytest.mark.parametrize("measured", [False, True], ids=["rehearsed", "measured"])
def test_weights_that_are_set_free_by_the_model_itself(measured, tmp_path):
    make = (lambda: Unfrozen(reads=True)) if measured else Unfrozen
    result = assert_exact(
        make,
        data=rows(*[128] * 8),
        budget="1300KiB",
        monitor=True,
        settings=lambda: {"max_epochs": 3, "logger": CSVLogger(tmp_path)},
    )
    rows_with_peaks = [row for row in read_last(tmp_path) if "memory/peak_MiB" in row]
    peaks = {int(row["step"]): row["memory/peak_MiB"] * 1024 for row in rows_with_peaks}
    settled = [peak for step, peak in peaks.items() if 4 <= step < 8 or step >= 10]
    assert max(settled) <= 1300, (peaks, result.own_words)
    assert peaks[23] > peaks[6]  # more is trained


def test_a_change_in_the_middle_of_training_that_no_plan_can_hold_is_said_and_trained():
    result = assert_exact(
        lambda: Unfrozen(reads=True), data=rows(*[128] * 8), budget="1000KiB", settings=lambda: {"max_epochs": 3}
    )
    assert sum("Training goes on with the least memory" in line for line in result.own_words) == 1, result.own_words


class Unfrozen(Module):
    """Trains its last layer first, and all of them from the second epoch on."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__(stack(6))
        self.reads = reads
        self.model[:6].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.model.requires_grad_(True) if self.current_epoch else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item() if self.reads else 0.0
        return loss


class AddsLoss(Module):
    """Runs twice in a step, with as large a batch, once everything has settled."""

    changes_at = 12

    def __init__(self) -> None:
        super().__init__(stack(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.model(batch.flip(0)).square().mean() if self.global_step >= self.changes_at else loss


def test_a_step_that_takes_more_for_no_larger_batch(tmp_path):
    kib = 1800
    change = AddsLoss.changes_at
    trained = train(AddsLoss, rows(*[128] * (change + 6)), kib, tmp_path)
    said = [line for line in trained.result.own_words if "after a change of the step the peak is" in line]
    assert len(said) == 1, trained.result.own_words
    assert max(peak for step, peak in trained.peaks.items() if step < change) <= kib
    assert max(trained.peaks.get(step, 0) for step in (change, change + 1)) > kib  # not every step is looked at
    assert max(peak for step, peak in trained.peaks.items() if step > change + 2) <= kib, trained.peaks
