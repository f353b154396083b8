"""Operator policies: what may be written, what is kept and computed again, and what is said."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ckpt import ActivationCheckpointing, CheckpointCLI
from lightning_ckpt.measure.saved import saved_bytes
from lightning_ckpt.recompute import attach
from lightning_ckpt.recompute.policy import PolicyError, resolve_policy
from tests.support import Block, Training, assert_equal, batches, blocks, fit, trainer

aten = torch.ops.aten


# ---------------------------------------------------------------- what may be written


@pytest.mark.parametrize(
    "name", ["mm", "aten.mm", "aten::mm", "torch.ops.aten.mm", aten.mm, [aten.mm], ("mm",)], ids=str
)
def test_an_operator_may_be_written_in_many_ways(name):
    assert aten.mm.default in resolve_policy(name)


@pytest.mark.parametrize("name", ["aten.mm.default", "aten::mm.default", aten.mm.default, [aten.mm.default]], ids=str)
def test_an_overload_may_be_named(name):
    assert resolve_policy(name) == {aten.mm.default}


def test_a_list_may_hold_the_named_set_too():
    assert resolve_policy(["matmul", "aten.convolution"]) == resolve_policy("matmul") | {aten.convolution.default}


def test_matrix_products_and_attention_of_every_device_are_meant():
    meant = {str(operator) for operator in resolve_policy("matmul")}
    assert {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"} <= meant
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        assert f"aten._scaled_dot_product_{kernel}.default" in meant
    assert not any(".out" in name for name in meant)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("matmull", "'matmull', which is no operator .* Did you mean 'matmul'"),
        (["aten.mmm"], "'aten.mmm', which is no operator .* Did you mean 'aten.mm'"),
        ("nowhere.mm", "'nowhere.mm', which is no operator"),
        ("aten.linear", "'aten.linear' cannot be kept .*made of other operators .*'matmul' for matrix products"),
        ("scaled_dot_product_attention", "made of other operators"),
        ("relu_", "'relu_' cannot be kept .*changes an argument"),
        ("aten.mm.out", "'aten.mm.out' cannot be kept .*changes an argument"),
        ("aten.view", "'aten.view' cannot be kept .*returns a view"),
        (["mm", "aten._to_copy"], "'aten._to_copy' cannot be kept .*autocast casts a weight once"),
        ([], r"`policy=\[\]` names no operator"),
        (3, "holds 3, which is no operator"),
        ([nn.Linear], "which is no operator. Write `policy='matmul'`"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_at_once(policy, words):
    with pytest.raises(PolicyError, match=words):
        ActivationCheckpointing(policy=policy)


def test_every_suggestion_can_be_written():
    for wrong in ("mmm", "aten.conv", "sofmax", "gelu2"):
        with pytest.raises(PolicyError) as refused:
            resolve_policy(wrong)
        for suggested in str(refused.value).split("Did you mean ")[1].rstrip("?").split(" or "):
            assert resolve_policy(suggested.strip("'"))


class Model(Training):
    def train_dataloader(self):
        return batches(2)


def run_cli(*arguments):
    quiet = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    settings = {"save_config_callback": None, "trainer_defaults": quiet, "auto_configure_optimizers": False}
    return CheckpointCLI(Model, args=["fit", *arguments], **settings)


@pytest.mark.parametrize(("flag", "policy"), [("matmul", "matmul"), ("[mm, aten.addmm]", ["mm", "aten.addmm"])])
def test_a_policy_is_a_flag(flag, policy):
    (callback,) = [
        each for each in run_cli(f"--ckpt.policy={flag}").trainer.callbacks if isinstance(each, ActivationCheckpointing)
    ]
    assert callback.policy == policy


def test_a_wrong_flag_ends_with_one_sentence(capsys):
    with pytest.raises(SystemExit):
        run_cli("--ckpt.policy=matmull")
    errors = capsys.readouterr().err
    assert "Did you mean 'matmul'" in errors
    assert "Traceback" not in errors


# ---------------------------------------------------------------- what is kept, what runs again


class Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def encoder(dropout=0.1):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def step(model, policy=None):
    """One step: bytes saved, what backward computes, gradients, the random stream afterwards."""
    model = copy.deepcopy(model)
    if policy is not None:
        for name, layer in model.layers.named_children():
            attach(layer, name, "off", policy=frozenset(policy))
    torch.manual_seed(3)
    loss = model(torch.ones(2, 5, 16)).square().mean()
    saved = saved_bytes([loss], model.parameters()).saved
    with Counted() as counted:
        loss.backward()
    return saved, counted.counts, [parameter.grad for parameter in model.parameters()], torch.rand(2)


PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_matrix_products_are_computed_once_and_the_rest_twice(dropout):
    model = encoder(dropout)
    plain, full, kept = step(model), step(model, []), step(model, resolve_policy("matmul"))
    for got in (full, kept):
        assert all(map(torch.equal, got[2], plain[2]))
        assert torch.equal(got[3], plain[3])
    assert full[0] < kept[0] < plain[0]
    products = [sum(run[1][operator] for operator in PRODUCTS) for run in (plain, full, kept)]
    assert products[2] == products[0] < products[1]
    assert kept[1][aten.native_layer_norm.default] == full[1][aten.native_layer_norm.default] > 0


def test_what_comes_behind_the_last_saved_tensor_is_not_kept():
    """The result of a block's last product is its output: the next block keeps that, and the replay stops before."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    recompute = attach(model, "model", policy=resolve_policy("matmul"))
    output = model(torch.ones(4, 8, requires_grad=True))
    (kept,) = {node.frame for node in slots_of(output)}
    assert [tensor.shape for tensor in kept.results.on_device()] == [(4, 8)]
    assert recompute.kept_operators == {aten.addmm.default}


