"""The command that waits for a GPU runs here at tiny sizes, keeps every row, and outlives a part that does not end."""

import json
import subprocess

import pytest
import torch

from tests.benchmarks import gpu

TINY = ("kernels", "students")  # the parts that are quick without a GPU; steps and runs are the other benchmarks' own


@pytest.fixture
def out(tmp_path):
    path = tmp_path / "gpu.json"
    gpu.change(path, {"parts": {part: {"rows": []} for part in gpu.PARTS}})
    return path


@pytest.mark.parametrize("part", TINY)
def test_a_part_gives_rows_that_can_be_written(part, monkeypatch):
    monkeypatch.setattr(gpu, "ceilings", lambda: {"copy": 1e10, "product": 1e10})
    rows = list(gpu.PARTS[part](True))
    assert rows and not [row for row in rows if "failed" in row]
    assert json.loads(json.dumps(rows)) and gpu.summary({part: {"rows": json.loads(json.dumps(rows))}})


def test_a_file_whose_tests_do_not_all_pass_or_of_which_none_was_found_is_named(monkeypatch):
    for code, named in ((0, []), (1, ["tests a.py: failed"]), (5, ["tests a.py: failed"])):
        done = subprocess.CompletedProcess([], code, stdout="", stderr="")
        monkeypatch.setattr(gpu, "TESTED", ("a.py",))
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        assert gpu.summary({"tests": {"rows": [*gpu.tested(False)], "ended": "exit 0"}}) == named


def test_a_part_that_hangs_is_ended_and_keeps_its_rows(out):
    gpu.add_row(out, "students", {"op": "student"})
    gpu.run_part("students", True, out, 0.01)
    own = gpu.read(out)["parts"]["students"]
    assert own["ended"] == "its time of 0 s was over" and own["rows"] == [{"op": "student"}]


def test_a_part_that_fails_says_why_and_the_others_go_on(out, monkeypatch):
    monkeypatch.setitem(gpu.LIMITS, "absent", 60)
    gpu.change(out, {"parts": {"absent": {"rows": []}}})
    gpu.run_part("absent", True, out, 60)
    own = gpu.read(out)["parts"]["absent"]
    assert own["ended"] == "exit 2" and "invalid choice: 'absent'" in own["said"]
    assert "absent: exit 2" in gpu.summary(gpu.read(out)["parts"])


def test_targets_are_judged_and_kernels_that_do_not_win_are_named():
    rows = [
        {"op": "prefill", "tokens": 8192, "wanted": 4.0, "ours": 1.0, "rivals": {
            "sdpa flash": {"seconds": 5.0}, "sdpa cudnn": {"seconds": 3.0}, "chunked pytorch": {"seconds": 0.5}}},
        {"op": "decode", "kind": "slots", "batch": 1, "wanted": 6e-6, "ours": 1e-4,
         "ours in a graph": {"seconds": 5e-6}},
        {"op": "layerwise step", "loss": "l2", "wanted": 1.4, "ours": 3.0, "rivals": {"forward": {"seconds": 2.0}}},
        {"op": "loss", "failed": "RuntimeError: none"},
    ]  # fmt: skip
    said = gpu.summary({"kernels": {"rows": rows, "ended": "exit 0"}, "runs": {"rows": [], "ended": "exit 1"}})
    assert said == [
        "prefill 8192: 3.00 × SDPA, wanted 4.0: not met",
        "prefill 8192: no faster than chunked pytorch: 0.50 of its time",
        "decode slots 1: 5.0 µs, wanted 6: met",
        "layerwise step l2: 1.50 of the forward pass, wanted 1.4: not met",
        "loss: failed",
        "runs: exit 1",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no GPU here" in capsys.readouterr().err
