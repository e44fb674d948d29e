"""GGUF files as teachers: inspected by their heads, expanded while they load, refused where they would be misread."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearizer import pipeline
from linearizer.cli.text import describe_inspection
from linearizer.errors import ModelNotAvailable, RequestError, UnsupportedModel
from linearizer.hub import gguf_files
from linearizer.hub.models import HubName, download_bytes, find_model
from linearizer.page import limits
from linearizer.plan.plan import Plan
from linearizer.run.disk import checkpoint_bytes
from linearizer.run.folder import Run
from linearizer.run.names import id_of_address
from linearizer.teacher import streaming
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.load import load_config, load_teacher, load_tokenizer
from linearizer.workers.forecast import run_memory
from tests.support.gguf_models import Kind, llama_of, write_gguf
from tests.support.models import tokens

QUICK = "--budget 16 --length 32 --texts 2 --sinks 2 --dtype float32".split()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A tiny model in 8 bits, which no test may change."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    write_gguf(llama_of(), path)
    return path


def changed(file, folder, place, content):
    """Write a file with other bytes at a place."""
    data = bytearray(file.read_bytes())
    data[place] = content
    (path := folder / "changed.gguf").write_bytes(data)
    return str(path)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.F16, Kind.F32])
@torch.no_grad()
def test_weights_are_expanded_to_what_they_stand_for(kind, tmp_path):
    expected = write_gguf(llama_of(), path := tmp_path / "tiny.gguf", kind)
    source = find_model(str(path))
    inspection = inspect_model(source, config := load_config(source))
    assert inspection.supported and not inspection.packed and not inspection.links, inspection.reason
    assert (inspection.quantised, inspection.gguf) == (f"GGUF, {kind.name}", "tiny.gguf")
    assert inspection.parameters == sum(x.numel() for x in expected.parameters())
    assert inspection.weight_bytes == path.stat().st_size
    assert config.dtype == (torch.float16 if kind == Kind.F16 else torch.float32)
    teacher = load_teacher(source, torch.float32)
    assert {x.dtype for x in teacher.parameters()} == {torch.float32}
    assert all(torch.equal(x, expected.state_dict()[name]) for name, x in teacher.state_dict().items())
    assert torch.allclose(teacher(tokens(1, 20)).logits, expected(tokens(1, 20)).logits, atol=1e-5)


def test_it_is_forecast_by_its_expanded_weights(file):
    source = find_model(str(file))
    inspection = inspect_model(source, load_config(source))
    expanded = 4 * inspection.parameters
    assert inspection.expanded_bytes == expanded > 3 * inspection.weight_bytes
    assert streaming.bytes_in_memory(inspection, device="cpu") == expanded
    plan = Plan.of(model=str(file), budget=16)
    assert run_memory(plan, inspection) > expanded
    assert checkpoint_bytes(plan, inspection) == expanded
    said = describe_inspection(inspection)
    assert "Q8_0; its weights are held expanded while they load" in said and "mit" in said


def test_weights_that_memory_cannot_hold_once_they_are_expanded_are_refused(file, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "free_bytes", lambda device: file.stat().st_size * 2)
    with pytest.raises(RequestError, match="its quantised weights take .* and cannot be read block by block"):
        pipeline.begin(tmp_path / "run", Plan(str(file), texts=2, length=32, budget=16))


def test_a_run_ends_in_a_student_that_transformers_loads(file, tmp_path, said, judged_briefly):
    path = tmp_path / "teacher.gguf"
    shutil.copy(file, path)
    code, _, err = said("run", path, *QUICK, "--out", tmp_path / "run")
    assert code == 0, err
    run = Run.open(tmp_path / "run")
    config = json.loads((run.checkpoint / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["linearized"]["teacher"] == {"name": "teacher.gguf", "revision": None, "file": "teacher.gguf"}
    card = (run.checkpoint / "README.md").read_text()
    assert "quantised (teacher.gguf, GGUF, Q8\\_0) and were expanded" in card
    code, _, err = said("compare", run.folder, "--prompt", "Once", "--tokens", 4)
    assert code == 0, err
    path.unlink()  # the checkpoint needs nothing of it
    student = AutoModelForCausalLM.from_pretrained(run.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint)
    text = student.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert text.shape[1] > 4


def test_of_a_file_on_the_hub_the_head_alone_is_fetched_until_it_is_loaded(hub, file, monkeypatch):
    monkeypatch.setattr(gguf_files, "FIRST_BYTES", 2**14)  # so that it is asked for three times
    commit = hub.add("org/heads", {"sub/tiny.gguf": file.read_bytes(), "README.md": b"---\nlicense: apache-2.0\n---\n"})
    source = find_model("org/heads:sub/tiny.gguf")
    assert (source.licence, source.pinned) == ("apache-2.0", f"org/heads:sub/tiny.gguf@{commit}")
    inspection = inspect_model(source, load_config(source))
    assert inspection.supported and inspection.gguf == "tiny.gguf"
    mine, demo = load_tokenizer(source), load_tokenizer(find_model("demo"))
    text = "The def statement of 3.10,  unlike   others"
    assert mine(text)["input_ids"] == demo(text)["input_ids"] and mine.eos_token == demo.eos_token
    assert download_bytes(source) == file.stat().st_size and source.head.stat().st_size == file.stat().st_size
    assert source.head.read_bytes()[-1000:] == bytes(1000), "the weights are a hole"
    local = load_teacher(find_model(str(file)), torch.float32).state_dict()
    loaded = load_teacher(source, torch.float32).state_dict()
    assert all(torch.equal(x, local[name]) for name, x in loaded.items())
    assert download_bytes(source) == 0 and find_model(source.pinned).head != source.head


def test_threads_that_inspect_the_same_file_do_not_disturb_each_other(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        write = partial(gguf_files.write_stand_in, tmp_path / "sub" / "m.gguf", bytes(20_000))
        list(threads.map(write, [10**6] * 400))
    assert [path.stat().st_size for path in (tmp_path / "sub").iterdir()] == [10**6]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name@v1", ("org/name", "v1", None)),
        ("org/name:a.gguf", ("org/name", None, "a.gguf")),
        ("org/name:sub/a.gguf@v1", ("org/name", "v1", "sub/a.gguf")),
        ("org/name@v1:a.gguf", ("org/name", "v1", "a.gguf")),
        ("https://huggingface.co/org/name/blob/main/sub/a.gguf", ("org/name", "main", "sub/a.gguf")),
        ("https://hf.co/org/name/resolve/v1/a.gguf?download=true", ("org/name", "v1", "a.gguf")),
        ("https://huggingface.co/org/name/blob/main/config.json", ("org/name", "main", None)),
    ],
)
def test_names_and_addresses_of_the_hub_say_revision_and_file(name, read):
    parsed = HubName.of(id_of_address(name))
    assert (parsed.repo_id, parsed.revision, parsed.file) == read and HubName.of(str(parsed)) == parsed


def test_a_model_that_is_gguf_alone_says_how_its_files_are_named(hub, file, tmp_path):
    shutil.copy(file, tmp_path / "a.gguf")
    with pytest.raises(ModelNotAvailable, match=f"has its weights as GGUF: name one of its files, .*{tmp_path}/a.gg"):
        find_model(str(tmp_path))
    hub.add("org/only", {"a.gguf": b"x", "b.gguf": b"x"})
    with pytest.raises(ModelNotAvailable, match="name one of its files, such as 'org/only:a.gguf'"):
        find_model("org/only")
    with pytest.raises(ModelNotAvailable, match="names a file that does not exist: there is a.gguf, b.gguf"):
        find_model("org/only:c.gguf")
    with pytest.raises(ModelNotAvailable, match="'org/gone:c.gguf' is not a folder here and not on the Hub"):
        find_model("org/gone:c.gguf")


def test_without_the_package_a_file_is_refused_in_a_sentence(file, monkeypatch):
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
    gguf_files.head_of_file.cache_clear()
    with pytest.raises(ModelNotAvailable, match="the package that reads these is not installed: `pip install gguf`"):
        find_model(str(file))


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"split__count": 3}, "is one of 3 parts of a model"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, "has scaled rotary positions"),
    ],
)
def test_what_transformers_would_misread_is_refused(metadata, sentence, tmp_path):
    write_gguf(llama_of(), tmp_path / "odd.gguf", **metadata)
    with pytest.raises(UnsupportedModel, match=f"{sentence}.*name (a file|the model)"):
        find_model(str(tmp_path / "odd.gguf"))


def test_a_kind_that_transformers_does_not_read_is_refused_in_a_sentence(file, tmp_path):
    at = (data := file.read_bytes()).index(b"llama", data.index(b"general.architecture"))
    source = find_model(changed(file, tmp_path, slice(at, at + 5), b"lamma"))
    with pytest.raises(UnsupportedModel, match="is a GGUF file that transformers .* does not read .*lamma.*: name the"):
        load_config(source)


DAMAGES = {  # where, and what is there instead
    "cut": (slice(-1000, None), b""),
    "cut in the head": (slice(500, None), b""),
    "other magic": (slice(0, 4), b"GGML"),
    "other version": (slice(4, 8), (9).to_bytes(4, "little")),
    "endless keys": (slice(16, 24), (2**60).to_bytes(8, "little")),
    "other kind of value": (slice(24 + 8 + len("general.architecture"), 25 + 8 + len("general.architecture")), b"\x63"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_sentence(damage, file, tmp_path):
    with pytest.raises(ModelNotAvailable, match="has damaged weights .*: download the model again"):
        find_model(changed(file, tmp_path, *DAMAGES[damage]))


def test_a_space_takes_files_of_the_hub_by_what_they_become(file, monkeypatch):
    monkeypatch.setenv("SPACE_ID", "org/space")
    limits.check_model("org/name:sub/a.gguf")
    with pytest.raises(RequestError, match="name a model by its id on the Hub"):
        limits.check_model(str(file))
