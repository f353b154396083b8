"""What a user may set about offload: every option is read, and what has no meaning is quoted back."""

import dataclasses
import pickle

import pytest

from lightning_ckpt import OffloadOptions
from lightning_ckpt.offload import OffloadError

SIZES = ("min_bytes", "max_inflight_bytes", "prefetch_bytes", "host_budget")


def test_the_defaults():
    assert dataclasses.asdict(OffloadOptions()) == {
        "move": "hidden",
        "min_bytes": 262144,
        "keep_last": 1,
        "max_inflight_bytes": None,
        "prefetch_bytes": None,
        "host_budget": None,
    }


@pytest.mark.parametrize("move", ["hidden", "all"])
@pytest.mark.parametrize("keep_last", [0, 1, 100])
def test_moves_and_numbers_of_layers_are_kept_as_they_are(move, keep_last):
    options = OffloadOptions(move=move, keep_last=keep_last)
    assert (options.move, options.keep_last) == (move, keep_last)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("written", "nbytes"),
    [(0, 0), (4096, 4096), ("4096", 4096), ("8GB", 8 * 10**9), ("8 gib", 8 * 2**30), (1e6, 10**6)],
)
def test_every_size_becomes_bytes(name, written, nbytes):
    options = OffloadOptions(**{name: written})
    assert getattr(options, name) == nbytes
    assert type(getattr(options, name)) is int
    others = {other: getattr(options, other) for other in SIZES if other != name}
    assert others == {other: getattr(OffloadOptions(), other) for other in others}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", ["8G", "many", "", -1, 0.5, True, [8]])
def test_what_is_no_size_is_quoted_with_its_name(name, value):
    with pytest.raises(OffloadError, match="'8GB'") as raised:
        OffloadOptions(**{name: value})
    assert str(raised.value).startswith(f"`{name}={value!r}`: ")
    assert raised.value.__suppress_context__, "one error, not one during the handling of another"


def test_no_minimum_is_no_default_but_no_limit_is():
    assert OffloadOptions(min_bytes=0).min_bytes == 0
    assert OffloadOptions(host_budget=0).host_budget == 0


@pytest.mark.parametrize("value", ["some", "", "Hidden", "ALL", None, True, 1, ["hidden"]])
def test_an_unknown_move_is_quoted(value):
    with pytest.raises(OffloadError) as raised:
        OffloadOptions(move=value)
    assert str(raised.value) == f"`move={value!r}` must be 'hidden' or 'all'."


@pytest.mark.parametrize("value", [-1, 1.0, 0.5, "2", None, True, False, [1]])
def test_what_is_no_number_of_layers_is_quoted(value):
    with pytest.raises(OffloadError) as raised:
        OffloadOptions(keep_last=value)
    assert str(raised.value) == f"`keep_last={value!r}` must be a number of layers: 0, 1, 2, ..."


def test_the_errors_are_value_errors():
    assert issubclass(OffloadError, ValueError)


def test_options_cannot_be_changed_once_they_are_checked():
    options = OffloadOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.keep_last = -1
    assert options.keep_last == 1


def test_a_change_of_one_option_is_checked_too():
    assert dataclasses.replace(OffloadOptions(keep_last=2), host_budget="1KiB") == OffloadOptions(
        keep_last=2, host_budget=1024
    )
    with pytest.raises(OffloadError, match="`keep_last=-1`"):
        dataclasses.replace(OffloadOptions(), keep_last=-1)


def test_equal_sizes_are_equal_options_however_they_are_written():
    assert OffloadOptions(host_budget="8GB") == OffloadOptions(host_budget=8 * 10**9) == OffloadOptions(host_budget=8e9)
    assert OffloadOptions(host_budget="8GB") != OffloadOptions(host_budget="8GiB")


def test_options_travel_to_other_processes():
    options = OffloadOptions(move="all", keep_last=3, host_budget="1GiB")
    assert pickle.loads(pickle.dumps(options)) == options
