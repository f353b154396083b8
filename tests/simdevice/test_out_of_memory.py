"""When the device's memory runs out: the user's own error, where memory stood, and nothing left behind."""

import contextlib
import gc
import logging
import pickle
import re

import backend
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_support import SimAccelerator
from scenarios import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ckpt import ActivationCheckpointing, OffloadOptions, OffloadStrategy, StepMonitor

pytestmark = pytest.mark.usefixtures("sim")
ROWS, WIDTH = 256, 1024
UNIT = 2**20  # bytes of an activation
TOO_MUCH = 2**38


def run_out():
    torch.empty(TOO_MUCH, dtype=torch.uint8, device=DEVICE)


class Exps(nn.Module):
    """Each `exp` saves its output, and nothing else is saved.

    Args:
        count: how often.
        then: called with the output at the end; what it returns is the layer's output. Default: nothing happens.
    """

    def __init__(self, count=1, then=None):
        super().__init__()
        self.count = count
        self.then = then
        self.inner = nn.Identity()

    def forward(self, x):
        for _ in range(self.count):
            x = (-x).exp().neg()
        return x if self.then is None else self.then(x)


class Shift(nn.Module):
    """Has a weight, and saves nothing."""

    def __init__(self, count=1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, WIDTH))

    def forward(self, x):
        return x + self.weight[0]


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        run_out()


def in_forward(x):
    run_out()


def in_backward(x):
    return InBackward.apply(x)


def in_recompute(x):
    if torch._C._current_graph_task_id() != -1:  # inside of backward
        run_out()
    return (-x).exp()


class Training(pl.LightningModule):
    def __init__(self, *layers, parameters=1):
        super().__init__()
        self.model = nn.Sequential(Shift(parameters), *layers)

    def training_step(self, batch, batch_idx):
        return self.model(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count=2, rows=ROWS):
    return DataLoader(torch.zeros(count * rows, WIDTH), batch_size=rows)


def make_trainer(callbacks=(), strategy=None, **settings):
    quiet = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(
        accelerator=SimAccelerator(),
        devices=1,
        strategy=strategy or SingleDeviceStrategy(device=DEVICE),
        callbacks=list(callbacks),
        **{**quiet, **settings},
    )


@pytest.fixture(autouse=True)
def _limited(sim):
    sim.configure("eager")
    gc.collect()
    torch.accelerator.empty_cache()
    sim.set_limit(torch.accelerator.memory_reserved() + 64 * UNIT)


@pytest.fixture
def said(caplog):
    """What has been said about memory that ran out, so far."""
    caplog.set_level(logging.INFO)

    def texts():
        return [record.getMessage() for record in caplog.records if "Out of memory" in record.getMessage()]

    return texts


