"""One recomputed layer on plain PyTorch: gradients, arguments, random streams, errors that name the layer."""

import collections
import dataclasses
import gc
import itertools
import queue
import random
import weakref

import pytest
import torch
from torch import nn

from lightning_ckpt.recompute import ReplayError, attach, attached, detach, is_replaying
from tests.support import Block, blocks


class Layer(nn.Module):
    """A layer that does what `function` says, with one weight."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def gradients(layer, call, recompute):
    """Gradients of the layer's weight and of the input, and the random stream afterwards."""
    torch.manual_seed(0)
    if recompute:
        attach(layer, "net.layer")
    try:
        x = torch.ones(3, 4, requires_grad=True)
        layer.weight.grad = None
        call(layer, x).sum().backward()
        return [layer.weight.grad, x.grad, torch.rand(2)]
    finally:
        detach(layer)


def assert_same_gradients(function, call=lambda layer, x: layer(x)):
    layer = Layer(function)
    plain = gradients(layer, call, recompute=False)
    for got, want in zip(gradients(layer, call, recompute=True), plain, strict=True):
        assert torch.equal(got, want)


Pair = collections.namedtuple("Pair", ["scale", "x"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    seen: int = 0


def use(self, x):
    return torch.tanh(x @ self.weight)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: [x], lambda a: a[0]),
        (lambda x: {"x": x}, lambda a: a["x"]),
        (lambda x: (1, (x,)), lambda a: a[1][0]),
        (lambda x: Pair(1, x), lambda a: a.x),
        (lambda x: Batch(x), lambda a: a.x),
        (lambda x: collections.OrderedDict(x=x), lambda a: a["x"]),
        (lambda x: collections.defaultdict(list, x=[x]), lambda a: a["x"][0]),
    ],
    ids=["list", "dict", "tuple", "namedtuple", "dataclass", "OrderedDict", "defaultdict"],
)
@pytest.mark.parametrize("keyword", [True, False])
def test_tensors_in_containers_get_their_gradients(wrap, unwrap, keyword):
    assert_same_gradients(
        lambda self, arg: use(self, unwrap(arg)),
        lambda layer, x: layer(arg=wrap(x * 2)) if keyword else layer(wrap(x * 2)),
    )


def test_a_container_that_the_layer_empties_is_replayed_as_it_was_passed():
    passed = []

    def call(layer, x):
        passed.append({"x": x * 2, "more": [1, 2]})
        return layer(passed[-1])

    def forward(self, arg):
        arg["more"].append(3)
        assert len(arg["more"]) == 3
        return use(self, arg.pop("x"))

    assert_same_gradients(forward, call)
    assert passed[0].keys() == passed[1].keys() == {"more"}
    assert passed[1]["more"] == [1, 2, 3]


def test_an_object_that_the_layer_changes_is_changed_once():
    batches = []

    def call(layer, x):
        batches.append(Batch(x * 2))
        return layer(batches[-1])

    def forward(self, batch):
        batch.seen += 1
        batch.x = batch.x + 1
        return use(self, batch.x) * batch.seen

    assert_same_gradients(forward, call)
    assert [batch.seen for batch in batches] == [1, 1]


@pytest.mark.parametrize("keyword", [True, False])
def test_a_tensor_changed_in_place_after_the_call_is_an_error_that_names_layer_and_argument(keyword):
    layer = Layer(lambda self, x, scale: use(self, x) * scale)
    attach(layer, "net.3")
    scale = torch.ones(4)
    output = layer(torch.ones(3, 4), scale=scale) if keyword else layer(torch.ones(3, 4), scale)
    scale.add_(1)
    with pytest.raises(ReplayError, match=r"'net\.3' got argument `(scale|1)` of shape \(4,\).*inplace.*clone"):
        output.sum().backward()


# ---------------------------------------------------------------- random streams, autocast, modes


