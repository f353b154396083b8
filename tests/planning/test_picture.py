"""The picture of a frontier shows its points and the budget, and no name stands on anything."""

import itertools
import sys

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from lightning_ckpt.planning.frontier import Frontier, Point
from lightning_ckpt.planning.picture import PictureError, draw_frontier

MIB, GIB = 2**20, 2**30
PLANS = tuple(Point("plan", (80 + 20 * i) * MIB, 0.1 * (1 - i / 19) ** 1.5) for i in range(20))
RULES = (
    Point("every_n_layers=1", 84 * MIB, 0.1),
    Point("every_n_layers=2", 262 * MIB, 0.05),
    Point("every_n_layers=4", 361 * MIB, 0.025),
    Point("operator policy", 264 * MIB, 0.049),  # all but where another one is
    Point("all kept", 460 * MIB, 0.0),
)
FRONTIER = Frontier(PLANS, RULES, step_s=0.5)


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws a frontier; the figure that was saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args: [figures.append(self), save(self, *args)])

    def draw(frontier, budget_bytes):
        draw_frontier(frontier, budget_bytes, tmp_path / "new" / "frontier.png")
        assert (tmp_path / "new" / "frontier.png").read_bytes().startswith(b"\x89PNG\r\n")
        return figures[-1]

    return draw


def lines(axes):
    """The points of every line, by label."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def names(axes):
    return [text for text in axes.texts if isinstance(text, Annotation)]


def test_points_budget_and_units(draw):
    figure = draw(FRONTIER, 300 * MIB)
    [axes] = figure.axes
    drawn = lines(axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(drawn)
    assert list(drawn) == ["best plans", "uniform rules", "budget 300.0 MiB"]
    for points, label in (PLANS, "best plans"), (RULES, "uniform rules"):
        assert drawn[label] == [
            (pytest.approx(point.peak_bytes / MIB), pytest.approx(100 * point.extra_s / 0.5)) for point in points
        ]
    assert [x for x, _ in drawn["budget 300.0 MiB"]] == [300, 300]
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
    assert axes.get_xlabel() == "peak memory of a step (MiB)"
    assert axes.get_ylabel() == "extra time (% of the plain step)"
    [ms] = axes.child_axes
    assert ms.get_ylim() == pytest.approx([5 * end for end in axes.get_ylim()])  # 1 % of 500 ms
    assert "ms" in ms.get_ylabel()


@pytest.mark.parametrize("budget", [None, 262, 460])
@pytest.mark.parametrize("scale", [1, 8])  # MiB and GiB; far from 0 and near
def test_names_stand_on_nothing(draw, budget, scale):
    plans, rules = (
        tuple(Point(p.name, p.peak_bytes * scale + (scale - 1) * 300 * MIB, p.extra_s) for p in points)
        for points in (PLANS, RULES)
    )
    figure = draw(Frontier(plans, rules, 0.5), budget and budget * MIB * scale + (scale - 1) * 300 * MIB)
    [axes] = figure.axes
    unit = {"peak memory of a step (MiB)": MIB, "peak memory of a step (GiB)": GIB}[axes.get_xlabel()]
    assert lines(axes)["best plans"][-1] == (pytest.approx(plans[-1].peak_bytes / unit), 0)
    assert sorted(text.get_text() for text in names(axes)) == sorted(rule.name for rule in RULES)
    boxes = [Text.get_window_extent(text) for text in names(axes)]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    for line in axes.lines:
        path = line.get_path().transformed(line.get_transform())
        assert not any(box.contains(*point) for box in boxes for point in path.vertices)
        if line.get_linestyle() != "None":
            assert not any(path.intersects_bbox(box, filled=False) for box in boxes)
    assert all(axes.bbox.contains(*corner) for box in boxes for corner in box.corners())


def test_rules_at_one_point_share_a_name(draw):
    alike = tuple(Point(name, 100 * MIB, 0.0) for name in ("all kept", "operator policy", "costs $ and $"))
    [axes] = draw(Frontier(alike[:1], alike, 0.5), None).axes
    assert [text.get_text() for text in names(axes)] == ["all kept\noperator policy\ncosts \\$ and \\$"]


def test_a_budget_far_beyond_leaves_room_for_the_points(draw):
    figure = draw(FRONTIER, 80 * GIB)
    assert figure.legends[0].get_texts()[-1].get_text() == "budget 80.00 GiB (beyond the axis)"
    assert figure.axes[0].get_xlim()[1] == pytest.approx(1.08 * 460)


def test_without_a_time_of_the_step_the_axis_is_in_ms(draw):
    [axes] = draw(Frontier(PLANS, RULES, 0.0), None).axes
    assert axes.get_ylabel() == "extra time of a step (ms)"
    assert lines(axes)["best plans"][0] == (80, pytest.approx(100))
    assert not axes.child_axes


def test_a_format_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(PictureError, match=r"frontier\.txt should end in \.png, \.svg, \.pdf"):
        draw_frontier(FRONTIER, None, tmp_path / "frontier.txt")


def test_a_missing_matplotlib_is_an_error_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PictureError, match=r"pip install 'lightning_ckpt\[report\]'"):
        draw_frontier(FRONTIER, None, tmp_path / "frontier.png")
