"""Which layers are chosen: naming them, counting them, finding them; what errors and prints say."""

import subprocess
import sys

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_ckpt.selection import SelectionError, select_layers
from tests.support import Block, blocks


class Net(nn.Module):
    """Any model. Selection only looks at it, so its forward never runs here."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("selection ran the model")


class WideBlock(Block):
    """A block of a class of its own."""


class Model(Net):
    """An encoder of three `Block` and a decoder of three `WideBlock`."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(
            embed=nn.Linear(8, 8),
            encoder=nn.ModuleList(Block() for _ in range(3)),
            decoder=nn.ModuleList(WideBlock() for _ in range(3)),
            **parts,
        )


ENCODER = ["encoder.0", "encoder.1", "encoder.2"]
DECODER = ["decoder.0", "decoder.1", "decoder.2"]


def chosen(model, *args, **kwargs) -> list[str]:
    return list(select_layers(model, *args, **kwargs).layers)


def complaint(model, *args, **kwargs) -> str:
    with pytest.raises(SelectionError) as error:
        select_layers(model, *args, **kwargs)
    return str(error.value)


# Naming layers


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("WideBlock", DECODER),
        ("Block", ENCODER + DECODER),  # the name of a base class stands for its subclasses too
        (f"{Block.__module__}.Block", ENCODER + DECODER),
        (WideBlock, DECODER),
        (Block, ENCODER + DECODER),
        ("encoder.1", ["encoder.1"]),
        ("decoder.*", DECODER),
        ("*coder.1", ["encoder.1", "decoder.1"]),
        ("encoder.[02]", ["encoder.0", "encoder.2"]),
        ("encoder.?", ENCODER),
        ("*.linear", [f"{name}.linear" for name in ENCODER + DECODER]),
        (r"encoder\.[12]", ["encoder.1", "encoder.2"]),
        (r"(en|de)coder\.\d+", ENCODER + DECODER),
        (["decoder.2", "encoder.*"], [*ENCODER, "decoder.2"]),  # the order is the model's
        ([WideBlock, "encoder.0", r"encoder\.0"], ["encoder.0", *DECODER]),
        (("encoder.0", "WideBlock"), ["encoder.0", *DECODER]),
    ],
)
def test_layers_are_named_by_class_import_path_qualified_name_glob_regex_or_list(layers, names):
    assert chosen(Model(), layers) == names


@pytest.mark.parametrize("path", ["torch.nn.TransformerEncoderLayer", "torch.nn.modules.TransformerEncoderLayer"])
def test_an_import_path_may_be_an_alias(path):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    assert type(layer).__module__ == "torch.nn.modules.transformer"
    assert chosen(nn.TransformerEncoder(layer, 2), path) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("1", ["1"]), ("1?", ["10", "11", "12"]), ("(1)", ["1"]), (r"1\d", ["10", "11", "12"])],
)
def test_names_and_patterns_match_whole_names(pattern, names):
    assert chosen(blocks(12), pattern) == names


def test_a_predicate_chooses_the_modules_it_is_true_for():
    assert chosen(Model(), check_fn=lambda module: isinstance(module, WideBlock)) == DECODER


def test_a_selection_holds_the_modules_themselves_and_all_it_counted_over():
    model = Model()
    selection = select_layers(model, "decoder.*", every_n_layers=2)
    assert selection.layers == {"decoder.0": model.decoder[0], "decoder.2": model.decoder[2]}
    assert selection.matched == dict(zip(DECODER, model.decoder, strict=True))
    assert len(selection) == 2


# Counting


@pytest.mark.parametrize("how", [{}, {"layers": "Block"}, {"check_fn": lambda module: isinstance(module, Block)}])
@pytest.mark.parametrize(
    ("every_n_layers", "names"),
    [
        (1, ENCODER + DECODER),
        (2, ["encoder.0", "encoder.2", "decoder.1"]),
        (3, ["encoder.0", "decoder.0"]),
        (4, ["encoder.0", "decoder.1"]),
        (100, ["encoder.0"]),
    ],
)
def test_the_first_and_every_nth_layer_are_counted_over_the_whole_model(every_n_layers, names, how):
    assert chosen(Model(), every_n_layers=every_n_layers, **how) == names


