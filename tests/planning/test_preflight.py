"""A rehearsed step takes the bytes of the real one, takes none itself, and leaves no trace."""

import contextlib
import copy
import math
import os
import random
import re
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt.measure.work import tensors_of
from lightning_ckpt.planning.make import step_of
from lightning_ckpt.planning.preflight import Preflight, PreflightError
from lightning_ckpt.planning.trace import StepRecorder, StepTrace
from lightning_ckpt.planning.treatment import Assignment, Treatment, treat
from lightning_ckpt.recompute import attach, attached
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.selection import select_layers
from tests.planning.models import KINDS, Mlp
from tests.support import blocks

OPERATORS = resolve_policy("matmul")
IN_PLACE = (Treatment.KEEP, Treatment.POLICY, Treatment.RECOMPUTE)


def mixed(layers: dict[str, nn.Module], seed: int) -> dict[str, Treatment]:
    """Random treatments."""
    draw = random.Random(seed)
    return {name: draw.choice(IN_PLACE) for name in layers}


def real_step(
    module: nn.Module,
    batch: Any,
    layers: dict[str, nn.Module],
    step: Callable[[nn.Module, Any], Tensor],
    assignment: Assignment,
    optimizer: torch.optim.Optimizer | None = None,
    accumulates: bool = False,
    around_step: Callable[[], Any] = contextlib.nullcontext,
) -> StepTrace:
    """Record the fourth of some real steps, as a Trainer makes them."""
    recomputed = [attach(layer, name, "off", (), frozenset()) for name, layer in layers.items()]
    for each in recomputed:
        treat(each, assignment[each.name], OPERATORS, None)

    def run(optimizer_begins: Callable[[], None], optimizer_ends: Callable[[], None]) -> None:
        with around_step():
            loss = step(module, batch)
            if not accumulates:
                module.zero_grad()
            loss.backward()
        del loss
        optimizer_begins()
        if optimizer is not None:
            optimizer.step()
        optimizer_ends()

    for _ in range(3):
        run(lambda: None, lambda: None)
    recorder = StepRecorder(layers)
    recorder.adopt(module.parameters())
    recorder.adopt(module.buffers())
    recorder.adopt(parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    recorder.adopt(tensors_of(batch))
    for state in optimizer.state.values() if optimizer is not None else ():
        recorder.adopt(value for value in state.values() if isinstance(value, Tensor))
    with recorder:
        run(recorder.optimizer_begins, recorder.optimizer_ends)
    trace = recorder.finish()
    for each in recomputed:
        each.detach()
    return trace


def sizes(trace: StepTrace) -> dict[str, int]:
    """All bytes in a trace."""
    found = {"peak": trace.peak, "rest": trace.rest.peak, "optimizer": trace.optimizer.peak}
    for i, call in enumerate(trace.calls):
        found |= {f"{i} {call.name} {key}": getattr(call, key) for key in ("before", "input_bytes", "after")}
        found |= {f"{i} {call.name} {key}": getattr(call, key).peak for key in ("forward", "between", "backward")}
    return found


def assert_same_bytes(
    module: nn.Module, batch: Any, step: Callable[[nn.Module, Any], Any], seeds: range = range(2), **settings: Any
) -> None:
    """Under random treatments the rehearsal and the real step have the same bytes everywhere."""
    layers = dict(select_layers(module).layers)
    optimizer = settings.get("optimizer")
    rehearsal = {name: value for name, value in settings.items() if name != "optimizer"}
    preflight = Preflight(
        module,
        batch,
        layers,
        step,
        optimizers=[] if optimizer is None else [optimizer],
        operators=OPERATORS,
        **rehearsal,
    )
    before = [preflight.run(mixed(layers, seed)) for seed in seeds]
    for seed, rehearsed in zip(seeds, before, strict=True):
        real = real_step(module, batch, layers, step, mixed(layers, seed), **settings)
        assert sizes(rehearsed) == sizes(real)
    # Also while the model is in training: gradients and the optimizer's state are there.
    assert sizes(preflight.run(mixed(layers, seeds[0]))) == sizes(before[0])


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.can_rehearse])
def test_models_of_all_kinds(name):
    kind = KINDS[name]
    module, batch = kind.module(), kind.batches(1)[0]
    module.log = lambda *args: None  # there is no Trainer
    optimizer = module.configure_optimizers()
    assert_same_bytes(module, batch, lambda module, batch: module.training_step(batch, 0), optimizer=optimizer)