def fails(module, callbacks=(), data=None, **settings):
    """Fit, which runs out of memory; what the error has told."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(callbacks, **settings).fit(module, loader() if data is None else data)
    assert type(caught.value) is torch.OutOfMemoryError
    [message] = caught.value.args
    assert message.startswith("sim out of memory: tried to allocate")
    return caught.value.args


def head_of(text):
    """Phase and layer, and the bytes that were kept."""
    match = re.match(r"(Step \d+: Out of memory in .*)\. ([\d.]+) MiB were kept for backward, of ([\d.]+) MiB", text)
    assert match is not None
    where, kept, held = match.groups()
    assert float(kept) <= float(held)
    return where, float(kept)


def sizes_of(text):
    return [line.strip() for line in text.splitlines()[1:] if " MiB  " in line]


def cure_of(text):
    return next(line for line in text.splitlines() if line.startswith("Most likely to help: "))[21:]


# ---------------------------------------------------------------- what is said


def test_forward_that_does_not_fit(sim, said):
    """A limit that the model runs into on its way; the error is as without the monitor, to the byte."""
    layers = (3, 9, 1, 5, 2, 4, 30, 30)
    reserved = torch.accelerator.memory_reserved()

    def run(callbacks):
        gc.collect()
        torch.accelerator.empty_cache()
        sim.set_limit(reserved + 50 * UNIT)
        return fails(Training(*map(Exps, layers)), callbacks)

    monitored = run([StepMonitor()])
    [text] = said()
    where, kept = head_of(text)
    assert where == "Step 0: Out of memory in forward, in layer 'model.7'"
    sizes = sizes_of(text)
    inside = float(sizes[0].split()[0])  # as far as it came
    assert kept == sum(layers[:6]) + inside
    assert sizes == [
        f"{inside:.2f} MiB  'model.7'",
        "9.00 MiB  'model.2'",
        "5.00 MiB  'model.4'",
        "4.00 MiB  'model.6'",
        "3.00 MiB  'model.1'",
        "3.00 MiB  2 other layers",
    ]
    # Besides what is kept: the weight, the batch, its shifted values, and two temporaries at most.
    assert 50 - 5 <= kept <= 50 - 2
    assert run([]) == monitored


def test_backward(said):
    fails(Training(Exps(3), Exps(2, in_backward), Exps(1)), [StepMonitor()])
    [text] = said()
    assert head_of(text) == ("Step 0: Out of memory in backward", 5)
    assert sizes_of(text) == ["3.00 MiB  'model.1'", "2.00 MiB  'model.2'"]


@pytest.mark.parametrize(
    ("every", "sizes"),
    [
        # Recomputed layers keep their inputs, each a tensor of its own, since `neg` follows every `exp`; the one that
        # runs again has regained six values.
        (1, ["7.00 MiB  'model.3'", "1.00 MiB  'model.1'", "1.00 MiB  'model.2'"]),
        (2, ["7.00 MiB  'model.3'", "5.00 MiB  'model.2'", "1.00 MiB  'model.1'"]),
    ],
)
def test_the_recompute_of_a_layer(said, every, sizes):
    module = Training(Exps(4), Exps(5), Exps(6, in_recompute), Exps(7))
    fails(module, [ActivationCheckpointing(every_n_layers=every, monitor=False), StepMonitor()])
    [text] = said()
    kept = sum(float(line.split()[0]) for line in sizes)
    assert head_of(text) == ("Step 0: Out of memory in backward, while layer 'model.3' ran again", kept)
    assert sizes_of(text) == sizes


def test_the_optimizer_that_makes_its_state(sim, said):
    class Adam(Training):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), foreach=False)

    module = Adam(Exps(), Exps(), parameters=8 * 256)  # 8 MiB: with gradient and two moments 32 MiB
    sim.set_limit(torch.accelerator.memory_reserved() + 30 * UNIT)
    fails(module, [StepMonitor()])
    [text] = said()
    assert head_of(text) == ("Step 0: Out of memory in optimizer", 0)
    assert "a strategy that shards parameters and optimizer state" in cure_of(text)


def test_validation_and_the_transfer_of_data(said):
    class Validates(Training):
        def validation_step(self, batch, batch_idx):
            run_out()

        def val_dataloader(self):
            return loader()

    class Transfers(Training):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            run_out()

    fails(Validates(Exps()), [StepMonitor()])
    fails(Transfers(Exps()), [StepMonitor()])
    wheres = [head_of(text)[0] for text in said()]
    assert wheres[0].endswith("Out of memory in what is outside of the training step")
    assert wheres[1] == "Step 0: Out of memory in what is outside of the training step"
    assert len(wheres) == 2


class Manual(Training):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.model(batch).sum())
        self.optimizers().step()


def test_manual_optimization(said):
    fails(Manual(Exps(3), Exps(2, in_backward), Exps(1)), [StepMonitor()])
    fails(Manual(Exps(3), Exps(2, in_forward)), [StepMonitor()])
    assert [head_of(text) for text in said()] == [
        ("Step 0: Out of memory in backward", 5),
        ("Step 0: Out of memory in forward, in layer 'model.2'", 5),
    ]


def test_accumulation_counts_the_last_micro_batch_only(said):
    calls = []

    def in_the_sixth_batch(x):
        calls.append(1)
        return in_forward(x) if len(calls) == 6 else x

    module = Training(Exps(3), Exps(1, in_the_sixth_batch))
    fails(module, [StepMonitor()], loader(9), accumulate_grad_batches=3)
    [text] = said()
    assert head_of(text) == ("Step 1: Out of memory in forward, in layer 'model.2'", 4)


def test_a_backward_after_one_through_layers_that_others_checkpoint(said):
    """Their layers run again in the device's own thread, in which autograd counts from the beginning."""

    class Twice(Training):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x = self.model[0](batch)
            for layer in self.model[1:]:
                x = layer(checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False))
            self.manual_backward(x.sum(), retain_graph=True)
            self.manual_backward(in_backward(x).sum())

    fails(Twice(*[Exps(count) for count in (1, 2, 3, 4, 5, 6)]), [StepMonitor()])
    [text] = said()
    where, kept = head_of(text)
    assert where == "Step 0: Out of memory in backward"
    # Each called directly keeps its own, and checkpointed its input.
    assert kept == (1 + 2 + 3 + 4 + 5 + 6) + 6
    assert sizes_of(text) == [
        "7.00 MiB  'model.6'",
        "6.00 MiB  'model.5'",
        "5.00 MiB  'model.4'",
        "4.00 MiB  'model.3'",
        "3.00 MiB  'model.2'",
        "2.00 MiB  1 other layer",
    ]


