"""StepMonitor on the device: the allocator's own figures and the device's own times, and nobody notices."""

import csv
import gc
from types import SimpleNamespace

import backend
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from scenarios import DEVICE
from test_offload_clock import Work
from test_offload_lightning import SMALL, Manual, Training, fit, strategy
from torch import nn

from lightning_ckpt import ActivationCheckpointing, OffloadOptions, StepMonitor
from lightning_ckpt.measure.clock import EventClock
from lightning_ckpt.offload import OffloadEngine

pytestmark = pytest.mark.usefixtures("sim")
MIB = 2**20
FUNCTIONS = ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats")
ORIGINALS = {name: getattr(torch._C, name) for name in FUNCTIONS}


@pytest.fixture(autouse=True)
def fresh_counters():
    torch.accelerator.reset_peak_memory_stats()
    assert originals_are_back()
    yield
    torch.accelerator.reset_peak_memory_stats()
    assert originals_are_back()


def clean():
    """Nothing on the device, of earlier fits neither."""
    gc.collect()
    backend.reset()
    torch.accelerator.reset_peak_memory_stats()


def originals_are_back():
    return all(getattr(torch._C, name) is original for name, original in ORIGINALS.items())


def monitored(folder, module=None, monitor=None, callbacks=(), **settings):
    """The rows of a run, and its monitor."""
    logger = CSVLogger(folder, name="run", flush_logs_every_n_steps=1)
    monitor = monitor or StepMonitor(table=False)
    settings = {"limit_val_batches": 0, "log_every_n_steps": 1, **settings}
    fit(module or Training(), callbacks=[*callbacks, monitor], logger=logger, **settings)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return table, monitor


def plainly(module=None, callbacks=(), **settings):
    fit(module or Training(), callbacks=callbacks, **{"limit_val_batches": 0, **settings})


def statistics():
    """The counters, read past everybody."""
    return ORIGINALS[FUNCTIONS[0]](0)


class Truth(pl.Callback):
    """Resets and reads the counters around every batch, as nobody else does here."""

    def __init__(self):
        self.peaks, self.reserved, self.after_forward = [], [], []

    def on_train_batch_start(self, *args):
        ORIGINALS[FUNCTIONS[1]](0)

    def on_before_backward(self, *args):
        self.after_forward.append(statistics()["allocated_bytes"]["all"]["current"])

    def on_train_batch_end(self, *args):
        self.peaks.append(statistics()["allocated_bytes"]["all"]["peak"])
        self.reserved.append(statistics()["reserved_bytes"]["all"]["peak"])


def truth_of(callbacks=(), **settings):
    """What a run needs that nobody watches. The callback itself would keep the model alive."""
    truth = Truth()
    plainly(callbacks=[*callbacks, truth], **settings)
    return SimpleNamespace(peaks=truth.peaks, reserved=truth.reserved, after_forward=truth.after_forward)


def recomputing():
    return [ActivationCheckpointing()]


def bytes_of(rows, name):
    return [row[f"memory/{name}_MiB"] * MIB for row in rows]


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("eager", 0), ("random", 1)])
@pytest.mark.parametrize("callbacks", [list, recomputing], ids=["plain", "recomputed"])
def test_memory_is_that_of_the_allocator_to_the_byte(sim, callbacks, policy, seed, tmp_path):
    monitored(tmp_path / "first", callbacks=callbacks())  # leaves behind what first runs leave
    sim.configure(policy, seed)
    clean()
    truth = truth_of(callbacks())
    clean()
    rows, _ = monitored(tmp_path, callbacks=callbacks())
    assert bytes_of(rows, "peak") == truth.peaks
    assert bytes_of(rows, "reserved") == truth.reserved
    assert bytes_of(rows, "after_forward") == truth.after_forward


