"""Which layers of a model are treated: plain PyTorch, no Lightning.

`select_layers` is the whole interface. It finds the layers (`detect`), or matches what the user wrote (`match`), then
counts every n-th, and returns a `Selection` that says what it chose.
"""

from lightning_ckpt.selection.match import SelectionError
from lightning_ckpt.selection.select import select_layers
from lightning_ckpt.selection.summary import Selection

__all__ = ["Selection", "SelectionError", "select_layers"]
