"""State that a layer does not own, and what surrounds its forward only: siblings, globals, switches, hooks, modes."""

import contextlib
import contextvars
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.recompute import ReplayError, attach, attached, detach, private
from tests.replay_limits.support import Scaled, compare
from tests.support import Training, assert_equal, batches, fit, trainer

# ---------------------------------------------------------------- the LightningModule and siblings


class Reporting(Scaled):
    """Reports to the LightningModule that it belongs to, which it knows by a list, so as not to own it."""

    owner: list = []

    def __init__(self):
        super().__init__()
        self.owner = []

    def forward(self, x):
        owner = self.owner[0]
        owner.calls += 1
        owner.means.append(x.detach().mean())
        return self.use(x, 1 / owner.calls)


class Owner(Training):
    def __init__(self, model):
        super().__init__(model)
        self.calls, self.means = 0, []
        model[1].owner.append(self)


class Norming(Scaled):
    """Writes what a sibling reads: running statistics in a module beside it."""

    def __init__(self, sibling):
        super().__init__()
        self.sibling = [sibling]

    def forward(self, x):
        self.sibling[0].calls += 1
        self.sibling[0].level.mul_(0.5).add_(x.detach().abs().mean())
        return self.use(x, 1 + self.sibling[0].level)


class Sibling(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("level", torch.zeros(()))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * self.level + self.calls


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.sibling = nn.Linear(8, 8), Sibling()
        self.layer = Norming(self.sibling)

    def forward(self, x):
        return self.sibling(self.layer(self.stem(x)))


def test_attributes_of_the_lightning_module_change_once():
    plain, got = compare(Reporting, Owner)
    assert got.owner[0].calls == plain.owner[0].calls == 4
    assert len(got.owner[0].means) == 4


def test_a_method_of_the_lightning_module_changes_it_once():
    class Counting(Training):
        def __init__(self, model):
            super().__init__(model)
            self.calls = 0
            model[1].count = self.count

        def count(self):
            self.calls += 1
            return self.calls

    class Layer(Scaled):
        def forward(self, x):
            return self.use(x, 1 / self.count())

    plain, got = compare(Layer, Counting)
    assert got.count() == plain.count() == 5


def test_attributes_and_buffers_of_a_sibling_change_once():
    models = []

    def make():
        models.append(Pair())
        return Training(models[-1])

    plain = fit(make)
    assert_equal(fit(make, callbacks=[ActivationCheckpointing(layers=Norming)]), plain)
    assert models[0].sibling.calls == models[1].sibling.calls == 3


# ---------------------------------------------------------------- classes and globals


class Tracker:
    """A helper class that keeps what it counts on itself."""

    calls = 0
    levels = []


def tracked(x):
    Tracker.calls += 1
    Tracker.levels.append(x.detach().abs().mean())
    return 1 + sum(Tracker.levels) / Tracker.calls


CALLS = 0
LAST_SHAPE: tuple = ()
OPTIONS = types.SimpleNamespace(scale=1.0, calls=0)
STATISTICS = np.zeros(2)
GENERATOR = np.random.default_rng(0)
TORCH_GENERATOR = torch.Generator()


class CountsOnClass(Scaled):
    calls = 0
    seen: dict = {}

    def forward(self, x):
        type(self).calls += 1
        self.seen[self.calls] = True
        return self.use(x, 1 / self.calls + len(self.seen))


class CountsOnSubclass(CountsOnClass):
    """`type(self).calls += 1` makes an attribute here of what it inherits."""


class CountsInGlobal(Scaled):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return self.use(x, 1 / CALLS)


class CountsInHelperClass(Scaled):
    def forward(self, x):
        return self.use(x, tracked(x))


class RemembersShape(Scaled):
    def forward(self, x):
        global LAST_SHAPE
        LAST_SHAPE = (*LAST_SHAPE, len(x))
        return self.use(x, 1 / len(LAST_SHAPE))


class CountsInNamespace(Scaled):
    def forward(self, x):
        OPTIONS.calls += 1
        return self.use(x, 1 / OPTIONS.calls)


class CountsInArray(Scaled):
    def forward(self, x):
        STATISTICS[0] += 1
        return self.use(x, 1 / float(STATISTICS[0]))


class DrawsFromNumpy(Scaled):
    """Adds noise at the end, which autograd does not save."""

    def forward(self, x):
        noise = GENERATOR.normal()
        return self.use(x, 1.0) + noise


class DrawsFromTorch(Scaled):
    def forward(self, x):
        return self.use(x, torch.rand(8, generator=TORCH_GENERATOR))


def reset_globals():
    global CALLS, LAST_SHAPE, GENERATOR
    CALLS, LAST_SHAPE, GENERATOR = 0, (), np.random.default_rng(0)
    OPTIONS.__dict__.update(scale=1.0, calls=0)
    STATISTICS[:] = 0
    TORCH_GENERATOR.manual_seed(0)
    Tracker.calls = 0
    Tracker.levels.clear()
    CountsOnClass.calls = 0
    CountsOnClass.seen.clear()
    if "calls" in vars(CountsOnSubclass):
        del CountsOnSubclass.calls


@pytest.mark.parametrize(
    "layer",
    [
        CountsOnClass,
        CountsInGlobal,
        CountsOnSubclass,
        CountsInHelperClass,
        RemembersShape,
        CountsInNamespace,
        CountsInArray,
        DrawsFromNumpy,
        DrawsFromTorch,
    ],
)
def test_globals_and_class_attributes_change_once(layer):
    def make():
        reset_globals()
        return layer()

    compare(make)


HELPER = """
calls = 0
state = {"calls": 0}

def count():
    global calls
    calls += 1
    return calls

def count_in_state():
    state["calls"] += 1
    return state["calls"]
"""


@pytest.fixture
def helper(monkeypatch):
    """A module of its own that layers call."""
    module = types.ModuleType("helper_of_layers")
    exec(HELPER, module.__dict__)
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    monkeypatch.setitem(globals(), "helper_module", module)
    for name in ("count", "count_in_state"):
        monkeypatch.setitem(globals(), name, getattr(module, name))
    return module


helper_module = count = count_in_state = None


class CallsHelperModule(Scaled):
    def forward(self, x):
        return self.use(x, 1 / helper_module.count())


class CallsImportedFunction(Scaled):
    def forward(self, x):
        return self.use(x, 1 / count())


class CallsImportedFunctionWithState(Scaled):
    def forward(self, x):
        return self.use(x, 1 / count_in_state())


class CallsHelperForNothing(Scaled):
    def forward(self, x):
        helper_module.count()
        return self.use(x, 1.0)


@pytest.mark.parametrize("layer", [CallsHelperModule, CallsHelperForNothing])
def test_globals_of_a_helper_module_change_once(layer, helper):
    counts = []

    def make():
        counts.append(helper.calls)
        helper.calls = 0
        helper.state["calls"] = 0
        return layer()

    compare(make)
    assert helper.calls == counts[-1]  # as often in the recomputed run as in the plain one


@pytest.mark.parametrize("layer", [CallsImportedFunction, CallsImportedFunctionWithState])
def test_imported_functions_that_change_globals_of_their_module_are_refused(layer, helper):
    with pytest.raises(ReplayError, match=r"'model\.1' saved tensor \d .* with other values in the replay"):
        compare(layer)


# ---------------------------------------------------------------- switched between forward and backward


class Config:
    def __init__(self):
        self.scale, self.activation = 1.0, "tanh"


class Configured(Scaled):
    def __init__(self):
        super().__init__()
        self.config = Config()

    def forward(self, x):
        x = self.linear(x * self.config.scale)
        return torch.tanh(x) if self.config.activation == "tanh" else torch.relu(x)


class SwitchesBack(Training):
    """Switches the config for some of the forwards only, and back before backward."""

    since = 0

    def training_step(self, batch, batch_idx):
        if batch_idx < self.since:
            return super().training_step(batch, batch_idx)
        self.switch(True)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.switch(False)

    def switch(self, on):
        config = self.model[1].config
        config.scale, config.activation = (0.5, "relu") if on else (1.0, "tanh")


@pytest.mark.parametrize("since", [0, 3])
def test_a_config_switched_around_the_forward_is_switched_in_the_replay(since):
    plain, got = compare(Configured, type("Switches", (SwitchesBack,), {"since": since}), steps=5)
    assert vars(got.config) == vars(plain.config) == {"scale": 1.0, "activation": "tanh"}


class GloballyConfigured(Scaled):
    def forward(self, x):
        return self.use(x, OPTIONS.scale)


class SwitchesGlobal(SwitchesBack):
    def switch(self, on):
        OPTIONS.scale = 0.5 if on else 1.0


@pytest.mark.parametrize("since", [0, 3])
def test_a_global_config_switched_around_the_forward_is_switched_in_the_replay_or_refused(since):
    reset_globals()
    module = type("Switches", (SwitchesGlobal,), {"since": since})
    with contextlib.suppress(ReplayError):
        compare(GloballyConfigured, module, steps=5)


LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def tokens(count=4):
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(torch.randint(1, 32, (count * 2, 10), generator=generator), batch_size=2)


def llama(cls=Training, **kwargs):
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, attention_dropout=0.1))
    return cls(model, loss=lambda model, batch: model(input_ids=batch, labels=batch, use_cache=False).loss)


