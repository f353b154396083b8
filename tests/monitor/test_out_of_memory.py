"""When memory runs out, on the CPU: the user's own error, and before it, once, where memory stood."""

import contextlib
import gc
import logging
import weakref

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.memory import is_oom_error
from torch import nn

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.support import Training, assert_equal, batches, fit, trainer

MIB = 2**20
ROWS, WIDTH = 256, 1024  # an activation is 1 MiB


def run_out():
    """A real failure of the allocator."""
    torch.empty(2**60, dtype=torch.uint8)


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


def in_forward(x):
    run_out()


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        run_out()


def in_backward(x):
    return InBackward.apply(x)


def in_recompute(x):
    if torch._C._current_graph_task_id() != -1:  # inside of backward
        run_out()
    return (-x).exp()


class Shift(nn.Module):
    """Has a weight, and saves nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.weight


def module(*layers, **kwargs):
    return Training(nn.Sequential(Shift(), *layers), loss=lambda model, batch: model(batch).sum(), **kwargs)


def data(count=2):
    return batches(count, ROWS, WIDTH)


@pytest.fixture
def said(caplog):
    """What has been said about memory that ran out, so far."""
    caplog.set_level(logging.INFO)

    def texts():
        return [record.getMessage() for record in caplog.records if "Out of memory" in record.getMessage()]

    return texts


def fails(model, callbacks=(), error=RuntimeError, loader=None, **settings):
    """Fit, which runs out of memory; the error that reaches the user."""
    with pytest.raises(error, match="can't allocate memory") as caught:
        trainer(callbacks, **settings).fit(model, data() if loader is None else loader)
    assert type(caught.value) is error
    return caught.value


def lines_of(text):
    """The first line, the lines of sizes, and the last one."""
    first, *sizes, last = text.splitlines()
    return first, [line.strip() for line in sizes], last


# ---------------------------------------------------------------- what is said


def test_it_is_a_failure_of_the_allocator_that_lightning_knows():
    with pytest.raises(RuntimeError) as caught:
        run_out()
    assert is_oom_error(caught.value)


def test_layers_are_told_by_what_they_keep_the_most_first(said):
    layers = [Exps(count) for count in (1, 7, 2, 6, 3, 5, 4)]
    error = fails(module(*layers, Exps(2, in_forward)), [StepMonitor()])
    assert len(error.args) == 1
    [text] = said()
    first, sizes, last = lines_of(text)
    assert first == "Step 0: Out of memory in forward, in layer 'model.8'. 30.00 MiB were kept for backward:"
    assert sizes == [
        "7.00 MiB  'model.2'",
        "6.00 MiB  'model.4'",
        "5.00 MiB  'model.6'",
        "4.00 MiB  'model.7'",
        "3.00 MiB  'model.5'",
        "5.00 MiB  3 other layers",
    ]
    assert last.startswith("Most likely to help: `Trainer(callbacks=[ActivationCheckpointing()])`")


def test_what_is_outside_of_the_layers_is_told_last(said):
    model = module(Exps(1), Exps(1), Exps(1, in_forward))
    model.loss = lambda model, batch: model(model[0](batch).exp().sin()).sum()  # keeps exp's output
    fails(model, [StepMonitor()])
    _, sizes, _ = lines_of(*said())
    assert sizes == [
        "1.00 MiB  'model.1'",
        "1.00 MiB  'model.2'",
        "1.00 MiB  'model.3'",
        "1.00 MiB  outside of the layers",
    ]


def test_one_other_layer_is_one_layer(said):
    fails(module(*[Exps(count) for count in (7, 6, 5, 4, 3, 2)], Exps(0, in_forward)), [StepMonitor()])
    _, sizes, _ = lines_of(*said())
    assert sizes[-1] == "2.00 MiB  1 other layer"


def test_in_backward_what_has_been_used_is_gone(said):
    fails(module(Exps(3), Exps(2, in_backward), Exps(1)), [StepMonitor()])
    first, sizes, _ = lines_of(*said())
    assert first == "Step 0: Out of memory in backward. 5.00 MiB were kept for backward:"
    assert sizes == ["3.00 MiB  'model.1'", "2.00 MiB  'model.2'"]


def test_in_the_recompute_the_layer_is_named_and_the_error_is_the_allocators_own(said):
    error = fails(
        module(Exps(3), Exps(2, in_recompute), Exps(1)), [ActivationCheckpointing(monitor=False), StepMonitor()]
    )
    assert "Recomputed layer" not in str(error)
    first, _, _ = lines_of(*said())
    assert first.startswith("Step 0: Out of memory in backward, while layer 'model.2' ran again.")


def test_in_the_optimizer(said):
    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            run_out()
            return loss

    model = module(Exps(), Exps(), optimizer=lambda parameters: Optimizer(parameters, lr=0.1))
    fails(model, [StepMonitor()])
    assert len(said()) == 1
    assert said()[0].startswith("Step 0: Out of memory in optimizer. ")


def test_in_validation_and_in_the_transfer_of_data(said):
    class Validates(Training):
        def validation_step(self, batch, batch_idx):
            run_out()

        def val_dataloader(self):
            return data()

    fails(Validates(nn.Sequential(Shift(), Exps())), [StepMonitor()])

    class Transfers(Training):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            run_out()

    fails(Transfers(nn.Sequential(Shift(), Exps())), [StepMonitor()])
    assert len(said()) == 2
    assert all("Out of memory in what is outside of the training step" in text for text in said())


def test_manual_optimization_and_accumulation(said):
    class Manual(Training):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.model(batch).sum())

    fails(Manual(nn.Sequential(Shift(), Exps(1), Exps(1, in_backward))), [StepMonitor()])
    fails(Manual(nn.Sequential(Shift(), Exps(1), Exps(1, in_forward))), [StepMonitor()])

    calls = []

    def in_the_sixth_batch(x):
        calls.append(1)
        if len(calls) == 6:
            run_out()
        return x

    fails(module(Exps(3), Exps(1, in_the_sixth_batch)), [StepMonitor()], accumulate_grad_batches=3, loader=data(9))
    heads = [lines_of(text)[0] for text in said()]
    assert heads == [
        "Step 0: Out of memory in backward. 2.00 MiB were kept for backward:",
        "Step 0: Out of memory in forward, in layer 'model.2'. 2.00 MiB were kept for backward:",
        # The sixth batch is the third of the second step; what the earlier ones kept is gone.
        "Step 1: Out of memory in forward, in layer 'model.2'. 4.00 MiB were kept for backward:",
    ]


@pytest.mark.parametrize("with_logger", [False, True])
def test_with_or_without_a_logger_it_is_said_once(said, tmp_path, with_logger):
    monitor = StepMonitor(table=False)
    fails(module(Exps(), Exps(1, in_forward)), [monitor], logger=CSVLogger(tmp_path) if with_logger else False)
    assert len(said()) == 1


def test_other_errors_are_not_commented(said):
    def broken(x):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trainer([StepMonitor()]).fit(module(Exps(), Exps(1, broken)), data())
    assert said() == []


# ---------------------------------------------------------------- what would help


@pytest.mark.parametrize(
    ("callbacks", "cure"),
    [
        (lambda: [StepMonitor()], "`Trainer(callbacks=[ActivationCheckpointing()])`"),
        (lambda: [ActivationCheckpointing(enabled=False)], "`enabled=True`"),
        (lambda: [ActivationCheckpointing(every_n_layers=4)], "`every_n_layers=1` instead of `every_n_layers=4`"),
        (lambda: [ActivationCheckpointing()], "a smaller batch"),  # the CPU has nothing to offload from
    ],
)
def test_the_most_helpful_change_comes_last(said, callbacks, cure):
    fails(module(*[Exps() for _ in range(5)], Exps(1, in_forward)), callbacks())
    [text] = said()
    assert lines_of(text)[2].startswith(f"Most likely to help: {cure}")


# ---------------------------------------------------------------- what is left


def test_nothing_is_left_on_the_model_and_a_smaller_batch_trains_as_ever():
    class Small(Training):
        def training_step(self, batch, batch_idx):
            if len(batch) > 4:
                run_out()
            return super().training_step(batch, batch_idx)

    def train(callbacks):
        kept = {}

        def make():
            torch.manual_seed(0)
            kept["model"] = Small()
            fails(kept["model"], callbacks(), loader=batches(2, 8))
            return kept["model"]

        got = fit(make, callbacks=callbacks())
        return got, kept["model"]

    got, model = train(lambda: [StepMonitor()])
    assert_equal(got, train(list)[0])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert "_compiled_call_impl" not in vars(model.model)


@pytest.mark.parametrize("callbacks", [list, lambda: [StepMonitor()]])
def test_activations_are_free_again_once_the_error_is_dropped(callbacks):
    """As in the plain run: whoever catches the error and goes on with a smaller batch has the memory for it."""
    alive = []

    def watched(x):
        alive.append(weakref.ref(x.untyped_storage()))
        run_out()

    model, loop = module(Exps(2), Exps(2, watched)), trainer(callbacks())
    gc.collect()
    gc.disable()  # it does not know how much memory is at stake
    try:
        with contextlib.suppress(RuntimeError):
            loop.fit(model, data())
        [storage] = alive
        is_free = storage() is None
    finally:
        gc.enable()
    assert is_free


def test_the_error_keeps_its_chain_and_its_notes():
    def chained(x):
        try:
            raise KeyError("first")
        except KeyError as first:
            try:
                run_out()
            except RuntimeError as error:
                error.add_note("a note")
                raise error from first

    error = fails(module(Exps(), Exps(1, chained)), [StepMonitor()])
    assert isinstance(error.__cause__, KeyError)
    assert error.__notes__ == ["a note"]


# ---------------------------------------------------------------- odd surroundings


def test_an_error_in_the_explanation_does_not_hide_the_users_own(caplog):
    class Hostile:
        @property
        def __class__(self):
            raise ZeroDivisionError("asked for its class")

    def odd(x):
        hostile = Hostile()
        run_out()
        return hostile

    fails(module(Exps(), Exps(1, odd)), [StepMonitor()])
    said = [record for record in caplog.records if "where memory stood" in record.getMessage()]
    assert len(said) == 1 or any("Out of memory" in record.getMessage() for record in caplog.records)


def test_a_lazy_layer_that_was_never_called_is_no_obstacle(said):
    model = module(Exps(2), Exps(1, in_forward))
    model.unused = nn.LazyLinear(4)
    model.optimizer = lambda parameters: torch.optim.SGD(model.model.parameters(), lr=0.1)
    fails(model, [StepMonitor()])
    [text] = said()
    _, sizes, _ = lines_of(text)
    assert sizes == ["2.00 MiB  'model.1'", "1.00 MiB  'model.2'"]


def test_a_compiled_model_is_explained_as_far_as_it_can_be(said):
    torch._dynamo.reset()
    model = module(Exps(), Exps())
    model.model = torch.compile(model.model, backend="eager")
    model.loss = lambda model, batch: model(batch).sum() + run_out()
    fails(model, [StepMonitor()])
    assert said()[0].startswith("Step 0: Out of memory in forward.")


def test_the_batch_size_finder_finds_what_it_finds_without(tmp_path):
    class Sized(Training):
        batch_size = 2

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=self.batch_size)

        def training_step(self, batch, batch_idx):
            if len(batch) > 10:
                run_out()
            return super().training_step(batch, batch_idx)

    def found(callbacks):
        torch.manual_seed(0)
        model = Sized()
        finder = BatchSizeFinder(steps_per_trial=1, max_trials=4)
        logger = CSVLogger(tmp_path)
        loop = trainer([*callbacks, finder], logger=logger, default_root_dir=tmp_path, max_steps=2)
        loop.fit(model)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        return model.batch_size, [parameter.detach().clone() for parameter in model.parameters()]

    size, parameters = found([StepMonitor(table=False)])
    plain_size, plain_parameters = found([])
    assert size == plain_size > 2
    assert all(torch.equal(got, want) for got, want in zip(parameters, plain_parameters, strict=True))


def test_a_snapshot_of_memory_on_the_cpu_has_no_effect_and_it_is_said_once(tmp_path, said):
    folder = tmp_path / "snapshots"
    monitor = StepMonitor(memory_snapshot=folder)
    with pytest.warns(UserWarning, match="has no effect: cpu cannot record") as caught:
        fails(module(Exps(), Exps(1, in_forward)), [monitor])
    assert len([w for w in caught if "memory_snapshot" in str(w.message)]) == 1
    assert not folder.exists()
    assert len(said()) == 1
    assert "snapshot" not in said()[0]


def test_the_error_comes_first_to_callbacks_that_wait_for_it(said):
    order = []

    class Waits(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            order.append((len(said()), exception))

    error = fails(module(Exps(), Exps(1, in_forward)), [StepMonitor(), Waits()])
    assert order == [(1, error)]