def test_with_accumulation_memory_is_that_of_the_largest_micro_batch(tmp_path):
    clean()
    truth = truth_of(accumulate_grad_batches=2)
    clean()
    rows, _ = monitored(tmp_path, accumulate_grad_batches=2)
    steps = [row for row in rows if "time/step_ms" in row]
    for name, values in (("peak", truth.peaks), ("reserved", truth.reserved), ("after_forward", truth.after_forward)):
        assert bytes_of(steps, name) == [max(pair) for pair in zip(values[::2], values[1::2], strict=True)]


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_the_phase_of_the_peak_is_where_it_is(phase, tmp_path):
    class Hungry(Training):
        def need(self, here):
            if here == phase:
                torch.empty(MIB, dtype=torch.uint8, device=DEVICE)

        def training_step(self, batch, index):
            self.need("forward")
            return super().training_step(batch, index)

        def on_after_backward(self):
            self.need("backward")

        def on_before_optimizer_step(self, optimizer):
            self.need("optimizer")

    rows, monitor = monitored(tmp_path, Hungry())
    assert {row["memory/peak_phase"] for row in rows} == {["forward", "backward", "optimizer"].index(phase) + 1}
    assert monitor.summary().peak_phase == phase


def test_allocations_in_a_callback_are_elsewhere(tmp_path):
    class Hungry(pl.Callback):
        def on_train_batch_end(self, *args):
            torch.empty(MIB, dtype=torch.uint8, device=DEVICE)

    rows, _ = monitored(tmp_path, callbacks=[Hungry()])
    assert {row["memory/peak_phase"] for row in rows} == {0}


# ---------------------------------------------------------------- the counters are shared


class Reads(pl.Callback):
    """What a user would read at all moments; resets the peak now and then."""

    def __init__(self, resets_at=None, every=1):
        self.read, self.resets_at, self.every, self.batches = [], resets_at, every, 0

    def _look(self, moment):
        read = torch.accelerator.memory_stats()
        self.read.append({name: value for name, value in read.items() if name.endswith((".peak", ".current"))})
        self.read.append(torch.accelerator.max_memory_allocated())
        if moment == self.resets_at and self.batches % self.every == 0:
            torch.accelerator.reset_peak_memory_stats()

    def on_train_batch_start(self, *args):
        self._look("start")

    def on_before_backward(self, *args):
        self._look("before backward")

    def on_after_backward(self, *args):
        self._look("after backward")

    def on_before_optimizer_step(self, *args):
        self._look("before optimizer")

    def on_train_batch_end(self, *args):
        self._look("end")
        self.batches += 1

    def on_train_end(self, *args):
        self._look("train end")


RESETS = [None, "start", "before backward", "after backward", "before optimizer", "end", "train end"]


@pytest.mark.parametrize(("resets_at", "every"), [*((moment, 1) for moment in RESETS), ("before backward", 3)])
def test_others_read_and_reset_as_without_the_monitor_and_it_is_right_as_without_them(resets_at, every, tmp_path):
    def with_a_past():
        clean()
        big = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)  # a peak before the fit, that others may want to see
        del big

    plainly()  # leaves behind what first runs leave
    with_a_past()
    read = (alone := Reads(resets_at, every)).read
    plainly(callbacks=[alone])
    after = torch.accelerator.max_memory_allocated()
    del alone  # it keeps the model alive
    with_a_past()
    truth = truth_of()
    with_a_past()
    beside = Reads(resets_at, every)
    rows, _ = monitored(tmp_path, callbacks=[beside])
    assert beside.read == read
    assert torch.accelerator.max_memory_allocated() == after
    assert bytes_of(rows, "peak") == truth.peaks
    assert bytes_of(rows, "reserved") == truth.reserved
    torch.accelerator.reset_peak_memory_stats()
    assert originals_are_back()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()


def test_the_peak_of_before_is_still_there_after_fit_until_it_is_reset(tmp_path):
    clean()
    torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    monitored(tmp_path)
    monitored(tmp_path)
    assert torch.accelerator.max_memory_allocated() >= 64 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated() < 64 * MIB