def gpt2(cls=Training):
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=16)
    return cls(GPT2LMHeadModel(config), loss=lambda model, batch: model(input_ids=batch, labels=batch).loss)


class OtherAttention(Training):
    """Eager attention in forward, another kind set before backward."""

    def training_step(self, batch, batch_idx):
        self.model.config._attn_implementation = "eager"
        loss = super().training_step(batch, batch_idx)
        self.model.config._attn_implementation = "sdpa"
        return loss


class OtherScaling(Training):
    """The scaling of attention changes between forward and backward."""

    def on_before_backward(self, loss):
        for module in self.model.modules():
            if hasattr(module, "scaling"):
                module.scaling *= 2

    def on_after_backward(self):
        for module in self.model.modules():
            if hasattr(module, "scaling"):
                module.scaling /= 2


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("cls", [OtherAttention, OtherScaling])
def test_a_hugging_face_config_changed_before_backward_is_as_in_forward(make, cls):
    plain = fit(lambda: make(cls), tokens())
    assert_equal(fit(lambda: make(cls), tokens(), [ActivationCheckpointing()]), plain)


class Fails(Training):
    def on_after_backward(self):
        raise KeyError("on purpose")


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("fails", [False, True])
def test_hugging_face_checkpointing_is_off_meanwhile_and_on_afterwards_even_after_an_exception(make, fails):
    module = make(Fails if fails else Training)
    module.model.gradient_checkpointing_enable()
    module.model.train()
    before = {name: getattr(part, "gradient_checkpointing", None) for name, part in module.named_modules()}
    with pytest.raises(KeyError, match="on purpose") if fails else contextlib.nullcontext():
        trainer([ActivationCheckpointing()]).fit(module, tokens())
    after = {name: getattr(part, "gradient_checkpointing", None) for name, part in module.named_modules()}
    assert after == before
    assert not any(attached(part) for part in module.modules())


