"""The logged bytes are the true ones: to the byte those that PyTorch's profiler saw the CPU's allocator hand out."""

import csv
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding, GPTNeoXConfig, GPTNeoXForCausalLM

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from lightning_ckpt.measure.sampling import Sample
from tests.support import Training, batches, blocks, trainer

MIB = 2**20
DISPATCHED = "PythonDispatchMode"  # what the profiler calls the way from a counted operator to its kernel
GENERATOR_STATE = 5056  # bytes of a CPU generator's state, which no operator returns
NUMBER = 8  # bytes of a Python number as an operand, which no operator returns either


def rows_of(logger):
    with open(f"{logger.log_dir}/metrics.csv") as file:
        table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in table if "time/step_ms" in row]


def bytes_in(row, name):
    size = row[f"memory/{name}_MiB"] * MIB
    assert size == int(size)
    return int(size)


def fit(make, data, folder, callbacks=(), **settings):
    logger = CSVLogger(folder, name="run")
    torch.manual_seed(0)
    loop = trainer([*callbacks, StepMonitor(table=False)], logger=logger, **settings)
    loop.fit(make(), data)
    return rows_of(logger)


# ---------------------------------------------------------------- what the allocator did


class Moments(pl.Callback):
    """Leaves marks in the profile, and notes which blocks are in use when a batch begins."""

    def __init__(self):
        self.present = []

    def mark(self, name):
        with record_function(f"@{name} {len(self.present) - 1}"):
            pass

    def on_train_batch_start(self, trainer, module, batch, index):
        tensors = [*module.parameters(), *module.buffers(), *(parameter.grad for parameter in module.parameters())]
        states = [dict(state) for optimizer in trainer.optimizers for state in optimizer.state.values()]
        tensors += tree_leaves([states, dict(batch) if isinstance(batch, Mapping) else batch])
        storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        self.present.append({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()})
        self.mark("begin")

    def on_before_backward(self, *args):
        self.mark("turn")

    def on_train_batch_end(self, *args):
        self.mark("end")


@dataclass
class Batch:
    """Bytes in use in one batch, of the blocks that were in use at its beginning or were allocated in it.

    Attributes:
        peak: the most at once, as a user of operators sees it: what an operator frees before it returns left out.
        with_workspaces: the most at once.
        after_forward: when backward began, told like the peak.
        born: of these, the bytes allocated in the batch, with what no operator has returned.
        workspaces: operators that freed blocks before they returned, with the bytes of the largest.
        unreturned: sizes of blocks that no operator has returned.
    """

    peak: int = 0
    with_workspaces: int = 0
    after_forward: int = 0
    born: int = 0
    workspaces: dict[str, int] = field(default_factory=dict)
    unreturned: list[int] = field(default_factory=list)


def _flat(event, operator=None):
    """Allocations and marks, each with the counted operator that it happened in."""
    if event.tag == _EventType.Allocation:
        yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, operator
        return
    if event.name.startswith("@"):
        yield event.start_time_ns, event.name, 0, None
    parent = event.parent
    if operator is None and parent is not None and parent.name == DISPATCHED:
        operator = (event.name, event.id, event.end_time_ns)
    for child in event.children:
        yield from _flat(child, operator)


