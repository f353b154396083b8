"""A memory budget on the device: the allocator's own peaks stay within it, and training is that of the plain run."""

import gc
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning_support import make_trainer
from scenarios import DEVICE
from test_offload_lightning import Training, fit
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ckpt import ActivationCheckpointing, OffloadOptions, OffloadStrategy, StepMonitor
from lightning_ckpt.planning import BudgetError, make_plan
from lightning_ckpt.planning.budget import device_memory
from tests.planning.models import KINDS, Kind, Stack, vectors

pytestmark = pytest.mark.usefixtures("sim")
MIB = 2**20
STEPS = 7  # the plan is final from the fifth on
SMALL_TENSORS = 1.03  # take whole blocks of the allocator, which a rehearsal does not know and the third step shows
#: A dozen equal layers, which save 3 MiB each and are given half of one: 40 MiB, and 12 MiB if all are recomputed.
DEEP = Kind(lambda: Stack((64,) * 12), lambda rows=4096: vectors(rows))
MOVING = OffloadOptions(min_bytes=1024)


class Curves(Logger):
    """Keeps what is logged, by name and step."""

    name, version = "curves", 0

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_hyperparams(self, *args, **kwargs):
        """There is nothing to keep."""

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)

    def values(self, name):
        return [row.get(name) for _, row in sorted(self.rows.items()) if "memory/peak_MiB" in row]


class Watch(pl.Callback):
    """What every step came to: its loss, the allocator's peak since the one before, and the plan that was in force."""

    def __init__(self):
        self.losses, self.peaks, self.plans = [], [], []

    def on_train_start(self, trainer, module):
        torch.accelerator.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().cpu())
        self.peaks.append(torch.accelerator.max_memory_allocated())
        keepers = [getattr(callback, "budget_keeper", None) for callback in trainer.callbacks]
        self.plans += [keeper.plan for keeper in keepers if keeper is not None]
        torch.accelerator.reset_peak_memory_stats()


def for_the_device(module):
    """Mixtral counts its experts' tokens as integers, in a histogram that the simulated device does not have."""
    if "Mixtral" in type(module.model).__name__:
        module.model.set_experts_implementation("eager")
        module.model.config.output_router_logits = False
    return module


