"""What other packages keep private and this one uses: all of it is in the table of docs/compatibility.md, and guarded.

A guard fails when the private name vanishes or comes to mean something else. Most are tests of what the package does
with it; those at the end of this file stand in where no other test would notice.
"""

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_ckpt.measure.storage import storages
from lightning_ckpt.measure.watching import _SENSITIVE
from lightning_ckpt.offload.admission import _FORMS
from lightning_ckpt.recompute.foreign import runs_inside_checkpoint
from lightning_ckpt.recompute.frame import is_out_of_memory
from lightning_ckpt.recompute.policy import MATMUL, resolve_policy
from lightning_ckpt.selection import select_layers
from lightning_ckpt.strategies import warn_if_compiled_whole
from tests.support import Block, Training

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_ckpt"

# Texts with a leading underscore that name nothing of another package: ends of our metrics' names, pytest's package.
_NO_NAMES = {"_MiB", "_ms", "_step", "_pytest"}


# ---------------------------------------------------------------- what the code uses


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__")


class Module:
    """One file of the package: the private names it uses, and those that its own classes define."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(PACKAGE).as_posix()
        self.source = path.read_text()
        self.tree = ast.parse(self.source)
        self.own: set[str] = set()
        self.used: set[str] = set()  # full names of what is imported, and what is reached from there
        self.texts: set[str] = set()  # in string constants
        self.attributes: list[tuple[str, bool]] = []  # of objects: the name, and whether the object is `self`
        self._imported: dict[str, str] = {}
        self._find_own()
        self._find_used()

    def _find_own(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef):
                        self.own.add(item.name)
                    elif isinstance(item, (ast.Assign, ast.AnnAssign)):
                        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
                        self.own |= {target.id for target in targets if isinstance(target, ast.Name)}
                        if any(isinstance(target, ast.Name) and target.id == "__slots__" for target in targets):
                            self.own |= set(ast.literal_eval(item.value))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                self.own.add(node.attr)

    def _find_used(self) -> None:
        inner = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        documentation = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self._import("", node.names)
            elif isinstance(node, ast.ImportFrom):
                self._import(f"{node.module}.", node.names)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                self._use(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                for name in re.findall(r"(?<!\w)[A-Za-z_]\w*(?:\.\w+)*", node.value):
                    if any(map(is_private, name.split("."))) and name not in _NO_NAMES:
                        self.texts.add(name)

    def _import(self, prefix: str, names: list[ast.alias]) -> None:
        for alias in names:
            full = prefix + alias.name
            self._imported[alias.asname or alias.name] = full
            if any(map(is_private, full.split("."))):
                self.used.add(full)

    def _use(self, node: ast.Attribute) -> None:
        """A chain of attributes, `a.b.c`: by its full name where it begins with something imported."""
        names: list[str] = []
        start: ast.expr = node
        while isinstance(start, ast.Attribute):
            names.insert(0, start.attr)
            start = start.value
        if isinstance(start, ast.Name) and start.id in self._imported:
            if any(map(is_private, names)) and names[-1] != "_C":
                self.used.add(".".join([self._imported[start.id], *names]))
            return
        for position, name in enumerate(names):
            if is_private(name):
                self.attributes.append((name, position == 0 and is_self(start)))


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names() -> dict[str, set[str]]:
    """The private names that the package uses, each with the modules that do."""
    modules = [Module(path) for path in sorted(PACKAGE.rglob("*.py"))]
    all_own = set().union(*(module.own for module in modules))
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        known = {name.rpartition(".")[2] for name in module.used} | all_own
        for name in module.used | (module.texts - known):
            found[name].add(module.path)
        for name, of_self in module.attributes:
            if name not in (all_own if of_self else module.own):
                found[name].add(module.path)
    for module in modules:  # what others have as well as we (`_version`): ours is that of `self`
        for name, of_self in module.attributes:
            if name in found and not of_self:
                found[name].add(module.path)
    parts = [name for name in found if any(name.startswith(f"{other}.") for other in found)]
    return {name: places for name, places in found.items() if name not in parts}


# ---------------------------------------------------------------- what the table says


class Row(NamedTuple):
    names: list[str]
    modules: set[str]
    guards: list[str]


def rows() -> list[Row]:
    lines = (ROOT / "docs" / "compatibility.md").read_text().partition("| private name |")[2].splitlines()[2:]
    cells = ([re.findall("`([^`]+)`", cell) for cell in line.split(" | ")] for line in lines if line.startswith("|"))
    return [Row(cell[0], set(cell[1]), cell[4]) for cell in cells]


def test_the_table_lists_what_the_package_uses():
    used = private_names()
    listed = {name for row in rows() for name in row.names}
    assert used.keys() - listed == set(), "not in the table of docs/compatibility.md"
    for row in rows():
        texts = {module: (PACKAGE / module).read_text() for module in row.modules}
        found = set()
        for name in row.names:
            # Names without an underscore, and those that are only set on `self`, are found by their text.
            places = used.get(name) or {module for module, text in texts.items() if name in text}
            assert places, f"{name} is not used any more"
            found |= places
        assert found == row.modules, f"modules that use {row.names}"


def test_every_guard_exists():
    guards = defaultdict(set)
    for row in rows():
        assert row.guards, f"nothing guards {row.names}"
        for guard in row.guards:
            path, _, name = guard.partition("::")
            guards[path].add(name)
    for path, names in guards.items():
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert names - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == set(), path


# ---------------------------------------------------------------- guards: tensors and graphs


def test_versions_of_tensors():
    x = torch.zeros(3)
    alias, copy = x.detach(), x.clone()
    before = x._version
    x.add_(1)
    assert (x._version, alias._version, copy._version) == (before + 1, before + 1, 0)
    x.data.add_(1)
    assert x._version == before + 1


def test_the_base_of_a_view():
    weight = nn.Parameter(torch.ones(2, 3))
    assert weight.t()[0]._base is weight
    assert weight._base is None
    assert (weight + 0)._base is None


def test_parts_of_a_sparse_tensor():
    tensor = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    assert not tensor.is_coalesced()
    assert tensor._indices().tolist() == [[0, 0]]
    assert tensor._values().tolist() == [1.0, 2.0]
    assert sorted(storage.nbytes() for storage in storages(tensor)) == [8, 16]


def test_the_backward_pass_of_a_thread():
    passes = [torch._C._current_graph_task_id()]
    x = torch.ones(2, requires_grad=True)

    def hook(gradient):
        passes.append(torch._C._current_graph_task_id())
        if len(passes) == 2:
            with torch.enable_grad():
                x.sin().sum().backward()
            passes.append(torch._C._current_graph_task_id())

    x.register_hook(hook)
    x.cos().sum().backward()
    outside, outer, inner, outer_again = passes
    assert outside == torch._C._current_graph_task_id() == -1
    assert outer == outer_again != inner
    assert min(outer, inner) >= 0


def test_names_of_autograds_nodes():
    x = torch.rand(3, 3, requires_grad=True)
    a, tau = torch.geqrf(x)
    sensitive = [x.prod(1), x.prod(), x.masked_fill(x > 0.5, x.sum()), torch.ormqr(a, tau, x)]
    assert all(y.grad_fn.name().startswith(_SENSITIVE) for y in sensitive)
    assert F.rrelu(x, training=True).grad_fn.name().startswith("RreluWithNoise")
    assert checkpoint(torch.sin, x, use_reentrant=True).grad_fn.name().startswith("CheckpointFunction")
    aten = torch.ops.aten
    forms = [
        *(aten.alias(x), x.as_strided((2,), (1,)), x[:1].expand(2, 3), x.permute(1, 0), x[0], x[1:], x.t()),
        *(aten._reshape_alias(x, (9,), (1,)), x.split(2)[0], x.split([1, 2])[0], x[:1].squeeze(), x[:1].squeeze(0)),
        *(x.to(torch.bfloat16), x.transpose(0, 1), x.unbind()[0], x.unsafe_split(2)[0], aten._unsafe_view(x, (9,))),
        *(x.unsqueeze(0), x.view(9)),
    ]
    assert {type(y.grad_fn).__name__ for y in forms} == _FORMS
    leaf = x.t().grad_fn.next_functions[0][0]
    assert type(leaf).__name__ == "AccumulateGrad"
    assert leaf.variable is x


# ---------------------------------------------------------------- guards: other people's checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_running_inside_of_a_checkpoint(use_reentrant):
    inside = []

    def layer(x):
        inside.append(runs_inside_checkpoint() and torch.is_grad_enabled())
        return x.exp().sin()

    x = torch.rand(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():  # hooks, but not of a checkpoint
        layer(x).sum().backward()
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert inside == [False, not use_reentrant, True]  # the reentrant kind runs without gradients at first


def test_a_checkpoint_wrapper_is_looked_through():
    model = nn.Sequential(checkpoint_wrapper(Block()), checkpoint_wrapper(Block()))
    layers = select_layers(model).layers
    assert list(layers) == ["0", "1"]
    assert all(type(layer) is Block for layer in layers.values())


# ---------------------------------------------------------------- guards: memory


def test_running_out_of_memory_is_told_by_its_text():
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(host.value)
    library = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(library))
    assert not is_out_of_memory(RuntimeError(library.replace("ALLOC_FAILED", "EXECUTION_FAILED")))


def test_memory_counters_are_read_by_these_names():
    """By name at every call, so that stand-ins are used; what they return is seen on the simulated device."""

    def names(function):
        return function.__code__.co_names

    assert "_accelerator_getDeviceStats" in names(torch.accelerator.memory_stats)
    assert "_accelerator_resetPeakStats" in names(torch.accelerator.reset_peak_memory_stats)
    assert "_cuda_memoryStats" in names(torch.cuda.memory.memory_stats_as_nested_dict)
    assert "_cuda_resetPeakMemoryStats" in names(torch.cuda.memory.reset_peak_memory_stats)


def test_snapshots_of_memory_go_by_these_names():
    inspect.signature(torch.cuda.memory._record_memory_history).bind(max_entries=1)
    inspect.signature(torch.cuda.memory._record_memory_history).bind(enabled=None)
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("file")
    assert hasattr(torch._C, "_cuda_attach_out_of_memory_observer") == torch.backends.cuda.is_built()


# ---------------------------------------------------------------- guards: operators and compiled code


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def test_operators_of_matrix_products_and_attention():
    assert [name for name in MATMUL if not hasattr(torch.ops.aten, name)] == []
    policy = resolve_policy("matmul")
    x = torch.rand(2, 2, 4, 8)
    with Seen() as seen:
        F.scaled_dot_product_attention(x, x, x)
        F.linear(x[0, 0], x[0, 1], x[0, 0, 0, :4])
    aten = torch.ops.aten
    assert seen.operators & policy == {aten._scaled_dot_product_flash_attention_for_cpu.default, aten.addmm.default}


def test_a_compiled_lightning_module_is_known():
    module = from_compiled(torch.compile(Training(), backend="eager"))
    with pytest.warns(UserWarning, match="'Training' is compiled as one piece"):
        warn_if_compiled_whole("name", module, {})
