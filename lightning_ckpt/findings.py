"""What the first training batch has shown of the recomputed layers, said once."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ckpt.compiler import casts_are_emulated
from lightning_ckpt.recompute import Recompute
from lightning_ckpt.recompute.inspection import CHECKPOINTS_ITSELF, IS_CHECKPOINTED, KEEPS_CACHE
from lightning_ckpt.recompute.policy import resolve_policy
from lightning_ckpt.selection.summary import shorten_names


def report_first_batch(
    who: str, recomputed: Sequence[Recompute], policy: Any, moves_inputs: bool, precision: str | None
) -> None:
    """Say what a user should know after the first batch.

    Args:
        who: the callback, for the messages.
        recomputed: what is attached to its layers.
        policy: the operators whose results are kept, as the user wrote them; None for none.
        moves_inputs: whether the inputs of layers travel to host memory.
        precision: the Trainer's.
    """
    _report_calls(who, recomputed)
    if policy is not None:
        _report_policy(who, recomputed, policy)
    compiled = [each for each in recomputed if each.compiled]
    if compiled and moves_inputs:
        rank_zero_warn(
            f"{who}: {len(compiled)} layers run in compiled code, which keeps their inputs itself, so they stay on the "
            f"device: {names_of(compiled)}. `Trainer(strategy='ckpt_offload')` moves them."
        )
    if compiled and "16" in str(precision) and not casts_are_emulated():
        rank_zero_warn(
            f"{who}: {len(compiled)} layers run in compiled code with `precision={precision!r}`: {names_of(compiled)}. "
            "Inductor leaves out casts where it fuses operators, and fuses a recompute otherwise, so gradients can "
            "differ from those of the compiled plain run in their last bits. Set "
            "`torch._inductor.config.emulate_precision_casts = True` for both to have them equal."
        )
    caching = _with_finding(recomputed, KEEPS_CACHE)
    if caching:
        rank_zero_info(
            f"{who}: {len(caching)} layers fill a key-value cache in training (`use_cache=True`). It is replayed "
            "exactly, but its keys and values stay in memory; pass `use_cache=False` to save them."
        )


def _report_calls(who: str, recomputed: Sequence[Recompute]) -> None:
    checkpointed = _with_finding(recomputed, IS_CHECKPOINTED)
    if checkpointed:
        rank_zero_warn(
            f"{who}: {len(checkpointed)} of {len(recomputed)} layers are checkpointed already, by a function that the "
            "model calls around them (`torch.utils.checkpoint`, DeepSpeed's, an adjoint method), and are left to it: "
            f"{names_of(checkpointed)}. Call the layers directly, to have them recomputed exactly here."
        )
    idle = [each for each in recomputed if not each.called and each not in checkpointed]
    if idle:
        rank_zero_warn(
            f"{who}: {len(idle)} of {len(recomputed)} layers were not called with gradients in the first training "
            f"batch, so nothing is saved there: {names_of(idle)}. If the model calls a method of theirs other than "
            "`forward`, choose the modules inside them; layers that are frozen, with what is before them, save "
            "nothing anyway."
        )
    nested = _with_finding(recomputed, CHECKPOINTS_ITSELF)
    if nested:
        classes = ", ".join(dict.fromkeys(type(each.layer).__name__ for each in nested))
        rank_zero_warn(
            f"{who}: {classes} layers checkpoint a part of themselves (`torch.utils.checkpoint` in their forward), and "
            f"that part now runs three times: {names_of(nested)}. Switch one of the two off."
        )


def _report_policy(who: str, recomputed: Sequence[Recompute], policy: Any) -> None:
    eager = [each for each in recomputed if each.called and not each.compiled]
    without = [each for each in eager if not each.kept_operators]
    if without:
        rank_zero_warn(
            f"{who}: {len(without)} of {len(recomputed)} layers keep nothing by `policy={policy!r}`, since they run "
            f"none of these operators, or none that the recompute needs: {names_of(without)}. They are recomputed as a "
            "whole."
        )
        return
    kept = {operator for each in eager for operator in each.kept_operators}
    listed = [item for item in policy if item != "matmul"] if isinstance(policy, list) else []
    unused = [item for item in listed if eager and not kept & resolve_policy(item)]
    if unused:
        rank_zero_warn(f"{who}: no layer keeps anything of {', '.join(map(str, unused))}, which `policy` lists.")


def _with_finding(recomputed: Iterable[Recompute], finding: str) -> list[Recompute]:
    return [each for each in recomputed if finding in each.findings]


def names_of(recomputed: Iterable[Recompute]) -> str:
    """The names of layers, shortened."""
    return shorten_names([each.name for each in recomputed])
