"""`python train.py plan` does what `fit` does before its first step, so training by its plan takes what it says."""

import csv
import random
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ckpt import CheckpointCLI, OffloadOptions
from lightning_ckpt.planning import Treatment, load_plan
from lightning_ckpt.planning.make import planner_by_preflight
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.preflight import Preflight
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.selection import select_layers
from tests.planning.test_plan_command import WIDTH, make_block

ROWS = 256
MIB = 2**20
HALF = ["--ckpt.memory_budget", "0.5"]
SCALARS = 64  # bytes of what is logged, which a plan does not count


class Net(nn.Module):
    """Three blocks.

    Args:
        dropout: probabilities of dropping a value.
    """

    def __init__(self, dropout: tuple[float, ...] = (0.1, 0.1, 0.1)) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(make_block, dropout))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class Base(pl.LightningModule):
    """Trains it; the models of this file are this one with something besides."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(6 * ROWS, WIDTH), batch_size=ROWS)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def run(*arguments: str, model: Any = Base, data: Any = None, cli: type = CheckpointCLI, **options: Any) -> Any:
    """The program with these arguments."""
    plain = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 4}
    return cli(
        model,
        data,
        args=[*arguments],
        trainer_defaults={**plain, "accelerator": "cpu", "enable_checkpointing": False, "log_every_n_steps": 1},
        save_config_callback=None,
        seed_everything_default=1,
        **options,
    )


def refuse(capsys: Any, *arguments: str, **options: Any) -> str:
    """What it says instead: one sentence, after the usage."""
    with pytest.raises(SystemExit) as error:
        run(*arguments, **options)
    assert error.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in said
    return said.rpartition("error: ")[2]


def peaks(folder: Path) -> list[int]:
    """Bytes that the steps of a fit have taken, as its monitor has logged them."""
    [path] = folder.glob("lightning_logs/*/metrics.csv")
    with path.open() as file:
        found = [row.get("memory/peak_MiB") for row in csv.DictReader(file)]
    return [round(float(each) * MIB) for each in found if each]


def assert_planned_as_trained(
    folder: Path, *arguments: str, budget: list[str] = HALF, fit: tuple[str, ...] = (), **options: Any
) -> tuple[Any, Any]:
    """Plan, then train by the plan: from the third step on, its peak is that of the plan.

    Args:
        folder: an empty one.
        arguments: for both.
        budget: arguments for the plan.
        fit: arguments for training.
        options: those of `run`.

    Returns:
        The plan and the program that has made it.
    """
    path = str(folder / "plan.yaml")
    cli = run("plan", *budget, *arguments, "--save", path, **options)
    plan = load_plan(path)
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(folder)]
    run("fit", "--ckpt.plan", path, *arguments, *fit, *logger, **options)
    found = peaks(folder)
    assert len(found) == 4
    assert found[2:] == pytest.approx([plan.peak_bytes] * 2, abs=SCALARS)
    assert plan.recomputed_bytes < plan.peak_bytes < plan.kept_bytes
    return plan, cli


# ---------------------------------------------------------------- what a model does before its first step


class SchedulersInAList(Base):
    """Asks for its scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.lr_schedulers().get_last_lr()[0])
        return super().training_step(batch, batch_idx)


class SchedulerInADict(Base):
    """Asks how many steps there will be."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ReadsItems(Base):
    """As stochastic depth is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(tuple(each.item() for each in torch.linspace(0.1, 0.3, 3)))


class ReadsList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(tuple(torch.linspace(0.1, 0.3, 3).tolist()))


class ReadsArray(Base):
    """Goes to NumPy and back."""

    def __init__(self) -> None:
        super().__init__()
        mask = np.tril(torch.ones(WIDTH, WIDTH).numpy())
        self.register_buffer("mask", torch.from_numpy(mask))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch @ self.mask, batch_idx)


class HasPlainTensor(Base):
    """One that is no buffer, made for the module's device."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tril(torch.ones(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        position = torch.arange(WIDTH, device=self.device, dtype=torch.float32)
        return super().training_step(batch @ self.mask + position, batch_idx)


class UsesLogger(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"seen": 1.0})
        return super().training_step(batch, batch_idx)


class UsesOptimizers(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.optimizers().param_groups is self.trainer.optimizers[0].param_groups
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class UsesTrainer(Base):
    """Everything else that a step may ask of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.training
        assert not self.trainer.sanity_checking
        assert self.trainer.world_size == 1
        assert batch_idx < self.trainer.num_training_batches == 6
        loss = super().training_step(batch, batch_idx)
        self.all_gather(loss.detach())
        return {"loss": loss, "extra": loss.detach()}


