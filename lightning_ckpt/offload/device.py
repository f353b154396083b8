"""What the engine has to know about the accelerator."""

import torch

#: The stream that this thread computes on, by the index of the device; a tenth of the cost of `torch.accelerator`'s.
current_stream = torch._C._accelerator_getStream
#: The backward pass that this thread works for, -1 if it does not.
current_backward = torch._C._current_graph_task_id

_MARGIN = 0.1  # of the device's memory, left to what comes later: other shapes, validation, fragments


def why_not(device: torch.device) -> str | None:
    """Why there is nothing to offload from `device`, None if there is.

    Example::

        why_not(torch.device("cpu"))   # 'there is no accelerator, so saved activations are in host memory already'
    """
    if device.type in ("cpu", "meta") or torch.accelerator.current_accelerator() is None:
        return "there is no accelerator, so saved activations are in host memory already"
    if torch.accelerator.current_accelerator().type != device.type:  # type: ignore[union-attr]
        return f"{device.type!r} is not the accelerator of this process"
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties is not None and getattr(properties(device), "is_integrated", False):
        return f"{device} shares its memory with the host, so moving activations would save nothing"
    return None


def room(device: torch.device) -> int:
    """Device memory in bytes that the process has not needed so far, with a margin; 0 where the device does not tell.

    What the allocator has reserved beyond its peak counts as free.
    """
    get_memory_info = getattr(torch.accelerator, "get_memory_info", None)
    if get_memory_info is None:
        return 0
    free, total = get_memory_info(device)
    unused = torch.accelerator.memory_reserved(device) - torch.accelerator.max_memory_allocated(device)
    return max(0, int(free + unused - _MARGIN * total))
