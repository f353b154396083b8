"""Models and features of torch that work on the device: race-free, never waiting, and with the CPU's results."""

import contextlib
import copy

import pytest
import torch
from schedules import SCHEDULES
from small_engine import GPT
from torch import nn
from torch.utils.checkpoint import checkpoint

some_schedules = pytest.mark.parametrize(("policy", "seed"), [SCHEDULES[i] for i in (0, 2, 5)])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model, inputs, device, loss, optimizer, context):
    """Losses of three steps, and the state of the model after them."""
    model = model.to(device)
    inputs = [x.to(device) for x in inputs]
    update = optimizer(model.parameters())
    torch.manual_seed(1)

    def closure():
        update.zero_grad()
        with context(device):
            value = loss(model, *inputs)
        value.backward()
        return value

    losses = [update.step(closure).detach() for _ in range(3)]
    return [x.detach().cpu() for x in (torch.stack(losses), *model.state_dict().values())]


def mean_square(model, *inputs):
    output = model(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    return output.float().square().mean()


def no_context(device):
    return contextlib.nullcontext()


def check(sim, model, *inputs, loss=mean_square, optimizer=sgd, context=no_context, tolerance=1e-4, sync=()):
    """Training on the device gives what training on the CPU gives, and no operator but those of `sync` waits."""
    expected = train(copy.deepcopy(model), inputs, "cpu", loss, optimizer, context)
    got = train(copy.deepcopy(model), inputs, "sim", loss, optimizer, context)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    assert {name for name in sim.counts() if name.startswith("sync:")} == {f"sync:aten::{name}" for name in sync}


# ---------------------------------------------------------------- language models


def llama(attention):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def neox(attention):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout=0.1,
        attn_implementation=attention,
    )
    return transformers.GPTNeoXForCausalLM(config)


@pytest.mark.parametrize("make", [llama, neox])
@pytest.mark.parametrize(("attention", "policy", "seed"), [("sdpa", "lazy", 0), ("eager", "random", 1)])
def test_hugging_face(sim, make, attention, policy, seed):
    sim.configure(policy, seed)
    check(
        sim,
        make(attention),
        torch.randint(0, 100, (2, 12)),
        loss=lambda model, rows: model(input_ids=rows, labels=rows).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


@some_schedules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(sim, dtype, policy, seed):
    sim.configure(policy, seed)
    check(
        sim,
        GPT(layers=1),
        torch.randint(0, 40, (2, 16)),
        loss=GPT.loss,
        context=lambda device: torch.autocast(device, dtype),
        tolerance=3e-2,
    )


# ---------------------------------------------------------------- layers


@some_schedules
def test_transformer_encoder_layer(sim, policy, seed):
    sim.configure(policy, seed)
    check(sim, nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), torch.randn(2, 6, 16))


