"""Sizes as users write them, and the host memory that is left: read from real files in a temporary folder."""

import os
import sys

import pytest

from lightning_ckpt.offload.budget import UNKNOWN_HOST_BYTES, default_host_budget, parse_bytes

GIB = 2**30


# ---------------------------------------------------------------- parse_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (1024, 1024),
        (2e9, 2 * 10**9),
        ("1024", 1024),
        ("1e9", 10**9),
        ("512B", 512),
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * GIB),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * GIB // 2),
        (" 2 tib ", 2 * 2**40),
        ("64kb", 64_000),
        (".5MB", 500_000),
        ("0.0001KiB", 0),
    ],
)
def test_sizes_are_read(value, expected):
    parsed = parse_bytes(value)
    assert parsed == expected
    assert type(parsed) is int


@pytest.mark.parametrize(
    "value",
    ["", "GB", "-8GB", "8 9GB", "8GB!", "٣GB", "0.5", "1.5B", "9" * 5000, -1, 0.5, float("inf"), True, None, [8]],
)
def test_what_is_no_size_is_quoted_with_what_to_write(value):
    with pytest.raises(ValueError, match="'8GB'") as raised:
        parse_bytes(value)
    assert str(raised.value).startswith(repr(value))


def test_a_nan_is_no_size():
    with pytest.raises(ValueError, match=r"^nan is not .* '8GB'"):
        parse_bytes(float("nan"))


@pytest.mark.parametrize("value", ["8G", "8 g", "8gi"])
def test_a_bare_prefix_is_ambiguous(value):
    with pytest.raises(ValueError, match=f"^'{value}' .*'8GB'.*'8GiB'"):
        parse_bytes(value)


def test_an_unknown_unit_lists_the_units():
    with pytest.raises(ValueError, match=r"^'8 gigs' .*MB, GB, TB.*MiB, GiB, TiB"):
        parse_bytes("8 gigs")


# ---------------------------------------------------------------- default_host_budget


class Machine:
    """A proc and a cgroup file system in a folder."""

    def __init__(self, folder):
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def meminfo(self, available):
        self.write(
            self.proc / "meminfo",
            f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:         1024 kB\nMemAvailable:   {available // 1024} kB",
        )

    def member(self, *lines):
        self.write(self.proc / "self" / "cgroup", "\n".join(lines))

    def group(self, folder, **files):
        for name, text in files.items():
            self.write(self.cgroup / folder / name.replace("_", ".", 1), text)

    def budget(self, ranks=1, fraction=1.0):
        return default_host_budget(ranks, fraction, self.proc, self.cgroup)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.meminfo(32 * GIB)
    return machine


def test_half_of_what_is_available_is_shared_by_the_ranks(machine):
    assert machine.budget() == 32 * GIB
    assert machine.budget(ranks=3, fraction=0.5) == 16 * GIB // 3
    assert default_host_budget(4, proc=machine.proc, cgroup=machine.cgroup) == 4 * GIB


@pytest.mark.parametrize("ranks", [0, -1])
def test_there_is_at_least_one_rank(machine, ranks):
    with pytest.raises(ValueError, match=str(ranks)):
        machine.budget(ranks)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_the_fraction_is_a_part(machine, fraction):
    with pytest.raises(ValueError, match=str(fraction)):
        machine.budget(fraction=fraction)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"memory_max": 10 * GIB, "memory_high": "max"}, 8 * GIB),
        ({"memory_max": 10 * GIB, "memory_high": 9 * GIB}, 7 * GIB),
        ({"memory_max": "max", "memory_high": 6 * GIB}, 4 * GIB),
        ({"memory_max": "max", "memory_high": "max"}, 32 * GIB),
        ({"memory_max": 100 * GIB}, 32 * GIB),
        ({"memory_max": GIB}, 0),
    ],
)
def test_version_2_limits_less_what_is_used_and_not_reclaimable(machine, limits, expected):
    machine.member("0::/job")
    machine.group("job", memory_current=5 * GIB, memory_stat=f"anon {GIB}\ninactive_file {3 * GIB}", **limits)
    assert machine.budget() == expected


@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_the_tightest_group_on_the_way_up_decides(machine, tightest):
    machine.member("0::/a/b/c")
    for folder in ("a", "a/b", "a/b/c"):
        limit = 4 * GIB if folder == tightest else 16 * GIB
        machine.group(folder, memory_max=limit, memory_current=GIB, memory_stat="inactive_file 0")
    machine.group("a/other", memory_max=GIB, memory_current=0)
    assert machine.budget() == 3 * GIB


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../../outside"])
def test_in_a_container_the_mount_itself_is_its_group(machine, path):
    machine.member(f"0::{path}")
    machine.group("", memory_max=4 * GIB, memory_current=GIB)
    assert machine.budget() == 3 * GIB


def test_file_cache_does_not_exceed_the_limit(machine):
    machine.member("0::/job")
    machine.group("job", memory_max=4 * GIB, memory_current=GIB, memory_stat=f"inactive_file {2 * GIB}")
    assert machine.budget() == 4 * GIB


@pytest.mark.parametrize("path", ["/job/task", "/job", "/elsewhere"])
def test_version_1_limits(machine, path):
    machine.member("5:cpuset:/job", f"4:memory:{path}", "0::/")
    machine.group("memory", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=GIB)
    machine.group(
        "memory/job",
        memory_limit_in_bytes=8 * GIB,
        memory_usage_in_bytes=3 * GIB,
        memory_stat=f"inactive_file 0\ntotal_inactive_file {GIB}",
    )
    assert machine.budget() == (32 * GIB if path == "/elsewhere" else 6 * GIB)


def test_files_that_make_no_sense_are_ignored(machine):
    machine.member("nonsense", "0::/job", "")
    machine.group("job", memory_max="many", memory_current="-", memory_stat="inactive_file\n\nfile few")
    assert machine.budget() == 32 * GIB
    (machine.cgroup / "job" / "memory.max").write_bytes(b"\xff\xfe")
    assert machine.budget() == 32 * GIB


def test_this_machine_has_some():
    assert 2**20 < default_host_budget(1) < 2**50


class Psutil:
    @staticmethod
    def virtual_memory():
        return type("Memory", (), {"available": 12 * GIB})


def test_without_proc_psutil_is_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", Psutil)
    assert Machine(tmp_path).budget() == 12 * GIB


def test_without_psutil_the_system_is_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 3 * 2**20, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert Machine(tmp_path).budget() == 12 * GIB


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_where_nothing_tells_a_constant_is_taken(tmp_path, monkeypatch, error):
    def sysconf(name):
        raise error(name)

    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert Machine(tmp_path).budget() == UNKNOWN_HOST_BYTES
    monkeypatch.delattr(os, "sysconf")
    assert Machine(tmp_path).budget() == UNKNOWN_HOST_BYTES