OFFLOADS = {
    "strategy": lambda: {"strategy": OffloadStrategy(device=DEVICE, move="all", min_bytes=64, keep_last=0)},
    "callback": lambda: {
        "callbacks": [ActivationCheckpointing(offload=OffloadOptions(min_bytes=64, keep_last=0), monitor=False)]
    },
}


@pytest.mark.parametrize("way", OFFLOADS)
@pytest.mark.parametrize("then", [in_forward, in_backward, in_recompute])
def test_with_offload_what_is_on_the_host_is_not_counted(said, way, then):
    def layers():
        return [Exps(2) for _ in range(6)] + [Exps(2, then), Exps(2)]

    settings = OFFLOADS[way]()
    callbacks = [*settings.pop("callbacks", []), StepMonitor()]
    if then is in_recompute and way == "strategy":
        callbacks.insert(0, ActivationCheckpointing(monitor=False))
    fails(Training(*layers()), callbacks, **settings)
    [text] = said()
    where, kept = head_of(text)
    phases = {
        in_forward: "forward, in layer 'model.7'",
        in_backward: "backward",
        in_recompute: "backward, while layer 'model.7' ran again",
    }
    if then is in_backward and way == "callback":
        assert where.startswith("Step 0: Out of memory in backward")
    else:
        assert where == f"Step 0: Out of memory in {phases[then]}"
    plainly = {in_forward: 14, in_backward: 14, in_recompute: 14}[then]
    assert kept < plainly


@pytest.mark.parametrize("with_logger", [False, True])
def test_it_is_said_once(said, tmp_path, with_logger):
    logger = CSVLogger(tmp_path) if with_logger else False
    fails(Training(Exps(), Exps(1, in_forward)), [StepMonitor(table=False)], logger=logger)
    assert len(said()) == 1


# ---------------------------------------------------------------- what would help


def offloading(**options):
    return OffloadStrategy(device=DEVICE, min_bytes=64, **options)


@pytest.mark.parametrize(
    ("callbacks", "strategy", "cure"),
    [
        (list, None, "`Trainer(callbacks=[ActivationCheckpointing()])`"),
        (lambda: [ActivationCheckpointing(enabled=False)], None, "`enabled=True`"),
        (lambda: [ActivationCheckpointing(every_n_layers=4)], None, "`every_n_layers=1` instead of"),
        (lambda: [ActivationCheckpointing()], None, "`offload=True`"),
        (lambda: [ActivationCheckpointing(offload=True)], None, "a smaller batch"),
        (lambda: [ActivationCheckpointing()], lambda: offloading(move="all"), "`offload=True`"),
        (lambda: [ActivationCheckpointing(offload=True)], offloading, "`OffloadStrategy(move='all')`"),
        (lambda: [ActivationCheckpointing(offload=True)], lambda: offloading(move="all"), "a smaller batch"),
        (list, lambda: offloading(move="all"), "`Trainer(callbacks=[ActivationCheckpointing()])`"),
    ],
)
def test_the_most_helpful_change(said, callbacks, strategy, cure):
    module = Training(*[Exps() for _ in range(5)], Exps(3, in_forward))
    fails(module, [*callbacks(), StepMonitor()], strategy=strategy and strategy())
    assert cure_of(said()[0]).startswith(cure)


