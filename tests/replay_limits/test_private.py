"""Guards for the private calls of PyTorch that the replay needs, and units that everything rests on."""

import collections
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ckpt.recompute import private, settings
from lightning_ckpt.recompute.contents import (
    ArrayContent,
    CellContent,
    SlotAttributes,
    read_content,
    same_content,
    values_of,
    write_content,
)
from lightning_ckpt.recompute.host_random import HostStreams, Window

# ---------------------------------------------------------------- modes


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_function_modes_are_those_entered_outermost_first():
    assert private.function_modes() == []
    with FunctionMode() as outer, FunctionMode() as inner:
        assert private.function_modes() == [outer, inner]
    assert private.function_modes() == []


def test_a_default_device_is_a_function_mode():
    with torch.device("meta"):
        assert [type(mode).__name__ for mode in private.function_modes()] == ["DeviceContext"]


def test_dispatch_modes_are_those_entered_outermost_first():
    assert private.dispatch_modes() == []
    with DispatchMode() as outer, DispatchMode() as inner:
        assert private.dispatch_modes() == [outer, inner]
    assert private.dispatch_modes() == []


def test_dispatch_modes_leave_out_none_of_pytorchs_own():
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert len(private.dispatch_modes()) == 1
    with FakeTensorMode() as mode:
        assert private.dispatch_modes() == [mode]


# ---------------------------------------------------------------- autocast


def test_autocast_nesting_counts_what_is_entered():
    assert private.autocast_nesting() == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert private.autocast_nesting() == 1
        with torch.autocast("cpu", enabled=False):
            assert private.autocast_nesting() == 2
    assert private.autocast_nesting() == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_autocast_nesting_is_set_and_set_back(depth):
    private.set_autocast_nesting(depth)
    assert private.autocast_nesting() == depth
    private.set_autocast_nesting(0)
    assert private.autocast_nesting() == 0


def test_casts_of_weights_are_kept_while_the_nesting_is_above_zero():
    weight, x = nn.Parameter(torch.eye(4)), torch.ones(1, 4)
    context = torch.autocast("cpu", torch.bfloat16)
    with context:
        first = torch.mm(x, weight)
        with torch.no_grad():
            weight.data.mul_(2)
        assert torch.equal(torch.mm(x, weight), first)  # an old cast: the cache is what the nesting protects
    with context:
        assert torch.equal(torch.mm(x, weight), first * 2)


# ---------------------------------------------------------------- attention and parametrizations


def test_the_order_of_attention_kernels_is_read_and_set():
    before = private.get_sdp_priority()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        inside = private.get_sdp_priority()
        assert inside != before
        assert inside[:2] == [int(SDPBackend.MATH), int(SDPBackend.FLASH_ATTENTION)]
    assert private.get_sdp_priority() == before
    private.set_sdp_priority(inside)
    assert private.get_sdp_priority() == inside
    private.set_sdp_priority(before)
    assert private.get_sdp_priority() == before


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def test_the_cache_of_parametrizations_is_read_and_set():
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Doubled())
    outside = private.get_parametrization_cache()
    assert outside == (0, {})
    with parametrize.cached():
        weight = linear.weight
        inside = private.get_parametrization_cache()
        assert inside[0] == 1
        assert list(inside[1].values()) == [weight]
    assert private.get_parametrization_cache() == (0, {})
    assert len(inside[1]) == 1  # a copy: leaving does not empty it
    private.set_parametrization_cache(inside)
    assert linear.weight is weight
    private.set_parametrization_cache(outside)
    assert linear.weight is not weight


# ---------------------------------------------------------------- settings


def _flags(module, name):
    return lambda: getattr(module, name), lambda value: setattr(module, name, value)


SETTINGS = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    "cudnn attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    "priority": (private.get_sdp_priority, private.set_sdp_priority, private.get_sdp_priority()[::-1]),
    "default type": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "mkldnn": (*_flags(torch.backends.mkldnn, "enabled"), False),
    "cudnn": (*_flags(torch.backends.cudnn, "enabled"), False),
    "cudnn deterministic": (*_flags(torch.backends.cudnn, "deterministic"), True),
    "cudnn benchmark": (*_flags(torch.backends.cudnn, "benchmark"), True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_put_back(name):
    get, put, other = SETTINGS[name]
    before, all_before = get(), settings.get_settings()
    put(other)
    try:
        assert get() == other != before
        changed = settings.get_settings()
        settings.set_settings(all_before)
        assert get() == before
        settings.set_settings(changed)
        assert get() == other
    finally:
        put(before)
    assert settings.get_settings() == all_before


def test_settings_with_a_cache_of_tensors_are_compared_and_put_back():
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Doubled())
    with parametrize.cached():
        first = linear.weight
        state = settings.get_settings()
        private.set_parametrization_cache((1, {}))
        assert linear.weight is not first
        settings.set_settings(state)
        assert linear.weight is first


# ---------------------------------------------------------------- contents


class Slotted:
    __slots__ = ("a", "b")


class Loud(dict):
    """Overrides what it can, as model outputs do."""

    def __setitem__(self, key, value):
        raise TypeError("read only")

    def __iter__(self):
        return iter(["wrong"])

    def values(self):
        return ["wrong"]

    keys = items = values


def slotted(**values):
    target = Slotted()
    for name, value in values.items():
        setattr(target, name, value)
    return SlotAttributes(target, ["a", "b"])


def loud(**values):
    made = Loud()
    dict.update(made, values)
    return made


def closure(*value):
    cell = types.CellType(*value)
    return CellContent(cell)


