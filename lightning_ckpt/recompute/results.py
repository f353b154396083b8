"""Results of chosen operators, kept in a layer's forward so that its replay need not compute them: an operator policy.

It is PyTorch's selective checkpointing for eager mode, made exact: an operator that draws random numbers leaves the
streams as if it had run, a result that was changed in place is computed again, and backward may run several times.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ckpt.recompute.arguments import Handle, Keep
from lightning_ckpt.recompute.state import UnexpectedError


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


@dataclass
class _Result:
    """What one call of an operator has returned.

    Attributes:
        operator: the operator.
        given: shapes and types of the tensors it was given.
        value: what it returned; None when that is not kept, or was used.
        versions: of the tensors in `value`.
        restore_streams: puts the random streams where the operator has left them; None if it draws nothing.
    """

    operator: OpOverload
    given: list[tuple[torch.Size, torch.dtype]]
    value: Any
    versions: list[int]
    restore_streams: Callable[[], None] | None

    def is_unchanged(self) -> bool:
        leaves = zip(tree_leaves(self.value), self.versions, strict=True)
        return not any(
            leaf.handle.is_changed if isinstance(leaf, _HandedOver) else _version(leaf) != version
            for leaf, version in leaves
        )


class Results:
    """Results of some operators in one call of a layer, in the order in which they ran.

    Args:
        operators: whose results are kept.
        photograph_streams: makes a function that puts the random streams back where they are now.
    """

    def __init__(self, operators: frozenset[OpOverload], photograph_streams: Callable[[], Callable[[], None]]) -> None:
        self._operators = operators
        self._photograph_streams = photograph_streams
        self._results: list[_Result] = []
        self._needed = 0

    def note_saved(self) -> None:
        """Autograd saves a tensor: the replay goes on until here at least."""
        self._needed = len(self._results)

    @contextlib.contextmanager
    def keeping(self, keep: Keep | None) -> Iterator[None]:
        """Keep what the layer's operators return inside.

        Args:
            keep: looks after the results until the replay, on the host, say; None leaves them where they are.
        """
        try:
            with _Keeping(self._operators, self._results, self._photograph_streams):
                yield
            for i, result in enumerate(self._results):
                # The replay stops before the last ones. What has changed since cannot be given; it is computed again.
                if i >= self._needed or not result.is_unchanged():
                    result.value = None
        except BaseException:
            self._results.clear()
            raise
        finally:  # a kept tensor must not hang on the graph that holds this object
            for result in self._results:
                result.value = tree_map(lambda value: _kept(value, keep), result.value)

    def reusing(self) -> AbstractContextManager[Any]:
        """Give the results to the layer's operators inside, each once, so that its memory is free afterwards."""
        return _Reusing(self._operators, self._results)

    def on_device(self) -> Iterator[Tensor]:
        """What is held in memory of the device that computes."""
        for result in self._results:
            for value in tree_leaves(result.value):
                if isinstance(value, Tensor):
                    yield value
                elif isinstance(value, _HandedOver):
                    yield from value.handle.on_device

    def kept_operators(self) -> set[OpOverload]:
        """The operators of which a result is kept."""
        return {result.operator for result in self._results if result.value is not None}


class PolicyMode(TorchDispatchMode):
    """Sees the chosen operators of one call of a layer, and no others."""

    # Else a higher-order operator (flex_attention, what compiled code wraps) would raise under the mode.
    supports_higher_order_operators = True

    def __init__(self, operators: frozenset[OpOverload], results: list[_Result]) -> None:
        super().__init__()
        self.operators = operators
        self.results = results
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
        if func not in self.operators or _local.level != self._level or _draws_from_own_stream(args, kwargs):
            return func(*args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Keeping(PolicyMode):
    def __init__(
        self,
        operators: frozenset[OpOverload],
        results: list[_Result],
        photograph_streams: Callable[[], Callable[[], None]],
    ) -> None:
        super().__init__(operators, results)
        self._photograph_streams = photograph_streams

    def run(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        value = operator(*args, **kwargs)
        streams = self._photograph_streams() if _draws(operator) else None
        versions = [_version(leaf) for leaf in tree_leaves(value)]
        self.results.append(_Result(operator, _kinds((args, kwargs)), value, versions, streams))
        return value


class _Reusing(PolicyMode):
    def __init__(self, operators: frozenset[OpOverload], results: list[_Result]) -> None:
        super().__init__(operators, results)
        self._next = 0

    def run(self, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        result = self.results[self._next] if self._next < len(self.results) else None
        self._next += 1
        given = _kinds((args, kwargs))
        if result is None or result.operator is not operator or result.given != given:
            before = "nothing" if result is None else f"{result.operator} of {_shown(result.given)}"
            raise UnexpectedError(
                f"called {operator} of {_shown(given)} in the replay where it called {before} in forward, so kept "
                "results (`policy`) cannot be told apart. Leave the operator out of `policy`, or the layer out with "
                "`layers=` or `check_fn=`."
            )
        if result.value is None or not result.is_unchanged():
            return operator(*args, **kwargs)
        value, result.value = result.value, None
        if result.restore_streams is not None:
            result.restore_streams()
        return tree_map(_given_back, value)


class _HandedOver:
    """In the place of a tensor that somebody else looks after."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle


def _kept(value: Any, keep: Keep | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach() if keep is None else _HandedOver(keep(value))


def _given_back(value: Any) -> Any:
    if isinstance(value, _HandedOver):
        return value.handle.tensor().detach()
    return value.detach() if isinstance(value, Tensor) else value


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1


def _draws(operator: OpOverload) -> bool:
    # Operators of other libraries may lack the tag.
    return torch.Tag.nondeterministic_seeded in operator.tags or operator.namespace != "aten"


def _draws_from_own_stream(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _kinds(arguments: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _shown(kinds: Iterable[tuple[torch.Size, torch.dtype]]) -> str:
    return " and ".join(str(tuple(shape)) for shape, _ in kinds) or "no tensors"
