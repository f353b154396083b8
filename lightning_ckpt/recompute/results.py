"""Results of chosen operators, kept in a layer's forward so that its replay need not compute them: an operator policy.

It is PyTorch's selective checkpointing for eager mode, made exact: an operator that draws random numbers leaves the
streams as if it had run, a result that was changed in place is computed again, and backward may run several times.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ckpt.measure.storage import storages
from lightning_ckpt.recompute.arguments import Handle, Keep
from lightning_ckpt.recompute.host_random import HostStreams
from lightning_ckpt.recompute.state import UnexpectedError

_CURE = "Leave the operator out of `policy`, or the layer out with `layers=` or `check_fn=`."

# They return parts of their argument's storage that autograd does not take for views.
_UNKNOWN_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}

Restore = Callable[[], None]
Kinds = list[tuple[torch.Size, torch.dtype]]


class _Local(threading.local):
    level = 0


_local = _Local()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """What runs inside is no part of the layer: a hook, another layer's replay, or the package's own work."""
    _local.level += 1
    try:
        yield
    finally:
        _local.level -= 1


class _HandedOver:
    """In the place of a tensor that somebody else looks after."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle


class _Result:
    """What one call of an operator has returned.

    Attributes:
        operator: the operator.
        given: shapes and types of the tensors it was given.
        value: what it returned; None where that is not kept, or was used.
    """

    def __init__(self, operator: OpOverload, given: Kinds) -> None:
        self.operator = operator
        self.given = given
        self.value: Any = None
        self._versions: list[int] = []
        self._storages: set[int] = set()
        self._aliases: list[Tensor] = []
        self._restore: list[Restore] = []

    def keep(self, value: Any, restore: list[Restore]) -> None:
        """Keep `value`; `restore` puts random streams where the operator has left them."""
        self.value = value
        self._versions = [_version(leaf) for leaf in tree_leaves(value)]
        self._storages = _storages_in(value)
        self._restore = restore

    def drop(self) -> None:
        """Have the replay compute it again."""
        self.value = None

    def shares(self, written: set[int]) -> bool:
        """Whether it lies in one of these storages."""
        return self.value is not None and not self._storages.isdisjoint(written)

    def note_alias(self, tensor: Tensor) -> None:
        """A tensor in the same storage has versions of its own: changes of it are changes of the result."""
        self._aliases.append(tensor)
        self._versions.append(_version(tensor))

    def settle(self, keep: Keep | None) -> None:
        """Hold it on no graph, unless it has changed since."""
        if not self._is_unchanged() or self._storages != _storages_in(self.value):  # `x.data = y` gives it another one
            self.drop()
        self.value = tree_map(lambda leaf: _held(leaf, keep), self.value)
        self._aliases = list(map(_probe, self._aliases))

    def take(self) -> Any:
        """What the operator returned, once; None where it has to run again."""
        if self.value is None or not self._is_unchanged():
            return None
        for restore in self._restore:
            restore()
        value, self.value = self.value, None
        return tree_map(_given_back, value)

    def on_device(self) -> Iterator[Tensor]:
        for leaf in tree_leaves(self.value):
            if isinstance(leaf, Tensor):
                yield leaf
            elif isinstance(leaf, _HandedOver):
                yield from leaf.handle.on_device

    def _is_unchanged(self) -> bool:
        if self.value is None:
            return True
        return not any(
            leaf.handle.is_changed if isinstance(leaf, _HandedOver) else _version(leaf) != version
            for leaf, version in zip([*tree_leaves(self.value), *self._aliases], self._versions, strict=True)
        )


class Results:
    """Results of some operators in one call of a layer, in the order in which they ran.

    Args:
        operators: whose results are kept.
        photograph_streams: makes a function that puts PyTorch's random streams back where they are now.
    """

    def __init__(self, operators: frozenset[OpOverload], photograph_streams: Callable[[], Restore]) -> None:
        self._operators = operators
        self._photograph_streams = photograph_streams
        self._results: list[_Result] = []
        self._needed = 0
        self._reusing: _Reusing | None = None

    def note_saved(self) -> int:
        """In forward, autograd saves a tensor: how many operators ran. The replay goes on until here at least."""
        self._needed = len(self._results)
        return self._needed

    def check_saved(self, position: int) -> None:
        """In the replay, autograd saves that tensor again: as many operators must have run.

        Raises:
            UnexpectedError: they have not.
        """
        ran = 0 if self._reusing is None else self._reusing.position
        if ran != position:
            raise UnexpectedError(
                f"called operators of `policy` {ran} times in the replay where it called them {position} times in "
                f"forward, so kept results cannot be told apart. {_CURE}"
            )

    @contextlib.contextmanager
    def keeping(self, keep: Keep | None) -> Iterator[None]:
        """Keep what the layer's operators return inside.

        Args:
            keep: looks after the results until the replay, on the host, say; None leaves them where they are.
        """
        try:
            with _Keeping(self._operators, self._results, self._photograph_streams):
                yield
            for result in self._results[self._needed :]:
                result.drop()
        except BaseException:
            self._results.clear()
            raise
        finally:  # what is kept must not hang on the graph that holds this object
            for result in self._results:
                result.settle(keep)

    def reusing(self) -> AbstractContextManager[Any]:
        """Give the results to the layer's operators inside, each once, so that its memory is free afterwards."""
        self._reusing = _Reusing(self._operators, self._results)
        return self._reusing

    def on_device(self) -> Iterator[Tensor]:
        """What is held in memory of the device that computes."""
        for result in self._results:
            yield from result.on_device()

    def kept_operators(self) -> set[OpOverload]:
        """The operators of which a result is kept."""
        return {result.operator for result in self._results if result.value is not None}