# ---------------------------------------------------------------- hooks around the forward only


class HooksAround(Training):
    """Steers the inside of a layer by a hook during the forwards from step `since` on."""

    since = 0

    def training_step(self, batch, batch_idx):
        if batch_idx < self.since:
            return super().training_step(batch, batch_idx)
        handle = self.hook(self.model[1].linear)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            handle.remove()

    def hook(self, linear):
        return linear.register_forward_hook(lambda module, args, output: output * 2)


class PreHooksAround(HooksAround):
    def hook(self, linear):
        return linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class GlobalHooksAround(HooksAround):
    def hook(self, linear):
        return nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output + 1 if isinstance(module, nn.Linear) else None
        )


@pytest.mark.parametrize("since", [0, 3])
@pytest.mark.parametrize("module", [HooksAround, PreHooksAround, GlobalHooksAround])
def test_hooks_around_the_forward_act_in_the_replay(module, since):
    compare(Simple, type("Hooks", (module,), {"since": since}), steps=5)


class Simple(Scaled):
    def forward(self, x):
        return self.use(x, 1.0)


def test_a_hook_that_only_watches_around_the_forward_fires_once_per_call():
    fired = []

    class Watching(HooksAround):
        def hook(self, linear):
            return linear.register_forward_hook(lambda module, args, output: fired.append(1))

    compare(Simple, Watching)
    assert len(fired) == 2 * 4


def test_weights_swapped_around_the_forward_are_replayed_or_refused():
    class FastWeights(Training):
        """One step of MAML, first order: the forward runs with weights that are not the module's own."""

        def training_step(self, batch, batch_idx):
            fast = {name: p * 0.9 for name, p in self.model.named_parameters()}
            return torch.func.functional_call(self.model, fast, (batch,)).square().mean()

    with contextlib.suppress(ReplayError):
        compare(Simple, FastWeights)


# ---------------------------------------------------------------- modes, flags and contexts around the forward