def test_after_an_exception_the_counters_are_everybodys(tmp_path):
    class Broken(Training):
        def training_step(self, batch, index):
            if index == 2:
                torch.empty(8 * MIB, dtype=torch.uint8, device=DEVICE)
                raise ZeroDivisionError
            return super().training_step(batch, index)

    with pytest.raises(ZeroDivisionError):
        monitored(tmp_path, Broken())
    assert torch.accelerator.max_memory_allocated() >= 8 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert originals_are_back()
    rows, _ = monitored(tmp_path / "again")
    assert len(rows) == 4
    assert max(bytes_of(rows, "peak")) < 8 * MIB


def test_memory_that_is_found_by_freeing_the_cache_is_counted_and_warned_of_once(sim, tmp_path):
    class Wasteful(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index in (1, 3):
                used = torch.accelerator.memory_allocated()
                torch.accelerator.empty_cache()
                blocks = [torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
                del blocks  # cached, in pieces too small for what follows
                backend.set_limit(used + 24 * MIB)

        def on_before_backward(self, trainer, *args):
            torch.empty(14 * MIB, dtype=torch.uint8, device=DEVICE)

    with pytest.warns(UserWarning, match="free its cache") as caught:
        rows, _ = monitored(tmp_path, callbacks=[Wasteful()])
    sim.set_limit()
    assert [row["memory/alloc_retries"] for row in rows] == [0, 1, 0, 1]
    [warning] = [str(each.message) for each in caught if "free its cache" in str(each.message)]
    assert warning.startswith("Step 1:")


# ---------------------------------------------------------------- times


class Timed(Training):
    """Takes simulated time everywhere: 1 s data, 2 s forward, 4 s backward, 8 s optimizer, 16 s between steps."""

    def __init__(self, model=None):
        super().__init__()
        self.model = model or self.model

    def on_after_batch_transfer(self, batch, index):
        backend.clock.spend(1.0)
        return batch

    def training_step(self, batch, index):
        backend.clock.spend(2.0)
        return super().training_step(batch, index)

    def on_after_backward(self):
        backend.clock.spend(4.0)

    def on_before_optimizer_step(self, optimizer):
        backend.clock.spend(8.0)

    def on_train_batch_end(self, *args):
        backend.clock.spend(16.0)


EXPECTED = {"data": 1000, "forward": 2000, "backward": 4000, "optimizer": 8000, "step": 15000, "recompute": 0}


def assert_times(rows, expected):
    for row in rows:
        times = {name: row[f"time/{name}_ms"] for name in expected}
        assert times == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("eager", 0), ("random", 3)])
def test_times_are_the_devices_own(sim, policy, seed, tmp_path):
    sim.configure(policy, seed)
    sim.clock.configure()
    rows, monitor = monitored(tmp_path, Timed())
    assert len(rows) == 4
    assert_times(rows, EXPECTED)
    assert all(row["time/tokens_per_s"] == pytest.approx(16 / 15, abs=1e-5) for row in rows)
    assert monitor.summary().step_ms == pytest.approx(15000, abs=1e-3)


def test_accumulation_sums_times(sim, tmp_path):
    sim.clock.configure()
    rows, _ = monitored(tmp_path, Timed(), accumulate_grad_batches=2)
    rows = [row for row in rows if "time/step_ms" in row]
    assert len(rows) == 2
    assert_times(rows, {"data": 2000, "forward": 4000, "backward": 8000, "optimizer": 8000, "step": 22000})


def test_what_is_between_steps_is_not_in_the_step_whatever_callback_does_it(sim, tmp_path):
    class Spends(pl.Callback):
        def on_train_batch_end(self, *args):
            backend.clock.spend(32.0)

    sim.clock.configure()
    rows, _ = monitored(tmp_path, Timed(), callbacks=[Spends()], limit_val_batches=1, val_check_interval=1)
    rows = [row for row in rows if "time/step_ms" in row]
    assert len(rows) == 4
    assert_times(rows, EXPECTED)


def test_manual_optimization_has_the_same_phases(sim, tmp_path):
    class ByHand(Timed):
        automatic_optimization = False

        def training_step(self, batch, index):
            backend.clock.spend(2.0)
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    sim.clock.configure()
    rows, _ = monitored(tmp_path, ByHand())
    assert_times([row for row in rows if "time/step_ms" in row], EXPECTED)


