"""`python train.py plan`: what it prints, writes and refuses; and training with what it wrote."""

import re
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_ckpt import CheckpointCLI
from lightning_ckpt.planning import Treatment, load_plan
from lightning_ckpt.recompute import attached

WIDTH, ROWS = 32, 8


def make_block(dropout):
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout))


class Blocks(LightningModule):
    """Four blocks, with weights in `setup` and `configure_model`.

    Args:
        dropout: probability of dropping a value.
    """

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = nn.Linear(WIDTH, WIDTH)
        self.devices: list[str] = []

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(make_block(self.dropout) for _ in range(4))

    def training_step(self, batch, batch_idx):
        self.devices.append(str(self.first.weight.device))
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        loss = hidden.square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        return DataLoader(torch.randn(6 * ROWS, WIDTH), batch_size=ROWS)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def run(*arguments, model=Blocks):
    plain = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 4}
    return CheckpointCLI(
        model,
        args=[*arguments],
        trainer_defaults={**plain, "accelerator": "cpu", "enable_checkpointing": False},
        save_config_callback=None,
        seed_everything_default=1,
    )


def refuse(capsys, *arguments):
    with pytest.raises(SystemExit) as error:
        run(*arguments)
    assert error.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_plan_is_printed_and_no_weight_is_made(capsys):
    cli = run("plan", "--ckpt.memory_budget", "0.5")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"a batch of {ROWS} x {WIDTH}" in shown
    assert "blocks.0" in shown
    assert "every_n_layers=2" in shown
    assert "all kept" in shown
    assert "Training measures them" in shown
    assert {parameter.device.type for parameter in cli.model.parameters()} == {"meta"}
    assert cli.model.devices == []  # what the rehearsal appended is gone
    assert all(attached(block) is None for block in cli.model.blocks)


def test_training_takes_the_plan_that_was_saved(tmp_path, capsys):
    path = str(tmp_path / "plan.yaml")
    run("plan", "--ckpt.memory_budget", "0.5", "--save", path)
    plan = load_plan(path)
    assert f"--ckpt.plan {path}" in capsys.readouterr().out
    assert {Treatment.KEEP, Treatment.RECOMPUTE} <= set(plan.assignment.values()) | {Treatment.RECOMPUTE}
    assert len(set(plan.assignment.values())) > 1
    planned = run("fit", "--ckpt.plan", path)
    plain = run("fit", "--ckpt.enabled", "false")
    for one, other in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_plan_for_other_layers_is_refused(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    run("plan", "--ckpt.memory_budget", "0.5", "--save", str(path))
    path.write_text(path.read_text().replace("blocks.3", "blocks.7"))
    assert "blocks.7" in refuse(capsys, "fit", "--ckpt.plan", str(path))


def test_the_largest_batch_is_as_large_as_fits(capsys):
    run("plan", "--ckpt.memory_budget", "2MiB", "--batch-size", "max")
    shown = capsys.readouterr().out
    rows = int(shown.split("has ")[1].split(" rows")[0])
    assert f"a batch of {rows} x {WIDTH}" in shown
    run("plan", "--ckpt.memory_budget", "2MiB", "--batch_size", str(rows))
    assert "below" in refuse(capsys, "plan", "--ckpt.memory_budget", "2MiB", "--batch_size", str(rows + 1))


def test_another_device_is_planned_for(capsys):
    run("plan", "--ckpt.memory_budget", "50%", "--device_memory", "8MiB", "--flops_per_s", "1e12")
    shown = " ".join(capsys.readouterr().out.split())
    assert "of 4.0 MiB" in shown
    assert "1 TFLOP/s" in shown
    assert "dropout masks" in shown


def test_a_trainer_for_another_machine_does_not_matter():
    run("plan", "--trainer.accelerator", "gpu", "--trainer.devices", "8", "--trainer.strategy", "ddp")


def test_half_precision_takes_less(tmp_path):
    peaks = {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        path = str(tmp_path / f"{precision}.yaml")
        run("plan", "--trainer.precision", precision, "--batch_size", "4096", "--save", path)
        peaks[precision] = load_plan(path).kept_bytes
    assert peaks["32-true"] > peaks["bf16-mixed"] > peaks["bf16-true"]


class Manual(Blocks):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Reads(Blocks):
    """Reads its loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else None


@pytest.mark.parametrize(("model", "said"), [(Manual, "its optimization is manual"), (Reads, "`.item()`")])
def test_a_step_that_cannot_be_rehearsed_is_one_sentence(capsys, model, said):
    with pytest.raises(SystemExit):
        run("plan", model=model)
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_configuration_of_fit_will_do(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", "--ckpt.memory_budget", "0.5", "--print_config")
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    run("plan", "--config", str(path))
    assert "blocks.0" in capsys.readouterr().out


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    run("plan", "--ckpt.memory_budget", "0.5", "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ckpt.memory_budget", "lots"], "`memory_budget='lots'`"),
        (["--ckpt.memory_budget", "1KiB"], "`memory_budget='1KiB'`"),
        (["--ckpt.memory_budget", "0.5", "--batch_size", "max"], "any batch fits"),
        (["--ckpt.memory_budget", "1KiB", "--batch_size", "max"], "a batch of one row takes"),
        (["--batch_size", "many"], "`batch_size='many'`"),
        (["--ckpt.plan", "plan.yaml"], "plan.yaml"),
        (["--device_memory", "large"], "`device_memory='large'`"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(capsys, arguments, said):
    assert said in refuse(capsys, "plan", *arguments)


LARGE = """
import re, sys, torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from lightning_ckpt import CheckpointCLI

class Large(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPTNeoXForCausalLM(GPTNeoXConfig())  # 20 billion weights
    def training_step(self, batch, batch_idx):
        return self.model(batch, labels=batch, use_cache=False).loss
    def train_dataloader(self):
        return DataLoader(torch.zeros(8, 2048, dtype=torch.long), batch_size=4)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

CheckpointCLI(Large, args=["plan", "--ckpt.memory_budget", "370GiB", "--save", sys.argv[1]])
# Not `ru_maxrss`: it starts from the peak of the process that started this one.
print(re.search(r"VmHWM:.*", open("/proc/self/status").read())[0])
"""


@pytest.mark.slow
def test_twenty_billion_weights_take_less_than_a_gibibyte(tmp_path):
    path = tmp_path / "plan.yaml"
    program = [sys.executable, "-c", LARGE, str(path)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "20,554.6 million weights" in done.stdout
    assert len(load_plan(path).layers) == 44
    peak = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert peak is not None
    assert int(peak[1]) < 2**20
