"""The link to host memory: how fast it is, and how much may be on its way."""

from dataclasses import replace

import torch

from lightning_ckpt.offload import OffloadOptions
from lightning_ckpt.offload.budget import default_host_budget, slab_bytes
from lightning_ckpt.offload.outbound import part_bytes
from lightning_ckpt.planning.profile import Profile
from lightning_ckpt.planning.solver import Link

#: Bytes per second, taken where the link is not there to be measured: PCIe 4.0 with 16 lanes, less its overhead.
BYTES_PER_S = 2.2e10

_PROBE_BYTES = 64 * 2**20
_PROBES = 3


def link_of(profile: Profile, options: OffloadOptions, bytes_per_s: float = BYTES_PER_S, local_ranks: int = 1) -> Link:
    """The link as a constraint on plans.

    Args:
        profile: what would travel.
        options: those of the user.
        bytes_per_s: how fast the link is, each way.
        local_ranks: processes on this machine that share its memory.
    """
    moved = [max((cost.moved for cost in layer.costs.values()), default=0) for layer in profile.layers]
    largest = max(moved, default=0)
    part = min(part_bytes(sum(moved)), largest)  # without room for one, compute would wait for every copy
    each_way = max(part, largest // 2)
    inflight = each_way if options.max_inflight_bytes is None else int(options.max_inflight_bytes)
    # The engine brings back one part ahead at least.
    prefetch = each_way if options.prefetch_bytes is None else max(int(options.prefetch_bytes), part)
    budget = options.host_budget
    host_bytes = default_host_budget(local_ranks) if budget is None else int(budget) // local_ranks
    slab = slab_bytes(host_bytes)
    usable = host_bytes // slab * slab  # whole slabs only
    return Link(bytes_per_s, inflight, prefetch, usable, part)


def measured(link: Link, device: torch.device) -> Link:
    """The same link with its real speed, both ways at once; the slower way counts.

    What is copied meanwhile takes no more memory than the link's window, on the device and on the host.
    """
    nbytes = min(_PROBE_BYTES, link.window_bytes // 2, link.host_bytes // 2)
    if not nbytes:
        return link
    bytes_per_s = _measure(device, nbytes)
    torch.accelerator.empty_host_cache()  # the engine's slabs are to have all of it
    return replace(link, bytes_per_s=bytes_per_s)


def _measure(device: torch.device, nbytes: int) -> float:
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device), torch.Stream(device)]
    for stream in streams:  # the memory may have been used before
        stream.wait_stream(torch.accelerator.current_stream(device))
    pairs = [(host[0], here[0]), (here[1], host[1])]
    best = 0.0
    for _ in range(_PROBES):
        marks = []
        for stream, (target, source) in zip(streams, pairs, strict=True):
            with stream:
                start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
                start.record(stream)
                target.copy_(source, non_blocking=True)
                end.record(stream)
            marks.append((start, end))
        torch.accelerator.synchronize(device)
        seconds = max(start.elapsed_time(end) for start, end in marks) / 1e3
        if seconds > 0:
            best = max(best, nbytes / seconds)
    return best or BYTES_PER_S
