"""Groups of saved tensors that travel together, one per layer, and the order in which backward asks for them."""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator

import torch

from lightning_ckpt.offload.records import Record

LayerKey = tuple[str, int]
Key = tuple[str, int, int]


class Group:
    """What was saved between two boundaries of the forward pass.

    Attributes:
        key: the same in every step: the name of what runs, how often it has run before, and which part of it this is.
        number: no other group has it.
        index: its place in the run.
        layer: how many layers had begun when it was opened.
        run: the forward work that it is part of.
        stream: the stream that computes, here and in its backward.
        nbytes: bytes of the storages that it is the first to save.
    """

    __slots__ = ("__weakref__", "_records", "index", "key", "layer", "nbytes", "number", "run", "stream")
    _numbers = itertools.count()

    def __init__(self, key: Key, index: int, layer: int, run: "Run", stream: torch.Stream) -> None:
        self.key = key
        self.index = index
        self.layer = layer
        self.run = run
        self.stream = stream
        self.nbytes = 0
        self.number = next(self._numbers)
        self._records: list[Record] = []

    @property
    def layer_key(self) -> LayerKey:
        """The key without the part."""
        return self.key[:2]

    def add(self, record: Record, is_new: bool) -> None:
        """One more storage that its backward needs."""
        self._records.append(record)
        if is_new:
            self.nbytes += record.nbytes

    def newest(self, count: int) -> list[Record]:
        """The storages that were added last."""
        return self._records[-count:]

    def records(self) -> list[Record]:
        """The storages that are still needed, in the order they were saved."""
        return [record for record in self._records if record.holder() is not None]


class Run:
    """The forward work between one backward and the next: usually one forward pass."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.layers = 0
        self._names: Counter[str] = Counter()
        self._groups: list[weakref.ref[Group]] = []
        self._keys: list[Key] = []
        self._index: dict[Key, int] = {}

    def open(self, name: str, starts_layer: bool, stream: torch.Stream) -> Group:
        """A new group, after all others."""
        self.layers += starts_layer
        key = (name, self._names[name], 0)
        self._names[name] += 1
        return self._append(key, stream)

    def open_part(self, group: Group) -> Group:
        """Another part of what `group` is a part of."""
        name, count, part = group.key
        return self._append((name, count, part + 1), group.stream)

    def _append(self, key: Key, stream: torch.Stream) -> Group:
        group = Group(key, len(self._groups), self.layers, self, stream)
        self._index[key] = group.index
        self._keys.append(key)
        self._groups.append(weakref.ref(group))
        return group

    def get(self, key: Key) -> Group | None:
        """The group of that key, if its backward is still to come."""
        index = self._index.get(key)
        return None if index is None else self._groups[index]()

    def before(self, key: Key) -> Key | None:
        """The key of the group before it."""
        index = self._index.get(key, 0)
        return self._keys[index - 1] if index else None

    def groups(self) -> list[Group]:
        """All groups whose backward is still to come."""
        return [group for group in (reference() for reference in self._groups) if group is not None]


class Order:
    """What is learned from one step to the next: how near the end a group is, and which one backward needs after it.

    A step that is built otherwise than those before is served as well, only later.
    """

    def __init__(self) -> None:
        self._layers_after: dict[LayerKey, int] = {}
        self._next: dict[Key, tuple[Key, int]] = {}
        self._runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
        self._count = 0

    def new_run(self) -> Run:
        """Begin the forward work of another backward."""
        self._count += 1
        run = self._runs[self._count] = Run(self._count)
        return run

    def learn_forward(self, run: Run) -> None:
        """A backward begins, so all layers of the run are known now."""
        for group in run.groups():
            self._layers_after[group.layer_key] = run.layers - group.layer

    def layers_after(self, group: Group) -> int | None:
        """How many layers followed it the last time, None where that is not known."""
        return self._layers_after.get(group.layer_key)

    def learn_backward(self, before: Group, after: Group) -> None:
        """Backward came to `after` when it was through with `before`."""
        self._next[before.key] = (after.key, after.run.number - before.run.number)

    def following(self, group: Group) -> Iterator[Group]:
        """The groups that backward needs after `group`, nearest first: as in the last step, else in reverse."""
        run, key = group.run, group.key
        seen = {(run, key)}
        while (place := self._after(run, key)) is not None and place not in seen:
            seen.add(place)
            run, key = place
            found = run.get(key)
            if found is not None:  # else its backward is over, or never comes
                yield found

    def _after(self, run: Run, key: Key) -> tuple[Run, Key] | None:
        if key in self._next:
            following, distance = self._next[key]
            other = self._runs.get(run.number + distance)
            return None if other is None else (other, following)
        before = run.before(key)
        return None if before is None else (run, before)