def true_batches(profiled, present):
    roots = profiled.profiler.kineto_results.experimental_event_tree()
    events = sorted((item for root in roots for item in _flat(root)), key=lambda item: item[0])
    freed_at = {}
    for index, (time, block, size, _) in enumerate(reversed(events)):
        position = len(events) - 1 - index
        if size < 0:
            freed_at[block] = time
        elif size > 0:
            events[position] = (*events[position], freed_at.pop(block, None))
    found, batch = [], None
    for _, block, size, operator, *end in events:
        if isinstance(block, str):
            name, number = block[1:].split()
            if name == "begin":
                live, batch, hidden, old = dict(present[int(number)]), Batch(), set(), set(present[int(number)])
                now = seen = batch.peak = batch.with_workspaces = sum(live.values())
            elif name == "turn":
                if seen > batch.after_forward:
                    batch.after_forward = seen
                    batch.born = sum(size for block, size in live.items() if block not in old)
            else:
                found.append(batch)
                batch = None
        elif batch is None:
            continue
        elif size < 0:
            size = live.pop(block, 0)
            now -= size
            seen -= 0 if block in hidden else size
            hidden.discard(block)
            old.discard(block)
        else:
            live[block] = size
            now += size
            if operator is None and size in (NUMBER, GENERATOR_STATE):
                batch.unreturned.append(size)
                hidden.add(block)
            elif operator is not None and end[0] is not None and end[0] <= operator[2]:
                batch.workspaces[operator[0]] = max(size, batch.workspaces.get(operator[0], 0))
                hidden.add(block)
            else:
                seen += size
            batch.with_workspaces = max(batch.with_workspaces, now)
            batch.peak = max(batch.peak, seen)
    return found


def profiled(make, data, folder, callbacks=(), **settings):
    """Rows, and what is true of each batch."""
    moments = Moments()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        rows = fit(make, data, folder, [*callbacks, moments], **settings)
    return rows, true_batches(record, moments.present)


def tokens(count=3, size=2, length=16):
    generator = torch.Generator().manual_seed(7)
    return DataLoader(torch.randint(1, 64, (count * size, length), generator=generator), batch_size=size)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def neox(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    config = GPTNeoXConfig(
        **{**sizes, "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_dropout": 0.1, **changes}
    )
    model = GPTNeoXForCausalLM(config)
    return Training(model, lambda model, batch: model(input_ids=batch, labels=batch, use_cache=False).loss, adamw)


def conv_net():
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
    )
    return Training(model)


def images(count=3, size=4):
    return DataLoader(torch.randn(count * size, 3, 16, 16), batch_size=size)


