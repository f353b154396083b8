"""How a plan and a frontier print: tables for terminals of 120 columns."""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from lightning_ckpt.planning.frontier import Frontier, Point
from lightning_ckpt.planning.plan import Plan, size

_COLUMNS = 120
_MIB = 2**20
_Row = tuple[str, ...]


def plan_table(plan: Plan) -> str:
    """A row per layer, their totals, and what `str(plan)` says of peak and time.

    Layers that follow one another by number and have the same figures share a row, which shows those of one layer.

    Example::

        print(plan_table(make_plan(model, batch, "20GiB")))
    """
    memory = {
        "saved MiB": [layer.saved_bytes / _MIB for layer in plan.layers],
        "input MiB": [layer.input_bytes / _MIB for layer in plan.layers],
        "host MiB": [layer.moved_bytes / _MIB for layer in plan.layers],
    }
    time = {
        "forward ms": [layer.forward_s * 1e3 for layer in plan.layers],
        "recompute ms": [layer.recompute_s * 1e3 for layer in plan.layers],
    }
    if not any(memory["host MiB"]):
        del memory["host MiB"]
    columns, totals = [], []
    for figures in (memory, time):
        text = _formatter(chain.from_iterable(figures.values()))
        for heading, values in figures.items():
            columns.append([text(value) for value in values])
            # What a kept layer is given is among what it saves, and would count twice.
            totals.append("" if heading == "input MiB" else text(sum(values)))
    rows = [
        (layer.name, str(layer.treatment), *cells)
        for layer, cells in zip(plan.layers, zip(*columns, strict=True), strict=True)
    ]
    merged = _merge(rows)
    total = (f"total of {len(rows)} layer{'' if len(rows) == 1 else 's'}", "", *totals)
    lines = _align([("layer", "treatment", *memory, *time), *merged, total], left=2)
    lines.insert(-1, "-" * max(map(len, lines)))
    if len(merged) < len(rows):
        lines.append("Where layers share a row, its figures are those of each of them.")
    totals = [textwrap.fill(line, _COLUMNS, subsequent_indent="  ") for line in plan.totals()]
    return "\n".join([*lines, "", *totals])


def frontier_table(frontier: Frontier) -> str:
    """Plans and uniform rules by peak memory, and beside each rule the best plan that needs no more memory.

    Example::

        print(frontier_table(planner.frontier(planner.rules())))
    """
    text = _formatter(point.extra_s * 1e3 for point in (*frontier.plans, *frontier.rules))

    def row(point: Point, *beside: str) -> _Row:
        return point.name, size(point.peak_bytes), text(point.extra_s * 1e3), _share(point.extra_s, frontier), *beside

    def rule_row(rule: Point) -> _Row:
        plan = _best_within(frontier.plans, rule.peak_bytes)
        if plan is None:
            return row(rule, "-", "-")
        slower_s = rule.extra_s - plan.extra_s
        return row(rule, text(plan.extra_s * 1e3), f"{text(slower_s * 1e3)} ms ({_share(slower_s, frontier)})")

    rows = [(plan.peak_bytes, row(plan, "", "")) for plan in frontier.plans]
    rows += [(rule.peak_bytes, rule_row(rule)) for rule in frontier.rules]
    rows.sort(key=lambda row: row[0])
    heading = ("", "peak", "extra ms", "of the step", "plan's extra ms", "rule slower by")
    return "\n".join(
        [
            *_align([heading, *(row for _, row in rows)], left=1),
            f"The plain step takes {frontier.step_s * 1e3:,.1f} ms. Beside a rule stands the best of these plans that",
            "needs no more memory.",
        ]
    )


def _best_within(plans: Iterable[Point], peak_bytes: int) -> Point | None:
    fitting = [plan for plan in plans if plan.peak_bytes <= peak_bytes]
    return min(fitting, key=lambda plan: plan.extra_s, default=None)


def _share(seconds: float, frontier: Frontier) -> str:
    return f"{seconds / frontier.step_s:z.1%}" if frontier.step_s else "-"


def _formatter(values: Iterable[float]) -> Callable[[float], str]:
    """Writes figures of one kind, with as many decimals as give the largest of them four digits."""
    largest = max(map(abs, values), default=0.0)
    decimals = min(6, max(1, 3 - math.floor(math.log10(largest)))) if largest else 1
    return lambda value: f"{value:z,.{decimals}f}"


def _align(rows: Sequence[_Row], left: int) -> list[str]:
    """Lines of columns, the first `left` of them with names and the others with numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# ---------------------------------------------------------------- one row for several layers


def _merge(rows: Sequence[_Row]) -> list[_Row]:
    """Rows that follow one another by the number in their names, and are equal else, become one."""
    runs: list[list[_Row]] = []
    place: int | None = None  # of the number that counts in the latest run
    for row in rows:
        counts = _counting_place(runs[-1][-1][0], row[0]) if runs and runs[-1][-1][1:] == row[1:] else None
        if counts is not None and place in (None, counts):
            runs[-1].append(row)
            place = counts
        else:
            runs.append([row])
            place = None
    return [(_range(run[0][0], run[-1][0]), *run[0][1:]) for run in runs]


def _counting_place(name: str, following: str) -> int | None:
    """Which part of a dotted name is one higher in the following one, all others being equal."""
    parts, others = name.split("."), following.split(".")
    if len(parts) != len(others):
        return None
    places = [i for i, (part, other) in enumerate(zip(parts, others, strict=True)) if part != other]
    if len(places) != 1 or not parts[places[0]].isdecimal():
        return None
    return places[0] if others[places[0]] == str(int(parts[places[0]]) + 1) else None


def _range(first: str, last: str) -> str:
    """`h.{0 ... 11}` for `h.0` to `h.11`."""
    return ".".join(a if a == b else f"{{{a} ... {b}}}" for a, b in zip(first.split("."), last.split("."), strict=True))
