"""Models that leave Python, or the process: after `fit` as if they had never been recomputed, and while it runs."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import onnxruntime
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_ckpt.recompute import attached
from tests.compositions import assert_same_values, fitted, leftovers
from tests.support import Training, assert_equal

X = torch.linspace(-1, 1, 16).view(2, 8)


class Exported(Training):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = X

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def run_onnx(file: Path) -> Tensor:
    session = onnxruntime.InferenceSession(file)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0])


def onnx(module: Exported, folder: Path) -> Tensor:
    torch.onnx.export(module.model.eval(), (X,), folder / "model.onnx", dynamo=False)
    return run_onnx(folder / "model.onnx")


def onnx_dynamo(module: Exported, folder: Path) -> Tensor:
    torch.onnx.export(module.model.eval(), (X,), folder / "model.onnx", dynamo=True, verbose=False)
    return run_onnx(folder / "model.onnx")


def to_onnx(module: Exported, folder: Path) -> Tensor:
    module.to_onnx(folder / "model.onnx", X, dynamo=False)
    return run_onnx(folder / "model.onnx")


def jit_script(module: Exported, folder: Path) -> Tensor:
    return torch.jit.script(module.model.eval())(X)


def jit_trace(module: Exported, folder: Path) -> Tensor:
    return torch.jit.trace(module.model.eval(), X)(X)


def to_torchscript(module: Exported, folder: Path) -> Tensor:
    return module.to_torchscript()(X)


def to_torchscript_trace(module: Exported, folder: Path) -> Tensor:
    return module.to_torchscript(method="trace")(X)


def exported(module: Exported, folder: Path) -> Tensor:
    torch.export.save(torch.export.export(module.model.eval(), (X,)), folder / "model.pt2")
    return torch.export.load(folder / "model.pt2").module()(X)


def exported_strictly(module: Exported, folder: Path) -> Tensor:
    return torch.export.export(module.model.eval(), (X,), strict=True).module()(X)


def symbolic_trace(module: Exported, folder: Path) -> Tensor:
    return torch.fx.symbolic_trace(module.model.eval())(X)


def pickled(module: Exported, folder: Path) -> Tensor:
    return pickle.loads(pickle.dumps(module.model)).eval()(X)


def saved(module: Exported, folder: Path) -> Tensor:
    file = io.BytesIO()
    torch.save(module.model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).eval()(X)


def deep_copied(module: Exported, folder: Path) -> Tensor:
    return copy.deepcopy(module).eval()(X)


SCRIPTS = [jit_script, to_torchscript]
EXPORTS = [onnx, to_onnx, jit_trace, to_torchscript_trace, exported, exported_strictly, symbolic_trace]
COPIES = [pickled, saved, deep_copied]
SLOW = pytest.param(onnx_dynamo, marks=pytest.mark.slow)


def name_of(export: Any) -> str:
    return export.__name__


@pytest.mark.parametrize("export", [*EXPORTS, *SCRIPTS, *COPIES, SLOW], ids=name_of)
def test_a_model_can_be_exported_after_fit(export, tmp_path):
    results = [export(fitted(Exported, treatment).module, tmp_path) for treatment in (None, "recompute")]
    assert torch.equal(*results)


def test_a_model_saved_after_fit_loads_where_the_package_is_unknown(tmp_path):
    module = fitted(
        lambda: Training(nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2)])),
        "recompute",
        counted=None,
    ).module
    torch.save(module.model, tmp_path / "model.pt")
    program = (
        "import sys, torch; sys.modules['lightning_ckpt'] = None; "
        f"torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(2, 8)).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class Exports(pl.Callback):
    """Exports the model after every epoch, with gradients on, and goes on."""

    def __init__(self, export: Any, folder: Path) -> None:
        self.export, self.folder = export, folder
        self.results: list[Tensor] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.results.append(self.export(pl_module, self.folder).detach())
        pl_module.train()


def train_and_export(export, folder, treatment):
    logger = CSVLogger(folder)  # so that the monitor measures
    return fitted(Exported, treatment, lambda: [Exports(export, folder)], counted=None, max_epochs=2, logger=logger)


@pytest.mark.parametrize("export", [*EXPORTS, *COPIES, SLOW], ids=name_of)
def test_a_model_can_be_exported_while_it_is_trained(export, tmp_path):
    plain, got = (train_and_export(export, tmp_path, treatment) for treatment in (None, "recompute"))
    results, expected = (run.callback(Exports).results for run in (got, plain))
    assert all(map(torch.equal, results, expected))
    assert not torch.equal(*results)
    assert_equal(got.run, plain.run)
    assert_same_values(got.module, plain.module)
    assert leftovers(got.module) == []


@pytest.mark.parametrize("export", SCRIPTS, ids=name_of)
def test_a_layer_cannot_be_scripted_while_it_is_recomputed_and_the_error_says_when(export, tmp_path):
    with pytest.raises(Exception, match=r"(?s)torch\.jit\.script.*after `fit`"):
        train_and_export(export, tmp_path, "recompute")


def test_a_copy_made_while_it_is_trained_is_still_recomputed_and_can_be_freed_of_that():
    class Keeps(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            self.copied = copy.deepcopy(pl_module.model)

    copied = fitted(Exported, "recompute", lambda: [Keeps()]).callback(Keeps).copied
    for layer in copied[1:]:
        recompute = attached(layer)
        assert recompute is not None
        recompute.detach()
    assert leftovers(copied) == []
    torch.jit.script(copied)
