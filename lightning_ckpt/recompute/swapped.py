"""Weights that stand in for a module's parameters during a call only: `torch.func.functional_call`, meta-learning."""

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_ckpt.recompute.tensors import regrow

Table = dict[str, Any]


class Swapped:
    """Plain tensors found among the parameters of modules.

    Only where a parameter is back in its place are they put there again for the replay. FSDP too has plain tensors
    there, views of what it has gathered, and brings new ones by itself.

    Args:
        modules: the modules that a layer consists of.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables: list[Table] = [module._parameters for module in modules]
        self._found: list[tuple[Table, str, Tensor, bool, int]] = [
            (table, name, value.detach(), value.requires_grad, value._version)
            for table in tables
            for name, value in table.items()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        ]

    def changed_shape(self) -> tuple[int, ...] | None:
        """The shape of one that was changed in place since, if any."""
        for table, name, value, _, version in self._found:
            if value._version != version and isinstance(table.get(name), nn.Parameter):
                return tuple(value.shape)
        return None

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put them in their places again, until `undo` is closed."""
        for table, name, value, needs_gradient, _ in self._found:
            present = table.get(name)
            if isinstance(present, nn.Parameter):
                undo.callback(table.__setitem__, name, present)
                table[name] = regrow(value) if needs_gradient else value
