"""Methods of single objects, replaced for a while."""

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Replaces methods on instances, and puts back what was there.

    Example::

        patches = Patches()
        patches.wrap(strategy, "backward", lambda inner, *args: print("backward") or inner(*args))
        patches.restore()
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Have `wrapper(inner, *args, **kwargs)` called in the place of a method, `inner`."""
        inner = getattr(owner, name)
        self._replaced.append((owner, name, owner.__dict__.get(name)))
        owner.__dict__[name] = functools.partial(wrapper, inner)

    def restore(self) -> None:
        """Put everything back."""
        for owner, name, before in reversed(self._replaced):
            owner.__dict__.pop(name, None)
            if before is not None:
                owner.__dict__[name] = before
        self._replaced.clear()
