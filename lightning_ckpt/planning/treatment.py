"""What may be done with a layer's activations, and how a layer is told."""

from collections.abc import Mapping
from enum import StrEnum

from lightning_ckpt.recompute import Recompute
from lightning_ckpt.recompute.arguments import Keep
from lightning_ckpt.recompute.policy import Operators


class Treatment(StrEnum):
    """Treatments of a layer.

    Attributes:
        KEEP: everything that its backward needs stays on the device, as in a plain run.
        POLICY: the results of some operators stay, the rest is recomputed.
        RECOMPUTE: its inputs stay, everything is recomputed.
        OFFLOAD: everything that its backward needs waits in host memory.
        RECOMPUTE_OFFLOAD: its inputs wait in host memory, everything is recomputed.
    """

    KEEP = "keep"
    POLICY = "policy"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    RECOMPUTE_OFFLOAD = "recompute + offload"

    @property
    def recomputes(self) -> bool:
        """Whether the layer runs a second time."""
        return self not in (Treatment.KEEP, Treatment.OFFLOAD)

    @property
    def moves(self) -> bool:
        """Whether something travels to host memory."""
        return self in (Treatment.OFFLOAD, Treatment.RECOMPUTE_OFFLOAD)


#: The treatment of each layer, by qualified name, in the order of forward.
Assignment = Mapping[str, Treatment]


def treat(recompute: Recompute, treatment: Treatment, operators: Operators, pack: Keep | None) -> None:
    """Have a layer treated so from its next call on.

    Args:
        recompute: what is attached to it.
        treatment: the treatment.
        operators: whose results stay under `Treatment.POLICY`.
        pack: what moves a tensor to host memory; None where nothing can be moved, and then everything stays.
    """
    recompute.recomputes = treatment.recomputes
    recompute.policy = operators if treatment is Treatment.POLICY else frozenset()
    recompute.keep = pack if treatment.moves else None