@some_schedules
def test_convolutions(sim, policy, seed):
    sim.configure(policy, seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Dropout2d(0.2),
        nn.Upsample(scale_factor=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    check(sim, model, torch.randn(4, 3, 8, 8))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, affine=False),
        nn.InstanceNorm1d(6, affine=True),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.GroupNorm(3, 6),
        nn.PReLU(),
        nn.Softmax(-1),
        nn.LogSoftmax(1),
        nn.AvgPool1d(2),
        nn.LSTM(8, 5, num_layers=2, batch_first=True),
        nn.GRU(8, 5, bidirectional=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers(sim, layer, dtype):
    sim.configure("random", 3)
    model = nn.Sequential(nn.Linear(8, 8), layer).to(dtype)
    check(sim, model, torch.randn(4, 6, 8, dtype=dtype), tolerance=1e-4 if dtype == torch.float32 else 3e-2)


@some_schedules
def test_embedding_and_dropout(sim, policy, seed):
    sim.configure(policy, seed)
    model = nn.Sequential(nn.Embedding(100, 16, padding_idx=0), nn.Dropout(0.3), nn.Linear(16, 4))
    check(sim, model, torch.randint(0, 100, (2, 12)))


def test_statistics_of_batches_are_written(sim):
    """The schema of native_batch_norm does not say that it writes them; a copy that does not wait is a race."""
    layer = nn.BatchNorm1d(3).to("sim")
    host = torch.zeros(3, pin_memory=True)
    x = torch.randn(4, 3, device="sim")
    side = torch.Stream()
    side.wait_stream(torch.accelerator.current_stream())
    layer(x)
    with side:
        host.copy_(layer.running_mean, non_blocking=True)
    assert any("native_batch_norm" in race for race in sim.races())
    sim.clear_races()


# ---------------------------------------------------------------- precision


def test_autocast_chooses_types(sim):
    x = torch.randn(4, 4, device="sim")
    with torch.autocast("sim", torch.bfloat16):
        low = x @ x
        assert low.dtype == nn.functional.linear(x, x).dtype == torch.bfloat16
        assert nn.functional.conv1d(x[None], x[:, :, None]).dtype == torch.bfloat16
        assert nn.functional.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
        assert low.relu().dtype == torch.bfloat16
        assert low.softmax(-1).dtype == low.sum().dtype == torch.float32
        assert nn.functional.layer_norm(low, (4,)).dtype == low.exp().dtype == torch.float32
        assert torch.addcmul(low, low, x).dtype == torch.float32
        assert torch.addcmul(low, low, low).dtype == torch.bfloat16
        assert torch.cat([low, x]).dtype == torch.float32
        with torch.autocast("sim", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("overflow", [False, True])
def test_gradient_scaler(sim, overflow):
    weight = torch.ones(3, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1)
    scaler = torch.amp.GradScaler("sim", init_scale=4)
    loss = (weight * 2).sum() * (torch.inf if overflow else 1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([weight], 100)
    scaler.step(optimizer)
    scaler.update()
    assert weight.detach().cpu().tolist() == ([1, 1, 1] if overflow else [-1, -1, -1])
    assert scaler.get_scale() == (2 if overflow else 4)


# ---------------------------------------------------------------- optimizers and gradients


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor", "LBFGS"])
def test_optimizers(sim, name):
    check(
        sim,
        nn.Linear(4, 4),
        torch.randn(8, 4),
        optimizer=lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01),
    )


@pytest.mark.parametrize("setting", ["foreach", "fused"])
def test_implementations_of_adamw(sim, setting):
    check(
        sim,
        nn.Linear(4, 4),
        torch.randn(8, 4),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **{setting: True}),
    )


def test_clipping_and_accumulation(sim):
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    parts = torch.randn(4, 6, 4)
    results = []
    for device in ("cpu", "sim"):
        model = copy.deepcopy(reference).to(device)
        for part in parts.to(device):
            model(part).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        results.append([norm.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())])
    torch.testing.assert_close(*results)


@some_schedules
def test_retained_graphs(sim, policy, seed):
    sim.configure(policy, seed)
    x = torch.randn(5, device="sim", requires_grad=True)
    y = (x.sin() * x).sum()
    y.backward(retain_graph=True)
    first = x.grad.cpu()
    y.backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * first)


@some_schedules
def test_double_backward(sim, policy, seed):
    sim.configure(policy, seed)
    start = torch.randn(5, 5)
    results = []
    for device in ("cpu", "sim"):
        x = start.clone().to(device).requires_grad_()
        (gradient,) = torch.autograd.grad((x @ x.tanh()).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append(x.grad.cpu())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(sim, reentrant):
    """Recomputation draws the same random numbers."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()).to("sim")
    x = torch.randn(8, 4, device="sim", requires_grad=True)
    gradients = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x.grad = None
        call(x).sum().backward()
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("whole", [False, True])
def test_compile(sim, whole):
    torch.compiler.reset()
    reference = GPT().to("sim")
    compiled = copy.deepcopy(reference)
    rows = torch.randint(0, 40, (2, 16)).to("sim")
    reference.loss(rows).backward()
    for module in [compiled] if whole else compiled.blocks:
        module.compile(backend="aot_eager", fullgraph=True)
    compiled.loss(rows).backward()
    for expected, got in zip(reference.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), expected.grad.cpu())
