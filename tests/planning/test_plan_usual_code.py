"""Usual code, and what it asks of `plan` and `make_plan`: the numbers of training, or one sentence."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from lightning_ckpt import ActivationCheckpointing, make_plan
from lightning_ckpt.planning import BudgetError
from lightning_ckpt.selection import SelectionError
from tests.planning.test_plan_command import WIDTH, make_block
from tests.planning.test_plan_like_fit import HALF, ROWS, Base, Net, assert_planned_as_trained, refuse, run

VOCABULARY = 64


def rows() -> Tensor:
    """A batch as `Base` gives it."""
    return torch.randn(ROWS, WIDTH)


# ---------------------------------------------------------------- a submodule under two names


class NotesTreatments(Base):
    """Notes how its layers have been treated in the end."""

    def on_train_end(self) -> None:
        [treatments] = [each.treatments() for each in self.trainer.callbacks if hasattr(each, "treatments")]
        self.treatments = " ".join(treatments)


class Composed(NotesTreatments):
    """Has its parts once by their names and once in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.model = nn.Sequential(self.net, self.head)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch).square().mean()


class Repeated(NotesTreatments):
    """Runs one of its blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = make_block(0.1)
        self.net.blocks = nn.ModuleList([shared, make_block(0.1), shared, make_block(0.1)])


TWO_NAMES = pytest.mark.parametrize("model", [Composed, Repeated])


@TWO_NAMES
def test_parts_with_two_names_are_planned_as_trained(tmp_path, model):
    _, cli = assert_planned_as_trained(tmp_path, model=model)
    assert all(weight.is_meta for weight in cli.model.parameters())


@TWO_NAMES
def test_parts_with_two_names_have_their_weights_after_make_plan(model):
    module = model()
    weights = dict(module.named_parameters(remove_duplicate=False))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    make_plan(module, rows(), 0.5)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert list(after) == list(weights)
    for name, weight in after.items():
        assert weight is weights[name], name
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, before[name]), name


@TWO_NAMES
def test_parts_with_two_names_train_within_a_budget_as_without(model):
    budgeted = run("fit", "--ckpt.memory_budget", "0.3", model=model).model
    plain = run("fit", "--ckpt.enabled", "false", model=model).model
    assert "recompute" in budgeted.treatments
    for (name, one), other in zip(budgeted.named_parameters(), plain.parameters(), strict=True):
        assert type(one) is nn.Parameter
        assert torch.equal(one, other), name


# ---------------------------------------------------------------- checkpointing that is on already


def make_gpt_neox() -> PreTrainedModel:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        use_cache=False,
    )
    return GPTNeoXForCausalLM(config)


def make_gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [make_gpt_neox, make_gpt2])
def test_the_checkpointing_of_hugging_face_does_not_count_and_stays_on(make):
    model = make()
    words = torch.zeros(8, 32, dtype=torch.long)
    batch = {"input_ids": words, "labels": words}
    plain = make_plan(model, batch, 0.5)
    model.gradient_checkpointing_enable()
    on = [name for name, part in model.named_modules() if getattr(part, "gradient_checkpointing", False)]
    assert len(on) >= len(plain.layers) == 3
    plan = make_plan(model, batch, 0.5)
    assert plan.kept_bytes == plain.kept_bytes
    assert plan == plain
    assert [name for name, part in model.named_modules() if getattr(part, "gradient_checkpointing", False)] == on
    assert model.is_gradient_checkpointing


class Talks(Base):
    """Its model's checkpointing is on, which training takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_gpt_neox()
        self.net.gradient_checkpointing_enable()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randint(0, VOCABULARY, (48, 32)), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(input_ids=batch, labels=batch).loss


