"""Work out what to keep, recompute and offload for a memory budget: plain PyTorch, no Lightning.

`make_plan` is the whole interface for a model and a batch: the step is rehearsed on fake tensors under every treatment
(`preflight`, `trace`), which gives what every layer costs (`profile`); the cheapest plan within the budget is solved
for exactly (`solver`), rehearsed in turn, and corrected where the parts did not add up (`planner`).
"""

from lightning_ckpt.planning.budget import Budget, BudgetError, parse_budget
from lightning_ckpt.planning.leaks import LeakError
from lightning_ckpt.planning.make import make_plan
from lightning_ckpt.planning.plan import LayerPlan, Plan
from lightning_ckpt.planning.plan_file import PlanFileError, check_layers, load_plan, save_plan
from lightning_ckpt.planning.preflight import PreflightError
from lightning_ckpt.planning.treatment import Treatment

__all__ = [
    "Budget",
    "BudgetError",
    "LayerPlan",
    "LeakError",
    "Plan",
    "PlanFileError",
    "PreflightError",
    "Treatment",
    "check_layers",
    "load_plan",
    "make_plan",
    "parse_budget",
    "save_plan",
]
