"""Let others watch what replays cost and what frames leave unsaved, without the frames knowing who they are."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Watcher(Protocol):
    """Told about every replay, in the thread and on the stream it runs on."""

    def replay_begins(self) -> None: ...

    def replay_ends(self) -> None: ...


_watchers: list[Watcher] = []


def watched() -> bool:
    """True while somebody watches: only then do frames note which storages they leave unsaved."""
    return bool(_watchers)


def watch(watcher: Watcher) -> None:
    """Tell `watcher` about every replay from now on."""
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """Tell `watcher` no more; one that does not watch is no error."""
    if watcher in _watchers:
        _watchers.remove(watcher)


@contextlib.contextmanager
def announced_replay() -> Iterator[None]:
    """Tell the watchers when the replay inside begins and ends."""
    watchers = list(_watchers)
    for watcher in watchers:
        watcher.replay_begins()
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.replay_ends()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Nobody watches what runs inside."""
    watchers = list(_watchers)
    _watchers.clear()
    try:
        yield
    finally:
        _watchers[:0] = watchers
