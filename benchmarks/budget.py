"""Plans beside uniform rules, at the same peak memory: `python benchmarks/budget.py [--rounds 11] [--picture FILE]`.

For every `every_n_layers` from 1 to 4, its peak is given to the planner as a budget, and steps under the rule and under
the plan alternate in one process. Peaks are counted to the byte in real steps; times are those of the process on one
thread, as ratios to the plain step of the same round. Then the other way round: the least memory of a plan that is
expected to be no slower than the rule.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch
from torch import Tensor, nn

from lightning_ckpt.measure.clock import HostClock
from lightning_ckpt.planning.make import planner_by_preflight
from lightning_ckpt.planning.planner import Planner
from lightning_ckpt.planning.preflight import Preflight
from lightning_ckpt.planning.times import LayerTimes
from lightning_ckpt.planning.trace import StepRecorder
from lightning_ckpt.planning.treatment import Treatment, treat
from lightning_ckpt.recompute import attach
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.selection import select_layers

MIB = 2**20
OPERATORS = resolve_policy("matmul")


class Block(nn.Module):
    """Two matrix products of a given width around an activation, with a norm and a skip connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Heterogeneous(nn.Module):
    """Twelve blocks with inner widths from 256 to 3072."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(256, 256 * (1 + (7 * i) % 12)) for i in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def neox() -> tuple[nn.Module, object, Callable[[nn.Module, Tensor], Tensor]]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    batch = torch.randint(0, 1024, (8, 256))
    return GPTNeoXForCausalLM(config).train(), batch, lambda model, ids: model(ids, labels=ids).loss


def heterogeneous() -> tuple[nn.Module, object, Callable[[nn.Module, Tensor], Tensor]]:
    return Heterogeneous(), torch.randn(8, 256, 256), lambda model, x: model(x)


class Run:
    """A model in training, whose layers are treated as asked."""

    def __init__(self, make: Callable[[], tuple[nn.Module, object, Callable[..., Tensor]]]) -> None:
        self.model, self.batch, self.step = make()
        self.layers = select_layers(self.model).layers
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.recomputed = [attach(layer, name, "sample") for name, layer in self.layers.items()]

    def treat(self, treatments: Sequence[Treatment]) -> None:
        for recompute, treatment in zip(self.recomputed, treatments, strict=True):
            treat(recompute, treatment, OPERATORS, None)

    def train(self) -> float:
        """One step; its time in seconds of the process."""
        start = time.process_time()
        loss = self.step(self.model, self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        del loss  # its graph would keep the logits
        self.optimizer.step()
        return time.process_time() - start

    def peak(self) -> int:
        """The peak of a real step, counted."""
        recorder = StepRecorder(self.layers)
        recorder.adopt([*self.model.parameters(), *self.model.buffers(), self.batch])
        recorder.adopt(value for each in self.optimizer.state.values() for value in each.values())
        recorder.adopt(each.grad for each in self.model.parameters())  # held by nobody else, so that they can go
        with recorder:
            self.train()
        return recorder.finish().peak

    def planner(self, steps: int) -> Planner:
        """Rehearsed bytes, measured times: every treatment is measured on every layer."""
        preflight = Preflight(
            self.model, self.batch, self.layers, self.step, optimizers=[self.optimizer], operators=OPERATORS
        )
        planner = planner_by_preflight(preflight, OPERATORS, None)
        forward: dict[str, list[float]] = {name: [] for name in self.layers}
        again: dict[tuple[str, Treatment], list[float]] = {}
        for _ in range(steps):
            for treatment in (Treatment.POLICY, Treatment.RECOMPUTE):
                self.treat([treatment] * len(self.layers))
                times = LayerTimes(self.recomputed, HostClock())
                self.train()
                in_forward, in_recompute, _ = times.finish()
                for name in self.layers:
                    forward[name].append(in_forward[name])
                    again.setdefault((name, treatment), []).append(in_recompute[name])
        profile = planner.profile.with_times(
            {name: median(values) for name, values in forward.items()},
            {key: median(values) for key, values in again.items()},
        )
        return Planner(profile, lambda assignment: preflight.run(assignment).peak, operators=OPERATORS)


def every(n: int, count: int) -> list[Treatment]:
    return [Treatment.KEEP if i % n else Treatment.RECOMPUTE for i in range(count)]


def compare(name: str, run: Run, rounds: int) -> list[tuple[str, int, float, int, float]]:
    """Rows: the rule, its peak and its time, the plan's peak and its time."""
    for _ in range(3):
        run.train()
    planner, count = run.planner(3), len(run.layers)
    rows = []
    print(f"\n{name}: {count} layers; peak in MiB, time of a step as a ratio to the plain one, median (quartiles)")
    print("| rule | peak | plan's peak | rule / plain | plan / plain | plan / rule | plan | no slower in |")
    print("|---|---|---|---|---|---|---|---|")
    for n in (1, 2, 3, 4):
        rule = every(n, count)
        run.treat(rule)
        run.train()
        budget = run.peak()
        plan = planner.plan(budget)
        planned = [layer.treatment for layer in plan.layers]
        run.treat(planned)
        run.train()
        peak = run.peak()
        assert peak <= budget, f"{peak} bytes are above {budget}"
        times: dict[str, list[float]] = {"plain": [], "rule": [], "plan": []}
        ways = {"plain": [Treatment.KEEP] * count, "rule": rule, "plan": planned}
        for i in range(rounds):
            for way in list(ways) if i % 2 else list(reversed(ways)):
                run.treat(ways[way])
                times[way].append(run.train())
        least = no_slower(planner, rule)
        ratios = {
            pair: [one / other for one, other in zip(times[pair[0]], times[pair[1]], strict=True)]
            for pair in (("rule", "plain"), ("plan", "plain"), ("plan", "rule"))
        }
        shown = [spread(values) for values in ratios.values()]
        kinds = ", ".join(f"{planned.count(each)} {each}" for each in Treatment if each in planned)
        print(
            f"| every_n_layers={n} | {budget / MIB:.1f} | {peak / MIB:.1f} | {' | '.join(shown)} | {kinds} | "
            f"{least / MIB:.1f} MiB |"
        )
        medians = [median(values) for values in ratios.values()]
        rows.append((f"every_n_layers={n}", budget, medians[0], peak, medians[1]))
    return rows


