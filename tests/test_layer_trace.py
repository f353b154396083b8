"""Which layer keeps how much: against bytes worked out by hand, at no cost to the training that it watches."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from lightning_ckpt.measure.layers import LayerTrace
from lightning_ckpt.recompute import attach
from lightning_ckpt.selection.detect import find_layers
from lightning_ckpt.selection.modules import outermost
from tests.support import Training, assert_equal, batches, blocks, fit

UNIT = 4 * 1024  # bytes of one activation of `source`


class Exps(nn.Module):
    """Each `exp` saves its output, and nothing else is saved."""

    def __init__(self, count=1):
        super().__init__()
        self.count = count

    def forward(self, x):
        for _ in range(self.count):
            x = x.exp()
        return x


def source():
    return torch.zeros(1024, requires_grad=True).view(-1)  # a view saves nothing


def traced(model, names=None):
    """A model with a trace of its children, or of those with these names."""
    layers = {name: layer for name, layer in model.named_children() if names is None or name in names}
    return LayerTrace(model, layers)


def units(trace, *roots):
    return {name: size / UNIT for name, size in trace.saved_bytes(roots).items()}


# ---------------------------------------------------------------- bytes by layer


def test_each_layer_keeps_what_its_operations_save_the_most_first():
    model = nn.Sequential(Exps(1), Exps(3), Exps(2))
    trace = traced(model)
    output = model(source())
    saved = units(trace, output)
    assert saved == {"1": 3, "2": 2, "0": 1}
    assert list(saved) == ["1", "2", "0"]


def test_linear_layers_keep_their_input_and_not_their_weight():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4))
    trace = traced(model)
    output = model(torch.ones(64, 8))
    assert trace.saved_bytes([output]) == {"2": 64 * 32 * 4, "1": 64 * 16 * 4, "0": 64 * 8 * 4}


def test_what_is_outside_of_the_layers_has_no_name():
    model = nn.Sequential(Exps(), Exps(), Exps())
    trace = traced(model, ["1"])
    output = model(source().exp()).sin()  # sin keeps its input, the third output, again
    assert units(trace, output) == {"": 3, "1": 1}


def test_a_layer_that_is_called_twice_keeps_both_calls():
    model = nn.Sequential(Exps(2), Exps(1))
    trace = traced(model)
    x = model[0](source())
    output = model[0](model[1](x))
    assert units(trace, output) == {"0": 4, "1": 1}


def test_a_shared_layer_goes_by_one_name():
    block = Exps(2)
    model = nn.Sequential(block, Exps(1), block)
    trace = traced(model)
    assert units(trace, model(source())) == {"0": 4, "1": 1}


def test_a_storage_that_two_layers_keep_counts_once_for_the_first():
    class Sin(nn.Module):
        def forward(self, x):
            return x.sin()  # keeps its input, which is what exp has kept as its output

    model = nn.Sequential(Exps(), Sin(), Sin())
    trace = traced(model)
    assert units(trace, model(source())) == {"0": 1, "2": 1}


def test_buffers_do_not_count():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1024))

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(Scaled(), Exps())
    trace = traced(model)
    assert units(trace, model(source())) == {"1": 1}


def test_in_the_midst_of_backward_what_has_been_used_is_gone():
    model = nn.Sequential(Exps(1), Exps(2), Exps(3))
    trace = traced(model)
    seen = []
    x = model[1](model[0](source()))
    x.register_hook(lambda gradient: seen.append(units(trace, output)))
    output = model[2](x)
    output.sum().backward()
    assert seen == [{"1": 2, "0": 1}]


def test_in_the_midst_of_forward_the_tensors_at_hand_are_the_roots():
    model = nn.Sequential(Exps(1), Exps(2), Exps(3))
    trace = traced(model)
    one, other = model[0](source()), model[1](source())
    assert units(trace, one, other) == {"1": 2, "0": 1}


def test_nested_layers_of_hugging_face_are_told_by_the_outermost():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.GPTNeoXForCausalLM(config).train()
    trace = LayerTrace(model, outermost(find_layers(model).items()))
    ids = torch.randint(0, 50, (4, 8))
    loss = model(input_ids=ids, labels=ids).loss
    saved = trace.saved_bytes([loss])
    layers = {name: size for name, size in saved.items() if name}
    assert set(layers) == {f"gpt_neox.layers.{i}" for i in range(3)}
    first, second, third = (layers[f"gpt_neox.layers.{i}"] for i in range(3))
    assert second == third
    assert first == second + 2 * 8 * 2 * 4  # cosine and sine of 8 positions in 2 dimensions, which all of them share
    assert sum(saved.values()) == sum(_plainly_saved(model, ids).values())


def _plainly_saved(model, ids):
    """Bytes of every storage that autograd saves, by a hook, parameters and buffers excluded."""
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return {pointer: storage.nbytes() for pointer, storage in kept.items()}


def test_recomputed_layers_keep_their_input_only():
    model = nn.Sequential(Exps(3), Exps(3), Exps(3), Exps(3))
    trace = traced(model)
    for name in ("1", "2"):
        attach(model[int(name)], name)
    # Layer 1 keeps its input, which layer 0 has kept already as its last output; layer 2 keeps that of layer 1.
    assert units(trace, model(source())) == {"0": 3, "3": 3, "2": 1}


def test_what_a_replay_has_regained_counts_for_its_layer():
    model = nn.Sequential(Exps(1), Exps(4))
    trace = traced(model)
    attach(model[1], "1")
    seen = []
    output = model(source())
    node = output.grad_fn.next_functions[0][0]  # the third of four: the replay has run, the fourth has been used
    node.register_prehook(lambda gradients: seen.append(units(trace, output)))
    output.sum().backward()
    assert seen == [{"1": 3, "0": 1}]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_others_checkpoint_keep_their_input_only(use_reentrant):
    model = nn.Sequential(Exps(3), Exps(3), Exps(3), nn.Tanh())
    trace = traced(model)
    x = model[0](source())
    for layer in model[1:3]:
        x = checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False)
    # Layer 1 keeps the last output of layer 0, which counts there already. A layer that runs without gradients at first
    # is not seen.
    assert units(trace, model[3](x)) == {"0": 3, "" if use_reentrant else "2": 1, "3": 1}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_run_again_in_backward_do_not_confuse_the_trace(use_reentrant):
    """Backward of an accelerator is a thread of its own, where autograd's numbers begin anew."""
    model = nn.Sequential(*[Exps(count) for count in (1, 2, 3, 4, 5, 6)])
    trace = traced(model)
    x = source()
    for layer in model:
        x = layer(checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False))
    # What others checkpoint keeps its input: the last output of the layer before, but for the first one.
    first = {"": 1, "0": 1} if use_reentrant else {"0": 2}
    want = {**first, "1": 2, "2": 3, "3": 4, "4": 5, "5": 6}
    assert units(trace, x) == want
    thread = threading.Thread(target=lambda: x.sum().backward(retain_graph=True))
    thread.start()
    thread.join()
    assert units(trace, x) == want


