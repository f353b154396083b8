"""What the exact replay costs a layer call, against PyTorch's wrapper, split by what it guards.

    python benchmarks/replay.py [--rounds 61]

48 tiny pre-norm transformer blocks of width 32 on 2 x 8 positions (one CPU thread), where the work around a layer call
shows most: CPU time of forward and backward, steps in turn in one process, medians of the ratios with quartiles. Then
the microseconds of each guard for one call, and the peak of live bytes of a whole step (first, with learning, and
later) of a 12-layer GPT-NeoX of width 256.
"""

import argparse
import statistics
import timeit
import warnings
from collections.abc import Callable

import torch
from step_time import cpu_time, make_model, report, step
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from lightning_ckpt.measure.live import LiveBytes
from lightning_ckpt.recompute import attach
from lightning_ckpt.recompute.ambient import Ambient
from lightning_ckpt.recompute.arguments import Arguments
from lightning_ckpt.recompute.fingerprint import Verify, fingerprint
from lightning_ckpt.recompute.host_random import HostStreams
from lightning_ckpt.recompute.observers import hook_tables, spied_on
from lightning_ckpt.recompute.settings import get_settings
from lightning_ckpt.recompute.state import State
from lightning_ckpt.selection import select_layers

LAYERS = 48


class TinyBlock(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.dropout(self.out(nn.functional.scaled_dot_product_attention(q, k, v)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def tiny_blocks(verify: Verify | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[TinyBlock() for _ in range(LAYERS)])
    if verify is not None:
        for i, layer in enumerate(model):
            attach(layer, str(i), verify)
    return model


def compare_tiny(rounds: int) -> None:
    x = torch.randn(2, 8, 32)
    models: dict[str, nn.Module] = {"plain": tiny_blocks(), "wrapper": tiny_blocks()}
    apply_activation_checkpointing(models["wrapper"], check_fn=lambda module: isinstance(module, TinyBlock))
    verifies: list[Verify] = ["sample", "off", "always"]
    models |= {f"ours, verify={verify}": tiny_blocks(verify) for verify in verifies}
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds + 4):
        for name in list(models) if i % 2 else reversed(models):
            model = models[name]
            seconds = cpu_time(lambda model=model: model(x).sum().backward())
            if i >= 4:  # the first calls learn
                times[name].append(seconds)
    for name in models:
        if name.startswith("ours"):
            pairs = zip(times[name], times["wrapper"], strict=True)
            report(f"{LAYERS} tiny layers: {name}, to PyTorch's wrapper", [ours / theirs for ours, theirs in pairs])
    for name, seconds in times.items():
        print(f"  {name:<24} {statistics.median(seconds) / LAYERS * 1e6:7.0f} us per layer, forward and backward")


def microseconds(work: Callable[[], object]) -> float:
    return min(timeit.repeat(work, number=300, repeat=7)) / 300 * 1e6


def split_by_guard() -> None:
    layer = TinyBlock()
    recompute, x = attach(layer, "layer"), torch.randn(2, 8, 32)
    for _ in range(5):
        layer(x).sum().backward()
    inventory, state = recompute.inventory, State(recompute.inventory)

    def spy() -> None:
        with spied_on(hook_tables(inventory.inner_modules), []):
            pass

    print("One layer call, microseconds:")
    for name, work in {
        "one pass over identities": inventory.unchanged,
        "state: photograph": lambda: State(inventory),
        "state: learn": state.learn,
        "arguments": lambda: Arguments((x,), {}, state.owns),
        "random streams, settings, autocast, modes, context": lambda: Ambient([]),
        "  of which settings": get_settings,
        "hooks that only watch": spy,
        "fingerprint of one saved tensor (sampled)": lambda: fingerprint(x),
        "host random streams (once per backward, twice)": HostStreams,
    }.items():
        print(f"  {name:<52} {microseconds(work):6.1f}")


def peaks() -> None:
    ours, theirs = make_model(), make_model()
    for name, layer in select_layers(ours).layers.items():
        attach(layer, name)
    layers = tuple({type(layer) for layer in select_layers(theirs).layers.values()})
    apply_activation_checkpointing(theirs, check_fn=lambda module: isinstance(module, layers))
    print("Peak of live bytes in a step, MiB (parameters and their gradients not counted before the first):")
    for name, model in (("PyTorch's wrapper", theirs), ("ours", ours)):
        found = []
        for _ in range(4):
            with LiveBytes() as live:
                step(model)
            found.append(live.peak / 2**20)
        print(f"  {name:<20} " + "  ".join(f"{peak:.2f}" for peak in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=61)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    compare_tiny(arguments.rounds)
    split_by_guard()
    peaks()


if __name__ == "__main__":
    main()
