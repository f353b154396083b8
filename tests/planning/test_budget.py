"""Budgets mean what users would expect of what they write, and come to the right number of bytes."""

import os

import pytest
import torch

from lightning_ckpt.planning.budget import Budget, BudgetError, device_memory, parse_budget

GIB = 2**30
CPU = torch.device("cpu")
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("20GiB", "bytes", 20 * GIB),
        ("20 GB", "bytes", 20 * 10**9),
        (" 1.5gib ", "bytes", 3 * GIB // 2),
        (21474836480, "bytes", 20 * GIB),
        ("21474836480", "bytes", 20 * GIB),
        (21474836480.0, "bytes", 20 * GIB),
        (2, "bytes", 2),
        (2**60 + 1, "bytes", 2**60 + 1),  # more digits than a float has
        ("80%", "share", 0.8),
        ("80 %", "share", 0.8),
        ("12.5%", "share", 0.125),
        ("100%", "share", 1.0),
        (0, "fraction", 0.0),
        (0.0, "fraction", 0.0),
        (0.5, "fraction", 0.5),
        (1, "fraction", 1.0),
        (1.0, "fraction", 1.0),
        (1 / 3, "fraction", 1 / 3),
        ("0.5", "fraction", 0.5),
        (".5", "fraction", 0.5),
        ("0", "fraction", 0.0),
        ("1", "fraction", 1.0),
        ("auto", "auto", 0.0),
        ("AUTO", "auto", 0.0),
        (" auto ", "auto", 0.0),
    ],
)
def test_what_is_written_is_understood(written, kind, value):
    assert parse_budget(written) == Budget(written, kind, value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        *(
            (written, "'20GiB'.*'80%'.*'auto'")
            for written in (1.5, -1, -0.5, True, False, "lots", "", "-5%", None, [1])
        ),
        *((written, "'20GiB'.*'80%'.*'auto'") for written in ("lots", "", "-5%", "nan", "inf")),
        *((written, "'20GiB'.*'80%'.*'auto'") for written in (float("nan"), float("inf"))),
        *((written, "above 0% and at most 100%") for written in ("0%", "120%")),
        ("20G", "'20GB'.*'20GiB'"),
        ("20 gigs", "GiB"),
    ],
)
def test_an_error_quotes_what_was_written_and_says_what_to_write(written, said):
    with pytest.raises(BudgetError, match=said) as caught:
        parse_budget(written)
    assert str(caught.value).startswith(f"`memory_budget={written!r}`")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("20GiB", 20 * GIB),
        (2**60 + 1, 2**60 + 1),
        ("50%", 40 * GIB),
        ("100%", 80 * GIB),
        (0, 10 * GIB),
        (0.25, 15 * GIB),
        (1, 30 * GIB),
        ("auto", 72 * GIB),
    ],
)
def test_bytes_on_a_device(written, expected):
    assert parse_budget(written).bytes(10 * GIB, 30 * GIB, CPU, 80 * GIB) == expected


def test_the_ends_of_the_fraction_are_exact():
    recomputed, kept = 3**30, 3**32 + 1
    assert parse_budget(0.0).bytes(recomputed, kept, CPU) == recomputed
    assert parse_budget(1.0).bytes(recomputed, kept, CPU) == kept


def test_a_fraction_where_recompute_needs_more():
    assert parse_budget(0.0).bytes(30, 10, CPU) == 30
    assert parse_budget(0.5).bytes(30, 10, CPU) == 20


def test_the_memory_of_this_machine():
    free, total = device_memory(CPU)
    assert 0 < free <= total < 1.5 * PHYSICAL


def test_shares_are_of_this_machine_if_no_other_is_told():
    assert 0 < parse_budget("50%").bytes(1, 2, CPU) < 0.75 * PHYSICAL
    assert parse_budget("auto").bytes(1, 2, CPU) < PHYSICAL


def test_an_error_has_the_name_that_the_user_wrote():
    with pytest.raises(BudgetError, match=r"^`budget='lots'`"):
        parse_budget("lots", "budget")
