"""What compiled code saves when its layers are recomputed, and layers that cannot be compiled as they are."""

import pytest
import torch
from torch import nn

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import attach
from tests.support import Block, Training, assert_equal, batches, fit


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def saved_by(model, x):
    """Bytes of the storages that autograd saves, parameters excluded."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage, storage.nbytes())  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(size for _, size in kept.values())


def test_compiled_layers_save_less_in_one_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Block(dropout=0.0) for _ in range(4)])
    x = torch.randn(64, 8)
    plain = saved_by(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    torch._dynamo.reset()
    for i in range(1, 5):
        attach(model[i], str(i))
    recomputed = saved_by(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    assert recomputed < plain / 2
    assert torch._dynamo.explain(model)(x).graph_break_count == 0


def test_a_model_that_was_compiled_and_run_before_is_recomputed_all_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Block(dropout=0.0) for _ in range(4)])
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(64, 8)
    plain = saved_by(compiled, x)
    for i in range(1, 5):
        attach(model[i], str(i))
    assert saved_by(compiled, x) < plain / 2


def test_a_layer_that_compiles_a_function_inside_is_exact():
    class Inside(Block):
        def __init__(self):
            super().__init__()
            self.function = torch.compile(lambda x, w: torch.tanh(x @ w), backend="aot_eager")

        def forward(self, x):
            return x + self.dropout(self.function(x, self.linear.weight))

    def make():
        return Training(nn.Sequential(nn.Linear(8, 8), Inside(), Inside()))

    data = batches(3, size=5)
    plain = fit(make, data)
    torch._dynamo.reset()
    assert_equal(fit(make, data, [ActivationCheckpointing()]), plain)


class Counts(Block):
    """Changes its own state, which a compiled graph cannot replay."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        return super().forward(x) * len(self.seen)


class CountsOutside(Counts):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def test_a_layer_that_cannot_be_exact_in_a_graph_is_an_error_with_its_line_and_the_cure():
    def make():
        return Training(torch.compile(nn.Sequential(nn.Linear(8, 8), Counts(), Counts()), backend="aot_eager"))

    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"self\.seen\.append"),
        pytest.warns(UserWarning, match=r"put `@torch\.compiler\.disable` on its `forward`"),
    ):
        fit(make, callbacks=[ActivationCheckpointing()])


def test_a_layer_that_is_kept_out_of_the_graph_is_exact():
    def make():
        model = nn.Sequential(nn.Linear(8, 8), CountsOutside(), CountsOutside())
        return Training(torch.compile(model, backend="aot_eager"))

    plain = fit(make)
    torch._dynamo.reset()
    assert_equal(fit(make, callbacks=[ActivationCheckpointing()]), plain)
