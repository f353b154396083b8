"""Draw time against peak memory: the best plans as a line, uniform rules as points, the budget."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ckpt.planning.frontier import Frontier, Point
from lightning_ckpt.planning.plan import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAR = 1.5  # a budget beyond that many times the highest peak would leave no room for the points
# Where a name may stand, in points from its marker: close by, and rather above and to the right, where fewer lines are.
_CLOSE = 8
_OFFSETS = [sign * far for far in (0, _CLOSE, 20, 34, 50, 70, 95, 125) for sign in (1, -1)]
_PLACES = sorted(
    set(product(_OFFSETS, _OFFSETS)) - {(0, 0)},
    key=lambda place: (math.hypot(*place) + 20 * (place[0] < 0) + 60 * (place[1] < 0), place),
)
_GAP = 4  # pixels around a name

_Place = tuple[float, float]


class PictureError(ValueError):
    """Says in a sentence why a picture cannot be made, and what to do."""


def draw_frontier(frontier: Frontier, budget_bytes: int | None, output: str | Path) -> None:
    """Draw what the best plans and the uniform rules cost, by the memory that they need.

    Both axes begin at 0. A budget of more than one and a half times the highest peak is named, but not drawn.

    Args:
        frontier: plans and rules.
        budget_bytes: the budget, in bytes; None for none.
        output: the picture to write; its suffix chooses the format (png, svg, pdf).

    Raises:
        PictureError: a `ValueError`: matplotlib is missing, or cannot write such a picture.

    Example::

        draw_frontier(frontier, plan.budget_bytes, "frontier.png")
    """
    figure = _figure()
    output = Path(output)
    if output.suffix.lower()[1:] not in figure.canvas.get_supported_filetypes():
        raise PictureError(f"{output} should end in .png, .svg, .pdf or another format of matplotlib.")
    _fill(figure, frontier, budget_bytes)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    except OSError as error:
        raise PictureError(f"{output} cannot be written: {error.strerror}.") from None


def _figure() -> "Figure":
    try:
        from matplotlib.figure import Figure  # not pyplot: no window to open, and no global state to leave behind
    except ImportError as error:
        raise PictureError(f"A picture needs `pip install 'lightning_ckpt[report]'` ({error}).") from error
    return Figure(figsize=(8, 4.6), dpi=150, layout="constrained")


def _fill(figure: "Figure", frontier: Frontier, budget_bytes: int | None) -> None:
    most = max((point.peak_bytes for point in (*frontier.plans, *frontier.rules)), default=0)
    unit, bytes_per_unit = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    per_second = 100 / frontier.step_s if frontier.step_s else 1e3  # without a step to compare with, ms

    def place(point: Point) -> _Place:
        return point.peak_bytes / bytes_per_unit, point.extra_s * per_second

    axes = figure.add_subplot()
    axes.set_title("Time against peak memory", loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    plans, rules = ([place(point) for point in each] for each in (frontier.plans, frontier.rules))
    # Not clipped: what costs no time lies on the axis.
    axes.plot(*_columns(plans), "-o", color="C0", markersize=3.5, linewidth=1.6, label="best plans", clip_on=False)
    axes.plot(*_columns(rules), "D", color="C1", markersize=6, label="uniform rules", clip_on=False)
    right = most
    if budget_bytes is not None:
        budget = f"budget {size(budget_bytes)}"
        if budget_bytes > _FAR * most:
            axes.plot([], [], "--", color="C3", label=f"{budget} (beyond the axis)")
        else:
            axes.axvline(budget_bytes / bytes_per_unit, linestyle="--", color="C3", label=budget)
            right = max(most, budget_bytes)
    axes.set_xlim(0, 1.08 * right / bytes_per_unit or 1)
    axes.set_ylim(0, 1.15 * max((y for _, y in [*plans, *rules]), default=0) or 1)
    axes.set_xlabel(f"peak memory of a step ({unit})")
    if frontier.step_s:
        axes.set_ylabel("extra time (% of the plain step)")
        ms = axes.secondary_yaxis("right", functions=_scaling(10 * frontier.step_s))  # from percent to ms
        ms.set_ylabel(f"extra time (ms; the plain step takes {frontier.step_s * 1e3:,.1f} ms)")
        ms.spines["right"].set_visible(False)
    else:
        axes.set_ylabel("extra time of a step (ms)")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    names = defaultdict(list)
    for rule, point in zip(frontier.rules, rules, strict=True):
        names[point].append(rule.name.replace("$", r"\$"))  # no formulas
    _name(figure, axes, {point: "\n".join(each) for point, each in names.items()}, [*plans, *rules])


def _columns(points: Sequence[_Place]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _scaling(factor: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """There and back."""
    return (lambda value: value * factor), (lambda value: value / factor)


def _name(figure: "Figure", axes: "Axes", names: Mapping[_Place, str], markers: Sequence[_Place]) -> None:
    """Write names beside points, each at the first place where nothing else is."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # only now it is settled where the axes are
    half = 4 * figure.dpi / 72
    taken = [Bbox([(x - half, y - half), (x + half, y + half)]) for x, y in axes.transData.transform(markers)]
    lines = [line.get_path().transformed(line.get_transform()) for line in axes.lines if line.get_linestyle() != "None"]

    def is_free(box: Bbox) -> bool:
        box = box.padded(_GAP)
        inside = all(axes.bbox.contains(*corner) for corner in box.corners())
        return inside and not box.count_overlaps(taken) and not any(line.intersects_bbox(box, False) for line in lines)

    for point, name in names.items():
        for tried, offset in enumerate([*_PLACES, _PLACES[0]]):
            text = axes.annotate(name, point, offset, textcoords="offset points", **_style(*offset))
            text.set_in_layout(False)
            text.get_window_extent()  # lets the text move to its place; the extent is that of the connection too
            box = Text.get_window_extent(text)
            if is_free(box) or tried == len(_PLACES):  # none is free: close by
                taken.append(box)
                break
            text.remove()


def _style(x: float, y: float) -> dict[str, Any]:
    """A name begins or ends at its place, and is connected with its point if it is far from it."""
    arrow = {"arrowstyle": "-", "color": "gray", "linewidth": 0.6} if max(abs(x), abs(y)) > _CLOSE else None
    horizontal = "center" if x == 0 else "left" if x > 0 else "right"
    vertical = "center" if y == 0 else "bottom" if y > 0 else "top"
    return {"ha": horizontal, "va": vertical, "fontsize": 9, "arrowprops": arrow}