def clean():
    """Nothing on the device, of earlier fits neither."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


def train(kind, callbacks=(), batches=None, module=None, **settings):
    """A run from the beginning: what every step came to, and the weights."""
    clean()
    module = module or for_the_device(kind.module())
    batches = batches or kind.batches(STEPS)
    watch, curves = Watch(), Curves()
    torch.manual_seed(2)
    make_trainer(callbacks=[*callbacks, watch], logger=curves, log_every_n_steps=1, **settings).fit(
        module, DataLoader(batches, batch_size=None)
    )
    weights = {name: weight.cpu() for name, weight in module.state_dict().items()}
    return SimpleNamespace(**vars(watch), weights=weights, curves=curves)


def budgeted(kind, budget, offload=False, **settings):
    return train(kind, [ActivationCheckpointing(memory_budget=budget, offload=offload)], **settings)


def assert_same(one, other):
    assert torch.equal(torch.stack(one.losses), torch.stack(other.losses))
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())


def treatments(plan):
    return [str(layer.treatment) for layer in plan.layers]


@pytest.fixture(scope="module")
def plain():
    """Plain runs, one of each kind."""
    runs = {}

    def run(kind, name):
        if name not in runs:
            runs[name] = train(kind)
        return runs[name]

    return run


# ---------------------------------------------------------------- peaks


BUDGETS = [("widths", budget) for budget in (0.0, 0.25, 0.5, 0.75, 1.0)]
BUDGETS += [("gpt_neox", 0.2), ("t5", 0.4), ("vit", 0.6), ("resnet", 0.3)]


@pytest.mark.parametrize(("name", "budget"), BUDGETS)
def test_the_peak_is_within_the_budget_and_as_planned(sim, plain, name, budget):
    expected = plain(KINDS[name], name)
    run = budgeted(KINDS[name], budget)
    assert_same(run, expected)
    peak, plan = max(run.peaks[-2:]), run.plans[-1]
    assert peak <= plan.budget_bytes
    assert 0.98 * plan.peak_bytes <= peak <= plan.peak_bytes
    assert run.curves.values("memory/planned_MiB")[-1] == plan.peak_bytes / MIB
    assert run.curves.values("memory/peak_MiB")[-1] == peak / MIB
    assert (set(treatments(plan)) == {"keep"}) == (budget == 1.0)


def test_a_step_that_cannot_be_rehearsed_keeps_to_the_budget_from_the_first_batch_on(sim, plain):
    """Experts are given another number of tokens in every batch, so peaks differ by a little."""
    kind = KINDS["mixtral"]
    expected = plain(kind, "mixtral")
    limit = int(0.9 * max(expected.peaks))
    run = budgeted(kind, limit)
    assert_same(run, expected)
    assert max(run.peaks) <= limit
    assert not run.plans[-1].rehearsed
    assert max(run.peaks[-2:]) == pytest.approx(run.plans[-1].peak_bytes, rel=0.05)


# ---------------------------------------------------------------- a device that is too small


@pytest.mark.parametrize("budget", ["auto", "80%", "size"])
def test_what_does_not_fit_trains_at_the_first_attempt(sim, plain, budget):
    expected = plain(DEEP, "deep")
    clean()
    total = torch.accelerator.memory_reserved() + max(expected.peaks) * 3 // 4
    sim.set_limit(total)
    with pytest.raises(torch.OutOfMemoryError):
        train(DEEP)
    clean()
    free, known = device_memory(DEVICE)
    assert known == total
    assert free == total
    run = budgeted(DEEP, total // 2 if budget == "size" else budget)
    assert_same(run, expected)
    part = {"auto": 0.9, "80%": 0.8, "size": 0.5}[budget]
    assert run.plans[-1].budget_bytes == pytest.approx(part * total, rel=0.01)
    assert max(run.peaks[-2:]) <= run.plans[-1].budget_bytes
    assert max(run.peaks) <= run.plans[-1].budget_bytes * SMALL_TENSORS
    assert run.peaks[-1] > 0.8 * run.plans[-1].budget_bytes  # what there is is used


def test_batches_that_grow(sim):
    def batches():
        return [DEEP.batches(1, rows=rows)[0] for rows in (1024, 1024, 1024, 1024, 1024, 2048, 3072, 4096)]

    expected = train(DEEP, batches=batches())
    clean()
    limit = max(expected.peaks) // 2
    sim.set_limit(torch.accelerator.memory_reserved() + 4 * limit // 3)
    run = budgeted(DEEP, limit, batches=batches())
    assert_same(run, expected)
    assert max(run.peaks) <= limit
    assert "recompute" not in treatments(run.plans[0])
    assert "recompute" in treatments(run.plans[-1])


# ---------------------------------------------------------------- host memory


@pytest.fixture(scope="module")
def recomputed():
    """The peak if everything is recomputed."""
    return max(train(DEEP, [ActivationCheckpointing()]).peaks)


@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("eager", 0), ("random", 1)])
def test_below_what_recompute_alone_can_reach(sim, plain, recomputed, policy, seed):
    expected = plain(DEEP, "deep")
    sim.configure(policy, seed)
    clean()
    limit = recomputed * 9 // 10
    run = budgeted(DEEP, limit, MOVING)
    assert_same(run, expected)
    assert max(run.peaks[-2:]) <= limit
    assert max(run.peaks) <= limit * SMALL_TENSORS
    assert any("offload" in each for each in treatments(run.plans[-1]))
    torch.accelerator.synchronize()
    assert sim.pinned_bytes()[0] == 0


def test_without_offload_that_is_an_error_with_the_cure(sim, recomputed):
    limit = recomputed * 9 // 10
    with pytest.raises(BudgetError, match=rf"`memory_budget={limit}`: .* that the step needs .*`offload=True`"):
        budgeted(DEEP, limit)


def test_host_memory_stays_within_its_budget(sim, plain):
    expected = plain(DEEP, "deep")
    limit, host = max(expected.peaks) // 2, 4 * MIB
    torch.accelerator.empty_host_cache()
    before = sim.pinned_held()
    run = budgeted(DEEP, limit, OffloadOptions(min_bytes=1024, host_budget=host))
    assert_same(run, expected)
    assert max(run.peaks) <= limit
    assert sum(layer.moved_bytes for layer in run.plans[-1].layers) <= host
    assert sim.pinned_held() - before <= host


# ---------------------------------------------------------------- when it goes wrong


class Failing(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step == self.step:
            raise ZeroDivisionError


@pytest.mark.parametrize("step", [2, 3])  # while memory is measured, and while times are
def test_an_exception_leaves_nothing_and_another_fit_is_as_usual(sim, plain, step):
    kind = KINDS["widths"]
    callback = ActivationCheckpointing(memory_budget=0.3, offload=MOVING)
    module = kind.module()
    with pytest.raises(ZeroDivisionError):
        train(kind, [callback, Failing(step)], module=module)
    assert callback.budget_keeper is None
    assert callback.offload_engine is None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not any("forward" in vars(part) for part in module.modules())
    torch.accelerator.synchronize()
    assert sim.pinned_bytes()[0] == 0
    assert_same(train(kind, [callback], module=kind.module()), plain(kind, "widths"))


@pytest.mark.parametrize("chosen", ["ckpt_offload", OffloadStrategy(device=DEVICE)], ids=["by name", "given"])
def test_a_strategy_that_moves_everything_is_refused_with_the_cure(chosen):
    callback = ActivationCheckpointing(memory_budget=0.5)
    with pytest.raises(MisconfigurationException, match=r"Use the plain strategy, with .*offload=True"):
        fit(Training(), strategy=chosen, callbacks=[callback])


# ---------------------------------------------------------------- when memory runs out all the same


def said_when_memory_runs_out(sim, caplog, plain, callbacks):
    """The line of the report that says what would help, on a device with three quarters of the memory needed."""
    needed = max(plain(DEEP, "deep").peaks)
    clean()
    sim.set_limit(torch.accelerator.memory_reserved() + needed * 3 // 4)
    with caplog.at_level("INFO"), pytest.raises(torch.OutOfMemoryError):
        train(DEEP, callbacks)
    [text] = [record.getMessage() for record in caplog.records if "Out of memory" in record.getMessage()]
    return text.splitlines()[-1]


def test_a_budget_is_a_cure(sim, caplog, plain):
    assert "`ActivationCheckpointing(memory_budget='auto')`" in said_when_memory_runs_out(
        sim, caplog, plain, [StepMonitor()]
    )


def test_a_budget_that_is_too_large_should_be_smaller(sim, caplog, plain):
    callback = ActivationCheckpointing(memory_budget="1GiB")
    said = said_when_memory_runs_out(sim, caplog, plain, [callback])
    assert "a smaller `memory_budget` than '1GiB'" in said
    assert "`offload=True`" in said


def test_a_plan_that_is_too_large_should_be_for_a_smaller_budget(sim, caplog, plain):
    kind = DEEP.module()
    plan = make_plan(kind, DEEP.batches(1)[0], "1GiB", device=DEVICE)
    said = said_when_memory_runs_out(sim, caplog, plain, [ActivationCheckpointing(plan=plan)])
    assert "a plan for a smaller budget" in said
