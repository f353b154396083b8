"""Act around `strategy.setup`: before it the model is complete, but neither wrapped nor given optimizers."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.strategies import Strategy

Action = Callable[[], AbstractContextManager[Any]]


class _AroundSetup:
    """Stands in for `strategy.setup` for one call. Several actions stack; without any it removes itself."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.replaced = strategy.__dict__.get("setup")
        self.actions: list[Action] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.remove()
        with contextlib.ExitStack() as stack:
            for action in self.actions:
                stack.enter_context(action())
            self.strategy.setup(*args, **kwargs)

    def remove(self) -> None:
        if self.strategy.__dict__.get("setup") is self:
            del self.strategy.__dict__["setup"]
            if self.replaced is not None:
                setattr(self.strategy, "setup", self.replaced)


def around_setup(strategy: Strategy, action: Action) -> None:
    """Run the next `strategy.setup`, and no other, inside the context that `action` makes."""
    shim = strategy.__dict__.get("setup")
    if not isinstance(shim, _AroundSetup):
        shim = _AroundSetup(strategy)
        setattr(strategy, "setup", shim)
    shim.actions.append(action)


def forget(strategy: Strategy, action: Action) -> None:
    """Do not run `action` after all; one that was never asked for or has run is no error."""
    shim = strategy.__dict__.get("setup")
    if isinstance(shim, _AroundSetup) and action in shim.actions:
        shim.actions.remove(action)
        if not shim.actions:
            shim.remove()