def test_the_count_runs_over_what_was_named():
    assert chosen(Model(), ["encoder.2", "WideBlock"], every_n_layers=2) == ["encoder.2", "decoder.1"]


@pytest.mark.parametrize("every_n_layers", [0, -1, 1.5, True, "2", None])
def test_every_n_layers_that_is_no_integer_of_at_least_one_is_refused(every_n_layers):
    said = complaint(Model(), every_n_layers=every_n_layers)
    assert f"every_n_layers={every_n_layers!r}" in said
    assert "an integer of at least 1" in said


def test_a_layer_in_several_places_is_one_layer():
    block, other = Block(), Block()
    assert chosen(nn.Sequential(*[block] * 4)) == ["0"]
    assert chosen(nn.Sequential(*[block] * 4), "Block") == ["0"]
    assert chosen(nn.Sequential(*[block, other] * 2)) == ["0", "1"]
    assert chosen(nn.Sequential(*[block, other] * 2), every_n_layers=2) == ["0"]


def test_of_layers_inside_each_other_the_outermost_is_taken():
    assert chosen(Model(), "decoder*") == DECODER
    assert chosen(Model(), ["encoder.0.linear", "encoder.0"]) == ["encoder.0"]
    assert chosen(Model(), check_fn=lambda module: True) == ["embed", *ENCODER, *DECODER]
    assert chosen(Net(body=nn.Sequential(Block(), nn.Sequential(Block()))), nn.Sequential) == ["body"]


# What is never taken, and what is looked through


