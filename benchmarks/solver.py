"""How long the solver takes for a chain of transformer layers under a memory limit, and how close it comes to the best.

    python benchmarks/solver.py [--chains 4]

Layers are of 1 to 6 kinds, of widths between 256 and 3072, in random order and with times that differ by 5 % as if
measured, or all different; 8,192 tokens in 2 bytes, 150 TFLOP/s, a link of 25 GB/s. With 3 choices a layer is kept, has
the results of some operators kept, or is recomputed; with 5 it, or its input, may be moved too. Limits lie between the
least peak and that of all kept. Processor time of one thread, in milliseconds, for one limit.

Where a plan is not known to be the cheapest, `gap` tells by how much at most another may be cheaper, as a share of the
time to recompute every layer: the bound may be as wrong as the plan.
"""

import argparse
import random
import statistics
import time

from lightning_ckpt.planning.solver import Chain, Choice, Link, cost, lowest, peak, solve

TOKENS, FLOPS_PER_NS, BYTES_PER_S = 8192, 150_000, 25e9
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99)  # limits, from the least peak to that of all kept


def make_chain(layers: int, kinds: int | None, choices: int, seed: int) -> Chain[str]:
    """A chain of that many layers of so many kinds; None: all different."""
    rng = random.Random(seed)

    def kind() -> tuple[int, float, float, float]:
        """Width, and the shares of a hidden state and of forward that options keep and cost."""
        return rng.randrange(256, 3073, 8), rng.uniform(12, 30), rng.uniform(4, 9), rng.uniform(0.25, 0.45)

    pool = [kind() for _ in range(kinds or layers)]
    order = pool if kinds is None else [rng.choice(pool) for _ in range(layers)]
    chain, forward_ns = [], []
    for width, kept, policy, policy_cost in order:
        hidden = TOKENS * width * 2
        ns = int(TOKENS * (24 * width**2 + 4096 * width) / FLOPS_PER_NS * rng.uniform(0.95, 1.05))
        saved = int(kept * hidden) + 4096
        needs = int(saved * 1.2)
        options = {
            "keep": Choice(saved, needs, 0),
            "policy": Choice(int(policy * hidden) + 2048, needs + hidden, int(ns * policy_cost)),
            "recompute": Choice(hidden, needs + hidden, int(ns * 0.93)),
        }
        if choices == 5:
            options["offload"] = Choice(4096, needs, 0, saved - 4096)
            options["recompute + offload"] = Choice(0, needs + hidden, int(ns * 0.93), hidden)
        chain.append(options)
        forward_ns.append(ns)
    head = TOKENS * rng.choice([1_000, 200_000])
    window = 2 * max(choice.moved for options in chain for choice in options.values())
    return Chain(
        rng.randrange(10**9, 10**10),
        chain,
        forward_ns,
        head,
        0,
        Link(BYTES_PER_S, window // 2, window // 2, 10**15, part_bytes=2**26),
    )


def measure(layers: int, kinds: int | None, choices: int, chains: int) -> str:
    times, times_lowest, gaps, exact = [], [], [], 0
    for seed in range(chains):
        chain = make_chain(layers, kinds, choices, seed)
        start = time.process_time()
        least = lowest(chain).peak
        times_lowest.append((time.process_time() - start) * 1e3)
        most = peak(chain, ["keep"] * layers)
        everything = cost(chain, ["recompute"] * layers)
        for share in SHARES:
            start = time.process_time()
            solution = solve(chain, least + int(share * (most - least)))
            times.append((time.process_time() - start) * 1e3)
            assert solution is not None
            exact += solution.exact
            gaps.append((solution.cost_ns - solution.bound_ns) / everything)
    return (
        f"{layers:>6} {kinds or 'all':>6} {choices:>8} {statistics.median(times):>8.1f} {max(times):>8.1f} "
        f"{max(times_lowest):>8.1f} {exact / len(times):>7.0%} {statistics.median(gaps):>7.1%} {max(gaps):>7.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=4, help="random chains for every line")
    chains = parser.parse_args().chains
    print(
        f"{'layers':>6} {'kinds':>6} {'choices':>8} {'median':>8} {'worst':>8} {'lowest':>8} {'exact':>7} {'gap':>15}"
    )
    for choices in (3, 5):
        for layers in (12, 24, 48, 96):
            for kinds in (1, 3, 6, None):
                print(measure(layers, kinds, choices, chains), flush=True)


if __name__ == "__main__":
    main()
