"""An engine around a training run, and what has to be true afterwards."""

from collections.abc import Callable
from typing import Any

import backend
import torch
from scenarios import DEVICE, Trained
from torch import nn

from lightning_ckpt.offload import Boundaries, OffloadEngine, OffloadOptions
from lightning_ckpt.selection.detect import find_layers
from lightning_ckpt.selection.modules import outermost


class Offloaded(Trained):
    """A run whose forward passes go through an engine.

    Args:
        keywords: options of the engine, or `transfers` and `host`.
    """

    def __init__(self, transfers: Any = None, host: Any = None, **options: Any) -> None:
        options = {"min_bytes": 64, "move": "all", **options}
        self.said: list[str] = []
        self.engine = OffloadEngine(
            DEVICE, OffloadOptions(**options), say=self.said.append, transfers=transfers, host=host
        )
        self._boundaries: list[Boundaries] = []
        super().__init__(self.engine.forward, self._watch_layers, self.engine.step_done)

    def _watch_layers(self, model: nn.Module) -> None:
        self.engine.learn(model)
        self._boundaries.append(Boundaries(model, outermost(find_layers(model).items()), self.engine))

    def leftovers(self) -> dict[str, int]:
        """What is still held although no graph is alive any more; everything has to be 0."""
        engine = self.engine
        return {
            "bytes on the device": engine.resident_bytes,
            "bytes on the host": engine.host.booked_bytes,
            "records": len(engine._outbound._alive),
            "flights": len(engine._outbound._flights),
        }


def train(scenario: Callable[[Trained], None], run: Trained, policy: str = "lazy", seed: int = 0) -> Trained:
    backend.configure(policy, seed)
    torch.manual_seed(0)
    scenario(run)
    torch.accelerator.synchronize()
    return run
