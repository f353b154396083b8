"""The page on exactness says what its script measures, and no layer is silently wrong in it."""

import importlib.util
import pathlib
import sys

import pytest

pytest.importorskip("transformers")
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "exactness.md"


def table():
    """Verdicts by kind, in the order of the columns."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[0][1] == "lightning_ckpt"
    return {text: verdicts for text, *verdicts in rows[1:]}


@pytest.fixture(scope="module")
def script():
    """The script that measures the table, imported."""
    spec = importlib.util.spec_from_file_location("measure_exactness", PAGE.with_name("measure_exactness.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_every_kind_is_exact_or_refused():
    verdicts = {text: columns[0] for text, columns in table().items()}
    assert len(verdicts) >= 20
    assert set(verdicts.values()) == {"exact", "refused"}
    assert list(verdicts.values()).count("exact") >= 20


def test_the_page_has_a_row_for_every_kind_that_the_script_measures(script):
    assert list(table()) == [kind.text for kind in script.KINDS.values()]


@pytest.mark.parametrize("name", ["batch_norm", "iterator_value"])
def test_the_script_measures_what_the_page_says(script, name, capsys):
    script.main([name])
    assert capsys.readouterr().out.strip() in PAGE.read_text().splitlines()


def test_the_page_quotes_the_messages_as_they_are(script):
    verdicts, refusal = script.measure(script.KINDS["late_random"])
    assert verdicts[0] == "refused"
    assert f"> {refusal}" in PAGE.read_text().splitlines()
