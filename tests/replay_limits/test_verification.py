"""Fingerprints: what nobody photographs becomes an error that names the layer, and nothing else does."""

import itertools
import queue
import threading
import time

import pytest
import torch
from torch import nn

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import ReplayError, attach, detach, frame
from lightning_ckpt.recompute.fingerprint import SAMPLE_EVERY, fingerprint, is_verified
from lightning_ckpt.recompute.inventory import LEARNING_CALLS
from lightning_ckpt.recompute.state import bitwise_equal
from tests.replay_limits.support import Scaled, compare
from tests.support import Training, batches, fit

# ---------------------------------------------------------------- what cannot be photographed


class Disturbed(Scaled):
    """Reads a number that differs in the replay in calls from `since` on."""

    def __init__(self, since, tmp_path):
        super().__init__()
        self.since = since
        self.path = tmp_path / "number"
        self.path.write_text("1")
        self.counter = itertools.count()  # a C object: nobody can put it back
        self.calls = 0
        unreached().level = torch.ones(())

    def forward(self, x):
        self.calls += 1
        return self.use(x, self.read() if self.calls > self.since else 1.0)


class ReadsFile(Disturbed):
    def read(self):
        number = int(self.path.read_text())
        self.path.write_text(str(number + 1))
        return 1 / number


class ReadsIterator(Disturbed):
    def read(self):
        return 1 / (1 + next(self.counter))


class ReadsTime(Disturbed):
    def read(self):
        return time.perf_counter_ns() % 1_000_003 / 1_000_003


class ReadsThread(Disturbed):
    """Takes what a worker has put in order."""

    def __init__(self, since, tmp_path):
        super().__init__(since, tmp_path)
        self.results = queue.SimpleQueue()

    def read(self):
        worker = threading.Thread(target=lambda: self.results.put(1 / (1 + next(self.counter))))
        worker.start()
        worker.join()
        return self.results.get()


class WritesData(Disturbed):
    """Changes a large buffer by `.data`, which no version counts."""

    def __init__(self, since, tmp_path):
        super().__init__(since, tmp_path)
        self.register_buffer("table", torch.ones(1000, 8))

    def read(self):
        self.table.data.mul_(0.5)
        return self.table[0].clone()


class Unreached(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.ones(()))


UNREACHED = [Unreached()]


def unreached():
    """A module that no walk finds: the name is put together."""
    return globals()["UNRE" + "ACHED"][0]


class ReadsOtherModule(Disturbed):
    def read(self):
        unreached().level = unreached().level * 0.5
        return unreached().level


DISTURBED = [ReadsFile, ReadsIterator, ReadsTime, ReadsThread, ReadsOtherModule]


@pytest.mark.parametrize("layer", DISTURBED)
@pytest.mark.parametrize("verify", ["sample", "always"])
def test_an_unseen_change_in_the_first_calls_is_an_error_that_names_the_layer(layer, verify, tmp_path):
    with pytest.raises(ReplayError, match=r"'model\.1' saved tensor \d+ .*other values.*check_fn"):
        compare(lambda: layer(0, tmp_path), verify=verify)


def test_data_that_is_written_in_the_first_calls_is_seen(tmp_path):
    compare(lambda: WritesData(0, tmp_path))


@pytest.mark.parametrize("layer", [*DISTURBED, WritesData])
def test_an_unseen_change_in_a_later_call_is_an_error_under_always(layer, tmp_path):
    with pytest.raises(ReplayError, match=r"'model\.1' saved tensor \d+ .*other values"):
        compare(lambda: layer(3, tmp_path), steps=5, verify="always")


@pytest.mark.parametrize("layer", [ReadsFile, ReadsIterator, ReadsOtherModule])
def test_without_verification_nothing_is_said_and_the_gradient_is_wrong(layer, tmp_path):
    def run(*callbacks):
        def make():
            return Training(nn.Sequential(nn.Linear(8, 8), layer(0, tmp_path), nn.Linear(8, 8)))

        return fit(make, batches(1), callbacks)

    plain = run()
    got = run(ActivationCheckpointing(layers="model.1", verify="off"))
    assert torch.equal(got.losses[0], plain.losses[0])
    assert any(not torch.equal(got.gradients[0][name], plain.gradients[0][name]) for name in plain.gradients[0])


def test_an_unseen_change_in_an_evaluated_layer_is_checked_in_its_first_calls_in_that_mode(tmp_path):
    class Evaluates(Training):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                self.model.eval()

    with pytest.raises(ReplayError, match=r"'model\.1' saved tensor"):
        compare(lambda: ReadsIterator(3, tmp_path), Evaluates, steps=5)


# ---------------------------------------------------------------- which calls are verified


