"""A small engine that keeps saved tensors in pinned memory, with bugs on demand: it tests the device, nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

BUGS = {
    "copy in before copy out": "the copy to the device does not wait until the copy to the host has filled the buffer",
    "no record_stream out": "the device's memory may be reused before the copy to the host has read it",
    "no record_stream in": "memory allocated on the stream of copies may be reused while the layers still read it",
    "use before copy in": "the layer does not wait for the copy to the device",
    "copy out before use": "the copy to the host does not wait for the layer that computes the tensor",
    "buffer reused early": "a buffer is reused while the copy to the device still reads it",
}


@dataclass(eq=False)
class Handle:
    """A tensor that is in pinned memory, on its way there, or on its way back."""

    buffer: Tensor
    size: torch.Size
    dtype: torch.dtype
    index: int
    copied_out: torch.Event | None = None
    tensor: Tensor | None = None
    copied_in: torch.Event | None = None

    @property
    def host(self) -> Tensor:
        return self.buffer.view(self.dtype).view(self.size)


class Engine:
    """Hooks for saved tensors, as a context manager.

    Args:
        *bugs: names in `BUGS`.
        prefetch: how many tensors to fetch ahead in backward.
    """

    def __init__(self, *bugs: str, prefetch: int = 2) -> None:
        assert set(bugs) <= set(BUGS)
        self.bugs = set(bugs)
        self.prefetch = prefetch
        self.min_bytes = 64
        self.skip: set[int] = set()  # addresses of parameters
        self.packed = 0
        self.out_stream, self.in_stream = torch.Stream(device="sim"), torch.Stream(device="sim")
        self._handles: list[Handle | None] = []
        self._buffers: dict[int, list[tuple[Tensor, torch.Event]]] = {}

    def _take_buffer(self, bytes: int) -> tuple[Tensor, torch.Event | None]:
        if free := self._buffers.get(bytes):
            return free.pop()
        return torch.empty(bytes, dtype=torch.uint8, pin_memory=True), None

    def pack(self, tensor: Tensor) -> Handle | Tensor:
        if (
            tensor.device.type != "sim"
            or tensor.nbytes < self.min_bytes
            or not tensor.is_contiguous()
            or tensor.data_ptr() in self.skip
        ):
            return tensor
        buffer, last_use = self._take_buffer(tensor.nbytes)
        handle = Handle(buffer, tensor.shape, tensor.dtype, len(self._handles))
        if last_use is not None and "buffer reused early" not in self.bugs:
            self.out_stream.wait_event(last_use)
        if "copy out before use" not in self.bugs:
            self.out_stream.wait_stream(torch.accelerator.current_stream())
        with self.out_stream:
            handle.host.copy_(tensor.detach(), non_blocking=True)
        handle.copied_out = self.out_stream.record_event()
        if "no record_stream out" not in self.bugs:
            tensor.record_stream(self.out_stream)
        self._handles.append(handle)
        self.packed += 1
        return handle

    def fetch(self, handle: Handle) -> None:
        if handle.tensor is not None:
            return
        if "copy in before copy out" not in self.bugs:
            self.in_stream.wait_event(handle.copied_out)
        with self.in_stream:
            handle.tensor = torch.empty(handle.size, dtype=handle.dtype, device="sim")
            handle.tensor.copy_(handle.host, non_blocking=True)
        handle.copied_in = self.in_stream.record_event()
        self._buffers.setdefault(handle.buffer.numel(), []).append((handle.buffer, handle.copied_in))

    def unpack(self, handle: Handle | Tensor) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        self.fetch(handle)
        for earlier in self._handles[max(0, handle.index - self.prefetch) : handle.index][::-1]:
            if earlier is not None:
                self.fetch(earlier)
        self._handles[handle.index] = None
        stream = torch.accelerator.current_stream()
        if "use before copy in" not in self.bugs:
            stream.wait_event(handle.copied_in)
        tensor, handle.tensor = handle.tensor, None
        if "no record_stream in" not in self.bugs:
            tensor.record_stream(stream)
        return tensor

    def __enter__(self) -> "Engine":
        self._handles = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        del self._hooks  # a cycle of references would keep the buffers until the garbage collector comes


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small language model; its batches are rows of token numbers below 40."""

    def __init__(self, vocabulary: int = 40, width: int = 32, layers: int = 2, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.tokens(rows) + self.positions(torch.arange(rows.shape[1], device=rows.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(rows).flatten(0, 1), rows.flatten())
