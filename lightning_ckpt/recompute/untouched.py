"""Run a module for a look at it, and leave everything it can reach as it was."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lightning_ckpt.recompute.contents import read_content, same_content, write_content
from lightning_ckpt.recompute.host_random import HostStreams
from lightning_ckpt.recompute.inventory import Inventory


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """What runs inside may assign attributes, fill containers, draw random numbers: afterwards nothing has happened.

    Values of tensors are not looked after: what runs inside must not write to real ones.

    Args:
        module: whatever can be reached from it holds afterwards what it holds now.
    """
    inventory = Inventory(module)
    busy = inventory.look_at_busy_roots()
    holders = [*inventory.quiet.holders, *busy.holders]
    contents = [read_content(holder) for holder in holders]
    host = HostStreams()
    streams = [(generator, generator.get_state()) for generator in _generators()]
    try:
        yield
    finally:
        for holder, content in zip(holders, contents, strict=True):
            if not same_content(content, read_content(holder)):
                write_content(holder, content)
        host.restore()
        for generator, state in streams:
            generator.set_state(state)


def _generators() -> list[torch.Generator]:
    accelerator = torch.accelerator.current_accelerator()
    found = [torch.default_generator]
    if accelerator is not None:
        found += getattr(torch.get_device_module(accelerator), "default_generators", ())
    return found