def no_slower(planner: Planner, rule: Sequence[Treatment]) -> int:
    """The least peak of a plan that is expected to take no longer than a rule."""
    allowed = planner.describe(rule, 0).extra_s
    low, high = planner.least(0).peak_bytes, planner.peak_of(rule)
    while high - low > MIB // 4:
        middle = (low + high) // 2
        plan = planner.plan(middle)
        low, high = (low, plan.peak_bytes) if plan.extra_s <= allowed else (middle, high)
    return high


def spread(values: Sequence[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3f} ({low:.3f}-{high:.3f})"


def draw(results: dict[str, list[tuple[str, int, float, int, float]]], output: str) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(6 * len(results), 4), layout="constrained")
    for axes, (name, rows) in zip(panels, results.items(), strict=True):
        axes.set_title(name)
        axes.plot([row[1] / MIB for row in rows], [row[2] for row in rows], "s--", label="every_n_layers = 1, 2, 3, 4")
        axes.plot([row[3] / MIB for row in rows], [row[4] for row in rows], "o-", label="plan of at most that peak")
        axes.set_xlabel("peak memory of a step (MiB)")
        axes.set_ylabel("time of a step (plain = 1)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0.9)
        axes.legend(frameon=False)
    figure.savefig(output, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--picture")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {}
    for name, make in (("GPT-NeoX, 12 x 256", neox), ("blocks of inner width 256 to 3072", heterogeneous)):
        results[name] = compare(name, Run(make), arguments.rounds)
    if arguments.picture:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
