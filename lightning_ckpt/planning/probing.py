"""Learn what layers cost from real steps, where a rehearsal is not possible.

First every layer has the treatment that takes least, so that the step fits; what it does not keep then is noted. An
operator policy is tried on single layers, one of each kind, as far as there is room for that.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.profile import Cost, LayerProfile, Profile, layer_costs, make_profile
from lightning_ckpt.planning.trace import StepTrace
from lightning_ckpt.planning.treatment import Treatment


def profile_of_cheapest(modules: Mapping[str, nn.Module], trace: StepTrace, moves: bool) -> Profile:
    """What a step in which every layer took least has shown.

    Args:
        modules: the layers by qualified name.
        trace: a step in which every layer was recomputed and watched.
        moves: whether the layers' inputs were in host memory.
    """
    cheapest = Treatment.RECOMPUTE_OFFLOAD if moves else Treatment.RECOMPUTE
    profile = make_profile(modules, {cheapest: trace})
    layers = []
    for layer in profile.layers:
        least = layer.costs[cheapest]
        inputs = layer.input_bytes if moves else 0
        unsaved = sum(call.unsaved_bytes for call in trace.calls if call.name == layer.name)
        recomputed = replace(least, resident=least.resident + inputs)
        kept = Cost(recomputed.resident + unsaved, max(recomputed.resident + unsaved, least.transient))
        costs = {Treatment.KEEP: kept, Treatment.RECOMPUTE: recomputed}
        if moves:
            costs[Treatment.OFFLOAD] = replace(kept, resident=least.resident, moved=unsaved + inputs)
            costs[Treatment.RECOMPUTE_OFFLOAD] = replace(least, moved=inputs)
        layers.append(replace(layer, costs=costs))
    return replace(profile, layers=tuple(layers))


def choose_probes(planner: Planner, limit: int) -> list[str]:
    """Layers to try an operator policy on, the last one of every kind first, as far as they fit into `limit` bytes.

    A policy keeps no more than is kept without recompute.
    """
    layers = planner.profile.layers
    treatments = [list(layer.costs)[-1] for layer in layers]
    chosen: list[str] = []
    kinds = set()
    for i in reversed(range(len(layers))):
        if layers[i].kind in kinds:
            continue
        tried = [*treatments[:i], Treatment.KEEP, *treatments[i + 1 :]]
        if planner.peak_of(tried) <= limit:
            treatments = tried
            kinds.add(layers[i].kind)
            chosen.append(layers[i].name)
    return chosen


def with_policy(profile: Profile, trace: StepTrace, names: list[str], ratio: float = 1.0) -> Profile:
    """The profile with what an operator policy has cost on some layers, for all layers of their kinds.

    Args:
        profile: what is known.
        trace: a step in which these layers had the policy.
        names: these layers; some of them may not have run.
        ratio: how many times larger the batches of the profile are than those of that step. Default: no larger.
    """
    seen = {name: cost.scaled(ratio) for name, cost in layer_costs(trace).items() if name in names}
    probed = {layer.kind: (layer, seen[layer.name]) for layer in profile.layers if layer.name in seen}
    layers = [_with_policy(layer, *probed[layer.kind]) if layer.kind in probed else layer for layer in profile.layers]
    return replace(profile, layers=tuple(layers))


def _with_policy(layer: LayerProfile, probe: LayerProfile, cost: Cost) -> LayerProfile:
    # Gradients of later layers are there already in a layer's own backward: more for early layers than for the probe.
    later = max(0, layer.costs[Treatment.RECOMPUTE].transient - probe.costs[Treatment.RECOMPUTE].transient)
    costs = {**layer.costs, Treatment.POLICY: replace(cost, transient=cost.transient + later)}
    return replace(layer, costs={each: costs[each] for each in Treatment if each in costs})
