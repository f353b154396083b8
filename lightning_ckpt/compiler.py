"""Settings of `torch.compile` under which a recompute in compiled code is not exact."""

import sys

from lightning.pytorch.utilities.exceptions import MisconfigurationException


def refuse_memory_budget(who: str) -> None:
    """Refuse to recompute layers while the compiler recomputes by a budget of its own.

    Raises:
        MisconfigurationException: it is set to.
    """
    budget = getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0)
    if budget < 1:
        raise MisconfigurationException(
            f"{who}: `torch._functorch.config.activation_memory_budget={budget}` has the compiler recompute as well, "
            "wrongly where dropout is (https://github.com/pytorch/pytorch/issues/190758). Set it to 1.0; "
            "`policy='matmul'` keeps a part of the activations, exactly."
        )


def casts_are_emulated() -> bool:
    """Whether inductor rounds where the model casts, although it leaves casts out where it fuses operators."""
    config = sys.modules.get("torch._inductor.config")
    return config is None or bool(getattr(config, "emulate_precision_casts", False))
