"""Floating-point operations: by formula, against PyTorch's own counter, and at no change to the training."""

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_ckpt import ActivationCheckpointing, StepMonitor
from tests.support import Training, assert_equal, batches, blocks, fit, trainer

MODEL, HARDWARE = "flops/model_TFLOP_per_s", "flops/hardware_TFLOP_per_s"


def run(module, tmp_path, data=None, recompute=None, **settings):
    """The summary of a monitored fit, and the rows in which its steps are, each with its operations."""
    monitor = StepMonitor(flops=True, table=False)
    logger = CSVLogger(tmp_path, name="run")
    callbacks = [monitor] if recompute is None else [recompute, monitor]
    torch.manual_seed(0)
    trainer(callbacks, logger=logger, **settings).fit(module, batches() if data is None else data)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return monitor.summary(), [row for row in table if "time/step_ms" in row]


def flops_of(rows, name=MODEL):
    """Operations of each step, from its rate and its time."""
    return [pytest.approx(row[name] * 1e12 * row["time/step_ms"] / 1e3, rel=1e-9) for row in rows]


def linear(m, n, k):
    """Operations of a product of m x k by k x n: a multiplication and an addition each."""
    return 2 * m * n * k


class Dense(nn.Module):
    """A layer with one matrix, whose activation is what is left to regain."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(self.linear(x))


class Twice(nn.Module):
    """Two matrices: in the recompute, the second product is only run if something behind it is saved."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


# ---------------------------------------------------------------- by formula


def test_linear_layers_forward_and_twice_that_in_backward_but_for_the_input_gradient_of_the_first(tmp_path):
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 5))
    summary, rows = run(Training(model), tmp_path, batches(size=16))
    first, second = linear(16, 24, 8), linear(16, 5, 24)
    assert summary.model_flops == 3 * first - first + 3 * second
    assert summary.recompute_flops == 0
    assert flops_of(rows) == flops_of(rows, HARDWARE) == [summary.model_flops] * 3


def test_convolutions(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2, padding=1))
    images = torch.utils.data.DataLoader(torch.randn(8, 3, 10, 10), batch_size=4)
    summary, _ = run(Training(model), tmp_path, images)
    first = 2 * 4 * (8 * 8) * 6 * (3 * 3 * 3)  # 4 images, 8 x 8 positions, 6 channels out of 3 x 3 x 3 numbers
    second = 2 * 4 * (4 * 4) * 4 * (6 * 3 * 3)
    assert summary.model_flops == 3 * first - first + 3 * second


def gpt_neox(**settings):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
        **settings,
    )
    torch.manual_seed(0)
    model = transformers.GPTNeoXForCausalLM(config)
    return Training(model, loss=lambda model, ids: model(input_ids=ids, labels=ids).loss)


def ids(count=2, size=3, length=8):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 40, (count * size, length), generator=generator)
    return torch.utils.data.DataLoader(rows, batch_size=size)


TOKENS, WIDTH, LENGTH = 3 * 8, 16, 8
NEOX_LAYER = linear(TOKENS, 3 * WIDTH, WIDTH) + linear(TOKENS, WIDTH, WIDTH) + 2 * linear(TOKENS, 32, WIDTH)
SCORES = 3 * 2 * linear(LENGTH, LENGTH, 8)  # 3 rows, 2 heads of width 8: queries by keys, and as much for the values
HEAD = linear(TOKENS, 40, WIDTH)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_counted_whichever_kernel_does_it(tmp_path, attention):
    summary, _ = run(gpt_neox(attn_implementation=attention), tmp_path, ids())
    # The fused kernel computes the scores once more in its own backward.
    scores_backward = (5 if attention == "sdpa" else 4) * SCORES
    assert summary.model_flops == 3 * (2 * NEOX_LAYER + HEAD) + 2 * (2 * SCORES + scores_backward)


