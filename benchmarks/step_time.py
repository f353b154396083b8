"""Step time of recomputed layers against PyTorch's `apply_activation_checkpointing`.

    python benchmarks/step_time.py [--rounds 41] [--every-n-layers 1]

Both sides train the same 12-layer GPT-NeoX of width 256 (batch 8 x 256, fp32, one CPU thread) in one process, step by
step in turn, the order reversed every round. Printed are medians of the ratios of process CPU time of neighbouring
steps, with quartiles.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from lightning_ckpt.recompute import attach
from lightning_ckpt.selection import select_layers

TOKENS = torch.randint(0, 1024, (8, 256), generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=256, num_hidden_layers=12, num_attention_heads=4, intermediate_size=1024, vocab_size=1024
    )
    return GPTNeoXForCausalLM(config).train()


def loss_of(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss


def step(model: nn.Module) -> None:
    model.zero_grad()
    loss_of(model).backward()


def cpu_time(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(ours: nn.Module, theirs: nn.Module, rounds: int) -> list[float]:
    """Ratios of CPU time, ours to theirs, one a round."""
    ratios = []
    for i in range(rounds + 1):
        pair = [ours, theirs] if i % 2 else [theirs, ours]
        times = {id(model): cpu_time(lambda model=model: step(model)) for model in pair}
        if i:  # the first round warms up
            ratios.append(times[id(ours)] / times[id(theirs)])
    return ratios


def report(name: str, ratios: list[float]) -> None:
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{name:<60} {middle:.4f}  (quartiles {low:.4f} to {high:.4f}, {len(ratios)} rounds)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--every-n-layers", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    plain, ours, theirs = make_model(), make_model(), make_model()
    chosen = select_layers(ours, every_n_layers=arguments.every_n_layers).layers
    for name, layer in chosen.items():
        attach(layer, name)
    same = {id(theirs.get_submodule(name)) for name in chosen}
    apply_activation_checkpointing(theirs, check_fn=lambda module: id(module) in same)
    n = arguments.every_n_layers
    report(f"every_n_layers={n}: ours to apply_activation_checkpointing", compare(ours, theirs, arguments.rounds))
    report(f"every_n_layers={n}: ours to the plain model", compare(ours, plain, arguments.rounds // 3))


if __name__ == "__main__":
    main()
