"""Which labels are dominated, against a comparison of all with all."""

import numpy as np
import pytest

from lightning_ckpt.planning.solver.pareto import nondominated


@pytest.mark.parametrize("count", [1, 40, 300])
@pytest.mark.parametrize("most", [3, 10**6])  # many equals, and few
@pytest.mark.parametrize("width", [2, 3, 5])
def test_what_no_other_equals_or_beats_is_kept_once(width, most, count):
    random = np.random.default_rng(0)
    columns = random.integers(0, most, (width, count))
    columns[1] = most - columns[0] + random.integers(0, 3, count)  # less of one is more of another
    labels = set(map(tuple, columns.T.tolist()))
    best = {a for a in labels if not any(a != b and all(x <= y for x, y in zip(b, a, strict=True)) for b in labels)}
    kept = [tuple(label) for label in columns.T[nondominated(list(columns))].tolist()]
    assert sorted(kept) == sorted(best)
