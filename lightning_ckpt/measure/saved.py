"""Bytes of saved activations: what autograd keeps between forward and backward."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from lightning_ckpt.measure.graph import graph_nodes, is_checkpoint_holder, kind_of, packed_values
from lightning_ckpt.measure.storage import PLAIN, StorageSizes
from lightning_ckpt.offload.records import Flattened, Kept, Moved
from lightning_ckpt.recompute.frame import Slot


@dataclass(frozen=True)
class SavedBytes:
    """Saved activations of one backward, parameters excluded, each storage counted once.

    Attributes:
        saved: bytes that autograd and the recomputed layers' frames keep, offloaded ones left out.
        avoided: bytes that autograd would keep in addition if no layer were recomputed by this package.
        plain: bytes that autograd would keep without any treatment by this package: nothing recomputed, nothing moved.
        pattern: equal where the same storages are kept in the same order, and the same layers are verified.
        complete: False where a part of the graph was compiled: the compiler recomputes inside and does not say what.
    """

    saved: int
    avoided: int
    plain: int
    pattern: int = 0
    complete: bool = True


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
    inputs, plain = StorageSizes(), StorageSizes()  # what frames keep; what autograd keeps, wherever it is
    present.add_all(parameters)
    frames: set[int] = set()
    verified = 0
    complete = True
    for node in graph_nodes(outputs):
        kind = kind_of(node)
        if kind.holds_nothing:
            continue
        complete = complete and not kind.is_compiled
        for packed, record in packed_values(node):
            if type(packed) in PLAIN:  # nearly all of them
                kept.add(packed)
            elif isinstance(packed, Slot):
                frame = packed.frame
                if id(frame) not in frames:
                    frames.add(id(frame))
                    inputs.add_all(frame.on_device())
                    verified += frame.verified
                    if frame.unsaved is not None:
                        unsaved.update(frame.unsaved)
            elif is_checkpoint_holder(packed):
                foreign = _checkpoint_frame(record)
                if foreign is not None and id(foreign) not in frames:
                    frames.add(id(foreign))
                    kept.add_all(_checkpoint_inputs(foreign))
            else:
                kept.add_all(_tensors_in(packed))
                _add_moved(plain, packed)
    pattern = hash((kept.sizes, inputs.sizes, verified))
    saved_plainly = kept.bytes_without(present)
    if not frames and not plain.sizes:  # nothing is treated
        return SavedBytes(saved_plainly, 0, saved_plainly, pattern, complete)
    plain.update(kept)
    plain.update(unsaved)
    kept.update(inputs)
    return SavedBytes(
        saved=kept.bytes_without(present),
        avoided=unsaved.bytes_without(present, kept),
        plain=plain.bytes_without(present),
        pattern=pattern,
        complete=complete,
    )


def kept_tensors(node: Node) -> Iterator[Tensor]:
    """What `node` keeps for its backward; for a recomputed layer, its frame's inputs and what has been regained."""
    for packed, record in packed_values(node):
        if isinstance(packed, Slot):
            yield from packed.frame.on_device()
            if packed.value is not None:
                yield packed.value
        elif is_checkpoint_holder(packed):
            foreign = _checkpoint_frame(record)
            if foreign is not None:
                yield from _checkpoint_inputs(foreign)
        else:
            yield from _tensors_in(packed)


def _add_moved(sizes: StorageSizes, packed: Any) -> None:
    if isinstance(packed, Moved):
        record = packed.holder.record
        sizes.add_storage(record.identity, record.nbytes)
    elif isinstance(packed, Flattened):
        for part in packed.parts.values():
            _add_moved(sizes, part)


def _tensors_in(packed: Any) -> Iterator[Tensor]:
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, (tuple, list)):
        for item in packed:
            yield from _tensors_in(item)
    elif isinstance(packed, (Moved, Kept, Flattened)):
        yield from packed.on_device


# The frame of `torch.utils.checkpoint`, which keeps the inputs, is known to the unpack hook alone.


def _checkpoint_frame(record: Any) -> Any:
    cells = getattr(record.unpack_hook, "__closure__", None) or ()
    contents = (cell.cell_contents for cell in cells)
    return next((content for content in contents if type(content).__name__ == "_CheckpointFrame"), None)


def _checkpoint_inputs(frame: Any) -> Iterator[Tensor]:
    for saved in getattr(frame, "saved_args", ()):
        yield from _tensors_in(getattr(saved, "data", None))
