"""One plan on all ranks: which one it is, and when it changes."""

import json
from collections.abc import Sequence

import lightning.pytorch as pl
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from lightning_ckpt.agreement import gather

_KEY = "lightning_ckpt/plan"


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
        self._count = 0

    def failure(self, own: str | None) -> str | None:
        """Why something has failed on any rank, or None if it has not: every rank has to ask."""
        everybody = gather(self._trainer, self._who, {"failure": own or ""})
        return next((str(each["failure"]) for each in everybody if each["failure"]), None)

    def most(self, own: int) -> int:
        """The largest number of all ranks: every rank has to ask."""
        return max(int(str(each["number"])) for each in gather(self._trainer, self._who, {"number": str(own)}))

    def elect(self, peak: int, treatments: Sequence[str]) -> list[str]:
        """The treatments of the rank whose peak is the highest: every rank has to ask."""
        everybody = gather(self._trainer, self._who, {"peak": str(peak), "treatments": list(treatments)})
        return list(max(everybody, key=lambda each: int(str(each["peak"])))["treatments"])

    def propose(self, treatments: Sequence[str]) -> None:
        """Have all ranks, this one too, treat layers so from their next batch on; the first proposal counts."""
        _get_default_store().compare_set(f"{_KEY}/{self._count}", "", json.dumps(list(treatments)))

    def proposed(self) -> list[str] | None:
        """What has been proposed since this was asked last.

        Ranks meet in every backward: what one of them wrote before its forward, all others see before their next one.
        """
        key = f"{_KEY}/{self._count}"
        if not self.several or not _get_default_store().check([key]):
            return None
        self._count += 1
        treatments: list[str] = json.loads(_get_default_store().get(key))
        return treatments