class PolicyMode(TorchDispatchMode):
    """Sees the operators of one call of a layer."""

    # Else a higher-order operator (flex_attention, what compiled code wraps) would raise under the mode.
    supports_higher_order_operators = True

    def __init__(self, operators: frozenset[OpOverload], results: list[_Result]) -> None:
        super().__init__()
        self._operators = operators
        self._results = results
        self._level = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else `torch.compile` inside the layer would run eagerly under the mode: other kernels, other bits.
        return True

    def __enter__(self) -> Any:
        self._level = _local.level
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._operators or _local.level != self._level or _draws_from_own_stream(args, kwargs):
            return self.run_other(func, args, kwargs)
        return self.run_listed(func, args, kwargs)

    def run_listed(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def run_other(self, operator: Any, args: Any, kwargs: Any) -> Any:
        return operator(*args, **kwargs)


class _Keeping(PolicyMode):
    def __init__(
        self, operators: frozenset[OpOverload], results: list[_Result], photograph_streams: Callable[[], Restore]
    ) -> None:
        super().__init__(operators, results)
        self._photograph_streams = photograph_streams

    def run_listed(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        result = _Result(operator, _kinds((args, kwargs)))
        self._results.append(result)  # before it runs: it may fail, and the layer may go on
        value = operator(*args, **kwargs)
        result.keep(value, self._photograph(operator))
        return value

    def run_other(self, operator: Any, args: Any, kwargs: Any) -> Any:
        # The versions of a result do not tell of all changes: a GRU changes parts of its gates that autograd does not
        # know of, and the output of a linear layer without a bias has versions of its own.
        names = _written_arguments(operator)
        if names and self._results:
            given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
            changed = _storages_in([given[name] for name in names if name in given])
            for result in self._results:
                if result.shares(changed):
                    result.drop()
        output = operator(*args, **kwargs)
        if operator in _UNKNOWN_VIEWS:
            for tensor in tree_leaves(output):
                for result in self._results:
                    if result.shares(_storages_in(tensor)):
                        result.note_alias(tensor)
        return output

    def _photograph(self, operator: OpOverload) -> list[Restore]:
        if operator.namespace != "aten":  # it may draw from anything, and lack the tag
            return [self._photograph_streams(), HostStreams().restore]
        return [self._photograph_streams()] if torch.Tag.nondeterministic_seeded in operator.tags else []


class _Reusing(PolicyMode):
    # Its `position`: how many listed operators have run.

    def __init__(self, operators: frozenset[OpOverload], results: list[_Result]) -> None:
        super().__init__(operators, results)
        self.position = 0

    def run_listed(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        result = self._results[self.position] if self.position < len(self._results) else None
        self.position += 1
        given = _kinds((args, kwargs))
        if result is None or result.operator is not operator or result.given != given:
            before = "none" if result is None else f"{result.operator} of {_shown(result.given)}"
            raise UnexpectedError(
                f"called {operator} of {_shown(given)} in the replay where it called {before} in forward, so kept "
                f"results (`policy`) cannot be told apart. {_CURE}"
            )
        value = result.take()
        return operator(*args, **kwargs) if value is None else value


@cache
def _written_arguments(operator: Any) -> tuple[int | str, ...]:
    """Positions and names of the arguments that an operator changes."""
    arguments = operator._schema.arguments if isinstance(operator, OpOverload) else ()
    written = [(i, each.name) for i, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write]
    return tuple(key for pair in written for key in pair)


def _held(leaf: Any, keep: Keep | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach() if keep is None else _HandedOver(keep(leaf))


def _given_back(leaf: Any) -> Any:
    if isinstance(leaf, _HandedOver):
        return leaf.handle.tensor().detach()
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _probe(tensor: Tensor) -> Tensor:
    """Has the versions of `tensor`, but not its memory."""
    probe = tensor.detach()
    if type(probe) is Tensor or is_fake(probe):
        probe.data = probe.new_empty(0)
    return probe


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else -1


def _storages_in(value: Any) -> set[int]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return {storage._cdata for leaf in leaves for storage in storages(leaf)}


def _draws_from_own_stream(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _kinds(arguments: Any) -> Kinds:
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _shown(kinds: Iterable[tuple[torch.Size, torch.dtype]]) -> str:
    return " and ".join(str(tuple(shape)) for shape, _ in kinds) or "no tensors"
