"""What a layer owns, found once, checked by one pass over identities, and what was learned about its calls.

Most modules of a layer never change. Their holders are *quiet*: that nothing in them changed since the inventory was
made is seen by comparing every value they hold by identity, in a few microseconds. Roots that changed once, or that
hold what such a pass cannot check (sets, slots, activations), are *busy* and looked into again at every call.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_ckpt.recompute.contents import Content, Holder, ModuleAttributes, read_content, same_content, values_of
from lightning_ckpt.recompute.globals import mutable_globals
from lightning_ckpt.recompute.reach import Place, Reached

LEARNING_CALLS = 2


@dataclass
class Learned:
    """What the calls of a layer in one mode (its training flags) have shown.

    Attributes:
        calls: how many there were.
        seen: places of tensors that were looked at before.
        changes: places of tensors that the layer changes in place.
        draws: whether it draws from `random` or `numpy.random`.
        arguments: names of tensor arguments that the layer changes in place.
    """

    calls: int = 0
    seen: set[Place] = field(default_factory=set)
    changes: set[Place] = field(default_factory=set)
    draws: bool = False
    arguments: set[str] = field(default_factory=set)

    @property
    def learning(self) -> bool:
        return self.calls < LEARNING_CALLS


class Inventory:
    """The holders, tensors, generators and parameters of a layer.

    Attributes:
        inner_modules: these without the layer itself.
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
        return sum(map(len, self._views)) == len(self._flat) and all(
            map(is_, chain.from_iterable(self._views), self._flat)
        )

    def look_at_busy_roots(self) -> Reached:
        """Look into the busy roots now."""
        return self.reach(self._busy)

    def _build(self) -> None:
        roots: dict[str, Any] = {f".{name}" if name else "": part for name, part in self._layer.named_modules()}
        roots |= {f"global {name}": value for name, value in self._find_globals(roots)}
        hidden = self.reach(roots).modules
        known = {id(part) for part in roots.values()}
        while hidden:
            roots |= {name: part for ident, (name, part) in hidden.items() if ident not in known}
            known |= hidden.keys()
            found = self.reach(dict(hidden.values())).modules
            hidden = {ident: item for ident, item in found.items() if ident not in known}
        self.modules = {name: part for name, part in roots.items() if isinstance(part, nn.Module)}
        alone = {name: self.reach({name: root}) for name, root in roots.items()}
        self._busy = {name: root for name, root in roots.items() if name in self._restless or not alone[name].quick}
        self.quiet = self.reach({name: root for name, root in roots.items() if name not in self._busy})
        self.given_up = [place for reached in alone.values() for place in reached.given_up]
        self._views = [_live_values(holder) for holder in self.quiet.holders]
        self._flat = [value for content in self.quiet.contents for value in values_of(content)]
        parameters = chain.from_iterable(module._parameters.values() for module in self.modules.values())
        self.inner_modules = [module for module in self.modules.values() if module is not self._layer]
        self.parameters = list({id(p): p for p in parameters if p is not None}.values())
        self.learned = self._by_mode[tuple(module.training for module in self.modules.values())]

    @staticmethod
    def reach(roots: dict[str, Any]) -> Reached:
        """Everything that is reached from `roots`, modules or other objects by name."""
        reached = Reached()
        for name, root in roots.items():
            if not isinstance(root, nn.Module):
                reached.add(name, root)
            elif _is_outer(root):
                reached.add(name, vars(root))
            else:
                reached.add_module(name, root)
        reached.finish()
        return reached

    def _find_globals(self, roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for module in roots.values():
            for name, value in mutable_globals(type(module)):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield name, value

    def _find_restless(self) -> None:
        for holder, content, root in zip(self.quiet.holders, self.quiet.contents, self.quiet.roots, strict=True):
            now = read_content(holder)
            if not same_content(_without_mode(holder, content), _without_mode(holder, now)):
                self._restless.add(root)


def _live_values(holder: Holder) -> Collection[Any]:
    """The values that a quick holder holds at any time."""
    if isinstance(holder, ModuleAttributes):
        return holder.target.values()
    return holder.values() if isinstance(holder, dict) else holder


def _is_outer(module: nn.Module) -> bool:
    # A LightningModule that a layer refers to: its own attributes can matter, the whole training run behind it cannot.
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
