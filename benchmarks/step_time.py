"""Step time of recomputed layers against PyTorch's `apply_activation_checkpointing`, and the cost of the monitor.

    python benchmarks/step_time.py [--rounds 41] [--every-n-layers 1]

Both sides train the same 12-layer GPT-NeoX of width 256 (batch 8 x 256, fp32, one CPU thread) in one process, step by
step in turn, the order reversed every round. Printed are medians of the ratios of process CPU time of neighbouring
steps, with quartiles. The monitor is measured in a real Trainer run: CPU time spent in its own code in a step, to the
CPU time of the step; and steps whose live bytes are counted (the first few) to later ones.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import lightning_ckpt.monitor
from lightning_ckpt import StepMonitor
from lightning_ckpt.measure.peak import CountedPeak
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


class Training(pl.LightningModule):
    """The model in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class StepTimes(pl.Callback):
    """CPU time from one batch start to the next, everything in between included."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, *args: object) -> None:
        self.marks.append(time.process_time())

    @property
    def steps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]


class TimedMonitor(StepMonitor):
    """A monitor that takes the CPU time of its own code, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.own = [0.0]

    def on_train_batch_start(self, *args: Any) -> None:
        self.own[-1] += cpu_time(lambda: super(TimedMonitor, self).on_train_batch_start(*args))

    def on_train_batch_end(self, *args: Any) -> None:
        self.own[-1] += cpu_time(lambda: super(TimedMonitor, self).on_train_batch_end(*args))
        self.own.append(0.0)


def monitor_cost(steps: int) -> None:
    module, times, monitor = Training(), StepTimes(), TimedMonitor()
    for name, layer in select_layers(module).layers.items():
        attach(layer, name)
    walk = lightning_ckpt.monitor.saved_bytes

    def timed_walk(*args: Any) -> Any:
        found: list[Any] = []
        monitor.own[-1] += cpu_time(lambda: found.append(walk(*args)))
        return found[0]

    lightning_ckpt.monitor.saved_bytes = timed_walk
    with tempfile.TemporaryDirectory() as folder:
        loop = pl.Trainer(
            accelerator="cpu",
            max_steps=steps + 1,
            callbacks=[times, monitor],
            logger=[CSVLogger(folder), TensorBoardLogger(folder)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loop.fit(module, torch.utils.data.DataLoader(list(range(steps + 1)), batch_size=1))
    lightning_ckpt.monitor.saved_bytes = walk
    warm, later = CountedPeak.WARM_UP, times.steps[CountedPeak.WARM_UP :]
    report(
        "monitor: its own code, to a step", [own / step for own, step in zip(monitor.own[warm:], later, strict=False)]
    )
    counted = [step / statistics.median(later) for step in times.steps[1:warm]]
    report("monitor: a counted step, to the median of later ones", counted)
    print(f"(at most {CountedPeak.WARM_UP} batches and one in {CountedPeak.BUDGET} are counted)")


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
    monitor_cost(max(12, arguments.rounds // 2))


if __name__ == "__main__":
    main()