def slots_of(output):
    from lightning_ckpt.measure.graph import graph_nodes, packed_values
    from lightning_ckpt.recompute.frame import Slot

    packed = [value for node in graph_nodes([output]) for value, _ in packed_values(node)]
    return [value for value in packed if isinstance(value, Slot)]


def test_kept_results_are_freed_as_they_are_used_and_with_the_graph():
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    attach(layer, "layer", policy=resolve_policy("matmul"))
    output = layer(torch.ones(4, 8, requires_grad=True))
    (frame,) = {slot.frame for slot in slots_of(output)}
    results = frame.results
    output.sum().backward(retain_graph=True)
    assert not list(results.on_device())
    for parameter in layer.parameters():
        parameter.grad = None
    output.sum().backward()  # all of it is computed again
    assert all(parameter.grad is not None for parameter in layer.parameters())


class Draws(nn.Module):
    """A listed operator draws random numbers before the layer draws more."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        noise = torch.rand_like(self.linear(x))
        return nn.functional.dropout(torch.tanh(x * noise + self.linear(x)), 0.5)


class ChangedInPlace(nn.Module):
    """A kept result is changed in place by the layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        hidden.mul_(2).add_(1)
        return torch.tanh(hidden) * x


class Returned(nn.Module):
    """A kept result is the layer's output, which the caller changes in place."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden, self.last(torch.sigmoid(hidden)).exp()


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (Draws, ["aten.rand_like"]),
        (Draws, ["aten.rand_like", "matmul", "aten.bernoulli"]),
        (ChangedInPlace, "matmul"),
        (Returned, "matmul"),
        (Block, ["aten.tanh", "aten.native_layer_norm"]),
    ],
)
def test_hostile_layers_are_exact(make, policy):
    def loss(model, batch):
        for layer in model:
            batch = layer(batch)
            if isinstance(batch, tuple):
                batch[0].mul_(2)
                batch = sum(batch)
        return batch.square().mean()

    def make_module():
        return Training(nn.Sequential(nn.Linear(8, 8), make(), make()), loss)

    callback = ActivationCheckpointing(layers=make.__name__, policy=policy, verify="off", monitor=False)
    assert_equal(fit(make_module, callbacks=[callback]), fit(make_module))
    assert len(callback.selection) == 2


@pytest.mark.parametrize("keep", [False, True], ids=["here", "in somebody's care"])
def test_outputs_with_versions_of_their_own_that_the_caller_changes(keep):
    """A linear layer without a bias returns its product by `_unsafe_view`, which shares memory but no versions."""

    class Handle:
        def __init__(self, tensor):
            self.kept = tensor.detach()
            self.version = tensor._version
            self.on_device = [self.kept]

        is_changed = property(lambda self: self.kept._version != self.version)

        def tensor(self):
            return self.kept

    class Projects(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            hidden = self.first(x)
            return hidden, torch.tanh(self.second(hidden + 0)).exp()

    def gradient(treated):
        torch.manual_seed(0)
        layer = Projects()
        if treated:
            recompute = attach(layer, "layer", verify="off", policy=resolve_policy("matmul"))
            recompute.keep = Handle if keep else None
        hidden, output = layer(torch.randn(2, 3, 4))
        hidden.mul_(3)
        (hidden.sum() + output.sum()).backward()
        return layer.second.weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_products_in_hooks_are_not_taken_for_the_layers_own():
    """One hook only watches and is quiet in the replay, one acts and runs again: neither shifts the order."""

    def watches(module, args, output):
        torch.mm(output, output.T)

    def acts(module, args, output):
        return output + torch.mm(output, torch.eye(8)) * 0.1

    def make_module():
        module = Training()
        for block in list(module.model)[1:]:
            block.linear.register_forward_hook(watches)
            block.norm.register_forward_hook(acts)
        return module

    callback = ActivationCheckpointing(policy="matmul", verify="off", monitor=False)
    assert_equal(fit(make_module, callbacks=[callback]), fit(make_module))


class OtherOperators(nn.Module):
    """Runs another product in the replay than in forward, by what nobody can see."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        first = not self.path.exists()
        self.path.touch()
        with torch.no_grad():
            gate = 1 if first else (x @ x.T).mean()
        return torch.tanh(self.linear(x)) * gate