class WrapsOne(Base):
    """One of its blocks is wrapped by PyTorch, which is left to that."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net((0.1,) * 5)
        self.net.blocks[1] = checkpoint_wrapper(self.net.blocks[1])


class WrapsAll(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(map(checkpoint_wrapper, self.net.blocks))


@pytest.mark.parametrize(("model", "layers"), [(Talks, 3), (WrapsOne, 4)])
def test_checkpointing_that_is_on_already_is_planned_as_trained(tmp_path, model, layers):
    plan, _ = assert_planned_as_trained(tmp_path, model=model)
    assert len(plan.layers) == layers


def test_nothing_to_plan_since_all_is_wrapped_is_one_sentence(capsys):
    said = (
        "all of the 3 chosen layers are checkpointed already by PyTorch's `checkpoint_wrapper`, so that there is "
        "nothing to plan. Do not wrap them."
    )
    assert refuse(capsys, "plan", *HALF, model=WrapsAll) == said
    with pytest.raises(SelectionError, match=f"^{re.escape(said)}$"):
        make_plan(WrapsAll(), rows(), 0.5)


# ---------------------------------------------------------------- code that mixes weights and tensors


class TriesSizes(Base):
    """Asks a forward how wide the head must be."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.net(torch.zeros(1, WIDTH)).shape[1], WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.net(batch)).square().mean()


class MovesItself(Base):
    def setup(self, stage: str) -> None:
        self.net.to(self.device)


class TakesVectors(Base):
    """Has its vectors from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        vectors = torch.randn(8, WIDTH)
        self.words = nn.Embedding(8, WIDTH)
        self.words.weight.data = vectors

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words = self.words(torch.arange(len(batch), device=self.device) % 8)
        return super().training_step(batch + words, batch_idx)


class MadeEmpty(Base):
    """Makes its weights without memory, and then gives them some."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Net()
            self.net.to_empty(device=self.device)
            for part in self.net.modules():
                if isinstance(part, nn.Linear):
                    part.reset_parameters()


class LoadsWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.load_state_dict({name: torch.randn(each.shape) for name, each in self.net.state_dict().items()})


class HasLazyHead(Base):
    """Its head has a shape after `setup`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(WIDTH)

    def setup(self, stage: str) -> None:
        self.head(self.net(torch.zeros(1, WIDTH)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.net(batch)).square().mean()


MIXING = [TriesSizes, MovesItself, TakesVectors, MadeEmpty, LoadsWeights, HasLazyHead]


@pytest.mark.parametrize("model", MIXING)
def test_code_that_mixes_weights_and_tensors_is_planned_as_trained(tmp_path, model):
    _, cli = assert_planned_as_trained(tmp_path, model=model)
    assert [name for name, weight in cli.model.named_parameters() if not weight.is_meta] == []


def test_weights_that_are_loaded_are_no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*meta.*")
        cli = run("plan", *HALF, model=LoadsWeights)
    assert all(weight.is_meta for weight in cli.model.parameters())


class Distills(Base):
    """Learns from a model that was trained before.

    Args:
        teacher: the file of that.
    """

    def __init__(self, teacher: str) -> None:
        super().__init__()
        self.teacher = Base.load_from_checkpoint(teacher).eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch) - self.teacher.net(batch)).square().mean()


def test_a_teacher_that_is_loaded_is_planned_as_trained(tmp_path):
    path = str(tmp_path / "teacher.ckpt")
    run("fit", "--trainer.max_steps", "1").trainer.save_checkpoint(path)
    _, cli = assert_planned_as_trained(tmp_path, "--model.teacher", path, model=Distills)
    assert all(weight.is_meta for weight in cli.model.parameters())
    assert not cli.model.teacher.training


class ReadsWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.net.first.weight.std().item()


class ComparesWeights(Base):
    """Reads its weights after all is made."""

    def setup(self, stage: str) -> None:
        if self.net.first.weight.abs().max() > 1:
            raise ValueError("no weights are that large")


class ChecksWeights(Base):
    """Has PyTorch check whether a weight is orthogonal already."""

    def __init__(self) -> None:
        super().__init__()
        self.net.first = nn.utils.parametrizations.orthogonal(self.net.first)


@pytest.mark.parametrize("model", [ReadsWeights, ComparesWeights, ChecksWeights])
def test_code_that_reads_weights_is_one_sentence(capsys, model):
    assert refuse(capsys, "plan", *HALF, model=model) == (
        "the step cannot be rehearsed: the model reads numbers of its weights (`.item()`, `if`) while it is made, and "
        "`plan` makes it without them. Training plans with the weights: `fit --ckpt.memory_budget`."
    )


# ---------------------------------------------------------------- what else decides what a step takes


class StaysInEval(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.eval()


class MakesTensors(Base):
    """Has, by the precision, a half of what it makes with its model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()
            self.mask = torch.ones(ROWS, 4 * WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch.to(self.dtype))
        return (hidden.repeat(1, 4) * self.mask).square().mean()