def test_they_are_those_of_pytorchs_own_counter(tmp_path):
    for i, module in enumerate((Training(blocks()), gpt_neox(attn_implementation="eager"))):
        data = ids() if i else batches()
        summary, _ = run(module, tmp_path / str(i), data)
        counter = FlopCounterMode(display=False)
        with counter:
            module.loss(module.model, next(iter(data))).backward()
        assert summary.model_flops == counter.get_total_flops() > 0


# ---------------------------------------------------------------- recompute


def test_recompute_is_counted_apart(tmp_path):
    make = lambda: Training(nn.Sequential(nn.Linear(8, 8), *[Dense(8) for _ in range(4)]))  # noqa: E731
    plain, _ = run(make(), tmp_path / "plain")
    summary, rows = run(make(), tmp_path / "recomputed", recompute=ActivationCheckpointing())
    one = linear(4, 8, 8)
    assert summary.model_flops == plain.model_flops == one * (5 * 3 - 1)
    assert summary.recompute_flops == 4 * one
    assert flops_of(rows) == [summary.model_flops] * 3
    assert flops_of(rows, HARDWARE) == [summary.model_flops + summary.recompute_flops] * 3


def test_recompute_stops_early_and_so_does_its_count(tmp_path):
    module = Training(nn.Sequential(nn.Linear(8, 8), *[Twice(8) for _ in range(2)]))
    summary, _ = run(module, tmp_path, recompute=ActivationCheckpointing())
    up = down = linear(4, 32, 8)
    # The last thing that is saved is the input of `down`, so that the product itself need not be run again.
    assert summary.recompute_flops == 2 * up
    assert summary.model_flops == 3 * 2 * (up + down) + 2 * linear(4, 8, 8)


def test_every_second_layer_recomputes_half(tmp_path):
    module = Training(nn.Sequential(nn.Linear(8, 8), *[Dense(8) for _ in range(4)]))
    summary, _ = run(module, tmp_path, recompute=ActivationCheckpointing(every_n_layers=2))
    assert summary.recompute_flops == 2 * linear(4, 8, 8)


def test_attention_in_recomputed_layers(tmp_path):
    module = gpt_neox(attn_implementation="sdpa")
    plain, _ = run(gpt_neox(attn_implementation="sdpa"), tmp_path / "plain", ids())
    summary, _ = run(module, tmp_path / "recomputed", ids(), recompute=ActivationCheckpointing())
    assert summary.model_flops == plain.model_flops
    skipped = linear(TOKENS, 32, WIDTH)  # the last product of the block: nothing behind it is saved
    assert summary.recompute_flops == 2 * (NEOX_LAYER + 2 * SCORES - skipped)


# ---------------------------------------------------------------- steps and kinds of batches


def test_accumulation_sums_the_micro_batches(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    summary, rows = run(Training(model), tmp_path, batches(7), accumulate_grad_batches=3)
    one = 5 * linear(4, 8, 8)
    assert flops_of(rows) == [3 * one, 3 * one, one]
    assert summary.model_flops == 3 * one


def test_batches_of_other_shapes_have_their_own_count_long_after_the_first_ones(tmp_path):
    sizes = [4, 4, 4, 4, 4, 2, 6, 4, 2, 6, 6, 2, 4]
    data = torch.utils.data.DataLoader([torch.randn(size, 8) for size in sizes], batch_size=None)
    _, rows = run(Training(nn.Linear(8, 8)), tmp_path, data)
    assert flops_of(rows) == [2 * linear(size, 8, 8) for size in sizes]


def test_measuring_one_step_in_two_counts_those(tmp_path):
    monitor = StepMonitor(every_n_steps=2, flops=True, table=False)
    logger = CSVLogger(tmp_path)
    trainer([monitor], logger=logger).fit(Training(nn.Linear(8, 8)), batches(6))
    assert monitor.summary().steps == 3
    assert monitor.summary().model_flops == 2 * linear(4, 8, 8)


def test_a_closure_that_runs_several_times_is_counted_as_often(tmp_path):
    module = Training(nn.Linear(8, 8), optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))
    calls = []
    inner = module.loss
    module.loss = lambda model, batch: calls.append(1) or inner(model, batch)
    _, rows = run(module, tmp_path, batches(1))
    assert len(calls) > 1
    assert flops_of(rows) == [len(calls) * 2 * linear(4, 8, 8)]


