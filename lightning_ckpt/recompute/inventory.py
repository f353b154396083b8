"""What a layer owns, found once, checked by one pass over identities, and what was learned about its calls.

Most modules of a layer never change. Their holders are *quiet*: that nothing in them changed since the inventory was
made is seen by comparing every value they hold by identity, in a few microseconds. Roots that changed once, or that
hold what such a pass cannot check (sets, slots, activations), are *busy* and looked into again at every call.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_ckpt.recompute.contents import Content, Holder, ModuleAttributes, read_content, same_content, values_of
from lightning_ckpt.recompute.globals import named_state, names_late_operator
from lightning_ckpt.recompute.reach import GLOBAL_HOOKS, Place, Reached, hook_tables_of

LEARNING_CALLS = 2
NOTHING = Reached()


@dataclass
class Learned:
    """What the calls of a layer in one mode (its training flags) have shown.

    Attributes:
        calls: how many there were.
        seen: places of tensors that were looked at before.
        changes: places of tensors that the layer changes in place.
        draws: whether it draws from `random` or `numpy.random`.
        arguments: names of tensor arguments that the layer changes in place.
        parameters: numbers of parameters that the layer itself writes.
        runs_backward: whether it runs backward in its forward, and so adds to gradients.
    """

    calls: int = 0
    seen: set[Place] = field(default_factory=set)
    changes: set[Place] = field(default_factory=set)
    draws: bool = False
    arguments: set[str] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    runs_backward: bool = False

    @property
    def learning(self) -> bool:
        return self.calls < LEARNING_CALLS

    def nothing_more(self) -> None:
        """Take everything for known: in a rehearsal, nothing is copied only to be compared."""
        self.calls = LEARNING_CALLS
        self.seen = _Everything()


class _Everything(set[Any]):
    def __contains__(self, item: object) -> bool:
        return True


class Inventory:
    """The holders, tensors, generators and parameters of a layer.

    Attributes:
        inner_modules: these without the layer itself.
        hook_tables: the tables of their forward hooks.
        has_compiled_parts: whether any of these is compiled.
        names_late_operator: whether they name an operator that fills a tensor after autograd saved it.
        roots: what it was made from: modules, globals that they name, hooks.
        modules: the layer's modules and those found hidden in its attributes, by name within the layer.
        quiet: what the quiet roots hold. Never changed, but replaced, so that frames can share it.
        parameters: every parameter of the modules, once.
        given_up: places that were too large to look into.
        learned: what is known for the present mode.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._restless: set[str] = set()
        self._by_mode: dict[tuple[bool, ...], Learned] = defaultdict(Learned)
        self.given_up: list[str] = []
        self._build()

    def refresh(self) -> None:
        """Make the inventory anew if anything in the quiet roots has changed."""
        if not self.unchanged():
            self._find_restless()
            self._build()

    def unchanged(self) -> bool:
        """True if every quiet holder holds the same objects as when the inventory was made."""
        return (
            list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._flat))
            and all(map(is_, chain.from_iterable(self._dicts), self._keys))
            and sum(map(len, self.hook_tables)) == self._hook_count
        )

    def look_at_busy_roots(self) -> Reached:
        """Look into the busy roots now."""
        return self.reach(self._busy) if self._busy else NOTHING

    def _build(self) -> None:
        roots: dict[str, Any] = {f".{name}" if name else "": part for name, part in self._layer.named_modules()}
        forward = self._layer.__dict__.get("forward")
        previous = getattr(forward, "previous", None)  # what somebody else had put on the instance
        if previous is not None:
            roots["forward"] = previous
        if any(GLOBAL_HOOKS):
            roots["global hooks"] = [table for table in GLOBAL_HOOKS if table]
        roots |= self._find_globals(roots)
        roots |= _attributes_of_parameters(self._layer)
        roots = with_hidden_modules(roots)
        self.roots = roots
        self.modules = {name: part for name, part in roots.items() if isinstance(part, nn.Module)}
        alone = {name: self.reach({name: root}) for name, root in roots.items()}
        self._busy = {name: root for name, root in roots.items() if name in self._restless or not alone[name].quick}
        self.quiet = self.reach({name: root for name, root in roots.items() if name not in self._busy})
        self.given_up = [place for reached in alone.values() for place in reached.given_up]
        self._views = [_live_values(holder) for holder in self.quiet.holders]
        self._flat = [value for content in self.quiet.contents for value in values_of(content)]
        self._lengths = list(map(len, self.quiet.contents))
        # Keys of modules' own attributes are left out: a value that only changes its name there is not worth the time.
        pairs = zip(self.quiet.holders, self.quiet.contents, strict=True)
        dicts = [(holder, content) for holder, content in pairs if isinstance(holder, dict)]
        self._dicts = [holder for holder, content in dicts if content]
        self._keys = [key for _, content in dicts for key in content]
        self.hook_tables = [table for module in self.modules.values() for table in hook_tables_of(module)[:2]]
        self.hook_tables += GLOBAL_HOOKS
        self._hook_count = sum(map(len, self.hook_tables))
        self.names_late_operator = any(map(names_late_operator, {type(module) for module in self.modules.values()}))
        parameters = chain.from_iterable(module._parameters.values() for module in self.modules.values())
        self.inner_modules = [module for module in self.modules.values() if module is not self._layer]
        self.has_compiled_parts = any(
            part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in self.inner_modules
        )
        self.parameters = list({id(p): p for p in parameters if p is not None}.values())
        self.learned = self._by_mode[tuple(module.training for module in self.modules.values())]

    @staticmethod
    def reach(roots: dict[str, Any], thorough: bool = False) -> Reached:
        """Everything that is reached from `roots`, modules or other objects by name."""
        reached = Reached(thorough)
        for name, root in roots.items():
            if not isinstance(root, nn.Module):
                reached.add(name, root)
            elif is_outer(root):
                reached.add(name, vars(root))
            else:
                reached.add_module(name, root)
        reached.finish()
        return reached

    def _find_globals(self, roots: dict[str, Any]) -> dict[str, Any]:
        modules = (root for root in roots.values() if isinstance(root, nn.Module))
        found: dict[str, Any] = {}
        for cls in dict.fromkeys(map(type, modules)):
            for name, value in named_state(cls):
                if callable(value) and found.get(name, value) is not value:  # local functions of one name
                    name = f"{name} ({len(found)})"
                found[name] = value
        return found

    def _find_restless(self) -> None:
        for holder, content, root in zip(self.quiet.holders, self.quiet.contents, self.quiet.roots, strict=True):
            now = read_content(holder)
            if not same_content(_without_mode(holder, content), _without_mode(holder, now)):
                self._restless.add(root)