def test_other_operators_in_the_replay_are_an_error_with_the_layers_name(tmp_path):
    module = Training(nn.Sequential(nn.Linear(8, 8), OtherOperators(tmp_path / "seen")))
    callback = ActivationCheckpointing(layers="OtherOperators", policy="matmul", verify="off")
    with pytest.raises(RuntimeError, match=r"Recomputed layer 'model.1' called aten.*`policy`"):
        trainer([callback]).fit(module, batches(1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_weight_shared_by_layers_is_exact_under_autocast(precision):
    class Shares(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.own = shared, nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                gate = torch.sigmoid(self.shared(x)).mean()
            return x + self.own(nn.functional.gelu(self.shared(x))) * gate

    def make_module():
        shared = nn.Linear(8, 8)
        model = nn.Sequential(nn.Linear(8, 8), *[Shares(shared) for _ in range(3)], shared)
        return Training(model, lambda model, batch: model(batch).float().square().mean())

    callback = ActivationCheckpointing(layers="Shares", policy="matmul", verify="off", monitor=False)
    got = fit(make_module, callbacks=[callback], precision=precision)
    assert_equal(got, fit(make_module, precision=precision))


# ---------------------------------------------------------------- what is said


def warnings_of(caplog_or_record):
    return [str(warning.message) for warning in caplog_or_record if "ActivationCheckpointing" in str(warning.message)]


def test_a_policy_without_effect_is_a_warning(recwarn):
    callback = ActivationCheckpointing(policy=["aten.bmm"])
    trainer([callback]).fit(Training(), batches(1))
    (said,) = warnings_of(recwarn)
    assert "4 of 4 layers keep nothing by `policy=['aten.bmm']`" in said
    assert "model.{1, 2, 3, 4}" in said


def test_an_operator_that_no_layer_runs_is_a_warning(recwarn):
    callback = ActivationCheckpointing(policy=["matmul", "aten.convolution", "tanh"])
    trainer([callback]).fit(Training(), batches(1))
    (said,) = warnings_of(recwarn)
    assert "no layer keeps anything of aten.convolution" in said


def test_a_policy_with_effect_says_nothing_more(recwarn):
    callback = ActivationCheckpointing(policy=["aten.tanh"])
    trainer([callback]).fit(Training(blocks()), batches(1))
    assert not warnings_of(recwarn)
    assert repr(callback) == "ActivationCheckpointing(every_n_layers=1, policy=['aten.tanh'])"
