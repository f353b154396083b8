"""Run something just before `strategy.setup`: after the model is complete, before it is wrapped or has optimizers."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy


class _BeforeSetup:
    """Stands in for `strategy.setup` for one call. Several actions stack; without any it removes itself."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.replaced = strategy.__dict__.get("setup")
        self.actions: list[Callable[[], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.remove()
        for action in self.actions:
            action()
        self.strategy.setup(*args, **kwargs)

    def remove(self) -> None:
        if self.strategy.__dict__.get("setup") is self:
            del self.strategy.__dict__["setup"]
            if self.replaced is not None:
                setattr(self.strategy, "setup", self.replaced)


def before_setup(strategy: Strategy, action: Callable[[], None]) -> None:
    """Run `action` once, just before the next `strategy.setup`."""
    shim = strategy.__dict__.get("setup")
    if not isinstance(shim, _BeforeSetup):
        shim = _BeforeSetup(strategy)
        setattr(strategy, "setup", shim)
    shim.actions.append(action)


def forget(strategy: Strategy, action: Callable[[], None]) -> None:
    """Do not run `action` after all; one that was never asked for or has run is no error."""
    shim = strategy.__dict__.get("setup")
    if isinstance(shim, _BeforeSetup) and action in shim.actions:
        shim.actions.remove(action)
        if not shim.actions:
            shim.remove()
