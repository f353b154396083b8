"""The cheapest plan of a chain of layers under a memory limit.

`chain` holds the data and what a plan comes to; `solve` is the interface; the rest is how it is found: by label setting
(`search`) over the chain as numbers (`problem`), with dominance (`pareto`), lower bounds (`bounds`), ties (`ending`).
"""

from lightning_ckpt.planning.solver.chain import Chain, Choice, Link, binding, cost, peak
from lightning_ckpt.planning.solver.solve import Solution, lowest, solve

__all__ = ["Chain", "Choice", "Link", "Solution", "binding", "cost", "lowest", "peak", "solve"]
