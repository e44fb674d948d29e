"""The command that waits for a GPU runs here at tiny sizes, keeps every row, and outlives a part that does not end."""

import json
import subprocess
import sys

import pytest
import torch

from tests.benchmarks import gpu
from tests.benchmarks.kernel_rows import attempt

TINY = ("kernels", "steps", "students", "serve")  # the parts that are quick without a GPU


@pytest.fixture
def out(tmp_path):
    path = tmp_path / "gpu.json"
    for part in gpu.PARTS:
        gpu.change_part(path, part, rows=[{"op": "student"}])
    return path


@pytest.mark.parametrize("part", TINY)
def test_a_part_gives_rows_that_can_be_written_and_judged(part):
    rows = json.loads(json.dumps(list(gpu.PARTS[part](True))))
    assert rows and not [row for row in rows if "failed" in row or "failed" in row.get("ours", {})]
    assert (part in ("students", "serve")) != bool(gpu.summary({part: {"rows": rows, "ended": "exit 0"}}))
    assert max(row.get("error", 0) for row in rows) < 1e-4


def test_a_rival_may_fail_in_any_way():
    class CompilerError(Exception):
        """Triton's errors are of no other kind."""

    def fail():
        raise CompilerError("out of resource: shared memory")

    assert attempt(fail) == attempt(lambda: fail) == {"failed": "CompilerError: out of resource: shared memory"}
    assert [row["failed"] for row in gpu.attempted("decode", fail)] == ["CompilerError: out of resource: shared memory"]


def test_a_file_whose_tests_do_not_all_pass_or_of_which_none_was_found_is_named(monkeypatch):
    for code, named in ((0, []), (1, ["tests a.py: failed"]), (5, ["tests a.py: failed"])):
        done = subprocess.CompletedProcess([], code, stdout="", stderr="")
        monkeypatch.setattr(gpu, "TESTED", ("a.py",))
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        assert gpu.summary({"tests": {"rows": [*gpu.tested(False)], "ended": "exit 0"}}) == named


@pytest.mark.parametrize(
    "program, seconds, ended, last",
    [
        ("sleep 60", 0.01, "its time of 0 s was over", ""),
        ("echo $4 is out of memory >&2; exit 2", 60, "exit 2", "students is out of memory"),
    ],
)
def test_a_part_that_hangs_or_fails_is_ended_and_keeps_its_rows(
    program, seconds, ended, last, out, tmp_path, monkeypatch
):
    """A program stands for Python, which would import libraries for seconds."""
    (stand_in := tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    gpu.run_part("students", True, out, seconds)
    own = gpu.read_parts(out)["students"]
    assert own["ended"] == ended and own["rows"] == [{"op": "student"}] and last in own["said"]
    assert f"students: {ended}" in gpu.summary(gpu.read_parts(out))


def test_the_process_of_a_part_keeps_each_row(out):
    gpu.main(["--part", "serve", "--tiny", "--out", str(out)])
    assert [row["op"] for row in gpu.read_parts(out)["serve"]["rows"]] == ["student", "serve", "serve"]
    with pytest.raises(SystemExit):
        gpu.main(["--part", "absent", "--tiny", "--out", str(out)])


def test_targets_are_judged_and_kernels_that_do_not_win_are_named():
    def seconds(**values):
        return {name.replace("_", " "): {"seconds": value} for name, value in values.items()}

    rows = [
        {"op": "prefill", "tokens": 8192, "wanted": 4.0, **seconds(ours=1.0),
         "rivals": seconds(sdpa_flash=5.0, sdpa_cudnn=3.0, chunked_pytorch=0.5)},
        {"op": "decode", "kind": "slots", "batch": 1, "wanted": 6e-6, **seconds(ours=1e-4, ours_in_a_graph=5e-6),
         "rivals": {}},
        {"op": "layerwise step", "loss": "output", "wanted": 1.4, **seconds(ours=3.0), "rivals": seconds(forward=2.0)},
        {"op": "loss", "failed": "RuntimeError: none"},
    ]  # fmt: skip
    parts = {"kernels": {"rows": rows, "ended": "exit 0"}, "runs": {"rows": [], "ended": "exit 1"}}
    assert gpu.summary(parts) == [
        "prefill 8192: 3.00 × SDPA, wanted 4.0: not met",
        "prefill 8192: no faster than chunked pytorch: 0.50 of its time",
        "decode slots 1: 5.0 µs, wanted 6: met",
        "layerwise step output: 1.50 of the forward pass, wanted 1.4: not met",
        "loss: failed",
        "runs: exit 1",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no GPU here" in capsys.readouterr().err
