"""A memory budget in training: plan, measure, plan again, check."""

from lightning_ckpt.budgeted.keeper import BudgetKeeper

__all__ = ["BudgetKeeper"]
