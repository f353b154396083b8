"""The page on strategies, treatments and precisions says what is so."""

import pytest

from tests.distributed.launch import shared
from tests.distributed.matrix import COMMAND, NAMES, PAGE, PRECISIONS, SECONDS, STRATEGIES, cell_of, page, verdict
from tests.distributed.record import RANKS, load
from tests.distributed.runs import path_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return shared(tmp_path_factory, "matrix", COMMAND, SECONDS).out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_cell_is_exact_or_refused_by_the_plain_run_too(out, strategy):
    cells = [(precision, treatment) for precision in PRECISIONS for treatment in NAMES]
    verdicts = {cell: verdict(out, strategy, *cell) for cell in cells}
    wrong = {cell: text for cell, text in verdicts.items() if text != "exact" and not text.startswith("refused: ")}
    assert wrong == {}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_runs_are_no_empty_ones(out, strategy):
    for precision in PRECISIONS:
        for rank in RANKS:
            plain = load(path_of(out, cell_of(strategy, precision), "plain"), rank)
            gradients = [value.tensor() for name, value in plain.tensors.items() if name.startswith("gradient")]
            assert plain.error or any(value.isfinite().all() and value.any() for value in gradients), precision


def test_the_page_is_what_was_run(out):
    assert PAGE.read_text() == page(out), "`python -m tests.distributed.matrix` writes it"