def mean_square(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


WIDE = torch.randn(64, 32)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "none": None,
    "AdamW": torch.optim.AdamW,
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "groups": lambda parameters: torch.optim.Adam([{"params": [each], "lr": 1e-3} for each in parameters]),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "accumulates"])
def test_optimizers(make_optimizer, accumulates):
    module = blocks(width=32)
    optimizer = None if make_optimizer is None else make_optimizer(module.parameters())
    assert_same_bytes(module, WIDE, mean_square, optimizer=optimizer, accumulates=accumulates)


class Gate(nn.Module):
    """A layer without a norm: for the statistics of one in bfloat16, fake tensors on the CPU have the wrong type."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, dim=-1)
        return x + self.down(nn.functional.dropout(value * gate.sigmoid(), 0.1))


def test_autocast():
    module = nn.Sequential(*[Gate() for _ in range(4)])
    assert_same_bytes(module, WIDE, mean_square, around_step=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_frozen_weights():
    module = blocks(width=32)
    module[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(each for each in module.parameters() if each.requires_grad)
    assert_same_bytes(module, WIDE, mean_square, optimizer=optimizer)


class Tied(nn.Module):
    """Its head is its embedding, and one of its layers runs twice.

    Args:
        layers: their number; those beyond three never run.
    """

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Mlp(32, 64) for _ in range(layers))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for i in (0, 1, 1, 2):
            x = self.layers[i](x)
        return self.head(x)


WORDS = torch.randint(0, 64, (4, 32))


def test_tied_weights_and_a_layer_that_runs_twice():
    module = Tied()
    assert_same_bytes(module, WORDS, mean_square, optimizer=torch.optim.AdamW(module.parameters()))


def test_weights_that_get_no_gradient_have_no_state_either():
    module = Tied(layers=4)
    layers, optimizer = dict(select_layers(module).layers), torch.optim.AdamW(module.parameters())
    assignment = dict.fromkeys(layers, Treatment.RECOMPUTE)
    rehearsed = Preflight(module, WORDS, layers, mean_square, optimizers=[optimizer]).run(assignment)
    real = real_step(module, WORDS, layers, mean_square, assignment, optimizer)
    assert module.layers[3].up.weight.grad is None
    assert rehearsed.optimizer.peak == real.optimizer.peak
    assert rehearsed.peak == real.peak


@dataclass
class Sample:
    """A batch of its own kind."""

    x: Tensor
    name: str = "batch"


Pair = namedtuple("Pair", ["x", "y"])

BATCHES: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "dict": ({"a": {"x": WIDE}, "name": "batch"}, lambda batch: batch["a"]["x"]),
    "tuple": ((WIDE, 3), lambda batch: batch[0]),
    "list": ([[WIDE]], lambda batch: batch[0][0]),
    "namedtuple": (Pair(WIDE, None), lambda batch: batch.x),
    "dataclass": (Sample(WIDE), lambda batch: batch.x),
}


@pytest.mark.parametrize(("batch", "find"), BATCHES.values(), ids=BATCHES)
def test_batches(batch, find):
    preflight = Preflight(module := blocks(width=32), batch, {}, lambda module, batch: mean_square(module, find(batch)))
    plain = Preflight(module, WIDE, {}, mean_square)
    assert sizes(preflight.run({})) == sizes(plain.run({}))
    assert find(batch) is WIDE


def test_keyword_arguments():
    layers = nn.ModuleList([nn.Bilinear(32, 32, 32)])

    def step(module: Any, batch: Tensor) -> Tensor:
        return module[0](batch, input2=batch).sum()

    for treatment in IN_PLACE:
        assignment = {"0": treatment}
        rehearsed = Preflight(layers, WIDE, {"0": layers[0]}, step, operators=OPERATORS).run(assignment)
        assert sizes(rehearsed) == sizes(real_step(layers, WIDE, {"0": layers[0]}, step, assignment))


# ---------------------------------------------------------------- nothing is touched


class Busy(nn.Module):
    """Changes everything that it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(32, 32) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)
        self.lazily: Tensor | None = None
        self.calls = 0
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {"nested": {"losses": []}}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.by_name["nested"]["losses"].append(x.mean())
        self.by_name[f"call {self.calls}"] = random.random()
        self.lazily = x * float(numpy.random.rand())
        self.new = nn.Parameter(torch.zeros(2))
        x = self.norm(x) + torch.rand(x.shape)
        for layer in self.layers:
            layer.last = x
            x = layer(x)
        self.register_buffer("later", x.detach())
        return x


