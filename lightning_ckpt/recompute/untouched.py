"""Run a module for a look at it, and leave everything it can reach as it was."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_ckpt.recompute.contents import read_content, same_content, write_content
from lightning_ckpt.recompute.host_random import HostStreams
from lightning_ckpt.recompute.inventory import Inventory
from lightning_ckpt.recompute.streams import Stream, stream_of

_ITERATOR = " (an iterator)"


class UntouchableError(RuntimeError):
    """Something can be reached that could not be put back; the message names it."""


@contextlib.contextmanager
def untouched(module: nn.Module, around: Mapping[str, Any] | None = None) -> Iterator[None]:
    """What runs inside may assign attributes, fill containers, draw random numbers: afterwards nothing has happened.

    Tensors keep their numbers only if what runs inside does not write to real ones, apart from weights that are given
    other ones (`weight.data = ...`) or gradients.

    Args:
        module: whatever can be reached from it holds afterwards what it holds now.
        around: other objects, by name, of which the same is true. Default: none.

    Raises:
        UntouchableError: there is an iterator in one of them.
    """
    inventory = Inventory(module)
    everything = [inventory.quiet, inventory.look_at_busy_roots(), Inventory.reach(dict(around or {}))]
    given_up = [*inventory.given_up, *(place for each in everything for place in each.given_up)]
    for place in given_up:
        if place.endswith(_ITERATOR) and not place.endswith(f".gen{_ITERATOR}"):  # that of an open context manager
            raise UntouchableError(f"it may advance `{_name_of(place)}`, an iterator")
    holders = [holder for each in everything for holder in each.holders]
    contents = [read_content(holder) for holder in holders]
    host = HostStreams()
    owned = [stream for each in everything for stream in each.streams]
    streams = [(stream, stream.read()) for stream in (*owned, *_default_streams())]
    weights = [(weight, weight.data, weight.grad) for weight in module.parameters()]
    try:
        yield
    finally:
        for holder, content in zip(holders, contents, strict=True):
            if not same_content(content, read_content(holder)):
                write_content(holder, content)
        host.restore()
        for stream, state in streams:
            stream.write(state)
        for weight, data, gradient in weights:
            if weight.device != data.device or weight.data_ptr() != data.data_ptr():
                weight.data = data
            if weight.grad is not gradient:
                weight.grad = gradient


def _name_of(place: str) -> str:
    """A place as users write it: those of a `LightningModule` are entries of its attributes."""
    return re.sub(r"^\.?\['(\w+)'\]", r"\1", place.removesuffix(_ITERATOR)).lstrip(".")


def _default_streams() -> list[Stream]:
    accelerator = torch.accelerator.current_accelerator()
    found = [torch.default_generator]
    if accelerator is not None:
        found += getattr(torch.get_device_module(accelerator), "default_generators", ())
    return [stream for stream in map(stream_of, found) if stream is not None]