def test_dropout_draws_the_same_mask_and_the_stream_goes_on_as_without():
    assert_same_gradients(lambda self, x: use(self, nn.functional.dropout(x, 0.5)))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_as_it_was(inside):
    def call(layer, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            return layer(x)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) if inside else torch.autograd.set_grad_enabled(True):
            return use(self, use(self, x)).float()

    assert_same_gradients(forward, call)


def test_nothing_is_recomputed_without_gradients():
    calls = itertools.count()
    layer = Layer(lambda self, x: use(self, x) * next(calls))
    attach(layer, "layer")
    with torch.no_grad():
        layer(torch.ones(3, 4))
    with torch.inference_mode():
        layer(torch.ones(3, 4))
    assert next(calls) == 2
    assert not attached(layer).called


def test_is_replaying_tells_the_second_run():
    seen = queue.SimpleQueue()  # nothing that a replay could put back
    layer = Layer(lambda self, x: seen.put(is_replaying()) or use(self, x))
    attach(layer, "layer")
    layer(torch.ones(3, 4)).sum().backward()
    assert [seen.get(), seen.get()] == [False, True]
    assert seen.empty()
    assert not is_replaying()


# ---------------------------------------------------------------- autograd's own rules


def test_backward_twice_with_retain_graph():
    def call(layer, x):
        output = layer(x)
        output.square().sum().backward(retain_graph=True)
        return output

    assert_same_gradients(lambda self, x: nn.functional.dropout(use(self, x), 0.3), call)


def test_gradients_of_gradients():
    def call(layer, x):
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return gradient.square() + layer(x)

    assert_same_gradients(use, call)


def test_a_layer_that_takes_gradients_inside_its_forward():
    def forward(self, x):
        energy = use(self, x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force

    assert_same_gradients(forward)


def test_a_function_that_reads_its_saved_tensors_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            _, first = ctx.saved_tensors
            _, second = ctx.saved_tensors
            return gradient * (first + second) / 2

    assert_same_gradients(lambda self, x: Twice.apply(use(self, x)))


def test_frozen_inputs_and_partly_frozen_layers_get_the_right_gradients():
    class Adapter(Block):
        def __init__(self):
            super().__init__(4, dropout=0.0)
            self.requires_grad_(False)
            self.extra = nn.Linear(4, 4)

        def forward(self, x):
            return super().forward(x) + self.extra(x)

    layer, x = Adapter(), torch.ones(3, 4)
    layer(x).sum().backward()
    plain = layer.extra.weight.grad.clone()
    layer.extra.weight.grad = None
    attach(layer, "layer")
    layer(x).sum().backward()
    assert torch.equal(layer.extra.weight.grad, plain)
    assert layer.linear.weight.grad is None


def test_a_tensor_changed_in_place_inside_the_layer_is_an_error_as_without():
    def forward(self, x):
        b = use(self, x)
        c = b * b
        b.add_(1)
        return (c + b).exp()

    layer = Layer(forward)
    with pytest.raises(RuntimeError, match="inplace operation"):
        layer(torch.ones(3, 4)).sum().backward()
    attach(layer, "net.0")
    with pytest.raises(ReplayError, match=r"'net\.0'.*inplace operation"):
        layer(torch.ones(3, 4)).sum().backward()


def test_a_layer_that_does_something_else_the_second_time_is_an_error_that_names_it():
    calls = itertools.count()  # an iterator cannot be put back

    def forward(self, x):
        return use(self, x if next(calls) == 0 else x[:1])

    layer = Layer(forward)
    attach(layer, "net.5")
    with pytest.raises(ReplayError, match=r"'net\.5' saved tensor .* in the replay"):
        layer(torch.ones(3, 4)).sum().backward()


def test_a_layer_that_does_less_the_second_time_is_an_error_that_names_it():
    calls = itertools.count()

    def forward(self, x):
        return use(self, x).exp() if next(calls) == 0 else use(self, x)

    layer = Layer(forward)
    attach(layer, "net.5")
    with pytest.raises(ReplayError, match=r"'net\.5' saved \d tensors in forward but \d in the replay"):
        layer(torch.ones(3, 4)).sum().backward()


def test_a_torch_func_transform_inside_is_an_error_that_names_the_layer():
    layer = Layer(lambda self, x: use(self, x) * torch.func.grad(lambda v: v.sin().sum())(x))
    attach(layer, "net.7")
    with pytest.raises(ReplayError, match=r"'net\.7' calls a `torch\.func` transform.*check_fn"):
        layer(torch.ones(3, 4))


def test_an_attribute_that_cannot_be_read_is_an_error_that_names_the_layer():
    class Unreadable(random.Random):
        def getstate(self):
            raise ValueError("not for you")

    layer = Layer(use)
    layer.generator = Unreadable()
    attach(layer, "net.9")
    with pytest.raises(ReplayError, match=r"'net\.9' could not be photographed: ValueError\(not for you\)"):
        layer(torch.ones(3, 4))


def test_an_exception_in_the_replay_leaves_the_random_stream_alone():
    calls = itertools.count()

    def forward(self, x):
        x = nn.functional.dropout(x, 0.5)
        if next(calls) == 1:
            raise ValueError("broken")
        return use(self, x)

    layer = Layer(forward)
    attach(layer, "layer")
    output = layer(torch.ones(3, 4))
    state = torch.get_rng_state()
    with pytest.raises(ReplayError, match=r"'layer' raised ValueError\(broken\) in the replay"):
        output.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert not is_replaying()


# ---------------------------------------------------------------- memory and lifetime


def test_saved_values_live_one_layer_at_a_time():
    alive = []

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.linear(x).exp()
            alive.append(weakref.ref(hidden.untyped_storage()))
            return hidden.sin()

    model = nn.Sequential(*[Wide() for _ in range(5)])
    for i, layer in enumerate(model):
        attach(layer, str(i))
    output = model(torch.ones(2, 4))
    assert sum(ref() is not None for ref in alive) == 0
    peak = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: peak.append(sum(ref() is not None for ref in alive)))
    output.sum().backward()
    assert max(peak) <= 1