class ChangesBatch(Base):
    """Makes the batch of what the data gives."""

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randint(0, WIDTH, (6 * ROWS,)), batch_size=ROWS)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return functional.one_hot(batch, WIDTH).float()


class HasLoaders(Base):
    def train_dataloader(self) -> Any:
        return {name: DataLoader(torch.randn(6 * ROWS, WIDTH), batch_size=ROWS) for name in ("one", "other")}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["one"] + batch["other"], batch_idx)


class Prepares(Base):
    """Has its data only after `prepare_data` and `setup`, and its blocks after `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def prepare_data(self) -> None:
        self.rows = 6 * ROWS

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.data = torch.randn(self.rows, WIDTH)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=ROWS)


MODELS = [
    SchedulersInAList,
    SchedulerInADict,
    ReadsItems,
    ReadsList,
    ReadsArray,
    HasPlainTensor,
    UsesLogger,
    UsesOptimizers,
    UsesTrainer,
    ChangesBatch,
    HasLoaders,
    Prepares,
]


@pytest.mark.parametrize("model", MODELS)
def test_training_takes_what_was_planned(tmp_path, model):
    plan, cli = assert_planned_as_trained(tmp_path, model=model)
    assert len(plan.layers) == 3
    assert all(weight.is_meta for weight in cli.model.parameters())


class Data(pl.LightningDataModule):
    """Data of its own.

    Args:
        rows: how many.
    """

    def __init__(self, rows: int = 6 * ROWS) -> None:
        super().__init__()
        self.rows = rows

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        assert self.trainer.world_size == 1
        self.data = torch.randn(self.rows, WIDTH)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=ROWS, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return 2 * batch


class AsksForData(Base):
    train_dataloader = pl.LightningModule.train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.datamodule.rows == 6 * ROWS
        return super().training_step(batch, batch_idx)


def test_data_of_a_data_module(tmp_path):
    assert_planned_as_trained(tmp_path, model=AsksForData, data=Data)


class FromArguments(Base):
    """Is given its parts.

    Args:
        net: what is trained.
        optimizer: makes its optimizer.
        scheduler: makes its scheduler.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


def test_parts_that_are_given_as_arguments(tmp_path):
    arguments = ["--model.net", f"{__name__}.Net", "--model.optimizer", "SGD", "--model.optimizer.lr", "0.1"]
    _, cli = assert_planned_as_trained(tmp_path, *arguments, model=FromArguments)
    assert all(weight.is_meta for weight in cli.model.parameters())


class NoOptimizer(Base):
    configure_optimizers = pl.LightningModule.configure_optimizers


def test_optimizer_and_scheduler_that_are_flags(tmp_path):
    flags = ["--optimizer", "Adam", "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "2"]
    assert_planned_as_trained(tmp_path, *flags, model=NoOptimizer)


# ---------------------------------------------------------------- weights


class Marked(Base):
    """Weights of all kinds: tied, marked, in lists, computed from others, copied, loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.one.no_decay = True
        blocks = self.net.blocks
        blocks[1][0].weight = blocks[0][0].weight
        self.several = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.load_state_dict({name: torch.zeros_like(each) for name, each in self.frozen.state_dict().items()})
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for weight in self.parameters():
                weight.uniform_(-0.1, 0.1)
                weight.data.mul_(2)
        self.register_buffer("position", torch.arange(WIDTH, dtype=torch.float32))
        self.table = torch.linspace(0, 1, WIDTH)
        self.scale = float(torch.rand(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.frozen(batch @ self.one @ self.other) + self.several[0] + self.several[1] + self.table
        return super().training_step(self.normed(hidden + self.position), batch_idx)

    def configure_optimizers(self) -> Any:
        marked = [weight for weight in self.parameters() if getattr(weight, "no_decay", False)]
        assert [each.shape for each in marked] == [(WIDTH, WIDTH)]
        others = [weight for weight in self.parameters() if not hasattr(weight, "no_decay") and weight.requires_grad]
        return torch.optim.AdamW([{"params": marked, "weight_decay": 0.0}, {"params": others}])


def test_weights_have_no_memory_and_all_else_has_its_numbers(tmp_path):
    _, cli = assert_planned_as_trained(tmp_path, model=Marked)
    model = cli.model
    assert all(weight.is_meta for weight in model.parameters())
    assert model.one is model.other
    assert model.one.no_decay
    assert model.net.blocks[1][0].weight is model.net.blocks[0][0].weight
    assert [weight.requires_grad for weight in model.frozen.parameters()] == [False, False]
    assert len(list(model.parameters())) == len(list(Marked().parameters()))
    assert torch.equal(model.position, torch.arange(WIDTH, dtype=torch.float32))
    assert torch.equal(model.table, torch.linspace(0, 1, WIDTH))
    assert 0 <= model.scale < 1


def make_base(size: int = 3) -> Base:
    return Base()


def test_a_function_that_makes_the_model():
    assert all(weight.is_meta for weight in run("plan", *HALF, model=make_base).model.parameters())


def test_a_model_that_is_named_by_an_argument():
    model = ["--model", f"{__name__}.Base"]
    cli = run("plan", *HALF, *model, model=pl.LightningModule, subclass_mode_model=True)
    assert type(cli.model) is Base
    assert all(weight.is_meta for weight in cli.model.parameters())


def test_weights_that_are_made_after_the_plan_have_memory():
    run("plan", *HALF)
    assert not any(weight.is_meta for weight in Base().parameters())


# ---------------------------------------------------------------- a plan's own operators


class Gated(Base):
    """Much of what its blocks compute is of one operator, which is no matrix product."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.GELU(), nn.Tanh(), nn.Sigmoid()]
        self.net.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), *parts, nn.Linear(128, 256), nn.Linear(256, WIDTH)) for _ in range(6)
        )