def test_the_first_calls_and_one_in_a_sample_are_verified():
    verified = [call for call in range(400) if is_verified("sample", call, call < LEARNING_CALLS)]
    assert verified == [0, 1, SAMPLE_EVERY, 2 * SAMPLE_EVERY, 3 * SAMPLE_EVERY]
    assert all(is_verified("always", call, False) for call in range(70))
    assert not any(is_verified("off", call, call < 2) for call in range(70))


@pytest.mark.parametrize(
    ("verify", "expected"), [("sample", {0, 1, SAMPLE_EVERY}), ("always", set(range(130))), ("off", set())]
)
def test_fingerprints_are_taken_in_verified_calls_only(verify, expected, monkeypatch):
    taken = []
    monkeypatch.setattr(frame, "fingerprint", lambda tensor: taken.append(tensor) or fingerprint(tensor))
    layer = Simple()
    attach(layer, "layer", verify)
    calls = set()
    for call in range(130):
        layer(torch.ones(2, 8)).sum().backward()
        if taken:
            calls.add(call)
        taken.clear()
    detach(layer)
    assert calls == expected


class Simple(Scaled):
    def forward(self, x):
        return self.use(x, 1.0)


# ---------------------------------------------------------------- what a fingerprint tells apart


def same(a, b):
    return fingerprint(a).matches(fingerprint(b))


VALUES = torch.tensor([1.0, 2.0, -3.0, 4.0, 0.5, -6.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x / 2,
        lambda x: x * 2,
        lambda x: x + 1,
        lambda x: torch.zeros_like(x),
        lambda x: torch.cat([x[:-1], x[-1:] * 1.01]),
    ],
    ids=["halved", "doubled", "shifted", "zero", "one value"],
)
def test_changes_of_values_are_told_apart(dtype, change):
    values = VALUES.to(dtype)
    assert same(values, values.clone())
    assert not same(values, change(values))


@pytest.mark.parametrize("values", [VALUES, torch.arange(6), torch.arange(7).to(torch.int8)])
def test_another_order_of_the_values_is_told_apart(values):
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    assert not same(values, swapped)
    assert not same(values, values.flip(0))


def test_rows_in_another_order_are_told_apart():
    rows = torch.randn(8, 8)
    assert not same(rows, rows.roll(1, 0))


def test_signs_that_change_places_are_told_apart():
    assert not same(torch.tensor([1.0, -2.0]), torch.tensor([-1.0, 2.0]))
    values = torch.randn(64)
    values = torch.cat([values.abs(), -values.abs()])
    assert not same(values, -values)


class Shuffles(Scaled):
    """Shuffles its rows by an order that nobody photographs, as token masking does."""

    def __init__(self, tmp_path=None):
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, x):
        return self.use(x.roll(next(self.counter), 0), 1.0)


class FlipsSigns(Scaled):
    """Multiplies balanced values by a sign that nobody photographs."""

    def __init__(self, tmp_path=None):
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, x):
        x = torch.cat([x, -x])
        sign = (-1) ** next(self.counter)
        return self.use(x * sign, 1.0)[: len(x) // 2]


@pytest.mark.parametrize("layer", [Shuffles, FlipsSigns])
def test_an_unseen_order_or_sign_is_an_error_that_names_the_layer(layer):
    with pytest.raises(ReplayError, match=r"'model\.1'"):
        compare(layer, verify="always")


def test_nan_equals_nan_and_no_other_value():
    values = torch.tensor([1.0, float("nan"), float("inf")])
    assert same(values, values.clone())
    assert not same(values, torch.tensor([1.0, 2.0, float("inf")]))
    assert bitwise_equal(values, values.clone())
    assert not bitwise_equal(values, torch.tensor([1.0, 2.0, float("inf")]))


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.ones((), dtype=torch.float64),
        torch.arange(5, dtype=torch.uint8),
        torch.arange(5, dtype=torch.int8),
        torch.arange(5).bool(),
        torch.arange(7).bfloat16(),
        torch.arange(7).bfloat16()[1:],
        torch.arange(8).half()[3:5],
        torch.arange(9).bool()[1:],
        torch.arange(6).to(torch.complex64),
        torch.arange(6).to(torch.complex64).conj(),
        torch.arange(6).to(torch.complex64).conj().imag,
        torch.arange(6).float().expand(3, 6),
        torch.arange(6).float().view(2, 3).T,
        torch.arange(6).float().to(torch.float8_e4m3fn),
        torch.arange(6).to(torch.uint16),
        torch.quantize_per_tensor(torch.arange(6).float(), 0.1, 0, torch.qint8),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)]),
        torch.arange(6).float().as_subclass(Tagged),
        torch.empty(3, device="meta"),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3, 2)).T,
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout} {type(tensor).__name__}",
)
def test_a_tensor_of_any_kind_equals_its_copy(tensor):
    first, again = fingerprint(tensor), fingerprint(tensor.detach().clone())
    assert first is None or again is None or first.matches(again)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0, float("nan")], dtype=torch.complex64),
        torch.tensor([1.0, float("nan")], dtype=torch.complex64).conj(),
        torch.arange(6).float().to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor(float("nan")),
        torch.zeros(0),
        torch.quantize_per_tensor(torch.arange(6).float(), 0.1, 0, torch.qint8),
        torch.tensor([[0.0, float("nan")], [1.0, 0.0]]).to_sparse(),
        torch.tensor([[0.0, float("nan")], [1.0, 0.0]]).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged),
        pytest.param(
            torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)]),
            marks=pytest.mark.xfail(strict=True, reason="limit: the bits of strided nested tensors are not compared"),
        ),
        torch.tensor([1.0, float("nan")]).as_subclass(Tagged),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout} {type(tensor).__name__}",
)
def test_a_tensor_of_any_kind_has_the_bits_of_its_copy(tensor):
    assert bitwise_equal(tensor, tensor.detach().clone())