def _attributes_of_parameters(layer: nn.Module) -> dict[str, Any]:
    """What subclasses of `Parameter` carry along: quantized weights keep their scales there until they are used."""
    named = layer.named_parameters()
    return {f".{name}": vars(p) for name, p in named if nn.Parameter in type(p).__mro__[1:]}


def with_hidden_modules(roots: dict[str, Any]) -> dict[str, Any]:
    """`roots` and all modules that are reached from them, with their submodules."""
    found = dict(roots)
    known = {id(part) for part in roots.values()}
    new = {
        f"{name}.{sub}": part
        for name, root in roots.items()
        if isinstance(root, nn.Module) and not is_outer(root)
        for sub, part in root.named_modules()
        if id(part) not in known
    }
    found |= new
    known |= {id(part) for part in new.values()}
    new = found
    while new:
        hidden = Inventory.reach(new).modules.values()
        new = {}
        for name, module in hidden:
            parts = [("", module)] if is_outer(module) else module.named_modules()
            new |= {f"{name}.{sub}".rstrip("."): part for sub, part in parts if id(part) not in known}
        known |= {id(part) for part in new.values()}
        found |= new
    return found


def _live_values(holder: Holder) -> Collection[Any]:
    """The values that a quick holder holds at any time."""
    if isinstance(holder, ModuleAttributes):
        return holder.target.values()
    return holder.values() if isinstance(holder, dict) else holder


def is_outer(module: nn.Module) -> bool:
    """True for a LightningModule: its own attributes can matter to a layer, the training run behind it cannot."""
    return hasattr(type(module), "configure_optimizers")


def _without_mode(holder: Holder, content: Content) -> Content:
    # Going from training to validation and back changes no more than the mode, for which `Learned` has a place.
    if isinstance(holder, ModuleAttributes) and isinstance(content, dict):
        return {key: value for key, value in content.items() if key != "training"}
    return content


def parameter_flags(parameters: list[nn.Parameter]) -> list[bool]:
    """Which of the parameters require gradients."""
    return [parameter.requires_grad for parameter in parameters]


def versions(tensors: list[Tensor] | list[nn.Parameter]) -> list[int]:
    """How often each tensor was changed in place; -1 where nobody counts."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
