"""Split a stretch of work into phases that may lie inside each other; each moment belongs to the innermost one."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from lightning_ckpt.measure.clock import Clock


class Phases:
    """Exclusive time of named phases.

    In automatic optimization forward and backward run inside the optimizer's step, in manual optimization backward
    and the optimizer's step run inside forward; either way each gets its own time only.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._stack: list[str] = []
        self._since: Any = None
        self._spans: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent inside belongs to `name`, but for phases inside it."""
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def _switch(self) -> None:
        now = self.clock.mark()
        if self._stack:
            self._spans.append((self._stack[-1], self._since, now))
        self._since = now

    def add(self, name: str, start: Any, end: Any) -> None:
        """Time between two marks of the clock belongs to `name`, whatever else it belongs to."""
        self._spans.append((name, start, end))

    def seconds(self) -> dict[str, float]:
        """Seconds per phase. All marks must have passed."""
        totals: dict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            totals[name] += self.clock.seconds(start, end)
        return dict(totals)