class HasStateAtOnce(Base):
    """Its optimizer has all of its state before its first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters())


def test_a_model_in_eval_mode_is_planned_as_trained(tmp_path):
    _, cli = assert_planned_as_trained(tmp_path, model=StaysInEval)
    assert not cli.model.net.training


def test_tensors_that_are_made_in_half_precision_are_planned_as_trained(tmp_path):
    assert_planned_as_trained(tmp_path, "--trainer.precision", "bf16-true", model=MakesTensors)


def test_state_in_the_constructor_of_an_optimizer_is_planned_as_trained(tmp_path):
    plan, _ = assert_planned_as_trained(tmp_path, model=HasStateAtOnce)
    makes: dict[str, Callable[[nn.Module], Any]] = {
        "function": lambda module: lambda again: torch.optim.Adagrad(again.parameters()),
        "one that there is": lambda module: torch.optim.Adagrad(module.parameters()),
        "several": lambda module: [torch.optim.Adagrad([weight]) for weight in module.parameters()],
    }
    for kind, make in makes.items():
        module = Base()
        assert make_plan(module, rows(), 0.5, optimizers=make(module)).kept_bytes == plan.kept_bytes, kind
    assert make_plan(HasStateAtOnce(), rows(), 0.5).kept_bytes == plan.kept_bytes


class HasBackbone(Base):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.backbone(batch), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad])


FREEZING = """
trainer:
  callbacks:
  - class_path: lightning.pytorch.callbacks.BackboneFinetuning
    init_args: {unfreeze_backbone_at_epoch: 5}
"""
ACCUMULATING = """
trainer:
  callbacks:
    class_path: lightning.pytorch.callbacks.GradientAccumulationScheduler
    init_args: {scheduling: {0: 2}}
"""


@pytest.mark.parametrize(
    ("model", "config"), [(HasBackbone, FREEZING), (Base, ACCUMULATING)], ids=["freezing", "accumulating"]
)
def test_callbacks_that_change_steps_are_planned_as_trained(tmp_path, model, config):
    path = tmp_path / "config.yaml"
    path.write_text(config)
    assert_planned_as_trained(tmp_path, "--config", str(path), model=model)


# ---------------------------------------------------------------- rows


class NormsOverBatch(Base):
    """Cannot train with one row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(self.net(batch)).square().mean()


FEW = ["--ckpt.memory_budget", "2MiB"]


def test_the_largest_batch_of_a_model_that_needs_several_rows(capsys):
    run("plan", *FEW, "--batch_size", "max", model=NormsOverBatch)
    shown = capsys.readouterr().out
    most = int(re.search(r"^The largest batch within 2\.0 MiB has (\d+) rows\.$", shown, re.MULTILINE)[1])
    assert most > ROWS
    assert f"a batch of {most} x {WIDTH}" in shown
    run("plan", *FEW, "--batch_size", str(most), model=NormsOverBatch)
    assert "below" in refuse(capsys, "plan", *FEW, "--batch_size", str(most + 1), model=NormsOverBatch)


def test_a_budget_below_the_batch_of_a_model_that_needs_several_rows_is_one_sentence(capsys):
    said = refuse(capsys, "plan", "--ckpt.memory_budget", "100KiB", "--batch_size", "max", model=NormsOverBatch)
    assert re.fullmatch(
        r"`memory_budget='100KiB'`: a batch of 256 rows takes [\d.]+ [KM]iB, more than the 100\.0 KiB that there are\.",
        said,
    )