def test_where_parameters_fill_the_memory_activations_are_not_blamed(said):
    module = Training(Exps(), Exps(1, in_backward), parameters=30 * 256)
    fails(module, [StepMonitor()])
    cure = cure_of(said()[0])
    assert "shards parameters" in cure
    assert "ActivationCheckpointing" not in cure


# ---------------------------------------------------------------- what is left


SCENES = {
    "forward": (lambda: Training(Exps(3), Exps(2, in_forward)), list),
    "backward": (lambda: Training(Exps(3), Exps(2, in_backward), Exps(1)), list),
    "recompute": (
        lambda: Training(Exps(3), Exps(2, in_recompute), Exps(1)),
        lambda: [ActivationCheckpointing(monitor=False)],
    ),
    "manual": (lambda: Manual(Exps(3), Exps(2, in_forward)), list),
}


# In backward the device's own thread holds the error for a while, in the plain run, too.
@pytest.mark.parametrize(("scene", "collect"), [("forward", False), ("manual", False), *((s, True) for s in SCENES)])
def test_as_much_memory_is_free_again_as_without_the_monitor(scene, collect):
    """At once: whoever catches the error and goes on with a smaller batch has the memory for it."""
    make, treatment = SCENES[scene]

    def left(monitors):
        gc.collect()
        before = torch.accelerator.memory_allocated()
        gc.disable()
        try:
            module, loop = make(), make_trainer([*treatment(), *monitors()])
            with contextlib.suppress(torch.OutOfMemoryError):
                loop.fit(module, loader())
            if collect:
                del module, loop
                torch.ones(1, device=DEVICE, requires_grad=True).sum().backward()  # the device's thread lets go
                gc.collect()
            torch.accelerator.synchronize()
            return torch.accelerator.memory_allocated() - before
        finally:
            gc.enable()

    plain = left(list)
    assert left(lambda: [StepMonitor()]) <= plain


@pytest.mark.parametrize("scene", SCENES)
def test_the_model_is_as_it_was_and_trains_with_a_smaller_batch(scene, tmp_path):
    make, treatment = SCENES[scene]

    def train(monitors, name):
        torch.manual_seed(0)
        module = make()
        fails(module, [*treatment(), *monitors()])
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        for layer in module.model[1:]:
            layer.then = None
        logger = CSVLogger(tmp_path, name=name)
        loop = make_trainer([*treatment(), *monitors()], logger=logger)
        loop.fit(module, DataLoader(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=8))
        assert loop.global_step == 2
        assert not {"training_step", "backward", "optimizer_step"} & vars(loop.strategy).keys()
        return module.model[0].weight.detach().cpu()

    assert torch.equal(train(lambda: [StepMonitor(table=False)], "monitored"), train(list, "plain"))


# ---------------------------------------------------------------- snapshots


def snapshot_of(path):
    with open(path, "rb") as file:
        [trace] = pickle.load(file)["device_traces"]
    return trace


@pytest.fixture(params=[False, True], ids=["asked afterwards", "told by the device"])
def observer(request, monkeypatch):
    """With and without a device that tells at the moment itself that memory runs out."""
    monkeypatch.setattr("lightning_ckpt.monitor.allocations._observers", {})
    monkeypatch.setattr(backend, "_memory_observers", [])
    if request.param:
        attach = backend.attach_out_of_memory_observer
        monkeypatch.setattr(torch._C, "_sim_attach_out_of_memory_observer", attach, raising=False)
    return request.param


def test_a_snapshot_is_written_once_and_its_path_is_said(observer, tmp_path, said):
    folder = tmp_path / "some" / "snapshots"
    calls = []

    def in_the_third_batch(x):
        calls.append(1)
        return in_forward(x) if len(calls) == 3 else x

    module = Training(Exps(3), Exps(2, in_the_third_batch))
    fails(module, [StepMonitor(memory_snapshot=folder)], loader(5))
    path = folder / "out_of_memory_rank0_step2.pickle"
    assert list(folder.iterdir()) == [path]
    [text] = said()
    assert text.splitlines()[-1] == f"Memory snapshot: {path}"
    trace = snapshot_of(path)
    assert trace[-1]["action"] == "oom"
    sizes = [entry["size"] for entry in trace if entry["action"] == "alloc" and "aten.exp" in entry["operator"]]
    assert sizes == [UNIT] * 5 * 3  # three batches of five `exp`
    assert not backend.recording()