def trainable(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer in the middle of training."""
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(module, WIDE).backward()
        optimizer.step()
    return optimizer


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a rehearsal could touch: identities of objects, and copies of what is in them."""
    found: list[Any] = [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    found += [{name: tensor.tolist() for name, tensor in module.state_dict().items()}, torch.get_default_dtype()]
    found += [copy.deepcopy(optimizer.state_dict()["param_groups"]), vars(optimizer).keys()]
    found += [
        (id(key), name, id(value), value.tolist())
        for key, state in optimizer.state.items()
        for name, value in state.items()
    ]
    for parameter in module.parameters():
        gradient = parameter.grad
        found += [id(parameter), id(gradient), None if gradient is None else gradient.tolist(), parameter._version]
        found += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    for part in module.modules():
        found.append([(name, id(value), _inside(value)) for name, value in vars(part).items()])
    return found


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, id(item), _inside(item)) for key, item in value.items()]
    return [id(item) for item in value] if isinstance(value, list) else None


@contextlib.contextmanager
def unchanged(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = everything(module, optimizer)
    yield
    after = everything(module, optimizer)
    assert len(after) == len(before)
    for i, (a, b) in enumerate(zip(after, before, strict=True)):
        assert a == b, f"number {i} has changed"


@pytest.mark.parametrize("is_attached", [False, True], ids=["plain", "attached"])
def test_nothing_is_touched(is_attached):
    module = Busy()
    optimizer = trainable(module)
    layers = dict(select_layers(module).layers)
    attachments = [attach(layer, name, "sample", (), frozenset()) for name, layer in layers.items() if is_attached]
    with unchanged(module, optimizer):
        preflight = Preflight(module, WIDE, layers, mean_square, optimizers=[optimizer], operators=OPERATORS)
        for treatment in IN_PLACE:
            preflight.run(dict.fromkeys(layers, treatment))
    for each in attachments:
        each.detach()
    mean_square(module, WIDE).backward()
    optimizer.step()


def test_hooks_stay_and_see_nothing_real_change():
    module = blocks(width=32)
    optimizer = trainable(module)
    seen: list[str] = []
    module[1].register_forward_hook(lambda *args: seen.append("forward"))
    module[1].linear.weight.register_hook(lambda gradient: seen.append("gradient"))
    optimizer.register_step_post_hook(lambda *args: seen.append("step"))
    with unchanged(module, optimizer):
        Preflight(module, WIDE, dict(select_layers(module).layers), mean_square, optimizers=[optimizer]).run({})
    assert "step" not in seen
    assert "gradient" not in seen


# ---------------------------------------------------------------- what cannot be rehearsed


def read_item(module: nn.Module, batch: Tensor) -> Tensor:
    loss = mean_square(module, batch)
    math.sqrt(loss.item())
    return loss


def branch(module: nn.Module, batch: Tensor) -> Tensor:
    loss = mean_square(module, batch)
    return loss if loss > 0 else -loss


def to_numpy(module: nn.Module, batch: Tensor) -> Tensor:
    loss = mean_square(module, batch)
    numpy.sqrt(loss.detach().numpy())
    return loss


def choose(module: nn.Module, batch: Tensor) -> Tensor:
    return mean_square(module, batch[(batch[:, 0] > 0).nonzero().squeeze(1)])


def no_loss(module: nn.Module, batch: Tensor) -> None:
    mean_square(module, batch)


def own_error(module: nn.Module, batch: Tensor) -> Tensor:
    raise KeyError("no such thing")


@pytest.mark.parametrize("step", [read_item, branch, to_numpy, choose, no_loss, own_error])
def test_what_needs_numbers_is_an_error_that_leaves_no_trace(step, caplog):
    module = Busy()
    optimizer = trainable(module)
    layers = dict(select_layers(module).layers)
    with unchanged(module, optimizer):
        preflight = Preflight(module, WIDE, layers, step, optimizers=[optimizer], operators=OPERATORS)
        with pytest.raises(PreflightError, match=r"\w+: .{8,}|none in a rehearsal$") as caught:
            preflight.run(dict.fromkeys(layers, Treatment.RECOMPUTE))
        assert len(str(caught.value).splitlines()) == 1
    assert caplog.text == ""


def test_an_operator_that_has_no_rehearsal_is_not_shown_as_an_error(caplog):
    kind = KINDS["mixtral"]
    module = kind.module()
    with pytest.raises(PreflightError, match="RuntimeError"):
        Preflight(module, kind.batches(1)[0], {}, step_of(module)).run({})
    assert caplog.text == ""


def test_lazy_weights_are_refused_by_name():
    with pytest.raises(PreflightError, match=r"weight '0.weight' has no shape"):
        Preflight(nn.Sequential(nn.LazyLinear(4)), WIDE, {}, mean_square)


# ---------------------------------------------------------------- models that are not there


def peak_kib() -> int:
    """The most that was resident in this process since the last reset."""
    with open("/proc/self/status") as status:
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read())
    assert found is not None
    return int(found[1])


