"""A plan comes back from its file as it was; what is wrong with an edited one is said with its line."""

import dataclasses
import re

import hypothesis
import pytest
import yaml
from hypothesis import strategies

from lightning_ckpt.planning.plan import LayerPlan, Plan
from lightning_ckpt.planning.plan_file import PlanFileError, check_layers, load_plan, save_plan
from lightning_ckpt.planning.treatment import Treatment

TREATMENTS = [Treatment.RECOMPUTE_OFFLOAD, Treatment.RECOMPUTE, Treatment.POLICY, Treatment.KEEP]
PLAN = Plan(
    tuple(LayerPlan(f"h.{i}", each, 3000 + i, 1000, 0, 0.1 + 0.2, 1e-7) for i, each in enumerate(TREATMENTS)),
    budget_bytes=2**60 + 1,
    peak_bytes=20 * 2**30,
    binds="the optimizer's step",
    extra_s=0.0456,
    step_s=1.0,
    gap_s=0.25,
    kept_bytes=30 * 2**30,
    recomputed_bytes=10 * 2**30,
    operators=("aten.mm", "aten.bmm"),
    measured=True,
    rehearsed=False,
)
CLASSES = {layer.name: "Block" for layer in PLAN.layers}


@pytest.fixture
def path(tmp_path):
    """A file with a plan."""
    save_plan(PLAN, tmp_path / "new" / "plan.yaml", CLASSES)
    return tmp_path / "new" / "plan.yaml"


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# ---------------------------------------------------------------- as it was

texts = strategies.text(strategies.characters(exclude_categories=["Cs"]))
awkward = strategies.sampled_from(["0", "~", "<<", "yes", "\x85", "x" * 200])  # for YAML
seconds = strategies.floats(0, allow_infinity=False)
sizes = strategies.integers(0, 2**70)


@strategies.composite
def plans(draw):
    treatments = strategies.sampled_from(Treatment)
    names = draw(strategies.lists(texts | awkward, min_size=1, unique=True))
    layers = [
        LayerPlan(name, draw(treatments), *(draw(sizes) for _ in range(3)), draw(seconds), draw(seconds))
        for name in names
    ]
    operators = tuple(draw(strategies.lists(texts, max_size=3)))
    figures = draw(strategies.tuples(sizes, sizes, texts, seconds, seconds, seconds, sizes, sizes))
    return Plan(tuple(layers), *figures, operators, draw(strategies.booleans()), draw(strategies.booleans()))


@hypothesis.settings(derandomize=True, deadline=None, max_examples=50)
@hypothesis.given(plans())
def test_a_plan_comes_back_as_it_was(tmp_path_factory, plan):
    path = tmp_path_factory.getbasetemp() / "any_plan.yaml"
    save_plan(plan, path, {layer.name: "Block" for layer in plan.layers})
    assert load_plan(path) == plan


def test_the_file_reads_well(path):
    lines = path.read_text().splitlines()
    assert "version: 1" in lines
    assert "peak_bytes: 21474836480" in lines
    assert "operators: [aten.mm, aten.bmm]" in lines
    assert lines[-4].startswith("  h.0: {treatment: recompute + offload, class: Block, saved_bytes: 3000, ")
    assert all(str(each) in "".join(line for line in lines if line.startswith("#")) for each in Treatment)
    assert yaml.safe_load(path.read_text())["layers"]["h.3"] == {
        "treatment": "keep",
        "class": "Block",
        "saved_bytes": 3003,
        "input_bytes": 1000,
        "moved_bytes": 0,
        "forward_s": 0.1 + 0.2,
        "recompute_s": 1e-7,
    }


# ---------------------------------------------------------------- edited


def test_a_treatment_can_be_edited(path):
    edit(path, "treatment: policy", 'treatment:   "recompute"  ')
    third = dataclasses.replace(PLAN.layers[2], treatment=Treatment.RECOMPUTE)
    assert load_plan(path) == dataclasses.replace(PLAN, layers=(*PLAN.layers[:2], third, PLAN.layers[3]))