class FeatureDistance(torchmetrics.Metric):
    """A metric that holds a network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = blocks(2)

    def update(self, x: Tensor) -> None: ...

    def compute(self) -> Tensor:
        return torch.zeros(())


def distances() -> nn.ModuleList:
    return nn.ModuleList([FeatureDistance(), FeatureDistance()])


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({}, ENCODER + DECODER),
        ({"layers": "Block"}, ENCODER + DECODER),
        ({"layers": Block}, ENCODER + DECODER),
        ({"layers": "*"}, ["embed", *ENCODER, *DECODER]),
        ({"check_fn": lambda module: True}, ["embed", *ENCODER, *DECODER]),
    ],
)
def test_metrics_and_the_networks_they_hold_are_never_layers(how, names):
    collection = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "distance": FeatureDistance()})
    assert chosen(Model(distance=FeatureDistance(), each=distances(), together=collection), **how) == names


@pytest.mark.parametrize("layers", ["FeatureDistance", FeatureDistance, torchmetrics.Metric, "each.0"])
def test_a_metric_that_is_named_is_an_error(layers):
    assert "matches no module" in complaint(Model(each=distances()), layers)


def test_an_error_never_suggests_a_metric():
    assert "FeatureDistance" not in complaint(Net(body=Block(), each=distances()))


@pytest.mark.parametrize("layers", ["Model", Model, f"{Model.__module__}.Model"])
def test_the_model_itself_is_an_error_that_shows_what_to_write(layers):
    said = complaint(Model(), layers)
    assert "the model itself" in said
    assert "`layers='Block'`" in said


def test_a_model_inside_one_of_its_own_class_is_taken_without_the_outer_one():
    assert chosen(Net(first=Net(), second=Net()), "Net") == ["first", "second"]


def test_a_compiled_layer_is_taken_as_the_original_under_its_own_name():
    model, block = Model(), Block()
    model.encoder[1] = torch.compile(block)
    assert chosen(model) == ENCODER + DECODER
    assert chosen(model, "encoder.*") == ENCODER
    assert chosen(model, Block) == ENCODER + DECODER
    assert select_layers(model, "encoder.1").layers == {"encoder.1": block}


@pytest.mark.parametrize("how", [{}, {"layers": "Block"}, {"layers": "*coder.*"}])
def test_a_compiled_model_is_looked_through(how):
    assert chosen(torch.compile(Model()), **how) == ENCODER + DECODER


def test_a_compiled_part_is_looked_through():
    model = Net(body=torch.compile(Model()))
    names = [f"body.{name}" for name in ENCODER + DECODER]
    assert chosen(model) == names
    assert chosen(model, "body.*coder.*") == names


# Finding layers that nobody has named


def test_repeated_blocks_are_found_in_sequentials_lists_and_dicts():
    assert chosen(blocks(3)) == ["1", "2", "3"]
    assert chosen(Model()) == ENCODER + DECODER
    assert chosen(Net(heads=nn.ModuleDict({"left": Block(), "right": Block()}))) == ["heads.left", "heads.right"]


def test_a_single_block_in_a_list_is_found():
    assert chosen(Net(embed=nn.Linear(8, 8), shared=nn.ModuleList([Block()]))) == ["shared.0"]


def unit(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(Net):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(first=unit(inputs, outputs), second=unit(outputs, outputs), skip=nn.Conv2d(inputs, outputs, 1))


class Stage(Net):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(blocks=nn.Sequential(Residual(inputs, outputs), Residual(outputs, outputs)))


class DoubleUnit(Net):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(units=nn.Sequential(unit(inputs, outputs), unit(outputs, outputs)))


def test_stages_that_all_differ_in_shape_are_looked_into():
    model = Net(stem=unit(3, 4), stages=nn.ModuleList([Stage(4, 8), Stage(8, 16)]))
    assert chosen(model) == [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(2)]


def test_stages_written_as_bare_sequentials_are_looked_into():
    stages = [nn.Sequential(Residual(4, 8), Residual(8, 8)), nn.Sequential(Residual(8, 16), Residual(16, 16))]
    assert chosen(nn.Sequential(unit(3, 4), *stages)) == ["1.0", "1.1", "2.0", "2.1"]
    assert chosen(Net(layer1=stages[0], layer2=stages[1])) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]


def test_blocks_of_equal_shape_are_taken_whole_whatever_they_repeat_inside():
    assert chosen(Net(stages=nn.ModuleList([Stage(4, 4), Stage(4, 4)]))) == ["stages.0", "stages.1"]


def test_blocks_that_repeat_only_convolutions_with_their_norm_are_taken_whole():
    model = Net(down=nn.ModuleList([DoubleUnit(3, 4), DoubleUnit(4, 8), DoubleUnit(8, 16)]))
    assert chosen(model) == ["down.0", "down.1", "down.2"]


# Errors that show the cure


def test_a_module_list_is_an_error_that_names_what_it_holds():
    said = complaint(Model(), "encoder")
    assert "ModuleList" in said
    assert "`layers='encoder.*'`" in said
    assert chosen(Model(), "encoder.*") == ENCODER


def test_a_module_list_with_a_forward_of_its_own_is_a_layer():
    class CallableList(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = block(x)
            return x

    model = Net(left=CallableList([Block()]), right=CallableList([Block()]))
    assert chosen(model, "CallableList") == ["left", "right"]


def test_nothing_found_is_an_error_that_names_a_class_to_write():
    said = complaint(Net(first=Block(), second=Block()))
    assert "No repeated layers were found in Net" in said
    assert "`layers='Block'`" in said


@pytest.mark.parametrize("how", [{"layers": "Xyz"}, {"layers": []}, {"check_fn": lambda module: False}])
def test_nothing_matched_is_an_error_that_lists_the_repeated_classes(how):
    said = complaint(Model(), **how)
    assert "Block (3), WideBlock (3)" in said
    assert "`layers='Block'`" in said


def test_a_model_of_bare_leaves_is_an_error_that_says_so():
    assert "nothing to recompute" in complaint(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def test_an_error_never_suggests_a_list():
    said = complaint(Net(layers=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])))
    assert "ModuleList" not in said


@pytest.mark.parametrize(
    ("layers", "suggested"),
    [
        ("Blok", "Did you mean 'Block'"),
        ("wideblock", "Did you mean 'WideBlock'"),
        ("torch.nn.LayerNrm", "Did you mean 'LayerNorm'"),
        ("encodr.*", "Did you mean 'encoder.*'"),
        (r"encodr\.\d", "'encoder.*'"),
        ("encodr.0", "'encoder.*'"),
        ("encoders.1.linear", "'encoder.*.linear'"),
        (["Block", "Blok"], "Did you mean 'Block'"),
    ],
)
def test_what_is_misspelt_is_an_error_that_names_the_nearest(layers, suggested):
    misspelt = layers[-1] if isinstance(layers, list) else layers
    said = complaint(Model(), layers)
    assert f"`layers={misspelt!r}` matches no module of Model" in said
    assert suggested in said


@pytest.mark.parametrize("layers", ["no.such.Thing", "math.sqrt", ".encoder.0", "encoder.", "encoder.7", "", "["])
def test_odd_strings_are_an_error_that_quotes_them(layers):
    assert f"`layers={layers!r}` matches no module of Model" in complaint(Model(), layers)


def test_a_bad_regular_expression_is_an_error_that_says_what_is_wrong_with_it():
    said = complaint(Model(), r"encoder\.(")
    assert r"`layers='encoder\\.('` is not a valid regular expression" in said
    assert "unterminated subpattern" in said


def test_layers_and_a_predicate_together_are_refused():
    assert "either `layers` or `check_fn`" in complaint(Model(), "Block", check_fn=lambda module: True)


@pytest.mark.parametrize("layers", [3, [3], lambda module: True, int])
def test_what_is_no_pattern_is_a_type_error_that_points_to_check_fn(layers):
    with pytest.raises(TypeError, match="`check_fn=`"):
        select_layers(Model(), layers)


def test_a_predicate_that_cannot_be_called_is_a_type_error():
    with pytest.raises(TypeError, match="`check_fn='Block'` must be a function"):
        select_layers(Model(), check_fn="Block")


def test_a_selection_error_is_a_value_error():
    assert issubclass(SelectionError, ValueError)


# Prints


def test_a_hundred_layers_print_on_one_short_line():
    model = Net(layers=nn.ModuleList(Block(256) for _ in range(100)))
    assert str(select_layers(model)) == (
        "100 of 100 Block: layers.{0, 1, 2, ..., 99}, 0.253 MiB of parameters each"  # 256 * 256 + 3 * 256 floats
    )
    assert str(select_layers(model, every_n_layers=4)).startswith("25 of 100 Block: layers.{0, 4, 8, ..., 96}, ")


def test_every_class_prints_on_a_line_of_its_own():
    first, second = str(select_layers(Model(), every_n_layers=2)).splitlines()
    assert first.startswith("2 of 3 Block: encoder.{0, 2}, ")
    assert second.startswith("1 of 3 WideBlock: decoder.1, ")


def test_layers_of_different_sizes_say_so():
    model = Net(layers=nn.ModuleList([Block(64), Block(128)]))
    assert str(select_layers(model)) == "2 of 2 Block: layers.{0, 1}, of different sizes"


def test_the_table_has_a_line_for_every_chosen_layer():
    model = Net(layers=nn.ModuleList(Block(256) for _ in range(100)))
    lines = select_layers(model, every_n_layers=50).table().splitlines()
    assert lines == ["layers.0   Block  0.253 MiB", "layers.50  Block  0.253 MiB"]
    assert len(select_layers(model).table().splitlines()) == 100


# The floor below Lightning

WITHOUT_LIGHTNING = """
import importlib, pkgutil, sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None  # importing them now fails
for name in ("selection", "recompute", "measure"):
    package = importlib.import_module(f"lightning_ckpt.{name}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        print(importlib.import_module(module.name).__name__)
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_selection_recompute_and_measure_import_without_lightning():
    done = run_python(WITHOUT_LIGHTNING)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert {"lightning_ckpt.selection.select", "lightning_ckpt.recompute.frame", "lightning_ckpt.measure.saved"} <= set(
        imported
    )


def test_the_callback_does_not_import_without_lightning():
    done = run_python(WITHOUT_LIGHTNING + "import lightning_ckpt.callback")
    assert done.returncode != 0
    assert "lightning" in done.stderr.splitlines()[-1]


def test_a_repeated_class_is_taken_wherever_it_is():
    class DoubleConv(nn.Sequential):
        def __init__(self, i, o):
            super().__init__(nn.Conv2d(i, o, 3), nn.GroupNorm(1, o), nn.Conv2d(o, o, 3), nn.GroupNorm(1, o))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = DoubleConv(1, 4)
            self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8))
            self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
            self.up = DoubleConv(16, 8)

    assert list(select_layers(UNet()).layers) == ["first", "down1.1", "down2.1", "up"]


def test_nothing_is_imported_to_match_a_name(tmp_path, monkeypatch):
    (tmp_path / "imported_by_mistake.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SelectionError, match="matches no module"):
        select_layers(nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]), "imported_by_mistake.Block")
