"""Split a stretch of work into phases that may lie inside each other; each moment belongs to the innermost one."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from lightning_ckpt.measure.clock import Clock


class Phases:
    """Exclusive time of named phases.

    In automatic optimization forward and backward run inside the optimizer's step, in manual optimization backward
    and the optimizer's step run inside forward; either way each gets its own time only.

    Args:
        clock: tells the time.
        on_end: called with the name of a phase, or `REST`, whenever another one takes its place. Default: nothing.
    """

    #: What belongs to no phase.
    REST = "rest"

    def __init__(self, clock: Clock, on_end: Callable[[str], object] = lambda phase: None) -> None:
        self.clock = clock
        self._on_end = on_end
        self._stack: list[str] = []
        self._since: Any = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._stretch: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent inside belongs to `name`, but for phases inside it."""
        since = self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            now = self._switch()
            self._stack.pop()
            if not self._stack:
                self._stretch = since if self._stretch is None else self._stretch[0], now

    def take_stretch(self) -> tuple[Any, Any] | None:
        """Marks at the start of the first phase and the end of the last one since this was called last."""
        stretch, self._stretch = self._stretch, None
        return stretch

    def _switch(self) -> Any:
        self._on_end(self._stack[-1] if self._stack else self.REST)
        now = self.clock.mark()
        if self._stack:
            self._spans.append((self._stack[-1], self._since, now))
        self._since = now
        return now

    def add(self, name: str, start: Any, end: Any) -> None:
        """Time between two marks of the clock belongs to `name`, whatever else it belongs to."""
        self._spans.append((name, start, end))

    def seconds(self) -> dict[str, float]:
        """Seconds per phase. All marks must have passed."""
        totals: dict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            totals[name] += self.clock.seconds(start, end)
        return dict(totals)
