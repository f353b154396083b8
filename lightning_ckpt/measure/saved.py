"""Bytes of saved activations: what autograd keeps between forward and backward."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_ckpt.measure.graph import graph_nodes, is_checkpoint_holder, packed_values
from lightning_ckpt.measure.storage import StorageSizes
from lightning_ckpt.offload.records import Flattened, Kept, Moved
from lightning_ckpt.recompute.frame import Slot


@dataclass(frozen=True)
class SavedBytes:
    """Saved activations of one backward, parameters excluded, each storage counted once.

    Attributes:
        saved: bytes that autograd and the recomputed layers' frames keep, offloaded ones left out.
        avoided: bytes that autograd would keep in addition if no layer were recomputed by this package.
        complete: False where a part of the graph was compiled: the compiler recomputes inside and does not say what.
    """

    saved: int
    avoided: int
    complete: bool


def saved_bytes(outputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> SavedBytes:
    """Count what is kept for the backward of `outputs`, for example of the loss.

    Frames note what they leave unsaved only while somebody watches (`recompute.watch`); else `avoided` is 0.

    Args:
        outputs: where backward will start. Tensors that were not computed with gradients count nothing.
        parameters: tensors that are in memory anyway: parameters and buffers.

    Returns:
        The bytes, counted from whole storages.

    Example::

        loss = model(x).square().mean()
        print(saved_bytes([loss], model.parameters()).saved)
    """
    present, kept, unsaved = StorageSizes(), StorageSizes(), StorageSizes()
    for parameter in parameters:
        present.add(parameter)
    frames: set[int] = set()
    complete = True
    for node in graph_nodes(outputs):
        complete = complete and "CompiledFunction" not in node.name()
        for packed, unpack_hook in packed_values(node):
            if isinstance(packed, Slot):
                frame = packed.frame
                if id(frame) not in frames:
                    frames.add(id(frame))
                    _add_all(kept, frame.arguments.on_device())
                    if frame.unsaved is not None:
                        unsaved.update(frame.unsaved)
            elif is_checkpoint_holder(packed):
                foreign = _checkpoint_frame(unpack_hook)
                if foreign is not None and id(foreign) not in frames:
                    frames.add(id(foreign))
                    _add_all(kept, _checkpoint_inputs(foreign))
            else:
                _add_all(kept, _tensors_in(packed))
    return SavedBytes(kept.bytes_without(present), unsaved.bytes_without(present, kept), complete)


def _add_all(sizes: StorageSizes, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        sizes.add(tensor)


def _tensors_in(packed: Any) -> Iterator[Tensor]:
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, (tuple, list)):
        for item in packed:
            yield from _tensors_in(item)
    elif isinstance(packed, (Moved, Kept, Flattened)):
        yield from packed.on_device


# The frame of `torch.utils.checkpoint`, which keeps the inputs, is known to the unpack hook alone.


def _checkpoint_frame(unpack_hook: Callable[..., Any] | None) -> Any:
    cells = getattr(unpack_hook, "__closure__", None) or ()
    contents = (cell.cell_contents for cell in cells)
    return next((content for content in contents if type(content).__name__ == "_CheckpointFrame"), None)


def _checkpoint_inputs(frame: Any) -> Iterator[Tensor]:
    for saved in getattr(frame, "saved_args", ()):
        yield from _tensors_in(getattr(saved, "data", None))