def test_a_forward_without_backward_leaves_nothing_behind():
    model = blocks()
    for i in range(1, 5):
        attach(model[i], str(i))
    x = torch.ones(4, 8)
    for _ in range(4):
        model(x)
    gc.collect()
    before = sum(isinstance(item, torch.Tensor) for item in gc.get_objects())
    for _ in range(5):
        model(x)
    gc.collect()
    assert sum(isinstance(item, torch.Tensor) for item in gc.get_objects()) == before


def test_nothing_waits_for_the_garbage_collector():
    layer = Layer(lambda self, x, more: use(self, x) + more[0][0])
    attach(layer, "layer")
    kept = []
    gc.disable()
    try:
        for _ in range(4):
            x = torch.ones(3, 4, requires_grad=True) * 2
            kept.append(weakref.ref(x.untyped_storage()))
            layer(x, [(x + 1,)]).sum().backward()
            del x
        assert [ref() for ref in kept] == [None] * 4
    finally:
        gc.enable()


def test_a_forward_of_the_instance_is_kept_inside_and_comes_back():
    layer = Block()
    plain = layer.forward
    layer.forward = lambda x: plain(x) * 2
    mine = layer.forward
    torch.manual_seed(0)
    x = torch.ones(2, 8)
    want = layer(x)
    attach(layer, "layer")
    torch.manual_seed(0)
    assert torch.equal(layer(x), want)
    detach(layer)
    assert layer.forward is mine


def test_attaching_twice_is_an_error_and_detaching_twice_is_not():
    layer = Block()
    attach(layer, "blocks.0")
    with pytest.raises(ValueError, match=r"'other' is recomputed already, attached as 'blocks\.0'"):
        attach(layer, "other")
    detach(layer)
    detach(layer)
    assert "forward" not in layer.__dict__


def test_a_lazy_layer_takes_its_shapes_first():
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    attach(model, "model")
    model(torch.ones(2, 3))
    model(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad.shape == (4, 3)
