"""Whatever is compiled, and whenever: bit-equal, as many graphs, no graph breaks, less saved."""

import pytest
import torch

from lightning_ckpt import ActivationCheckpointing
from tests.compile.support import assert_exact, blocks, compile_each, rows, saved_bytes
from tests.support import Training, trainer


def module(backend):
    return torch.compile(Training(blocks()), backend=backend)


def submodule(backend):
    return Training(torch.compile(blocks(), backend=backend, fullgraph=True))


def submodule_in_place(backend):
    model = blocks()
    model.compile(backend=backend, fullgraph=True)
    return Training(model)


def layers_in_place(backend):
    model = blocks()
    compile_each(model[1:], backend, fullgraph=True)
    return Training(model)


def layers_wrapped(backend):
    model = blocks()
    for i in range(1, len(model)):
        model[i] = torch.compile(model[i], backend=backend, fullgraph=True)
    return Training(model)


class Late(Training):
    """Compiles its layers in one of Lightning's hooks."""

    def __init__(self, backend, hook, wrap):
        super().__init__(blocks())
        self.backend, self.hook, self.wrap = backend, hook, wrap

    def _compile(self, hook):
        if hook == self.hook:
            for i in range(1, len(self.model)):
                if self.wrap:
                    self.model[i] = torch.compile(self.model[i], backend=self.backend)
                else:
                    self.model[i].compile(backend=self.backend)

    def configure_model(self):
        self._compile("configure_model")

    def setup(self, stage):
        self._compile("setup")

    def on_fit_start(self):
        self._compile("on_fit_start")


def late(hook, wrap):
    return lambda backend: Late(backend, hook, wrap)


WAYS = {
    "module": module,
    "submodule": submodule,
    "submodule in place": submodule_in_place,
    "layers in place": layers_in_place,
    "layers wrapped": layers_wrapped,
    "layers in setup": late("setup", True),
    "layers in configure_model": late("configure_model", False),
    "layers in place, attached before": late("on_fit_start", False),
    "layers wrapped, attached before": late("on_fit_start", True),
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_runs_equal_the_compiled_plain_run(way):
    runs = assert_exact(WAYS[way])
    for run in runs.values():
        assert run.breaks == 0
        assert run.graphs == [1, 1, 1]  # equal layers share one graph
    plain, matmul = runs["plain"], runs["matmul"]
    assert plain.products == matmul.products


@pytest.mark.parametrize("way", ["submodule", "layers in place"])
def test_a_model_that_ran_compiled_before_is_compiled_once_more(way):
    def make(backend):
        training = WAYS[way](backend)
        training.model(torch.ones(256, 16)).sum().backward()
        training.zero_grad()
        return training

    assert_exact(make, more_graphs=1)


def test_nothing_is_left_in_compiled_code_after_fit():
    model = blocks(dropout=0.0)
    compiled = torch.compile(model, backend="aot_eager")
    x = next(iter(rows()))
    with saved_bytes(model) as plain:
        compiled(x)
    trainer([ActivationCheckpointing()]).fit(Training(compiled), rows())
    with saved_bytes(model) as after:
        compiled(x)
    assert after == plain


def test_more_layers_than_the_compiler_recompiles_share_a_graph():
    def make(backend):
        model = blocks(torch._dynamo.config.recompile_limit + 2)
        compile_each(model[1:], backend, fullgraph=True)
        return Training(model)

    runs = assert_exact(make, rows(1))
    assert runs["matmul"].graphs == [1]


def test_every_second_layer_adds_one_graph():
    assert_exact(layers_in_place, more_graphs=1, callback={"every_n_layers": 2})