class Layer(nn.Module):
    """Takes half a second in forward and a quarter in backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(backend.clock.timed(x, 0.5, 0.25))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(40, 4), nn.Linear(4, 40)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, ids):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("every", [1, 2])
def test_recompute_is_the_time_of_the_layers_that_run_again(sim, every, tmp_path):
    recomputed = len(range(0, 3, every))
    sim.clock.configure()
    callbacks = [ActivationCheckpointing(every_n_layers=every)]
    rows, _ = monitored(tmp_path, Timed(Layers()), callbacks=callbacks)
    again = 500 * recomputed
    expected = {**EXPECTED, "forward": 3500, "backward": 4750 + again, "recompute": again, "step": 17250 + again}
    assert_times(rows[1:], expected)


# ---------------------------------------------------------------- what it costs


def test_the_host_never_waits_in_training(sim, tmp_path):
    """The host is infinitely fast, so its time moves when it waits, and only then."""

    class Silent(Timed):
        def training_step(self, batch, index):
            backend.clock.spend(2.0)
            return self.loss(batch)

    class HostTimes(pl.Callback):
        def __init__(self):
            self.times = []

        def on_train_batch_start(self, *args):
            self.times.append(backend.clock.host())

        on_before_backward = on_after_backward = on_train_batch_end = on_train_batch_start

    def run(train):
        clean()
        sim.clock.configure()
        backend.clear_counts()
        host = HostTimes()
        train(host)
        return host.times, {name: count for name, count in backend.counts().items() if name.startswith("sync:")}

    plain, syncs = run(lambda host: plainly(Silent(), [host], logger=CSVLogger(tmp_path, name="plain")))
    assert run(lambda host: monitored(tmp_path, Silent(), callbacks=[host])) == (plain, syncs)
    assert all(len(set(plain[at : at + 4])) == 1 for at in range(0, 16, 4))  # moving a batch waits, in any run


class Uses:
    """Counts what the monitor needs of the device."""

    def __init__(self, monkeypatch):
        self.events, self.resets = [], []
        uses = self

        def mark(clock, original=EventClock.mark):
            uses.events.append(1)
            return original(clock)

        def reset(index, original=ORIGINALS[FUNCTIONS[1]]):
            uses.resets.append(1)
            original(index)

        monkeypatch.setattr(EventClock, "mark", mark)
        monkeypatch.setattr(torch._C, FUNCTIONS[1], reset)


class Watching(pl.Callback):
    def __init__(self, uses):
        self.uses, self.at_start = uses, []

    def on_train_batch_start(self, *args):
        self.at_start.append((len(self.uses.events), len(self.uses.resets)))


def test_steps_that_are_not_measured_use_nothing(tmp_path):
    with pytest.MonkeyPatch.context() as patches:
        uses = Uses(patches)
        watching = Watching(uses)
        rows, _ = monitored(tmp_path, monitor=StepMonitor(3, table=False), callbacks=[watching], max_epochs=3)
        torch.accelerator.reset_peak_memory_stats()
    assert [row["step"] for row in rows if "time/step_ms" in row] == [2, 5, 8, 11]
    # Measuring starts when the step's data is fetched, which is before its batch starts.
    used = [now != before for before, now in zip([(0, 1), *watching.at_start], watching.at_start, strict=False)]
    assert used[1:] == [step % 3 != 1 for step in range(1, 12)]


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("eager", 0), ("random", 1), ("random", 2)])
@pytest.mark.parametrize("make", [Training, Manual])
def test_one_row_a_step_with_the_loss_in_it(sim, make, policy, seed, tmp_path):
    sim.configure(policy, seed)
    rows, _ = monitored(tmp_path, make(), max_epochs=2)
    measured = [row for row in rows if "time/step_ms" in row]
    steps = [row["step"] for row in measured]
    assert steps == list(range(8))
    if make is Training:
        assert [row["step"] for row in rows] == steps
        assert all("loss" in row for row in rows)


# ---------------------------------------------------------------- offload


OFFLOADING = {
    "strategy": lambda: {"strategy": strategy(move="all", keep_last=0)},
    "callback": lambda: {"callbacks": [ActivationCheckpointing(offload=OffloadOptions(**SMALL, keep_last=0))]},
    "both": lambda: {
        "strategy": strategy(move="all", keep_last=0),
        "callbacks": [ActivationCheckpointing(every_n_layers=2, offload=True)],
    },
    "recompute": lambda: {"callbacks": recomputing()},
    "recompute some": lambda: {"callbacks": [ActivationCheckpointing(every_n_layers=2)]},
}


@pytest.mark.parametrize("way", OFFLOADING)
@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), ("eager", 0), ("random", 1)])
def test_what_a_plain_run_would_save_is_what_it_saves(sim, way, policy, seed, tmp_path):
    _, plain = monitored(tmp_path / "plain")
    sim.configure(policy, seed)
    _, treated = monitored(tmp_path / "treated", **OFFLOADING[way]())
    assert treated.summary().plain_bytes == plain.summary().saved_bytes == plain.summary().plain_bytes
    assert treated.summary().saved_bytes < plain.summary().saved_bytes


@pytest.mark.parametrize("way", ["strategy", "callback", "both"])
def test_offloaded_bytes_and_waits_are_those_of_the_engine(sim, way, tmp_path, monkeypatch):
    sim.clock.configure(out_bytes_per_s=1e5, in_bytes_per_s=1e5, operator_s=1e-4)
    taken, take = [], OffloadEngine.take_statistics

    def noting(engine):
        taken.append(take(engine))
        return taken[-1]

    monkeypatch.setattr(OffloadEngine, "take_statistics", noting)
    settings = OFFLOADING[way]()
    rows, _ = monitored(tmp_path, **settings)
    figures = [statistics.figures() for statistics in taken if statistics.out_bytes]
    assert [row["memory/offloaded_MiB"] for row in rows] == [figure["host_MiB"] for figure in figures]
    assert all(row["memory/offloaded_MiB"] > 0 for row in rows)
    waits = [figure["forward_wait_ms"] + figure["backward_wait_ms"] for figure in figures]
    assert [row["time/copy_wait_ms"] for row in rows] == pytest.approx(waits)
    assert max(waits) > 0


class Chunk(nn.Module):
    """Saves its input of 4 KiB; takes one second in forward and two in backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()  # a layer has parts, or it would not be found

    def forward(self, x):
        return Work.apply(self.inner(x), 1.0)


