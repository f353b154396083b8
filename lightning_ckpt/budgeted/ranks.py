"""One plan on all ranks: which one it is, and when it changes."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import lightning.pytorch as pl
from torch import distributed, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_ckpt.agreement import Settings, gather

_trainings = itertools.count()  # those of a process, and the callbacks in them, share one store


class Ranks:
    """What ranks tell each other about plans, by the store in which they have found each other.

    Args:
        trainer: whose ranks are meant.
        who: whose plans they are, for messages.
    """

    def __init__(self, trainer: pl.Trainer, who: str) -> None:
        self._trainer = trainer
        self._who = who
        self.several = trainer.world_size > 1 and distributed.is_available() and distributed.is_initialized()
        self._training = next(_trainings)
        self._elections = 0

    def failure(self, own: str | None) -> str | None:
        """Why something has failed on any rank, or None if it has not: every rank has to ask."""
        everybody = gather(self._trainer, self._who, {"failure": own or ""})
        return next((str(each["failure"]) for each in everybody if each["failure"]), None)

    def most(self, own: int) -> int:
        """The largest number of all ranks: every rank has to ask."""
        return max(int(str(each["number"])) for each in gather(self._trainer, self._who, {"number": str(own)}))

    def common(self, own: Sequence[str]) -> list[str]:
        """What is among the names of all ranks, in this rank's order: every rank has to ask."""
        everybody = gather(self._trainer, self._who, {"names": list(own)})
        return [name for name in own if all(name in each["names"] for each in everybody)]

    def elect(self, need: int, treatments: Mapping[str, str]) -> dict[str, str]:
        """The treatments of the rank that needs most, by layer: every rank has to ask."""
        self._elections += 1  # whoever has called for one has it now
        own: Settings = {"need": str(need), "layers": list(treatments), "treatments": list(treatments.values())}
        chosen = max(gather(self._trainer, self._who, own), key=lambda each: int(str(each["need"])))
        return dict(zip(chosen["layers"], chosen["treatments"], strict=True))

    def call(self, step: int) -> None:
        """Have all ranks elect a plan when they begin a later optimizer step than this one."""
        _get_default_store().compare_set(self._key, "", str(step))

    def called(self, step: int) -> bool:
        """Whether an election is due at the beginning of this optimizer step: the same on all ranks.

        Ranks meet in the backward of every step: what one of them wrote before it, all of them see after it. What is
        seen earlier has to wait.
        """
        store = _get_default_store() if self.several else None
        return store is not None and store.check([self._key]) and int(store.get(self._key)) < step

    @property
    def _key(self) -> str:
        return f"lightning_ckpt/plan/{self._training}/{self._elections}"


def communicates(layers: Iterable[nn.Module]) -> bool:
    """Whether ranks may wait for each other inside layers, so that none may run one again unless all do."""
    parts = [part for layer in layers for part in layer.modules()]
    return any(
        isinstance(part, (FullyShardedDataParallel, nn.SyncBatchNorm))
        or any(isinstance(parameter, DTensor) for parameter in part._parameters.values())
        for part in parts
    )