# ---------------------------------------------------------------- copies


def test_a_copy_made_while_traced_computes_and_can_be_saved():
    model = blocks()
    trace = traced(model)
    model.eval()
    x = torch.randn(4, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
    trace.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_copy_that_outlives_the_trace_is_a_free_module():
    """Such as the best model so far, or a teacher, copied in the midst of training and trained on its own later."""
    model = blocks()
    trace = traced(model)
    other = copy.deepcopy(model)
    trace.remove()
    for _ in range(3):
        other(torch.randn(4, 8))
    assert trace._starts == []  # else it would grow for ever
    original = weakref.ref(model)
    del model, trace
    gc.collect()
    assert original() is None


# ---------------------------------------------------------------- at no cost


def test_the_trace_keeps_nothing_alive():
    alive = {}

    class Keeps(nn.Module):
        def forward(self, x):
            dropped, kept = x.exp(), x.exp()
            alive.update({name: weakref.ref(t.untyped_storage()) for name, t in (("dropped", dropped), ("kept", kept))})
            return kept * kept

    model = nn.Sequential(nn.Linear(8, 8), Keeps(), nn.Tanh())
    trace = traced(model)
    gc.disable()  # at once means at once
    try:
        output = model(torch.ones(4, 8))
        assert alive["dropped"]() is None
        assert alive["kept"]() is not None
        assert trace.saved_bytes([output])["1"] == 4 * 8 * 4
        del output
        assert alive["kept"]() is None
    finally:
        gc.enable()


def test_clear_forgets_and_no_grad_notes_nothing():
    model = nn.Sequential(Exps(), Exps())
    trace = traced(model)
    with torch.no_grad():
        model(source())
    assert trace._starts == []
    model(source())
    assert len(trace._starts) == 4
    trace.clear()
    assert trace._starts == []


def _whole(model):
    return torch.compile(model, backend="eager")


def _whole_in_place(model):
    model.compile(backend="eager")
    return model


def _layers(model):
    for i in range(1, len(model)):
        model[i] = torch.compile(model[i], backend="eager")
    return model


def _layers_in_place(model):
    for layer in model[1:]:
        layer.compile(backend="eager")
    return model


def _forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize("trace_before_first_call", [True, False])
@pytest.mark.parametrize("compiled", [_whole, _whole_in_place, _layers, _layers_in_place, _forward])
def test_compiled_code_has_the_same_graphs_and_is_not_compiled_again(compiled, trace_before_first_call):
    def train(with_trace):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        inner = blocks(2)
        layers = {str(i): inner[i] for i in range(1, len(inner))}
        model = compiled(inner)
        results, traces = [], []
        for step in range(4):
            if with_trace and not traces and (trace_before_first_call or step == 2):
                traces.append(LayerTrace(model, layers))
            torch.manual_seed(step)
            output = model(torch.randn(4, 8))
            output.square().sum().backward()
            results += [output.detach(), *[parameter.grad.clone() for parameter in inner.parameters()]]
        counted = {name: dict(counters[name]) for name in ("stats", "graph_break")}
        for trace in traces:
            trace.remove()
        return results, counted

    results, counted = train(True)
    plain, wanted = train(False)
    assert counted == wanted
    assert counted["stats"]["unique_graphs"] > 0
    assert all(torch.equal(got, want) for got, want in zip(results, plain, strict=True))


@pytest.mark.parametrize("compiled", [_layers, _layers_in_place])
def test_layers_that_are_compiled_one_by_one_are_told_apart(compiled):
    torch._dynamo.reset()
    inner = blocks(2)
    layers = {str(i): inner[i] for i in range(1, len(inner))}
    model = compiled(inner)
    trace = LayerTrace(model, layers)
    saved = trace.saved_bytes([model(torch.randn(4, 8)).sum()])
    assert {"1", "2"} <= set(saved)
    assert len({saved[name] for name in layers}) == 1
    trace.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_training_with_the_trace_is_that_of_the_plain_run():
    class Traced(Training):
        def on_train_start(self):
            self.__dict__["trace"] = traced(self.model)

    got = fit(Traced, batches(4))
    assert_equal(got, fit(Training, batches(4)))
