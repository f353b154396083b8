"""The script for a real accelerator runs through on this one, and finds what is known of it."""

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
SECTIONS = ["machine", "allocation", "link", "equality", "host", "inputs", "everything"]
MIB = 2**20


@pytest.fixture(scope="module")
def gpu_check():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("gpu_check", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


@pytest.fixture
def run(gpu_check, tmp_path):
    """Runs the script; its exit status and the file that it wrote."""

    def run(*arguments):
        path = tmp_path / "report.json"
        status = gpu_check.main(["--small", "--json", str(path), *arguments])
        return status, json.loads(path.read_text())["sections"]

    return run


def only_table(section):
    (rows,) = section["tables"].values()
    return {next(iter(row.values())): row for row in rows}


def test_every_section_runs(sim, run, capsys):
    sim.clock.configure(out_bytes_per_s=2e9, in_bytes_per_s=1e9, operator_s=2e-5, flops_per_s=2e10)
    status, sections = run()
    printed = capsys.readouterr().out

    assert status == 0, printed
    assert list(sections) == SECTIONS
    for name, section in sections.items():
        assert section["status"] == "ok", (name, section["notes"])
        assert section["tables"], name
        assert section["skipped"] == [], name
        assert f"=== {name} ===" in printed

    assert only_table(sections["machine"])["device"]["value"] == "simulated (sim:0)"
    for row in only_table(sections["link"]).values():
        assert row["out GB/s"] == pytest.approx(2, rel=0.05)
        assert row["in GB/s"] == pytest.approx(1, rel=0.05)
        assert row["out, both"] == pytest.approx(2, rel=0.05)  # the two links do not disturb each other
        assert row["in, both"] == pytest.approx(1, rel=0.05)

    precisions = sections["equality"]["tables"].values()
    assert len(precisions) == 2
    for rows in precisions:
        assert [row["equal"] for row in rows] == ["4 of 4"] * 6
        assert {row["way"] for row in rows if row["moved MiB a step"]} == {
            "inputs on host", "move hidden", "move all", "recompute and move all"
        }  # fmt: skip

    inputs, everything = only_table(sections["inputs"]), only_table(sections["everything"])
    for row in (*inputs.values(), *everything.values()):
        assert row["result"] == "ok"
    for other in ("recompute", "recompute, Hugging Face"):
        assert inputs["inputs on host"]["kept MiB"] < 0.8 * inputs[other]["kept MiB"]
    plain, recompute, move_all = (everything[name] for name in ("plain", "recompute", "move all"))
    assert recompute["peak MiB"] < move_all["peak MiB"] < 0.8 * plain["peak MiB"]
    assert recompute["kept MiB"] < move_all["kept MiB"] < 0.6 * plain["kept MiB"]
    assert move_all["forward"] < 1.05 * plain["forward"]
    assert move_all["backward"] < 1.05 * plain["backward"] < recompute["backward"]
    assert move_all["out MiB"] > 0.7 * plain["kept MiB"]
    assert 0 < move_all["in MiB"] <= move_all["out MiB"]


def test_a_slow_link_shows(sim, gpu_check, capsys):
    """Moving every layer makes the device wait, moving what the link hides does not."""
    sim.clock.configure(out_bytes_per_s=2e8, in_bytes_per_s=2e8, operator_s=2e-5, flops_per_s=2e10)
    rows = measure(gpu_check, ["plain", "move hidden", "move all"])
    plain, hidden, move_all = rows["plain"], rows["move hidden"], rows["move all"]
    assert move_all["waits, forward"] > 0.2 * plain["forward"]
    assert move_all["forward"] == pytest.approx(plain["forward"] + move_all["waits, forward"], rel=0.05)
    assert hidden["forward"] + hidden["backward"] < 1.05 * (plain["forward"] + plain["backward"])
    assert move_all["peak MiB"] < hidden["peak MiB"] < plain["peak MiB"]
    assert not hidden["stayed"].startswith("0 layers")
    assert "not hidden" in hidden["stayed"]
    assert move_all["stayed"].startswith("0 layers")
    assert "stay on the device" in capsys.readouterr().out  # what the user would be told


def test_what_does_not_fit_is_a_result(sim, gpu_check):
    machine = gpu_check.Machine.find()  # with memory enough for all layers
    sim.set_limit(torch.accelerator.memory_allocated() + 20 * MIB)
    rows = measure(gpu_check, ["plain", "recompute"], machine)
    assert rows["plain"] == {"way": "plain", "result": "does not fit"}
    assert rows["recompute"]["result"] == "ok"
    assert rows["recompute"]["ratio"] == 1


def measure(gpu_check, ways, machine=None):
    """The rows of one case."""
    section, report = gpu_check.Section(), gpu_check.Report(8, None)
    gpu_check.check_cases(section, machine or gpu_check.Machine.find(), gpu_check.SMALL, report, ways)
    assert section.status == "ok", section.notes
    return only_table({"tables": section.tables})


def test_a_failing_section_costs_no_other(sim, gpu_check, run, monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("no link")

    monkeypatch.setattr(gpu_check, "bytes_per_s", fail)
    for name in ("check_equality", "check_host", "check_cases"):
        monkeypatch.setattr(gpu_check, name, lambda *arguments: None)
    status, sections = run()
    assert status == 1
    assert sections["link"]["status"] == "failed"
    assert sections["link"]["notes"] == ["FAILED: RuntimeError: no link"]
    assert all(section["status"] == "ok" for name, section in sections.items() if name != "link")
    assert "no link" in capsys.readouterr().out.split("=== summary ===")[1]


def test_what_there_is_no_time_for_is_named(sim, run, capsys):
    status, sections = run("--minutes", "0")
    printed = capsys.readouterr().out
    assert status == 0
    assert [(name, section["status"], section["skipped"]) for name, section in sections.items()] == [
        (name, "skipped", [name]) for name in SECTIONS
    ]
    assert all(f"skipped, the time is up: {name}\n" in printed for name in SECTIONS)


def test_unequal_results_are_a_failure(sim, gpu_check, monkeypatch, capsys):
    class Wrong(gpu_check.Plain):
        @contextlib.contextmanager
        def forward(self):
            embedding = self.model.get_input_embeddings()
            handle = embedding.register_forward_hook(lambda module, inputs, output: output * (1 + 2**-20))
            yield
            handle.remove()

    monkeypatch.setitem(gpu_check.WAYS, "wrong", Wrong)
    monkeypatch.setattr(gpu_check, "EQUAL_WAYS", ("plain", "wrong"))
    section = gpu_check.Section()
    gpu_check.check_equality(section, gpu_check.Machine.find(), gpu_check.SMALL, gpu_check.Report(8, None))
    assert section.status == "failed"
    assert section.notes == [
        "FAILED: bf16-mixed: not equal to the plain run: wrong",
        "FAILED: fp32: not equal to the plain run: wrong",
    ]
    assert "training 0: loss of step 0 by up to" in capsys.readouterr().out


def test_no_accelerator_is_one_sentence(gpu_check, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(SystemExit, match=r"^This script measures an accelerator, .* on this machine\.$"):
        gpu_check.main([])
