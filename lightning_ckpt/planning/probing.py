"""Learn what layers cost from real steps, where a rehearsal is not possible.

First every layer has the treatment that takes least, so that the step fits. Then single layers, one of each kind, are
tried with the others, as far as there is room for that.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_ckpt.planning.profile import Cost, LayerProfile, Profile, layer_costs, make_profile
from lightning_ckpt.planning.trace import StepTrace
from lightning_ckpt.planning.treatment import Treatment


def profile_of_cheapest(modules: Mapping[str, nn.Module], trace: StepTrace, moves: bool) -> Profile:
    """What a step in which every layer took least has shown, and bounds for what it has not.

    A layer that is kept holds no more than it needs at once when it runs again, its gradients and those of the layers
    behind it left out.

    Args:
        modules: the layers by qualified name.
        trace: a step in which every layer was recomputed.
        moves: whether the layers' inputs were in host memory.
    """
    cheapest = Treatment.RECOMPUTE_OFFLOAD if moves else Treatment.RECOMPUTE
    profile = make_profile(modules, {cheapest: trace})
    layers = []
    for layer in profile.layers:
        least = layer.costs[cheapest]
        kept = Cost(least.transient, least.transient)
        costs = {Treatment.KEEP: kept, Treatment.RECOMPUTE: least}
        if moves:
            inputs = layer.input_bytes
            costs[Treatment.RECOMPUTE] = replace(least, resident=least.resident + inputs)
            costs[Treatment.OFFLOAD] = replace(kept, resident=least.resident, moved=kept.resident)
            costs[Treatment.RECOMPUTE_OFFLOAD] = replace(least, moved=inputs)
        layers.append(replace(layer, costs=costs))
    return replace(profile, layers=tuple(layers))


def choose_probes(profile: Profile, treatment: Treatment, limit: int) -> list[str]:
    """Layers to try a treatment on, the last one of every kind first, as far as they fit into `limit` bytes."""
    cheapest = list(profile.layers[0].costs)[-1]
    held = profile.base + sum(layer.costs[cheapest].resident for layer in profile.layers)
    most = max((layer.costs[cheapest].transient for layer in profile.layers), default=0)
    room = limit - held - max(most, profile.head)
    chosen: list[str] = []
    kinds = set()
    for layer in reversed(profile.layers):
        bound = _kept_at_most(layer)
        if layer.kind not in kinds and bound <= room:
            kinds.add(layer.kind)
            chosen.append(layer.name)
            room -= bound
    return chosen


def with_probed(profile: Profile, trace: StepTrace, treatment: Treatment, names: list[str]) -> Profile:
    """The profile with what layers have cost under a treatment, for all layers of their kinds.

    Args:
        profile: what is known.
        trace: a step in which some layers had the treatment.
        treatment: it.
        names: these layers.
    """
    seen = layer_costs(trace)
    probed = {layer.kind: (layer, seen[layer.name]) for layer in profile.layers if layer.name in names}
    layers = []
    for layer in profile.layers:
        if layer.kind in probed:
            layer = _with_cost(layer, treatment, *probed[layer.kind])
        layers.append(layer)
    return replace(profile, layers=tuple(layers))


def _with_cost(layer: LayerProfile, treatment: Treatment, probe: LayerProfile, cost: Cost) -> LayerProfile:
    # Gradients of later layers are there already in a layer's own backward: more for early layers than for the probe.
    known = Treatment.RECOMPUTE
    later = max(0, layer.costs[known].transient - probe.costs[known].transient)
    costs = dict(layer.costs)
    costs[treatment] = replace(cost, transient=cost.transient + later)
    if treatment is Treatment.KEEP and Treatment.OFFLOAD in costs:
        costs[Treatment.OFFLOAD] = replace(costs[Treatment.OFFLOAD], moved=cost.resident)
    return replace(layer, costs={each: costs[each] for each in Treatment if each in costs})


def _kept_at_most(layer: LayerProfile) -> int:
    return layer.costs[Treatment.RECOMPUTE].transient