SIGMOID = ["--ckpt.policy", "[aten.sigmoid]"]


@pytest.mark.parametrize("again", [(), SIGMOID], ids=["policy of the plan", "said again"])
def test_a_plan_keeps_the_results_of_its_own_operators(tmp_path, again):
    budget = ["--ckpt.memory_budget", "0.2", *SIGMOID]
    plan, _ = assert_planned_as_trained(tmp_path, budget=budget, fit=tuple(again), model=Gated)
    assert Treatment.POLICY in plan.assignment.values()
    assert plan.operators == ("aten.sigmoid",)


def test_training_by_a_plan_with_another_policy_is_refused(tmp_path, capsys):
    path = str(tmp_path / "plan.yaml")
    run("plan", "--ckpt.memory_budget", "0.2", *SIGMOID, "--save", path, model=Gated)
    said = refuse(capsys, "fit", "--ckpt.plan", path, "--ckpt.policy", "matmul", model=Gated)
    assert said.startswith("`policy='matmul'` has no effect with `plan`")
    assert "aten.sigmoid" in said


# ---------------------------------------------------------------- a program with methods of its own


class Own(CheckpointCLI):
    """Says when what is called."""

    def before_instantiate_classes(self) -> None:
        print("BEFORE ALL", self.subcommand)

    def before_plan(self) -> None:
        assert all(weight.is_meta for weight in self.model.parameters())
        print("BEFORE THE PLAN")

    def after_plan(self) -> None:
        print("AFTER THE PLAN")


def test_methods_around_the_subcommand(capsys):
    run("plan", *HALF, cli=Own)
    shown = capsys.readouterr().out
    words = ["BEFORE ALL plan", "BEFORE THE PLAN", "peak memory", "AFTER THE PLAN"]
    assert [shown.count(each) for each in words] == [1] * 4
    assert sorted(words, key=shown.index) == words


# ---------------------------------------------------------------- the largest batch


