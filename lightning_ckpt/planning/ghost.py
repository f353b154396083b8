"""Host memory in a rehearsal: what is moved there is gone from the device until backward asks for it."""

import weakref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ckpt.offload.admission import Admission


class _Moved:
    """One storage that has been moved."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._back: weakref.ref[Tensor] | None = None

    def back(self, device: torch.device) -> Tensor:
        """It is on the device again, for as long as anything uses it."""
        tensor = None if self._back is None else self._back()
        if tensor is None:
            tensor = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._back = weakref.ref(tensor)
        return tensor


class _Ghost:
    """A saved tensor: here, or moved."""

    def __init__(self, tensor: Tensor, here: Tensor | None, moved: _Moved | None) -> None:
        self._here = here
        self._moved = moved
        self._dtype, self._device = tensor.dtype, tensor.device
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        if self._here is not None:
            return self._here
        assert self._moved is not None
        return self._moved.back(self._device).view(self._dtype).as_strided(*self._layout)

    @property
    def is_changed(self) -> bool:
        return False

    @property
    def on_device(self) -> list[Tensor]:
        return [] if self._here is None else [self._here]


class GhostHost:
    """Moves fake tensors, as the offload engine moves real ones, but in no time.

    Args:
        module: the model, whose parameters and buffers stay.
        device: the device whose memory is to be saved.
        min_bytes: storages below this size stay.
    """

    def __init__(self, module: nn.Module, device: torch.device, min_bytes: int) -> None:
        self._module = module
        self._admission = Admission(device, min_bytes)
        self._moved: dict[int, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}

    def learn(self) -> None:
        """Note what the model keeps in memory anyway."""
        self._admission.learn(self._module)

    def pack(self, tensor: Tensor) -> _Ghost:
        """Move a tensor; what autograd is given in its place."""
        if self._admission.reason_to_stay(tensor) is not None:
            return _Ghost(tensor, tensor.detach(), None)
        storage = tensor.untyped_storage()
        reference, known = self._moved.get(storage._cdata, (None, None))
        moved = known() if known is not None and reference is not None and not reference.expired() else None
        if moved is None:
            moved = _Moved(storage.nbytes())
            self._moved[storage._cdata] = StorageWeakRef(storage), weakref.ref(moved)
        return _Ghost(tensor, None, moved)
