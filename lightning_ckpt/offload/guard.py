"""The engine's lock."""

import threading
from collections.abc import Callable
from types import TracebackType


class Guard:
    """A lock under which a garbage collection may run anything, and messages that wait until it is released.

    Entering gives True, or False where this thread is inside already: a finalizer that computes has been called in the
    middle of the engine's work, and must be served without it.

    Args:
        say: called with each message once, outside of the lock.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self._depth = 0
        self._say = say
        self._said: set[str] = set()
        self._messages: list[str] = []

    def __enter__(self) -> bool:
        thread = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            if self._thread == thread:
                self._depth += 1
                return False
            self._lock.acquire()
        self._thread = thread
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth:
            self._depth -= 1
        else:
            self.leave()

    def try_enter(self) -> bool:
        """Enter if nobody is inside, without waiting."""
        if not self._lock.acquire(blocking=False):
            return False
        self._thread = threading.get_ident()
        return True

    def leave(self) -> None:
        """Release the lock, then say what has come up."""
        self._thread = 0
        self._lock.release()
        if self._messages:
            self._flush()

    def say(self, message: str) -> None:
        """Say something once, as soon as nobody is inside."""
        if message not in self._said:
            self._said.add(message)
            self._messages.append(message)
            if self._thread == 0:
                self._flush()

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        for message in messages:
            self._say(message)