def test_comments_and_order_do_not_matter(path):
    edit(path, "measured: true\n", "")
    edit(path, "version: 1\n", "measured: true\n# mine\n\nversion: 1  # the first\n")
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")  # as some editors save
    assert load_plan(path) == PLAN


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("treatment: policy", "treatment: polcy", "  h.2: {treatment: polcy", "not 'polcy'; write `policy`"),
        ("treatment: keep", "treatment: KEEP", "  h.3: {treatment: KEEP", "not 'KEEP'; write `keep`"),
        ("treatment: keep", "treatment: drop", "  h.3:", "keep, policy, recompute, offload, recompute + offload"),
        ("treatment: keep", "treatment: [keep]", "  h.3:", "one of keep"),
        ("treatment: keep, ", "", "  h.3:", "no `treatment`"),
        ("3003", "3003.5", "  h.3:", "`saved_bytes` should be a whole number of bytes, 0 or more, not '3003.5'"),
        ("3003", "-3003", "  h.3:", "0 or more, not '-3003'"),
        ("saved_bytes: 3003", "saved: 3003", "  h.3:", "`saved` has no meaning; write `saved_bytes`"),
        ("saved_bytes: 3003", "saved_bytes: 3, saved_bytes: 4", "  h.3:", "`saved_bytes` is here a second time"),
        ("h.3: {", "h.2: {", "  h.2: {treatment: keep", "`h.2` is here a second time; remove one"),
        ("h.3: {", "? [a]\n  : {", "  ? [a]", "a name should be a text"),
        ("extra_s: 0.0456", "extra_s: soon", "extra_s: soon", "a number of seconds, 0 or more, not 'soon'"),
        ("extra_s: 0.0456", "extra_s: nan", "extra_s: nan", "a number of seconds"),
        ("extra_s: 0.0456", "extra_s: inf", "extra_s: inf", "a number of seconds"),
        ("measured: true", "measured: maybe", "measured: maybe", "true or false, not 'maybe'"),
        ("[aten.mm, aten.bmm]", "aten.mm", "operators: aten.mm", "a list, such as `[aten.mm, aten.bmm]`"),
        ("[aten.mm, aten.bmm]", "[[aten.mm]]", "operators: [[", "a text"),
        ("peak_bytes:", "peek_bytes:", "peek_bytes:", "`peek_bytes` has no meaning; write `peak_bytes`"),
        ("version: 1", "version: 1\nmine: 2", "mine: 2", "`mine` has no meaning; remove it"),
        ("version: 1", "version: 2", "version: 2", "version 1"),
        ("layers:", "layers: []\nx:", "x:", "`x` has no meaning; remove it"),
        ("  h.0: {", "  h.0: ", "  h.0: treatment", "no YAML"),
        ("version: 1", "version: 1\n\tbinds: x", "\tbinds: x", "no YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(path, old, new, line, said):
    edit(path, old, new)
    [(number, found)] = [(i, each) for i, each in enumerate(path.read_text().splitlines(), 1) if each.startswith(line)]
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {number}, `{found.strip()[:80]}")
    assert said in message


def test_a_layer_without_figures_is_told_how_it_is_written(path):
    text = re.sub(r"h\.3: .*", "h.3: recompute", path.read_text())
    path.write_text(text)
    with pytest.raises(PlanFileError, match=r"line \d+, `h.3: recompute`: .*write `h.3: \{treatment: keep, \.\.\.\}`"):
        load_plan(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": the file is empty"),
        ("# nothing\n", ": the file is empty"),
        ("hello", ", line 1, `hello`: .*`name: value`"),
        ("a: 1", ": .*write `version: 1`"),
        ("version: 1\nlayers: {}", ": there is no `budget_bytes`, `peak_bytes`, .*`operators`"),
        ("version: 1\n\x01", ": .*no YAML"),
        ("version: 1\n---\nversion: 1", ", line 2, `---`: .*no YAML"),
    ],
)
def test_other_files_are_no_plans(tmp_path, text, said):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanFileError, match=rf"^{re.escape(str(path))}{said}"):
        load_plan(path)


@pytest.mark.parametrize(
    ("layers", "said"),
    [("layers: {}", "there are no layers"), ("layers: [h.0]", "lines of `name: value`"), ("layers:", "lines of")],
)
def test_a_plan_has_layers(path, layers, said):
    text = path.read_text()
    path.write_text(text[: text.index("layers:")] + layers)
    with pytest.raises(PlanFileError, match=rf"line \d+, `{re.escape(layers)}`: .*{said}"):
        load_plan(path)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(PlanFileError, match=r"nowhere\.yaml: .*No such file.*`save_plan`"):
        load_plan(tmp_path / "nowhere.yaml")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(PlanFileError, match=r"picture\.png: .*UTF-8"):
        load_plan(tmp_path / "picture.png")


# ---------------------------------------------------------------- the model at hand


def test_layers_of_the_model_pass_in_any_order():
    check_layers(PLAN, ["h.0", "h.1", "h.2", "h.3"])
    check_layers(PLAN, ["h.0", "h.2", "h.1", "h.3"])  # a plan has the order of forward


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["h.0", "h.1"], r"the model has no h\.\{2, 3\}\. Choose .*`layers=`"),
        (["h.0", "h.1", "h.2", "h.3", "head"], "the plan has no head"),
        (["k.0", "k.1"], r"the model has no h\.\{0, 1, 2, 3\}; the plan has no k\.\{0, 1\}"),
        ([], r"the model has no h\.\{0, 1, 2, 3\}\."),
    ],
)
def test_other_layers_are_named(names, said):
    with pytest.raises(PlanFileError, match=said):
        check_layers(PLAN, names)
