"""The global random streams of the host, `random` and `numpy.random`.

Their states cost some 40 microseconds to read, too much for every call of a layer that does not draw from them. So the
first calls of a layer show whether it does; only then its calls keep the states. That the others still do not is seen
once for all calls between two backward passes: if the states are at the end what they were at the beginning, nobody
drew. If somebody did, each replay is watched.
"""

import random
import sys
from typing import Any


class HostStreams:
    """The states of `random` and `numpy.random` as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy: Any = numpy.get_state() if numpy is not None else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostStreams) or self._python != other._python:
            return False
        if self._numpy is None or other._numpy is None:
            return self._numpy is other._numpy
        name, words, *rest = self._numpy
        other_name, other_words, *other_rest = other._numpy
        return name == other_name and rest == other_rest and bool((words == other_words).all())

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Put the streams where they were."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


class Window:
    """All calls between two backward passes."""

    _open: "Window | None" = None

    def __init__(self) -> None:
        self._start = HostStreams()
        self._nobody_drew: bool | None = None

    @classmethod
    def current(cls) -> "Window":
        """The window that a call belongs to: the one open now, or a new one after a backward pass."""
        if Window._open is None:
            Window._open = Window()
        return Window._open

    def nobody_drew(self) -> bool:
        """True if nobody drew from the streams since the window was opened. The first question closes it."""
        if self._nobody_drew is None:
            self._nobody_drew = HostStreams() == self._start
            if Window._open is self:
                Window._open = None
        return self._nobody_drew