KINDS = {
    "dict": (lambda: {"a": 1, "b": [2]}, lambda h: h.pop("a")),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda h: h.update(a=h.pop("a"))),
    "dict renamed": (lambda: {"a": 1}, lambda h: h.update(b=h.pop("a"))),
    "OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), lambda h: h.move_to_end("a")),
    "defaultdict": (lambda: collections.defaultdict(int, a=1), lambda h: h["b"]),
    "Counter": (lambda: collections.Counter("abc"), lambda h: h.update("a")),
    "dict subclass": (lambda: loud(a=1, b=2), lambda h: dict.__setitem__(h, "a", 3)),
    "list": (lambda: [1, 2, 3], lambda h: h.reverse()),
    "list grown": (lambda: [1, 2, 3], lambda h: h.append(3)),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda h: h.append(5)),
    "set": (lambda: {1, 2}, lambda h: h.add(3)),
    "slots": (lambda: slotted(a=1, b=2), lambda h: setattr(h.target, "a", 5)),
    "slot deleted": (lambda: slotted(a=1, b=2), lambda h: delattr(h.target, "a")),
    "slot set": (lambda: slotted(a=1), lambda h: setattr(h.target, "b", 5)),
    "cell": (lambda: closure(1), lambda h: setattr(h.target, "cell_contents", 2)),
    "cell filled": (lambda: closure(), lambda h: setattr(h.target, "cell_contents", 2)),
    "array": (lambda: ArrayContent(np.arange(6.0)), lambda h: h.target.__iadd__(1)),
    "array in rows": (lambda: ArrayContent(np.arange(12.0).reshape(3, 4)[::2, ::2]), lambda h: h.target.sort()),
    "array order": (lambda: ArrayContent(np.asfortranarray(np.eye(3))), lambda h: h.target.__setitem__((0, 1), 5)),
    "array bool": (lambda: ArrayContent(np.array([True, False])), lambda h: h.target.__setitem__(0, False)),
    "array scalar": (lambda: ArrayContent(np.array(3)), lambda h: h.target.__setitem__((), 4)),
    "array NaN": (lambda: ArrayContent(np.array([np.nan, 1])), lambda h: h.target.__setitem__(1, np.nan)),
    "array dates": (
        lambda: ArrayContent(np.array(["2020-01-01"], "datetime64[D]")),
        lambda h: h.target.__iadd__(np.timedelta64(1, "D")),
    ),
    "array records": (
        lambda: ArrayContent(np.zeros(2, [("a", int), ("b", float)])),
        lambda h: h.target["b"].__setitem__(0, 2.0),
    ),
}
KINDS["array in rows"] = (KINDS["array in rows"][0], lambda h: h.target.__imul__(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_content_is_read_compared_and_written_back(kind):
    make, change = KINDS[kind]
    holder = make()
    before = read_content(holder)
    assert same_content(before, read_content(holder))
    change(holder)
    after = read_content(holder)
    assert not same_content(before, after)
    write_content(holder, before)
    assert same_content(before, read_content(holder))
    write_content(holder, after)
    assert same_content(after, read_content(holder))


def test_a_content_does_not_change_with_its_holder():
    for make, change in KINDS.values():
        holder = make()
        before = read_content(holder)
        values = list(values_of(before))
        change(holder)
        assert len(list(values_of(before))) == len(values)
        assert all(a is b for a, b in zip(values_of(before), values, strict=True))


def test_an_empty_array_is_read_and_written():
    holder = ArrayContent(np.zeros((0, 3)))
    write_content(holder, read_content(holder))


def test_contents_are_compared_by_identity_of_values():
    a, b = torch.ones(2), torch.ones(2)
    assert same_content([a], [a])
    assert not same_content([a], [b])
    assert not same_content({"x": a}, {"x": b})
    assert not same_content({"x": a}, {"y": a})


# ---------------------------------------------------------------- random streams of the host


@pytest.fixture
def _closed_window():
    Window._open = None
    yield
    Window._open = None


@pytest.mark.usefixtures("_closed_window")
@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: random.gauss(0, 1), np.random.normal])
def test_a_window_sees_who_drew(draw):
    window = Window.current()
    assert Window.current() is window
    assert window.nobody_drew()
    window = Window.current()
    draw()
    assert not window.nobody_drew()
    assert not window.nobody_drew()  # asked again: the same answer


@pytest.mark.usefixtures("_closed_window")
def test_a_window_ends_with_the_first_question():
    window = Window.current()
    assert window.nobody_drew()
    random.random()
    assert window.nobody_drew()  # drawn after its end
    assert Window.current() is not window
    assert Window.current().nobody_drew()


def test_host_streams_are_put_back_with_their_cached_value():
    np.random.seed(3)
    random.seed(3)
    np.random.normal(), random.gauss(0, 1)  # the second of a pair is kept by the generators
    streams = HostStreams()
    first = np.random.normal(), random.gauss(0, 1), np.random.random(), random.random()
    assert HostStreams() != streams
    streams.restore()
    assert HostStreams() == streams
    assert (np.random.normal(), random.gauss(0, 1), np.random.random(), random.random()) == first


def test_a_version_can_be_set_back_and_autograd_takes_it_for_true():
    x = torch.ones(3, requires_grad=True) * 2
    y = x * x
    version = x._version
    with torch.no_grad():
        x.add_(0)
    assert x._version == version + 1
    private.set_version(x, version)
    assert x._version == version
    y.sum().backward()  # raises if autograd saw another version than it saved
