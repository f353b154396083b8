"""How much a batch holds: tokens where it can be told, samples else."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """Contents of a batch.

    Attributes:
        tokens: tokens, padding included, or None where the batch holds none.
        samples: rows of the first tensor, or None where there is no tensor.
    """

    tokens: int | None
    samples: int | None


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    return list(_tensors(batch))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        names = dict.fromkeys([*(each.name for each in fields(value)), *getattr(value, "__dict__", ())])
        yield from _tensors([getattr(value, name, None) for name in names])
    else:
        yield from _tensors(list(parts_of(value).values()))


def parts_of(batch: Any) -> dict[str, Any]:
    """Attributes of a batch of a kind of its own, which can move to a device itself: those that may hold tensors."""
    if not callable(getattr(batch, "to", None)) or not hasattr(batch, "__dict__") or isinstance(batch, nn.Module):
        return {}
    return {name: value for name, value in vars(batch).items() if isinstance(value, (Tensor, Mapping, list, tuple))}


def shapes_of(tensors: Iterable[Tensor]) -> Hashable:
    """What batches of one kind have in common: shapes and types of their tensors."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def count_work(batch: Any) -> Work:
    """Count tokens and samples of a batch by its shapes.

    Tokens are the elements of `batch["input_ids"]`, as Hugging Face names them, or else of the first tensor if that is
    a table of integers, one row a sample. Samples are the rows of the first tensor.
    """
    first = next((tensor for tensor in tensors_of(batch) if tensor.dim() > 0), None)
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        first = batch["input_ids"]
    if first is None or first.dim() == 0:
        return Work(None, None)
    is_text = first.dim() == 2 and first.dtype in (torch.int64, torch.int32)
    return Work(first.numel() if is_text else None, first.shape[0])