class KnowsRows(Base):
    """Has one number of rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch) != ROWS:
            raise ValueError("other rows")
        return super().training_step(batch, batch_idx)


class TakesPairs(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch) % 2:
            raise ValueError("one is left over")
        one, other = self.net(batch).chunk(2)
        return (one - other).square().mean()


def test_rows_that_a_step_cannot_have_are_named(capsys):
    most = [*FEW, "--batch_size", "max"]
    said = refuse(capsys, "plan", *most, model=KnowsRows)
    assert re.fullmatch(r"the step cannot be rehearsed: with (?!256)\d+ rows, ValueError: other rows\.", said)
    said = refuse(capsys, "plan", *most, model=TakesPairs)
    assert re.fullmatch(r"the step cannot be rehearsed: with \d*[13579] rows, ValueError: one is left over\.", said)
    said = refuse(capsys, "plan", *FEW, "--batch_size", "64", model=KnowsRows)
    assert said == "`batch_size=64` cannot be planned for: ValueError: other rows."
    said = refuse(capsys, "plan", *FEW, "--batch_size", "1", model=NormsOverBatch)
    assert said.startswith("`batch_size=1` cannot be planned for: ValueError: Expected more than 1 value per channel")


TOO_MUCH = "cannot be planned for: bytes or nanoseconds add up to 4503599627370496 or more: look for a wrong unit."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch_size", "999999999999"], f"`batch_size=999999999999` {re.escape(TOO_MUCH)}"),
        (
            ["--batch_size", "9" * 30],
            r"`batch_size=9{30}` cannot be planned for: a batch of 9{30} rows is larger than tensors can be\.",
        ),
        (
            ["--ckpt.memory_budget", "1000TB", "--batch_size", "max"],
            r"`memory_budget='1000TB'` is beyond what can be planned for: a batch of \d+ rows was tried\.",
        ),
        (
            ["--ckpt.memory_budget", "1e30", "--batch_size", "max"],
            r"`memory_budget=1e\+30` is beyond what can be planned for: a batch of \d+ rows was tried\.",
        ),
    ],
    ids=["rows", "more rows", "budget", "larger budget"],
)
def test_more_than_there_can_be_is_one_sentence(capsys, arguments, said):
    found = refuse(capsys, "plan", *arguments)
    assert re.fullmatch(said, found), found


# ---------------------------------------------------------------- files


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "taken").write_text("a file")
    path = tmp_path / "taken" / "plan.png"
    said = refuse(capsys, "plan", *HALF, "--picture", str(path))
    assert re.fullmatch(rf"{re.escape(str(path))} cannot be written: [\w ]+\.", said), said


class AsksForFolders(Base):
    """Says where its samples will be."""

    def setup(self, stage: str) -> None:
        self.folders = [Path(self.logger.save_dir) / "samples", Path(self.logger.log_dir) / "samples"]


def test_folders_of_the_logger_are_known_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = run("plan", *HALF, "--trainer.logger", "true", model=AsksForFolders)
    outer, inner = (folder.absolute() for folder in cli.model.folders)
    assert outer == tmp_path / "samples"
    assert inner.is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- make_plan


def test_optimizers_that_are_none_are_named():
    with pytest.raises(BudgetError) as error:
        make_plan(Base(), rows(), 0.5, optimizers="adam")
    assert str(error.value) == (
        "`optimizers='adam'` is no optimizer: give those of the module, or a function that makes them of it."
    )


class BringsCallback(Base):
    """Makes its callback itself."""

    def configure_callbacks(self) -> Any:
        return [ActivationCheckpointing(memory_budget=0.5)]


def test_a_model_that_names_the_callback_is_rehearsed():
    assert make_plan(BringsCallback(), rows(), 0.5) == make_plan(Base(), rows(), 0.5)


def test_a_plan_is_the_same_where_gradients_are_off():
    module, batch = Base(), rows()
    plan = make_plan(module, batch, 0.5)
    with torch.no_grad():
        assert make_plan(module, batch, 0.5) == plan
        assert not torch.is_grad_enabled()
    assert all(weight.requires_grad for weight in module.parameters())