class Halving(TorchDispatchMode):
    """What `tanh` returns is halved."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output / 2 if func is torch.ops.aten.tanh.default else output


class HalvingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.tanh:
            return func(args[0] / 2)
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


level = contextvars.ContextVar("level", default=1.0)


@contextlib.contextmanager
def at_level(value):
    token = level.set(value)
    try:
        yield
    finally:
        level.reset(token)


class Ends(nn.Module):
    """Reads what surrounds it: a context variable, tanh, the default type, attention."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = self.linear(x * level.get()).view(1, 1, -1, 3, 8).unbind(-2)
        x = nn.functional.scaled_dot_product_attention(query, key, value)[0, 0]
        return torch.tanh(x) * torch.full((8,), 0.3).to(x.dtype)


@contextlib.contextmanager
def default_double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def without_mkldnn():
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def _around(context):
    class Around(Training):
        def training_step(self, batch, batch_idx):
            with context():
                return super().training_step(batch, batch_idx)

    return Around


CONTEXTS = {
    "dispatch mode": Halving,
    "function mode": HalvingFunctions,
    "context variable": lambda: at_level(0.5),
    "default type": default_double,
    "mkldnn": without_mkldnn,
    "math attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "flash attention first": lambda: nn.attention.sdpa_kernel(
        [nn.attention.SDPBackend.FLASH_ATTENTION, nn.attention.SDPBackend.MATH], set_priority=True
    ),
    "deterministic": lambda: _deterministic(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
def test_what_surrounds_the_forward_surrounds_the_replay(context):
    compare(Ends, _around(context), verify="always")


def test_modes_around_forward_and_other_modes_around_backward_are_told_apart():
    class Layer(Scaled):
        def forward(self, x):
            return torch.tanh(self.linear(torch.tanh(x)))

    class Module(Training):
        def __init__(self, model):
            super().__init__(model)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            with HalvingFunctions():
                loss = self.loss(self.model, batch)
            optimizer.zero_grad()
            with Watching():
                self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss.detach()}

    compare(Layer, Module)


def test_a_dispatch_mode_around_backward_only_is_refused_where_it_changes_the_replay():
    class Layer(Scaled):
        def forward(self, x):
            return torch.sin(self.linear(torch.tanh(x)))

    class Module(Training):
        def __init__(self, model):
            super().__init__(model)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.loss(self.model, batch)
            optimizer.zero_grad()
            with Halving():
                self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss.detach()}

    with pytest.raises(ReplayError, match=r"'model\.1' saved tensor"):
        compare(Layer, Module)


# ---------------------------------------------------------------- a context entered in one layer, left in another


class Enters(Scaled):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        x = self.use(x, 1.0)
        self.shared["context"] = torch.autocast("cpu", torch.bfloat16)
        self.shared["context"].__enter__()
        self.shared["depth"] = private.autocast_nesting()
        return self.use(x, 1.0)


class Leaves(Scaled):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        x = self.use(x, 1.0)
        self.shared["context"].__exit__(None, None, None)
        self.shared["depth"] = private.autocast_nesting()
        return self.use(x.float(), 1.0)


class EntersNested(Enters):
    """Enters a second autocast of another type inside."""

    def forward(self, x):
        x = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return self.use(x.float(), 1.0)


@pytest.mark.parametrize("enters", [Enters, EntersNested])
@pytest.mark.parametrize("around", [False, True])
def test_autocast_entered_in_one_layer_and_left_in_another(enters, around):
    depths = []

    def make():
        shared = {}
        model = nn.Sequential(nn.Linear(8, 8), enters(shared), Simple(), Leaves(shared), nn.Linear(8, 8))
        return (_around(lambda: torch.autocast("cpu", torch.bfloat16)) if around else Training)(model)

    def depth():
        depths.append((private.autocast_nesting(), torch.is_autocast_enabled("cpu")))

    plain = fit(make, batches(4))
    depth()
    got = fit(make, batches(4), [ActivationCheckpointing(layers=r"model\.[123]")])
    depth()
    assert_equal(got, plain)
    assert depths == [(0, False), (0, False)]


def test_gradient_mode_entered_in_one_layer_and_left_in_another():
    class Off(Scaled):
        def forward(self, x):
            x = self.use(x, 1.0)
            torch.set_grad_enabled(False)
            return x

    class On(nn.Module):
        def forward(self, x):
            torch.set_grad_enabled(True)
            return x

    off = Off()
    x = torch.ones(3, 8, requires_grad=True)
    attach(off, "off")
    output = off(x)
    On()(x)
    output.sum().backward()
    detach(off)
    assert torch.is_grad_enabled()
    assert x.grad is not None