def test_recording_stops_with_the_fit_and_nothing_is_written_if_all_goes_well(observer, tmp_path):
    looked = []

    class Looks(Training):
        def training_step(self, batch, batch_idx):
            looked.append(backend.recording())
            return super().training_step(batch, batch_idx)

    make_trainer([StepMonitor(memory_snapshot=tmp_path / "none")]).fit(Looks(Exps()), loader())
    assert looked == [True, True]
    assert not backend.recording()
    assert not (tmp_path / "none").exists()


def test_every_fit_that_runs_out_has_its_own_snapshot(observer, tmp_path, said):
    for name in ("first", "second"):
        fails(Training(Exps(), Exps(1, in_forward)), [StepMonitor(memory_snapshot=tmp_path / name)])
        assert [file.name for file in (tmp_path / name).iterdir()] == ["out_of_memory_rank0_step0.pickle"]
    assert len(said()) == 2


def test_an_error_that_the_user_handles_is_not_taken_for_the_one_that_ends_training(observer, tmp_path, said):
    def tries(x):
        with contextlib.suppress(torch.OutOfMemoryError):
            run_out()
        return x

    calls = []

    def in_the_second_batch(x):
        calls.append(1)
        return in_forward(x) if len(calls) == 2 else x

    fails(Training(Exps(1, tries), Exps(1, in_the_second_batch)), [StepMonitor(memory_snapshot=tmp_path)])
    [text] = said()
    assert text.splitlines()[-1].endswith("out_of_memory_rank0_step1.pickle")
    assert snapshot_of(tmp_path / "out_of_memory_rank0_step1.pickle")[-1]["action"] == "oom"


def test_a_snapshot_that_cannot_be_written_hides_neither_the_error_nor_the_explanation(observer, tmp_path, said):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    fails(Training(Exps(), Exps(1, in_forward)), [StepMonitor(memory_snapshot=blocked)])
    [text] = said()
    assert head_of(text) == ("Step 0: Out of memory in forward, in layer 'model.2'", 2)
    assert not backend.recording()


def test_training_is_the_same_while_allocations_are_recorded(tmp_path):
    def train(callbacks):
        torch.manual_seed(0)
        module = Training(Exps(), nn.Dropout(0.1), Exps())
        make_trainer(callbacks).fit(module, loader(3, 8))
        return module.model[0].weight.detach().cpu()

    assert torch.equal(train([StepMonitor(memory_snapshot=tmp_path)]), train([]))


# ---------------------------------------------------------------- operations


@pytest.mark.parametrize("treatment", [list, lambda: [ActivationCheckpointing(monitor=False)]])
def test_operations_are_those_that_the_device_was_given(sim, tmp_path, treatment):
    """The device's clock counts nothing but them here, so that its rate is what the hardware rate must be."""

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

        def forward(self, x):
            return self.act(self.linear(x))

    sim.set_limit()
    sim.configure("lazy")
    sim.clock.configure(flops_per_s=1e9)
    monitor = StepMonitor(flops=True, table=False)
    logger = CSVLogger(tmp_path)
    make_trainer([*treatment(), monitor], logger=logger).fit(Training(*[Dense() for _ in range(3)]), loader(2, 2))
    sim.clock.off()
    one = 2 * 2 * WIDTH * WIDTH
    assert monitor.summary().model_flops == 3 * 3 * one  # the weight of `Shift` needs the first input gradient, too
    assert monitor.summary().recompute_flops == (3 * one if treatment() else 0)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        header, *lines = file.read().splitlines()
    column = header.split(",").index("flops/hardware_TFLOP_per_s")
    assert [float(line.split(",")[column]) for line in lines] == pytest.approx([1e-3] * 2)
