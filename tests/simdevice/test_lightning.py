"""Plain runs of Lightning's Trainer on the device: what they compute is right, and no race is found."""

import lightning.pytorch as pl
import pytest
import torch
from lightning_support import make_trainer
from small_engine import GPT, Engine
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    """Trains a small language model.

    Args:
        engine: hooks for saved tensors in the training step.
    """

    def __init__(self, engine=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT()
        self.engine = engine
        self.losses = []
        self.dtypes = set()
        self.devices = set()

    def forward(self, rows):
        logits = self.net(rows)
        self.dtypes.add(logits.dtype)
        self.devices.add(logits.device.type)
        return logits

    def loss(self, rows):
        return torch.nn.functional.cross_entropy(self(rows).flatten(0, 1), rows.flatten())

    def training_step(self, rows, index):
        if self.engine is None:
            loss = self.loss(rows)
        else:
            self.engine.skip = {parameter.data_ptr() for parameter in self.parameters()}
            with self.engine:
                loss = self.loss(rows)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, rows, index):
        self.log("validation", self.loss(rows))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(pin_memory=False):
    rows = torch.randint(0, 40, (16, 16), generator=torch.Generator().manual_seed(1))
    return DataLoader(list(rows), batch_size=2, pin_memory=pin_memory)


def losses(model):
    return torch.stack(model.losses).float().cpu()


@pytest.fixture(scope="module")
def on_cpu():
    """Losses of the run that the others are compared to."""
    model = Model()
    settings = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **settings)
    trainer.fit(model, loader(), loader())
    return losses(model)


@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("copy_first", 0), ("random", 4)])
@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        ("32-true", torch.float32, 1e-3),
        ("bf16-mixed", torch.bfloat16, 0.1),
        ("bf16-true", torch.bfloat16, 0.3),
        ("16-mixed", torch.float16, 0.1),
    ],
)
def test_precisions(sim, on_cpu, precision, dtype, tolerance, policy, seed):
    sim.configure(policy, seed)
    model, trainer = Model(), make_trainer(precision)
    batches = loader(pin_memory=policy == "random")
    trainer.fit(model, batches, batches)
    assert trainer.state.finished
    assert model.devices == {"sim"}
    assert model.dtypes == {dtype}
    torch.testing.assert_close(losses(model), on_cpu, atol=tolerance, rtol=0)


def test_mixed_precision_scales_the_loss(sim):
    model, trainer = Model(), make_trainer("16-mixed")
    trainer.fit(model, loader())
    scaler = trainer.precision_plugin.scaler
    assert scaler.get_scale() > 1
    assert scaler._get_growth_tracker() > 0  # steps without an overflow


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_hooks_for_saved_tensors(sim, precision):
    plain, kept_on_host = Model(), Model(Engine())
    for model in (plain, kept_on_host):
        make_trainer(precision).fit(model, loader())
    assert kept_on_host.engine.packed > 100
    assert torch.equal(losses(plain), losses(kept_on_host))


@pytest.mark.expect_race
def test_a_race_in_a_trainer_is_found(sim):
    make_trainer().fit(Model(Engine("copy out before use")), loader())
    assert sim.races()


def test_accumulation_and_clipping(sim):
    results = []
    for batches in (2, 1):
        model = Model()
        make_trainer(accumulate_grad_batches=batches, gradient_clip_val=0.5, max_steps=4).fit(model, loader())
        results.append(len(model.losses))
    assert results == [8, 4]


def test_checkpoints(sim, tmp_path):
    """A run that is interrupted ends as one that is not."""
    whole = Model()
    make_trainer(max_epochs=2).fit(whole, loader())
    first = Model()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    second = Model()
    make_trainer(max_epochs=2).fit(second, loader(), ckpt_path=tmp_path / "first.ckpt")
    assert torch.equal(torch.cat([losses(first), losses(second)]), losses(whole))
