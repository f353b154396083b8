"""Trainings on two real processes equal the plain ones, bit for bit on each, and communicate as often."""

import pytest
import torch

from tests.distributed.cases import CASES, DISTURBED, STARTED, TREATMENTS
from tests.distributed.checkpoints import KINDS, TREATED, checkpoint_of, resumed_path, whole_path
from tests.distributed.launch import TORCHRUN, shared
from tests.distributed.models import STEPS
from tests.distributed.record import RANKS, differences, load
from tests.distributed.runs import path_of

pytestmark = pytest.mark.slow

NOTHING_MOVED = "nothing is moved: there is no accelerator"
COMPARED = [name for name, treatment in TREATMENTS.items() if treatment.counted]
HALVES = [halves for name in TREATED for halves in ((name, "plain"), ("plain", name))]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What two processes have noted that torchrun has started."""
    jobs = [*CASES, *(f"checkpoint {kind}" for kind in KINDS), *DISTURBED]
    return shared(tmp_path_factory, "torchrun", [*TORCHRUN, "tests.distributed", "OUT", *jobs], 500).out


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """What processes have noted that the strategy has started."""
    return shared(tmp_path_factory, "started", ["-m", "tests.distributed", "OUT", *STARTED], 400).out


def records(out, case, treatment):
    return [load(path_of(out, case, treatment), rank) for rank in RANKS]


def pairs(out, case, treatment):
    """What each process has noted with a treatment, and plainly."""
    return zip(records(out, case, treatment), records(out, case, "plain"), strict=True)


def assert_exact(out, case, treatment, at_least=2):
    """With all calls of layers, or some, made twice."""
    assert differences(path_of(out, case, treatment), path_of(out, case, "plain")) == []
    offload, recompute = TREATMENTS[treatment].offload, TREATMENTS[treatment].callback is not None
    for got, plain in pairs(out, case, treatment):
        times = got.forwards / plain.forwards
        assert (at_least <= times <= 2) if recompute else times == 1
        assert ("Offload" in got.strategy[0]) == offload
        assert got.strategy[1] == 2


# ---------------------------------------------------------------- the same training


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("case", CASES)
def test_training_is_exact(out, case, treatment):
    assert_exact(out, case, treatment, 1.5 if CASES[case].frozen_at_times else 2)


@pytest.mark.parametrize("case", STARTED)
def test_training_is_exact_in_processes_that_the_strategy_starts(started, case):
    assert_exact(started, case, "both")


@pytest.mark.parametrize("case", CASES)
def test_plain_training_learns_and_the_processes_differ(out, case):
    first, second = (record.tensors for record in records(out, case, "plain"))
    assert all(value.tensor().isfinite().all() for value in first.values())
    assert any(value.tensor().any() for name, value in first.items() if name.startswith("gradient"))
    assert len({name.rpartition(", step ")[2] for name in first}) >= 4
    assert any(value != second[name] for name, value in first.items() if name in second)


@pytest.mark.parametrize("case", CASES)
def test_kept_results_spare_matrix_products(out, case):
    for rank in RANKS:
        plain, policy, recompute = (
            records(out, case, treatment)[rank].matmuls for treatment in ("plain", "policy", "recompute")
        )
        assert policy <= plain < recompute


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize("treatment", COMPARED)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.in_threads])
def test_nothing_more_is_sent_than_must_be(out, case, treatment):
    # Where layers communicate in their forward, PyTorch's own checkpoint says how often they must.
    honest = "reference" if CASES[case].layers_communicate else "plain"
    for got, want in zip(records(out, case, treatment), records(out, case, honest), strict=True):
        assert got.communication == want.communication != {}


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.layers_communicate])
def test_the_number_of_collectives_stays(out, case, treatment):
    for got, plain in pairs(out, case, treatment):
        assert got.collectives == plain.collectives > 0


# ---------------------------------------------------------------- what is said


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("case", CASES)
def test_only_rank_zero_says_something_and_says_it_once(out, case, treatment):
    offload, callback = TREATMENTS[treatment].offload, TREATMENTS[treatment].callback
    expected = ["recomputes in backward"] * (callback is not None)
    expected += [NOTHING_MOVED] * (offload + bool((callback or {}).get("offload")))
    for rank, (got, plain) in enumerate(pairs(out, case, treatment)):
        assert not got.moves
        new = sorted({text for text in got.said if text not in plain.said})
        ours = [text for text in got.said if any(part in text for part in set(expected))]
        assert len(ours) == (len(expected) if rank == 0 else 0)
        assert [text for text in new if text not in ours and not text.startswith("StepMonitor")] == []


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("halves", HALVES, ids=" then ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_the_other_runs_checkpoint(out, kind, halves):
    assert differences(resumed_path(out, kind, *halves), whole_path(out, kind)) == []
    for rank in RANKS:
        steps = {name.rpartition(", step ")[2] for name in load(whole_path(out, kind), rank).tensors}
        assert steps == {*map(str, range(STEPS, 2 * STEPS)), "before", "end"}


@pytest.mark.parametrize("treatment", TREATED)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_hold_the_same(out, kind, treatment):
    got, want = (checkpoint_of(out, kind, name) for name in (treatment, "plain"))
    if want.is_dir():
        names = [sorted(path.name for path in folder.iterdir()) for folder in (got, want)]
        assert names[0] == names[1]
        got, want = got / "meta.pt", want / "meta.pt"
    got, want = (torch.load(path, weights_only=False) for path in (got, want))
    assert got.keys() == want.keys()
    assert got["callbacks"] == want["callbacks"]
    for name, value in want.get("state_dict", {}).items():
        assert torch.equal(got["state_dict"][name], value), name


# ---------------------------------------------------------------- the comparison itself


def test_a_difference_in_one_process_is_found_and_names_it(out):
    found = differences(path_of(out, "disturbed alone", "unverified"), path_of(out, "disturbed alone", "plain"))
    assert found
    assert all(text.startswith("rank 1: ") for text in found)


def test_a_difference_in_one_process_spreads_with_the_gradients(out):
    found = differences(path_of(out, "disturbed ddp", "unverified"), path_of(out, "disturbed ddp", "plain"))
    assert {text.split(":")[0] for text in found} == {"rank 0", "rank 1"}