def test_validation_is_not_counted(tmp_path):
    class Validates(Training):
        def validation_step(self, batch, batch_idx):
            self.model(batch)

        def val_dataloader(self):
            return batches()

    summary, rows = run(Validates(nn.Linear(8, 8)), tmp_path, val_check_interval=1)
    assert flops_of(rows) == [2 * linear(4, 8, 8)] * 3
    assert summary.model_flops == 2 * linear(4, 8, 8)


def test_without_the_option_nothing_is_counted(tmp_path):
    monitor = StepMonitor(table=False)
    trainer([monitor], logger=CSVLogger(tmp_path)).fit(Training(), batches())
    assert monitor.summary().model_flops is monitor.summary().recompute_flops is None


def test_the_table_says_them(tmp_path):
    summary, _ = run(Training(blocks()), tmp_path, recompute=ActivationCheckpointing())
    [text] = [text for name, text in summary.rows() if name == "operations of a step"]
    assert text == f"{summary.model_flops / 1e12:.4g} TFLOP and {summary.recompute_flops / 1e12:.4g} in recompute"


# ---------------------------------------------------------------- compiled code


def _kernels(graph, inputs):
    """Compiles like inductor with its matrix templates: products run in code that is no operator."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiled(module, example_inputs):
        def call(*args):
            with torch.utils._python_dispatch._disable_current_modes():
                return module(*args)

        return make_boxed_func(call)

    return aot_autograd(fw_compiler=compiled)(graph, inputs)


@pytest.mark.parametrize("backend", ["aot_eager", _kernels])
def test_what_compiled_code_computes_is_missing_rather_than_wrong(tmp_path, backend):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), *[torch.compile(Dense(8), backend=backend) for _ in range(2)])
    summary, rows = run(Training(model), tmp_path)
    assert len(rows) == 3
    right = linear(4, 8, 8) * (3 * 3 - 1)
    assert summary.model_flops in (None, right)
    assert flops_of([row for row in rows if MODEL in row]) == [right for row in rows if MODEL in row]


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("recompute", [False, True])
def test_training_is_that_of_the_plain_run(tmp_path, recompute):
    def callbacks():
        return [*([ActivationCheckpointing()] if recompute else []), StepMonitor(flops=True, table=False)]

    for i, (make, data) in enumerate(((Training, batches(6)), (lambda: gpt_neox(attn_implementation="sdpa"), ids(6)))):
        plain = fit(make, data)
        got = fit(make, data, callbacks(), logger=CSVLogger(tmp_path, name=str(i)))
        assert_equal(got, plain)


def product(model, batch):
    return model(batch).tanh().prod(1).sum()


def product_in_an_inner_gradient(model, batch):
    """As a gradient penalty, or a physical law as the loss."""
    x = batch.requires_grad_()
    [gradient] = torch.autograd.grad(model(x).tanh().prod(1).sum(), x, create_graph=True)
    return gradient.square().sum()


def product_in_a_checkpointed_part(model, batch):
    def part(x):
        return x.tanh().prod(1)

    return checkpoint(part, model(batch), use_reentrant=True).sum()


@pytest.mark.parametrize("flops", [False, True])
@pytest.mark.parametrize("loss", [product, product_in_an_inner_gradient, product_in_a_checkpointed_part])
def test_training_with_a_product_over_a_dimension_is_that_of_the_plain_run(tmp_path, loss, flops):
    """Some of PyTorch's derivatives are computed in another way, to other bits, while somebody watches operators."""

    def make():
        return Training(blocks(), loss)

    data = batches(3, size=64)  # enough rows for the last bit of one of them
    plain = fit(make, data)
    monitor = StepMonitor(flops=flops, table=False)
    assert_equal(fit(make, data, [monitor], logger=CSVLogger(tmp_path)), plain)
