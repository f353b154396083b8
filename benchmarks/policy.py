"""What an operator policy costs and saves, beside PyTorch's selective checkpointing with the same operators.

    python benchmarks/policy.py [--rounds 21]

The model and the way of measuring time are those of step_time.py. Memory is that of all live tensors, counted to the
byte: after forward and at the peak of the step, what was there before left out.
"""

import argparse
import functools
import warnings

import torch
from step_time import compare, loss_of, make_model, report
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lightning_ckpt.measure.live import LiveBytes
from lightning_ckpt.recompute import attach
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.selection import select_layers


def ours(policy: str | None) -> nn.Module:
    model = make_model()
    operators = frozenset() if policy is None else resolve_policy(policy)
    for name, layer in select_layers(model).layers.items():
        attach(layer, name, policy=operators)
    return model


def theirs(policy: str) -> nn.Module:
    model = make_model()
    layers = {id(layer) for layer in select_layers(model).layers.values()}
    contexts = functools.partial(create_selective_checkpoint_contexts, list(resolve_policy(policy)))
    wrapper = functools.partial(checkpoint_wrapper, context_fn=contexts)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: id(module) in layers)
    return model


def memory(model: nn.Module) -> tuple[float, float]:
    """MiB after forward and at the peak of the second step."""
    loss_of(model).backward()  # gradients are there from now on
    with LiveBytes() as live:
        live.take_peak()
        loss = loss_of(model)
        kept = live.current
        loss.backward()
    return kept / 2**20, live.peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    models = {
        "plain": make_model(),
        "ours, everything recomputed": ours(None),
        "ours, matmul": ours("matmul"),
        "PyTorch's, matmul": theirs("matmul"),
    }
    for name, model in models.items():
        kept, peak = memory(model)
        print(f"{name:<60} {kept:7.1f} MiB after forward, {peak:7.1f} MiB at the peak")
    plain, full, matmul, other = models.values()
    report("time: ours, matmul, to PyTorch's", compare(matmul, other, rounds))
    report("time: ours, matmul, to the plain model", compare(matmul, plain, rounds))
    report("time: PyTorch's, matmul, to the plain model", compare(other, plain, rounds))
    report("time: ours, everything recomputed, to the plain model", compare(full, plain, rounds))


if __name__ == "__main__":
    main()
