"""What every layer costs under every treatment, taken from steps in which all layers were treated alike."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from torch import nn

from lightning_ckpt.planning.budget import BudgetError
from lightning_ckpt.planning.trace import StepTrace
from lightning_ckpt.planning.treatment import Treatment
from lightning_ckpt.selection.summary import shorten_names


@dataclass(frozen=True)
class Cost:
    """What one layer costs under one treatment.

    Attributes:
        resident: bytes that it holds on the device between its forward and its backward, what it returns included.
        transient: the most bytes that it needs at once in its own forward or backward, its residents included.
        recompute_s: seconds of its second run.
        moved: bytes that travel to host memory.
    """

    resident: int
    transient: int
    recompute_s: float = 0.0
    moved: int = 0

    def scaled(self, ratio: float) -> "Cost":
        """The same for batches that are larger by a factor."""
        sizes = [int(nbytes * ratio) for nbytes in (self.resident, self.transient, self.moved)]
        return Cost(sizes[0], sizes[1], self.recompute_s * ratio, sizes[2])


@dataclass(frozen=True)
class LayerProfile:
    """One layer.

    Attributes:
        name: its qualified name.
        kind: equal for layers of the same structure and sizes, which take the same time.
        input_bytes: bytes of the activations that it is given.
        forward_s: seconds of its forward.
        costs: what it costs, by treatment, in the order of preference.
    """

    name: str
    kind: Hashable
    input_bytes: int
    forward_s: float
    costs: dict[Treatment, Cost]


@dataclass(frozen=True)
class Profile:
    """A model's training step, as far as treatments change it.

    Attributes:
        layers: its layers in the order of forward.
        base: bytes alive when the first layer begins.
        head: the most bytes that are needed at once between the last layer's forward and its backward, beyond what
            all layers hold.
        floor: the most bytes at times that no treatment changes.
        floor_is_optimizer: whether that is in the optimizer's step.
        step_s: seconds of a step in which everything is kept, the optimizer's left out.
        uncalled: names of layers that do not run in a training step.
        peaks: the most bytes of all in a step in which every layer had a treatment, for those that were seen.
    """

    layers: tuple[LayerProfile, ...]
    base: int
    head: int
    floor: int
    floor_is_optimizer: bool
    step_s: float
    peaks: Mapping[Treatment, int]
    uncalled: tuple[str, ...] = ()

    def with_times(
        self, forward_s: Mapping[str, float], recompute_s: Mapping[tuple[str, Treatment], float]
    ) -> "Profile":
        """The same with times that were measured, pooled over layers of a kind.

        Where a treatment was not seen on any layer of a kind, its time by formula is scaled by what forward took.

        Args:
            forward_s: seconds of forward, by layer.
            recompute_s: seconds of second runs, by layer and treatment.
        """
        kinds = {layer.name: layer.kind for layer in self.layers}
        forward = _medians((kinds[name], seconds) for name, seconds in forward_s.items() if name in kinds)
        again = _medians(((kinds[name], each), s) for (name, each), s in recompute_s.items() if name in kinds)
        layers = []
        for layer in self.layers:
            seconds = forward.get(layer.kind, layer.forward_s)
            scale = seconds / layer.forward_s if layer.forward_s else 1.0
            costs = {
                treatment: replace(cost, recompute_s=again.get((layer.kind, treatment), cost.recompute_s * scale))
                for treatment, cost in layer.costs.items()
            }
            layers.append(replace(layer, forward_s=seconds, costs=costs))
        return replace(self, layers=tuple(layers))

    def scaled(self, ratio: float) -> "Profile":
        """The same for batches that are larger by a factor: what activations take grows with them."""
        layers = tuple(
            replace(
                layer,
                input_bytes=int(layer.input_bytes * ratio),
                forward_s=layer.forward_s * ratio,
                costs={treatment: cost.scaled(ratio) for treatment, cost in layer.costs.items()},
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, head=int(self.head * ratio), step_s=self.step_s * ratio, peaks={})


def _medians(pairs: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    found: dict[Hashable, list[float]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: median(values) for key, values in found.items()}


def make_profile(modules: Mapping[str, nn.Module], traces: Mapping[Treatment, StepTrace]) -> Profile:
    """Costs from steps in which all layers had the same treatment.

    Args:
        modules: the layers by qualified name.
        traces: a step for each treatment, in the order of preference; the same calls in all of them.

    Returns:
        The profile. A layer that was never called is left out.

    Raises:
        BudgetError: none was called.
    """
    first = next(iter(traces.values()))
    if not first.calls:
        raise BudgetError(
            f"none of the {len(modules)} layers ({shorten_names(list(modules))}) runs in a training step, so there is "
            "nothing to plan. Name those that do with `layers=`."
        )
    names = list(dict.fromkeys(call.name for call in first.calls))
    by_treatment = {treatment: layer_costs(trace) for treatment, trace in traces.items()}
    kept = traces.get(Treatment.KEEP, first)
    moves = {treatment for treatment in traces if treatment.moves}
    layers: list[LayerProfile] = []
    for name in names:
        costs = {treatment: costs[name] for treatment, costs in by_treatment.items()}
        for treatment in moves:
            stays = costs.get(Treatment.RECOMPUTE if treatment.recomputes else Treatment.KEEP)
            if stays is not None:  # else nobody has seen what would stay
                moved = max(0, stays.resident - costs[treatment].resident)
                costs[treatment] = replace(costs[treatment], moved=moved)
        calls = [call for call in kept.calls if call.name == name]
        input_bytes = sum(call.input_bytes for call in calls)
        forward_s = sum(call.forward.seconds for call in calls)
        kind = (
            type(modules[name]),
            tuple(parameter.shape for parameter in modules[name].parameters()),
            input_bytes,
            *(round(cost.resident, -3) for cost in costs.values()),
        )
        layers.append(LayerProfile(name, kind, input_bytes, forward_s, costs))
    heads = {each: trace.calls[-1].between.peak - trace.calls[-1].after for each, trace in traces.items()}
    head = min(heads.values())
    last = layers[-1].costs
    for treatment, needed in heads.items():  # what follows the last layer may need more under one treatment of it
        if needed > head and layers[-1].name == first.calls[-1].name:
            least = last[treatment].resident + needed
            last[treatment] = replace(last[treatment], transient=max(last[treatment].transient, least))
    rest = max(trace.rest.peak for trace in traces.values())
    optimizer = max(trace.optimizer.peak for trace in traces.values())
    seconds = kept.rest.seconds + sum(
        part.seconds for call in kept.calls for part in (call.forward, call.between, call.backward)
    )
    return Profile(
        tuple(layers),
        base=first.calls[0].before,
        head=head,
        floor=max(rest, optimizer),
        floor_is_optimizer=optimizer >= rest,
        step_s=seconds,
        peaks={treatment: trace.peak for treatment, trace in traces.items()},
        uncalled=tuple(name for name in modules if name not in names),
    )


def layer_costs(trace: StepTrace) -> dict[str, Cost]:
    """What each layer cost in a step; one that is called several times has its first place in the order."""
    calls = trace.calls
    if not calls:
        return {}
    names = list(dict.fromkeys(call.name for call in calls))
    ends = [call.before for call in calls[1:]] + [calls[-1].after]
    resident = dict.fromkeys(names, 0)
    transient = dict.fromkeys(names, 0)
    again = dict.fromkeys(names, 0.0)
    for call, end in zip(calls, ends, strict=True):
        resident[call.name] += end - call.before
        again[call.name] += call.backward.replay_s
    held, before = calls[0].before, {}
    for name in names:
        before[name] = held
        held += resident[name]
    for i, call in enumerate(calls):
        peak = max(call.forward.peak, call.backward.peak, call.between.peak if i + 1 < len(calls) else 0)
        transient[call.name] = max(transient[call.name], peak - before[call.name])
    return {name: Cost(max(0, resident[name]), transient[name], again[name]) for name in names}