@pytest.mark.parametrize(("seconds", "hidden"), [(0.5, 1.0), (4.0, 36 / 96)])
def test_the_hidden_share_is_the_part_of_the_copies_that_the_device_did_not_wait_for(sim, seconds, hidden, tmp_path):
    """A link that is twice as fast as the layers hides everything; one that takes four times as long hides a part."""

    class Chain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.start = nn.Parameter(torch.zeros(1024))
            self.layers = nn.Sequential(*(Chunk() for _ in range(12)))

        def training_step(self, batch, index):
            return self.layers(self.start * 1).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sim.clock.configure(out_bytes_per_s=4096 / seconds, in_bytes_per_s=4096 / seconds)
    taken = []
    engine_take = OffloadEngine.take_statistics
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(OffloadEngine, "take_statistics", lambda engine: taken.append(engine_take(engine)) or taken[-1])
        rows, monitor = monitored(tmp_path, Chain(), strategy=strategy(move="all"), max_epochs=4)
    measured = [statistics for statistics in taken if statistics.out_bytes]
    moved = [(each.out_bytes + each.in_bytes) / 4096 * seconds * 1e3 for each in measured]
    waits = [row["time/copy_wait_ms"] for row in rows]
    share = 1 - sum(waits[5:]) / sum(moved[5:])
    assert monitor.summary().hidden_share == pytest.approx(share, abs=0.02)
    assert share == pytest.approx(hidden, abs=0.25)
