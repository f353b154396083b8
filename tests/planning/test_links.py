"""The link as a constraint on plans: what users set, and what the engine makes of it."""

import pytest

from lightning_ckpt.offload import OffloadOptions
from lightning_ckpt.planning.links import link_of
from lightning_ckpt.planning.profile import Cost, LayerProfile, Profile
from lightning_ckpt.planning.treatment import Treatment

MIB = 2**20


def profile(*moved: int) -> Profile:
    """Layers of which so many bytes could travel."""
    layers = tuple(
        LayerProfile(f"h.{i}", i, 0, 0.0, {Treatment.OFFLOAD: Cost(0, nbytes, moved=nbytes)})
        for i, nbytes in enumerate(moved)
    )
    return Profile(layers, 0, 0, 0, True, 0.0, {})


def test_both_ways_have_a_window_of_half_the_largest_layer_or_of_a_part_of_all():
    link = link_of(profile(64 * MIB, 640 * MIB), OffloadOptions())
    assert (link.inflight_bytes, link.prefetch_bytes, link.window_bytes) == (320 * MIB, 320 * MIB, 640 * MIB)
    many = link_of(profile(*[40 * MIB] * 80), OffloadOptions())
    assert (many.inflight_bytes, many.prefetch_bytes) == (40 * MIB, 40 * MIB)
    assert link_of(profile(*[80 * MIB] * 80), OffloadOptions()).inflight_bytes == 64 * MIB  # no part is larger


def test_layers_that_travel_whole_have_room_for_one():
    """With less, compute would wait for every copy."""
    link = link_of(profile(*[MIB // 4] * 6), OffloadOptions())
    assert (link.part_bytes, link.inflight_bytes, link.prefetch_bytes) == (MIB // 4,) * 3


@pytest.mark.parametrize(
    ("options", "inflight", "prefetch"),
    [
        ({"max_inflight_bytes": "5MiB"}, 5 * MIB, 320 * MIB),
        ({"prefetch_bytes": "50MiB"}, 320 * MIB, 50 * MIB),
        ({"max_inflight_bytes": 0, "prefetch_bytes": 0}, 0, 10 * MIB),  # one part is brought back ahead in any case
    ],
)
def test_each_window_is_that_of_its_option(options, inflight, prefetch):
    link = link_of(profile(640 * MIB), OffloadOptions(**options))
    assert (link.inflight_bytes, link.prefetch_bytes) == (inflight, prefetch)


@pytest.mark.parametrize(
    ("budget", "ranks", "usable"),
    [("1GiB", 1, 1024 * MIB), ("1GiB", 3, 320 * MIB), ("7MiB", 1, 4 * MIB), ("5000", 1, 4096), (0, 1, 0)],
)
def test_host_memory_is_used_in_whole_slabs(budget, ranks, usable):
    assert link_of(profile(MIB), OffloadOptions(host_budget=budget), local_ranks=ranks).host_bytes == usable
