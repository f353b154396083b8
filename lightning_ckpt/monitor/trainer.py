"""What others need to know of a Trainer, and what it does not say itself."""

from collections.abc import Hashable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ckpt.offload import OffloadEngine


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's own list of callbacks (an attribute it sets without declaring it)."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def step_of(trainer: pl.Trainer) -> int:
    """The step that the Trainer logs the loss of the current batch at."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def hands_out_iterator(trainer: pl.Trainer) -> bool:
    """Whether ``training_step`` fetches its batches itself, so that they are not known before."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def offload_engine_of(trainer: pl.Trainer) -> OffloadEngine | None:
    """The engine that moves activations in this training, of the strategy or of a callback."""
    owners = [trainer.strategy, *callbacks_of(trainer)]
    engines = (getattr(owner, "offload_engine", None) for owner in owners)
    return next((engine for engine in engines if engine is not None), None)


def treating(trainer: pl.Trainer) -> list[Any]:
    """The callbacks and the strategy that treat layers: each has `treatments` and knows what would `spare_more`."""
    return [owner for owner in (*callbacks_of(trainer), trainer.strategy) if hasattr(owner, "spare_more")]


def treatments_of(trainer: pl.Trainer) -> list[str]:
    """How layers are treated, a line each."""
    return [line for owner in treating(trainer) for line in owner.treatments()]


def planned_bytes_of(trainer: pl.Trainer) -> int | None:
    """The peak that a memory plan has foreseen for the layers, or None without a plan."""
    plans = (keeper.plan for keeper in _budget_keepers(trainer))
    return next((plan.peak_bytes for plan in plans if plan is not None), None)


def tell_peak(trainer: pl.Trainer, nbytes: int | None) -> None:
    """Tell whoever keeps a budget what an optimizer step has taken, as far as that is known."""
    for keeper in _budget_keepers(trainer):
        keeper.peak_was(nbytes)


def stage_of_plan(trainer: pl.Trainer) -> Hashable:
    """Equal for steps that run under the same memory plan, and at the same stage of it."""
    return planned_bytes_of(trainer), *(keeper.stage for keeper in _budget_keepers(trainer))


def _budget_keepers(trainer: pl.Trainer) -> list[Any]:
    keepers = (getattr(callback, "budget_keeper", None) for callback in callbacks_of(trainer))
    return [keeper for keeper in keepers if keeper is not None]


def replicas_of(trainer: pl.Trainer) -> int:
    """In how many parts the data is divided: less than the number of ranks where some of them share a batch."""
    settings: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(settings.get("num_replicas", 1))


def model_tensors(model: nn.Module) -> list[nn.Parameter | Tensor]:
    """Parameters and buffers, shared ones several times: faster than asking for each kind by name."""
    kinds = (kind for module in model.modules() for kind in (module._parameters, module._buffers))
    return [tensor for kind in kinds for tensor in kind.values() if tensor is not None]


def optimizer_tensors(trainer: pl.Trainer) -> Iterator[Tensor]:
    """The optimizers' states, those of optimizers within them included."""
    inner = [value for each in trainer.optimizers for value in vars(each).values() if isinstance(value, Optimizer)]
    for optimizer in (*trainer.optimizers, *inner):
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield value
                elif isinstance(value, (list, tuple, dict)):
                    yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