RUNS = {
    "GPT-NeoX": (neox, tokens, {}),
    "GPT-NeoX, every layer recomputed": (neox, tokens, {"every_n_layers": 1}),
    "GPT-NeoX, every second layer recomputed": (neox, tokens, {"every_n_layers": 2}),
    "convolutions, SGD": (conv_net, images, {}),
    "blocks with dropout, SGD": (lambda: Training(blocks(6, 64)), lambda: batches(3, 64, 64), {}),
    "blocks with dropout, AdamW": (lambda: Training(blocks(6, 64), None, adamw), lambda: batches(3, 64, 64), {}),
    "blocks recomputed": (lambda: Training(blocks(6, 64)), lambda: batches(3, 64, 64), {"every_n_layers": 1}),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_logged_bytes_are_those_of_the_allocator(run, tmp_path):
    make, data, recompute = RUNS[run]
    data = data()
    callbacks = [ActivationCheckpointing(**recompute)] if recompute else []
    rows, truth = profiled(make, data, tmp_path, callbacks)
    assert len(rows) == len(truth) == 3
    for row, true in zip(rows, truth, strict=True):
        assert bytes_in(row, "peak") == true.peak
        assert bytes_in(row, "after_forward") == true.after_forward
        # The count of an optimizer's steps is a number, too, in a tensor of 4 bytes.
        assert set(true.unreturned) <= {4, NUMBER, *([GENERATOR_STATE] if recompute else [])}
    # In the last step layers are not looked at any more while they run for the second time.
    batch, states = next(iter(data)), truth[-1].unreturned.count(GENERATOR_STATE) // 2  # one a frame, one a replay
    left = truth[-1].born - states * GENERATOR_STATE + batch.numel() * batch.element_size()  # saved by the first layer
    assert bytes_in(rows[-1], "saved") == pytest.approx(left, rel=1e-3)


def test_with_accumulation_the_peak_is_the_largest_of_the_micro_batches(tmp_path):
    rows, truth = profiled(lambda: Training(blocks(6, 64)), batches(4, 64, 64), tmp_path, accumulate_grad_batches=2)
    pairs = list(zip(truth[::2], truth[1::2], strict=True))
    assert len(rows) == 2
    for row, pair in zip(rows, pairs, strict=True):
        assert bytes_in(row, "peak") == max(true.peak for true in pair)
        assert bytes_in(row, "after_forward") == max(true.after_forward for true in pair)
    assert pairs[0][0].peak < pairs[0][1].peak  # the first has no gradients yet


def test_what_an_operator_needs_inside_itself_is_all_that_the_peak_leaves_out(tmp_path):
    """Convolutions, softmax, norms and sums allocate in their kernels what they free before they return."""
    rows, truth = profiled(conv_net, images(), tmp_path)
    for row, true in zip(rows, truth, strict=True):
        missing = true.with_workspaces - bytes_in(row, "peak")
        assert 0 < missing <= max(true.workspaces.values()) + sum(true.unreturned)
        assert {"aten::convolution", "aten::convolution_backward"} <= true.workspaces.keys()


@pytest.mark.parametrize("batch_type", [dict, BatchEncoding, UserDict])
def test_batches_of_every_kind_of_mapping_are_in_the_peak(batch_type, tmp_path):
    def collate(rows):
        return batch_type({"input_ids": torch.stack(rows), "image": torch.ones(100, 100)})

    def make():
        return Training(nn.Embedding(64, 8), lambda model, batch: model(batch["input_ids"]).square().mean())

    rows, truth = profiled(make, DataLoader(list(tokens().dataset), batch_size=2, collate_fn=collate), tmp_path)
    for row, true in zip(rows, truth, strict=True):
        assert bytes_in(row, "peak") == true.peak


def test_tensors_made_of_python_numbers_are_in_the_peak(tmp_path):
    """`torch.tensor` allocates its storage before an operator sees it."""
    numbers = [1.0] * 4096

    def make():
        return Training(nn.Linear(8, 8), lambda model, batch: model(batch).mean() * torch.tensor(numbers).mean())

    rows, _ = profiled(make, batches(3), tmp_path)
    assert all(bytes_in(row, "peak") > 4 * 4096 for row in rows)


# ---------------------------------------------------------------- where the peak is


class Peaks(torch.autograd.Function):
    """Needs this many bytes for a moment, in forward or in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.bytes = backward
        torch.empty(forward, dtype=torch.uint8)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ctx.bytes, dtype=torch.uint8)
        return gradient, None, None


class Hungry(torch.optim.SGD):
    """Needs this many bytes for a moment in its step."""

    bytes = 0

    def step(self, closure=None):
        loss = super().step(closure)
        torch.empty(self.bytes, dtype=torch.uint8)
        return loss


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("phase", [1, 2, 3])
def test_the_phase_of_the_peak_is_where_it_is(phase, manual, tmp_path):
    needs = [3 * MIB if number == phase else MIB for number in (1, 2, 3)]

    def optimizer(parameters):
        hungry = Hungry(parameters, lr=0.1)
        hungry.bytes = needs[2]
        return hungry

    class ByHand(Training):
        automatic_optimization = False

        def training_step(self, batch, index):
            [optimizer] = [self.optimizers()]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    def make():
        kind = ByHand if manual else Training
        return kind(nn.Linear(8, 8), lambda m, batch: Peaks.apply(m(batch), *needs[:2]).square().mean(), optimizer)

    rows, truth = profiled(make, batches(3), tmp_path)
    for row, true in zip(rows, truth, strict=True):
        assert row["memory/peak_phase"] == phase
        assert bytes_in(row, "peak") == true.peak
        assert 3 * MIB < true.peak < 3.1 * MIB


# ---------------------------------------------------------------- figures taken over from other batches


class Sizes(IterableDataset):
    """A batch of so many rows, one after another."""

    def __init__(self, sizes, width=64):
        self.sizes = sizes
        self.width = width

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for size in self.sizes:
            yield torch.randn(size, self.width, generator=generator)


def sized(sizes):
    return DataLoader(Sizes(sizes), batch_size=None)


def both(make, data, folder, monkeypatch, callbacks=list, **settings):
    """The rows of a run as it is, and those of a run in which every batch is counted."""
    rows = fit(make, data, folder / "sampled", callbacks(), **settings)
    with monkeypatch.context() as patches:
        for name in ("WARM_UP", "BURST"):
            patches.setattr(Sample, name, 10**6)
        counted = fit(make, data, folder / "counted", callbacks(), **settings)
    assert all("memory/peak_MiB" in row for row in counted)
    return rows, counted


MEMORY = ("memory/peak_MiB", "memory/peak_phase", "memory/after_forward_MiB", "memory/saved_MiB", "memory/avoided_MiB")


def assert_none_is_wrong(rows, counted):
    assert len(rows) == len(counted)
    for row, true in zip(rows, counted, strict=True):
        assert {name: row[name] for name in MEMORY if name in row} == {
            name: true[name] for name in MEMORY if name in row
        }, f"step {row['step']}"


@pytest.mark.parametrize(("at", "accumulate"), [(3, 1), (9, 1), (9, 2), (30, 1)])
def test_one_big_batch_among_small_ones_has_its_own_peak(at, accumulate, tmp_path, monkeypatch):
    sizes = [8] * (at + 4)
    sizes[at] = 128
    settings = {"accumulate_grad_batches": accumulate}
    rows, counted = both(lambda: Training(blocks(2, 64)), sized(sizes), tmp_path, monkeypatch, **settings)
    # With accumulation and an odd number of batches, the last one is a step of its own: it starts without gradients.
    assert all("memory/peak_MiB" in row for row in rows)
    assert_none_is_wrong(rows, counted)
    peaks = [row["memory/peak_MiB"] for row in rows]
    big = at // accumulate
    assert peaks[big] > 1.5 * max(peaks[:big] + peaks[big + 1 :])


@pytest.mark.parametrize("callbacks", [list, lambda: [ActivationCheckpointing()]], ids=["plain", "recomputed"])
def test_shapes_that_change_all_the_time_have_no_wrong_figure(callbacks, tmp_path, monkeypatch):
    """In its first steps a recomputed run compares, which takes memory that later batches of the shape do not need."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 40, (60,), generator=generator).tolist()
    fit(lambda: Training(blocks(2, 64)), sized(sizes), tmp_path / "first", callbacks())  # fills caches of the process
    rows, counted = both(lambda: Training(blocks(2, 64)), sized(sizes), tmp_path, monkeypatch, callbacks)
    assert_none_is_wrong(rows, counted)
    assert sum("memory/peak_MiB" in row for row in rows) > 10


class Skipping(Training):
    """Batches without a loss, and layers that are frozen later."""

    def training_step(self, batch, index):
        if index == 8:
            self.model[1].requires_grad_(False)
        if index == 14:
            self.model[1].requires_grad_(True)
        loss = super().training_step(batch, index)
        return None if index % 5 == 4 else loss


def test_skipped_batches_and_frozen_layers_have_no_wrong_figure(tmp_path, monkeypatch):
    rows, counted = both(lambda: Skipping(blocks(2, 64), None, adamw), batches(25, 8, 64), tmp_path, monkeypatch)
    assert_none_is_wrong(rows, counted)


class Experts(nn.Module):
    """Sends every row to one of two experts, by its first value."""

    def __init__(self, width=64):
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))] * 2)

    def forward(self, x):
        chosen = x[:, 0] > 0
        return torch.cat([self.experts[0](x[chosen]), self.experts[1](x[~chosen])])


def test_memory_that_follows_values_has_no_wrong_figure(tmp_path, monkeypatch):
    """With experts, what is saved is the same in sum for every batch, and the peak is not."""
    rows, counted = both(lambda: Training(Experts()), batches(25, 64, 64), tmp_path, monkeypatch)
    assert len({row["memory/peak_MiB"] for row in counted}) > 5
    assert_none_is_wrong(rows, counted)