def reset_peak_kib() -> int:
    """Forget what earlier tests held; what is resident now."""
    with open("/proc/self/clear_refs", "w") as references:
        references.write("5")
    return peak_kib()


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_weights_on_meta_take_no_memory():
    with torch.device("meta"):
        module = nn.Sequential(*[Mlp(8192, 32768) for _ in range(4)])
        batch = torch.empty(4096, 8192)
    layers = dict(select_layers(module).layers)
    before = reset_peak_kib()
    preflight = Preflight(module, batch, layers, mean_square, optimizers=lambda m: [torch.optim.AdamW(m.parameters())])
    kept, recomputed = (preflight.run(dict.fromkeys(layers, each)).peak for each in IN_PLACE[::2])
    weights = sum(parameter.nbytes for parameter in module.parameters())
    assert kept > recomputed > 4 * weights > 32 * 2**30
    assert peak_kib() - before < 512 * 2**10
    assert all(parameter.is_meta for parameter in module.parameters())


def test_meta_and_real_weights_take_the_same():
    with torch.device("meta"):
        absent = blocks(width=32)
    here = blocks(width=32)
    peaks = [
        Preflight(module, batch, dict(select_layers(module).layers), mean_square).run({}).peak
        for module, batch in ((absent, WIDE.to("meta")), (here, WIDE))
    ]
    assert peaks[0] == peaks[1]


def test_layers_that_somebody_else_recomputes_learn_nothing_from_a_rehearsal():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(3)))
    others = [attach(model[i], str(i)) for i in (0, 1)]
    preflight = Preflight(model, torch.zeros(16, 8), {"2": model[2]}, lambda module, x: module(x).square().mean())
    recomputed = preflight.run({}).calls[0].before
    assert [other.inventory.learned.calls for other in others] == [0, 0]
    assert [attached(model[i]) for i in (0, 1)] == others
    for other in others:
        other.recomputes = False
    assert preflight.run({}).calls[0].before > recomputed  # they are treated as they are now


def test_the_batch_is_not_kept():
    batch = torch.zeros(64, 8)
    preflight = Preflight(nn.Linear(8, 8), {"x": batch}, {}, lambda module, batch: module(batch["x"]).mean())
    gone = weakref.ref(batch)
    del batch
    assert gone() is None
    assert preflight.run({}).peak > 64 * 8 * 4
