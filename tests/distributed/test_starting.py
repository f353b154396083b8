"""Ranks that ask for different things stop at the start, and are told what differs; FSDP's checkpointing is seen."""

import pytest

from tests.distributed.launch import TORCHRUN, shared

pytestmark = pytest.mark.slow

SAID = {
    "every_n_layers": "`every_n_layers` is 1 on rank 0 and 2 on rank 1",
    "enabled": "`enabled` is True on rank 0 and False on rank 1",
    "verify": "`verify` is sample on rank 0 and off on rank 1",
    "policy": "`policy` is matmul on rank 0 and [aten.mm, aten.addmm] on rank 1",
    "offload": "`offload` is False on rank 0 and True on rank 1",
    "check_fn": "`check_fn` is is_block on rank 0 and is_linear on rank 1",
    "another model": "the chosen layers include model.4 on rank 0 and not on rank 1",
    "several callbacks": "the number of these callbacks is 2 on rank 0 and 1 on rank 1",
    "plan": "`plan` is keep: 4 layers (model.{1, 2, 3, 4}) on rank 0 and recompute: 4 layers",
    "strategy": "`keep_last` is 1 on rank 0 and 2 on rank 1",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return shared(tmp_path_factory, "starting", [*TORCHRUN, "tests.distributed.starting", "OUT"], seconds=120)


@pytest.mark.parametrize("name", SAID)
def test_what_differs_is_said_on_every_rank(done, name):
    for rank in range(2):
        said = (done.out / f"{name}.{rank}").read_text()
        assert said.startswith("MisconfigurationException: ")
        assert SAID[name] in said
        assert "must be the same on all ranks" in said


def test_an_error_on_one_rank_stops_the_others(done):
    assert "`layers='Blok'` matches no module" in (done.out / "one rank fails.1").read_text()
    waiting = (done.out / "one rank fails.0").read_text()
    assert "rank 1 failed with SelectionError: `layers='Blok'` matches no module" in waiting


@pytest.mark.parametrize("name", ["the same", "one plan in two files"])
def test_ranks_that_ask_for_the_same_train(done, name):
    assert [(done.out / f"{name}.{rank}").read_text() for rank in range(2)] == ["trained", "trained"]


def test_a_rank_without_the_callback_is_named(done):
    waiting = (done.out / "one rank without.0").read_text()
    assert "ActivationCheckpointing is not there on rank 1, or has not started within 0:00:05 after rank 0" in waiting


def test_layers_that_fsdp_checkpoints_are_left_to_it(done):
    said = [(done.out / f"FSDP.{rank}").read_text().splitlines() for rank in range(2)]
    warning = (
        "4 of 5 chosen layers are checkpointed already, as a whole or in part, by `CheckpointingFSDPStrategy("
        "activation_checkpointing_policy=...)`, and are left to it: model.{1, 2, 3, 4}. Take the policy out, to have "
        "them recomputed exactly here."
    )
    assert warning in said[0][0]
    assert len(said[1]) == 2  # warned on rank 0 only
    for lines in said:
        assert lines[-2] == "trained"
        assert lines[-1].startswith("1 of 1 Linear: model.0")
