"""What makes a step another one than before."""

from collections.abc import Collection, Sequence

import lightning.pytorch as pl
from torch import nn

from lightning_ckpt.recompute import Recompute


class StepChanges:
    """Notices changes from one micro-batch to the next.

    Args:
        trainer: knows the optimizers.
        module: the model.
        recomputed: what is attached to its layers.
    """

    def __init__(self, trainer: pl.Trainer, module: nn.Module, recomputed: Sequence[Recompute]) -> None:
        self._trainer = trainer
        self._parameters = list(module.parameters())
        self._idle = list(recomputed)  # what has not run yet
        self._trained = self._what_is_trained()

    def trains_others(self) -> bool:
        """Whether weights were frozen or set free, optimizers were given more, or gradients are added up otherwise."""
        before, self._trained = self._trained, self._what_is_trained()
        return before != self._trained

    def runs_others(self, unknown: Collection[str]) -> bool:
        """Whether layers have run for the first time that are among the unknown ones."""
        begun = {each.name for each in self._idle if each.called}
        self._idle = [each for each in self._idle if not each.called]
        return not begun.isdisjoint(unknown)

    def _what_is_trained(self) -> tuple[list[bool], list[int]]:
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        numbers = [len(group["params"]) for group in groups]
        return [each.requires_grad for each in self._parameters], [*numbers, self._trainer.accumulate_grad_batches]
