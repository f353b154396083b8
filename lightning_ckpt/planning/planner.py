"""From a profile to a plan that fits a budget."""

from collections.abc import Callable, Sequence

from lightning_ckpt.planning.budget import BudgetError
from lightning_ckpt.planning.frontier import Frontier, Point
from lightning_ckpt.planning.plan import LayerPlan, Plan, size
from lightning_ckpt.planning.profile import LayerProfile, Profile
from lightning_ckpt.planning.solver import Chain, Choice, Link, Solution, binding, cost, lowest, peak, solve
from lightning_ckpt.planning.treatment import Assignment, Treatment
from lightning_ckpt.recompute.policy import Operators

_REHEARSALS = 4  # of plans, each corrected by what the one before has shown
_EXACT = 0.002  # of the budget, which is not worth another rehearsal
_POINTS = 24  # budgets on the frontier


class Planner:
    """Works out plans for any budget from what a step was seen to cost.

    Args:
        profile: what every layer costs under every treatment.
        rehearse: counts the peak of a step under an assignment, in bytes; None where that cannot be done, and then the
            peak is put together from parts.
        link: what the link to the host can carry; None where nothing may be moved.
        others: bytes on the device that the profile does not know of. Default: none.
        operators: whose results stay under the policy treatment.
        measured: whether the profile's times were measured. Default: no.
    """

    def __init__(
        self,
        profile: Profile,
        rehearse: Callable[[Assignment], int] | None,
        link: Link | None = None,
        others: int = 0,
        operators: Operators = frozenset(),
        measured: bool = False,
    ) -> None:
        self.profile = profile
        self._rehearse = rehearse
        self._others = others
        self._operators = operators
        self._measured = measured
        self._forward_s = sum(layer.forward_s for layer in profile.layers)
        # How many times as long as its forward the backward of a layer takes, if layers share both alike.
        self._backward = max(0.0, profile.step_s / self._forward_s - 1) if self._forward_s else 0.0
        layers = [
            {
                treatment: Choice(
                    c.resident, c.transient, round(c.recompute_s * 1e9) + self._late_ns(layer, c.moved, link), c.moved
                )
                for treatment, c in layer.costs.items()
                if link is not None or not treatment.moves
            }
            for layer in profile.layers
        ]
        self._chain: Chain[Treatment] = Chain(
            max(0, profile.base + others),
            layers,
            [round(layer.forward_s * 1e9) for layer in profile.layers],
            profile.head,
            max(0, profile.floor + others),
            link,
        )
        self._peaks: dict[tuple[Treatment, ...], int] = {}
        if rehearse is not None:  # else peaks are put together from parts, for all plans in the same way
            for treatment, seen in profile.peaks.items():
                if all(treatment in choices for choices in layers):
                    alike = self.uniform(treatment)
                    self._peaks[tuple(alike)] = seen + others + self._under_way(alike)

    def _late_ns(self, layer: LayerProfile, moved: int, link: Link | None) -> int:
        """The time for which backward waits, as a layer's copies back take longer than a backward of such a layer.

        Waits within a layer are not foreseen.
        """
        if link is None or not moved or not self._forward_s:
            return 0
        return max(0, link.copy_ns(moved) - round(layer.forward_s * self._backward * 1e9))

    # ---------------------------------------------------------------- what plans come to

    def uniform(self, treatment: Treatment) -> list[Treatment]:
        """Every layer treated alike."""
        return [treatment] * len(self.profile.layers)

    def peak_of(self, treatments: Sequence[Treatment]) -> int:
        """The peak of a step, in bytes: rehearsed where that can be done."""
        key = tuple(treatments)
        if key not in self._peaks:
            if self._rehearse is None:
                self._peaks[key] = peak(self._chain, treatments)
            else:
                names = [layer.name for layer in self.profile.layers]
                rehearsed = self._rehearse(dict(zip(names, treatments, strict=True)))
                self._peaks[key] = rehearsed + self._others + self._under_way(treatments)
        return self._peaks[key]

    def _under_way(self, treatments: Sequence[Treatment]) -> int:
        """Bytes that are on their way, and so still on the device: a rehearsal moves everything in no time."""
        moved = sum(choice.moved for choice in self._chain.choices(treatments))
        return 0 if self._chain.link is None else min(moved, self._chain.link.window_bytes)

    @property
    def kept_bytes(self) -> int:
        """The peak if every layer is kept."""
        return self.peak_of(self.uniform(Treatment.KEEP))

    @property
    def recomputed_bytes(self) -> int:
        """The peak if every layer is recomputed."""
        return self.peak_of(self.uniform(Treatment.RECOMPUTE))

    # ---------------------------------------------------------------- plans

    def plan(self, limit: int) -> Plan:
        """The fastest plan whose peak is within `limit` bytes.

        Raises:
            BudgetError: there is none; the message says what is needed at least, and why.
        """
        plain = self.uniform(Treatment.KEEP)
        if self.kept_bytes <= limit:
            return self.describe(plain, limit)
        target, tried = limit, set()
        best: Solution[Treatment] | None = None
        for _ in range(_REHEARSALS):
            solution = solve(self._chain, target)
            if solution is None or tuple(solution.plan) in tried:
                break
            tried.add(tuple(solution.plan))
            actual = self.peak_of(solution.plan)
            if actual <= limit and (best is None or solution.cost_ns < best.cost_ns):
                best = solution
            wrong = solution.peak - actual  # the parts do not add up to the whole
            if 0 <= wrong < _EXACT * limit:
                break
            target = limit + wrong
        # Where parts come to more than the whole, a plan that has been rehearsed anyway may be faster.
        known = [treatments for treatments, seen in self._peaks.items() if seen <= limit]
        simple = min(known, key=lambda treatments: cost(self._chain, treatments), default=None)
        if simple is not None and (best is None or cost(self._chain, simple) < best.cost_ns):
            return self.describe(simple, limit)
        if best is not None:
            return self.describe(best.plan, limit, best.cost_ns - best.bound_ns)
        lean = self._leanest()
        least = self.peak_of(lean)
        if least > limit:
            raise BudgetError(self._below_the_floor(lean, least, limit))
        return self.describe(lean, limit)

    def least(self, limit: int) -> Plan:
        """The plan with the least peak, whatever the budget."""
        return self.describe(self._leanest(), limit)

    def _leanest(self) -> Sequence[Treatment]:
        """The plan with the least peak: that of the parts, unless they are wrong and one that is known needs less."""
        return min([lowest(self._chain).plan, self.uniform(Treatment.RECOMPUTE), *self._peaks], key=self.peak_of)

    def describe(self, treatments: Sequence[Treatment], limit: int, gap_ns: int = 0) -> Plan:
        """A plan with these treatments, to which there may be one that is faster by a gap."""
        link = self._chain.link if any(treatment.moves for treatment in treatments) else None
        layers = []
        for layer, treatment in zip(self.profile.layers, treatments, strict=True):
            of_it = layer.costs[treatment]
            layers.append(
                LayerPlan(
                    layer.name,
                    treatment,
                    of_it.resident,
                    layer.input_bytes,
                    of_it.moved,
                    layer.forward_s,
                    of_it.recompute_s,
                )
            )
        # Nothing is known of layers that do not run. If they ever do, they shall take little.
        idle = Treatment.RECOMPUTE if self._chain.link is None else Treatment.RECOMPUTE_OFFLOAD
        layers += [LayerPlan(name, idle, 0, 0, 0, 0.0, 0.0) for name in self.profile.uncalled]
        return Plan(
            tuple(layers),
            budget_bytes=limit,
            peak_bytes=self.peak_of(treatments),
            binds=self._binding(treatments),
            extra_s=cost(self._chain, treatments) / 1e9,
            step_s=self.profile.step_s,
            gap_s=gap_ns / 1e9,
            kept_bytes=self.kept_bytes,
            recomputed_bytes=self.recomputed_bytes,
            operators=tuple(sorted({str(operator.overloadpacket) for operator in self._operators})),
            measured=self._measured,
            rehearsed=self._rehearse is not None,
            inflight_bytes=0 if link is None else link.inflight_bytes,
            prefetch_bytes=0 if link is None else link.prefetch_bytes,
        )

    def _binding(self, treatments: Sequence[Treatment]) -> str:
        point = binding(self._chain, treatments)
        if isinstance(point, int):
            return f"layer {self.profile.layers[point].name}"
        if point == "head":
            return "what follows the last layer (head and loss)"
        return "the optimizer's step" if self.profile.floor_is_optimizer else "what comes before the first layer"

    def _below_the_floor(self, treatments: Sequence[Treatment], least: int, limit: int) -> str:
        point = binding(self._chain, treatments)
        if point == "head":
            cure = "A smaller batch, shorter sequences, or a loss that is computed in parts would help."
        elif point != "floor":
            cure = "One layer's recompute takes it: smaller layers (`layers=`) or a smaller batch would help."
        elif self.profile.floor_is_optimizer:
            cure = (
                "Weights, gradients and the optimizer's state take it: an optimizer with less state, weights of fewer "
                "bytes, or sharding them (FSDP) would help."
            )
        else:
            cure = "A smaller batch, or fewer weights before the layers, would help."
        if not any(treatment.moves for layer in self.profile.layers for treatment in layer.costs):
            cure += " So may `offload=True` on an accelerator, which keeps activations in host memory."
        elif self._chain.link is not None:
            most = sum(max(cost.moved for cost in layer.costs.values()) for layer in self.profile.layers)
            if most > self._chain.link.host_bytes:
                cure += (
                    f" So would more host memory: `host_budget` leaves {size(self._chain.link.host_bytes)} of the "
                    f"{size(most)} that could be moved."
                )
        return (
            f"the budget of {size(limit)} is below the {size(least)} that the step needs whatever is recomputed, in "
            f"{self._binding(treatments)}. {size(self._chain.base)} of that are there before the first layer: weights, "
            f"gradients, the optimizer's state, the batch. {cure}"
        )

    # ---------------------------------------------------------------- all budgets

    def frontier(self, rules: Sequence[tuple[str, Sequence[Treatment]]]) -> Frontier:
        """The best plans for all budgets, from parts, and uniform rules beside them, rehearsed where possible.

        Args:
            rules: names and treatments.
        """
        least, most = lowest(self._chain).peak, max(peak(self._chain, treatments) for _, treatments in rules)
        limits = {least + (most - least) * i // (_POINTS - 1) for i in range(_POINTS)}
        limits |= {peak(self._chain, treatments) for _, treatments in rules}
        plans: dict[int, Point] = {}
        for limit in sorted(limits):
            solution = solve(self._chain, limit)
            if solution is not None:
                plans[solution.peak] = Point("plan", solution.peak, solution.cost_ns / 1e9)
        points = [Point(name, self.peak_of(each), cost(self._chain, each) / 1e9) for name, each in rules]
        return Frontier(tuple(plans.values()), tuple(points), self.profile.step_s)

    def rules(self) -> list[tuple[str, list[Treatment]]]:
        """The uniform rules that users know."""
        count = len(self.profile.layers)
        found = [
            (
                f"every_n_layers={n}",
                [Treatment.KEEP if i % n else Treatment.RECOMPUTE for i in range(count)],
            )
            for n in (1, 2, 4)
        ]
        if Treatment.POLICY in self.profile.layers[0].costs:
            found.append(("operator policy", self.uniform(Treatment.POLICY)))
        return [*found, ("all kept", self.uniform(Treatment.KEEP))]