class Average(nn.Module):
    """Keeps a sixteenth of what it is given, and its recompute would need all of that."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 1024)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden.reshape(-1, 16, 64).mean(-1))


class Pooling(Base):
    """Takes less if all is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net.first = nn.Linear(WIDTH, 1024)
        self.net.blocks = nn.ModuleList(Average() for _ in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net.first(batch)
        for block in self.net.blocks:
            hidden = block(hidden)
        return hidden.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Deep(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net((0.1,) * 5)


MOVING = ["--ckpt.offload", "true", "--ckpt.offload.min_bytes", "1024"]
LARGEST = {
    "kept": (Pooling, ["--ckpt.memory_budget", "8MiB"]),
    "offload": (Deep, ["--ckpt.memory_budget", "8MiB", *MOVING]),
}


@pytest.mark.parametrize("kind", LARGEST)
def test_the_largest_batch_is_the_largest_that_has_a_plan(capsys, kind):
    model, arguments = LARGEST[kind]
    run("plan", *arguments, "--batch_size", "max", model=model)
    shown = capsys.readouterr().out
    rows = int(re.search(r"has (\d+) rows", shown)[1])
    assert f"a batch of {rows} x {WIDTH}" in shown
    assert rows > ROWS
    assert "below" in refuse(capsys, "plan", *arguments, "--batch_size", str(rows + 1), model=model)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ckpt.enabled", "false"], "`--ckpt.enabled false` leaves nothing to plan"),
        (["--ckpt.every_n_layers", "2"], "`--ckpt.every_n_layers 2` has no effect on a plan"),
        (["--flops_per_s", "0"], "`flops_per_s=0.0` must be a number per second"),
        (["--bytes_per_s", "-1"], "`bytes_per_s=-1.0` must be a number per second"),
        (["--link_bytes_per_s", "0", *MOVING], "`link_bytes_per_s=0.0` must be a number per second"),
        (["--link_bytes_per_s", "1e9"], "has no effect without `--ckpt.offload true`"),
    ],
)
def test_arguments_without_an_effect_are_one_sentence(capsys, arguments, said):
    assert said in refuse(capsys, "plan", *arguments)


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    path = str(tmp_path / "taken" / "plan.yaml")
    assert f"`save={path!r}` cannot be written" in refuse(capsys, "plan", *HALF, "--save", path)


class Words(Base):
    """Its batches are lists of texts."""

    def train_dataloader(self) -> Any:
        return DataLoader([str(i) for i in range(48)], batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(torch.ones(len(batch), WIDTH), batch_idx)


@pytest.mark.parametrize("rows", ["16", "max"])
def test_rows_of_batches_without_tensors_are_one_sentence(capsys, rows):
    arguments = ["--ckpt.memory_budget", "2MiB", "--batch_size", rows]
    assert "`batch_size` has no effect on a batch without tensors" in refuse(capsys, "plan", *arguments, model=Words)


class Empty(Base):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(0, WIDTH), batch_size=8)


def test_no_data_is_one_sentence(capsys):
    assert refuse(capsys, "plan", *HALF, model=Empty).startswith("the data gives no batch to plan for")


# ---------------------------------------------------------------- beside rules


class Random(nn.Module):
    """Layers of different costs, of which some save little."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        self.has_skips = drawn.random() < 0.5
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self._block(drawn) for _ in range(drawn.randint(2, 9)))
        self.head = nn.Linear(WIDTH, drawn.choice([4, 1024]))

    @staticmethod
    def _block(drawn: random.Random) -> nn.Module:
        inner, kind = drawn.choice([8, 64, 256]), drawn.random()
        act = nn.GELU() if kind < 0.5 else nn.Softmax(-1)
        drop = nn.Dropout(0.1) if kind < 0.7 else nn.Identity()
        return nn.Sequential(nn.Linear(WIDTH, inner), act, drop, nn.Linear(inner, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        outputs = []
        for block in self.blocks:
            hidden = block(hidden) + (hidden if self.has_skips else 0)
            outputs.append(hidden)
        return self.head(hidden + outputs[0]).log_softmax(-1).mean()


def planner_of(model: nn.Module) -> Planner:
    """A planner that may move."""
    operators = resolve_policy("matmul")
    preflight = Preflight(
        model,
        torch.randn(128, WIDTH),
        select_layers(model, "blocks.*").layers,
        lambda model, batch: model(batch),
        optimizers=lambda model: [torch.optim.Adam(model.parameters())],
        operators=operators,
        min_bytes=1024,
    )
    return planner_by_preflight(preflight, operators, OffloadOptions(min_bytes=1024))


@pytest.mark.parametrize("seed", [1, 6, 14, 20, 22])
def test_no_rule_that_fits_is_faster_than_the_plan(seed):
    planner = planner_of(Random(seed))
    rules = planner.rules()
    frontier = planner.frontier(rules)  # rehearses them
    least, kept = planner.least(0).peak_bytes, planner.kept_bytes
    limits = {least + (kept - least) * i // 8 for i in range(9)}
    limits |= {rule.peak_bytes for rule in frontier.rules if rule.peak_bytes >= least}
    for limit in sorted(limits):
        plan = planner.plan(limit)
        assert plan.peak_bytes <= limit
        for name, treatments in rules:
            rule = planner.describe(treatments, limit)
            assert rule.peak_bytes > limit or plan.extra_s <= rule.extra_s, (name, limit)
