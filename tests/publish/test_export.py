"""A student as a graph: with its state as inputs and outputs it gives what the student gives."""

import re
from dataclasses import replace

import numpy
import pytest
import torch
from transformers import AutoTokenizer

from linearizer.cli.main import main
from linearizer.errors import FolderError, RequestError
from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.publish import export
from linearizer.publish.export import COUNT, StudentStep, state_of, trace, write_onnx
from linearizer.run.files import find_carried
from linearizer.run.folder import Run
from linearizer.student.cache import CACHE
from tests.support.models import WHOLE, student_of, tokens
from tests.support.publishing import copy_run

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export and torch.onnx

TEXTS, LENGTH = 2, 48
KINDS = {
    "window and slots": [Head(window=4, slots=6), Head(window=5)],
    "few bits": [Head(window=4, slots=6, bits=4), Head(window=6, slots=5, bits=8)],
    "features and a memory": [Head(window=5, features=16), Head(window=4, features=8, memory="gdn")],
}


def student_with(kind):
    return student_of("llama", KINDS[kind], num_hidden_layers=1).eval()


def read_in_pieces(compute, step, ids, tokens):
    """Read with a graph, given what computes it: the logits of all tokens, and the state after them."""
    state, logits = [*state_of(step.empty).values()], []
    for piece in ids.split(tokens, 1):
        out, state = compute(piece, state)
        logits.append(out)
    return torch.cat(logits, 1), dict(zip(step.names, state, strict=True))


def read_by_student(student, ids):
    cache = student.empty_cache()
    with torch.no_grad():
        return torch.cat([student(ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(ids.shape[1])], 1)


@pytest.mark.parametrize(
    "kind, length", [("window and slots", 4), ("features and a memory", 1)], ids=["text", "features and a memory"]
)
def test_a_graph_reads_as_its_student_does(kind, length):
    student, ids = student_with(kind), tokens(TEXTS, LENGTH)
    expected = read_by_student(student, ids)
    step = StudentStep(student, TEXTS)
    logits, state = read_in_pieces(trace(step, length).module(), step, ids, length)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert state[COUNT].tolist() == [LENGTH] * TEXTS
    assert all(state[name].shape == x.shape for name, x in state_of(step.empty).items())
    torch.testing.assert_close(read_by_student(student, ids), expected)  # which is as it was


def test_onnx_runtime_reads_as_the_student_does_though_texts_begin_at_different_times(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    student, ids, later = student_with("few bits"), tokens(TEXTS, LENGTH), 7
    tokenizer, folder = AutoTokenizer.from_pretrained(find_carried("assets") / "demo-model"), tmp_path / "graph"
    finish(write_onnx(student, tokenizer, "owner/name", folder, TEXTS, 1))
    assert b"site-packages" not in (folder / "model.onnx").read_bytes()  # nor another path of this machine
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    exec(code, described := {})
    session, empty, state = described["session"], described["state"], dict(described["state"])
    assert isinstance(session, onnxruntime.InferenceSession)
    read = []
    for place in range(LENGTH):
        if place == later:  # the second text begins anew
            state = {name: numpy.stack([x[0], empty[name][1]]) for name, x in state.items()}
        logits, *after = session.run(None, {"input_ids": ids[:, place, None].numpy(), **state})
        state = dict(zip(state, after, strict=True))
        read.append(torch.from_numpy(logits))
    logits = torch.cat(read, 1)
    torch.testing.assert_close(logits[:1], read_by_student(student, ids[:1]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1:, later:], read_by_student(student, ids[1:, later:]), atol=1e-4, rtol=1e-4)
    assert described["read"](ids[:, 0].tolist()) == read[0][-1, -1].argmax()


def test_what_has_no_fixed_shape_is_refused():
    with pytest.raises(RequestError, match="keep a growing cache"):
        trace(StudentStep(student_of("llama", [WHOLE, Head(window=5)], num_hidden_layers=1)))
    with pytest.raises(RequestError, match="only for single tokens"):
        trace(StudentStep(student_with("features and a memory")), 4)


def test_the_description_of_a_graph_names_no_folder_of_this_machine(quick_run, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    run, names = copy_run(quick_run, tmp_path / "run"), []
    (run.folder / "inspection.json").write_text(replace(run.inspection, name="/home/somebody/model").to_json())
    monkeypatch.setattr(export, "write_onnx", lambda student, tokenizer, name, *_: names.append(name) or iter(()))
    finish(export.export_run(Run.open(run.folder), tmp_path / "graph"))
    assert names == ["model"]


def test_a_folder_that_is_there_is_not_written_over(quick_run, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    assert main(["export", str(quick_run), "--to", "onnx", "--out", str(tmp_path)]) == FolderError.exit_code
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(quick_run), "--tokens", "0", "--out", str(tmp_path / "new")]) == RequestError.exit_code
    assert main(["export", str(quick_run), "--out", str(tmp_path / "new")]) == RequestError.exit_code
    assert "not with features; the checkpoint itself runs in transformers" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