def test_sparse_tensors_with_other_places_are_not_equal():
    a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert not bitwise_equal(a.to_sparse(), b.to_sparse())
    assert not bitwise_equal(a.to_sparse_csr(), b.to_sparse_csr())


def test_negative_zero_is_not_zero():
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


# ---------------------------------------------------------------- no false alarm


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.rnn(x[:, None].expand(-1, 3, -1))[0][:, -1]


class Halves(Scaled):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.linear(x)
        return (x.to(torch.bfloat16)[:, 1:].exp().sum(1, keepdim=True) * x[:, :7].repeat(1, 2)[:, :8]).float()


class Empty(Scaled):
    def forward(self, x):
        return self.use(x, 1.0) + torch.cat([x[:0].exp(), x[:0]]).sum()


class Bytes(Scaled):
    """Saves indices and masks of bytes."""

    def forward(self, x):
        mask = (x.detach() > 0).to(torch.uint8)
        return self.use(x * mask, 1.0).gather(1, mask.long())


class Complex(Scaled):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.use(x, 1.0)) * 1j, n=8)


class Quantised(Scaled):
    """Fake quantisation, and a quantised table."""

    def __init__(self):
        super().__init__()
        self.table = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)

    def forward(self, x):
        x = torch.fake_quantize_per_tensor_affine(self.use(x, self.table.dequantize()), 0.1, 0, -128, 127)
        return x * 2


class Subclassed(Scaled):
    def forward(self, x):
        return (self.use(x.as_subclass(Tagged), 1.0).exp() * 0.1).as_subclass(torch.Tensor)


class NotANumber(Scaled):
    """Masked attention scores: infinities, and NaN in what nobody uses."""

    def forward(self, x):
        scores = self.use(x, 1.0).masked_fill(x.detach() < 0, float("-inf"))
        weird = scores.detach() - scores.detach()
        return torch.where(torch.isnan(weird), 0.0, scores.masked_fill(torch.isinf(scores), 0.0)) + scores.softmax(1)


class Uninitialised(Scaled):
    """Writes the half of an empty tensor that it uses."""

    def forward(self, x):
        out = torch.empty(len(x), 16)
        out[:, :8] = self.use(x, 1.0)
        return out[:, :8].exp() * 0.1


NO_ALARM = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "bfloat16": Halves,
    "empty": Empty,
    "bytes": Bytes,
    "complex": Complex,
    "quantised": Quantised,
    "subclass": Subclassed,
    "NaN": NotANumber,
    "uninitialised": Uninitialised,
    "RReLU": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU()),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    "max pool": lambda: nn.Sequential(nn.Linear(8, 16), nn.MaxPool1d(2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
}


@pytest.mark.parametrize("make_layer", NO_ALARM.values(), ids=NO_ALARM.keys())
def test_no_false_alarm(make_layer):
    compare(make_layer, steps=3, verify="always")


# ---------------------------------------------------------------- errors that only a replay meets


class Ends(Scaled):
    """Takes from an iterator that has one item for every forward, none for replays."""

    def __init__(self, count):
        super().__init__()
        self.numbers = iter([1.0] * count)

    def forward(self, x):
        return self.use(x, next(self.numbers))


def test_an_iterator_that_a_replay_exhausts_does_not_end_the_fit_silently():
    with pytest.raises(ReplayError, match=r"'model\.1'"):
        compare(lambda: Ends(3), steps=3)


def test_an_exception_that_only_the_replay_meets_names_the_layer(tmp_path):
    class RemovesFile(Scaled):
        """Takes a file away when it has read it."""

        def __init__(self):
            super().__init__()
            self.path = tmp_path / "once"
            self.path.write_text("1")

        def forward(self, x):
            number = int(self.path.read_text())
            self.path.unlink()
            return self.use(x, number)

    with pytest.raises(Exception, match=r"model\.1"):
        fit(lambda: Training(nn.Sequential(nn.Linear(8, 8), RemovesFile())), batches(1), [callback()])


def callback():
    return ActivationCheckpointing(layers="model.1")
