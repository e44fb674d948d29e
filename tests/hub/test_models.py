import json
import struct

import huggingface_hub
import pytest

from linearizer.errors import ModelNotAvailable
from linearizer.hub.models import access_token, download_bytes, fetch, find_model

OWNER = "hf_fake_org"


@pytest.fixture
def files(tiny_llama):
    return {path.name: path.read_bytes() for path in tiny_llama.iterdir()}


def test_model_of_the_hub_is_pinned_and_weighed_without_its_weights(hub, files):
    commit = hub.add("org/tiny", files)
    source = find_model("org/tiny")
    assert (source.revision, source.repo_id, source.licence) == (commit, "org/tiny", "mit")
    assert source.weights.parameters == 108_992
    assert source.weights.bytes == sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert not list(fetch(source, ("config.json",)).glob("*.safetensors"))


def test_what_is_left_to_download_is_known(hub, files, tiny_llama):
    hub.add("org/heavy", {**files, "note.txt": b"a repository of its own"})
    source = find_model("org/heavy")
    assert download_bytes(find_model(str(tiny_llama))) == 0 and download_bytes(source) == source.weights.bytes
    fetch(source, (source.weights.files[0],))
    assert 0 < download_bytes(source) < source.weights.bytes
    fetch(source, source.weights.files)
    assert download_bytes(source) == 0


def test_a_revision_is_resolved_to_its_commit_whose_files_are_fetched(hub, files):
    first = hub.add("org/tiny", files)
    hub.add("org/tiny", {"config.json": b"{}"})
    source = find_model(f"org/tiny@{first}")
    assert source.revision == first
    assert json.loads((fetch(source, ("config.json",)) / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("name", "token", "sentence"),
    [
        ("org/none", None, "'org/none' is not a folder here and not on the Hub, or it is private: check the spelling"),
        ("org/none", OWNER, "'org/none' is not on the Hub, or is private and the token in use may not see it"),
        ("org/private", None, "'org/private' is not a folder here and not on the Hub, or it is private"),
        ("org/gated", None, "'org/gated' is gated: accept its terms at http"),
        ("org/gated", "hf_fake_guest", "'org/gated' is gated: accept its terms at http"),
        ("org/open@v9", None, "'org/open@v9' names a revision that does not exist"),
        ("no such/thing", None, "'no such/thing' is neither a folder here nor an id of the Hub"),
        ("./nowhere", None, "'./nowhere' is not a folder here"),
        ("a/b/c", None, "'a/b/c' is not a folder here"),
        ("", None, "'' is neither a folder here nor an id of the Hub"),
        ("https://example.com/org/name", None, "is not a folder here"),
        (__file__, None, "is a file: name the folder"),
    ],
)
def test_model_that_cannot_be_had_is_one_sentence(hub, files, name, token, sentence):
    hub.add("org/open", files)
    hub.add("org/private", files, private=True)
    hub.add("org/gated", files, gated="manual")
    with pytest.raises(ModelNotAvailable) as caught:
        find_model(name, token)
    assert sentence in str(caught.value) and "hf_fake" not in str(caught.value)


def test_visitor_of_a_space_is_sent_to_its_button_and_to_no_terminal(hub, files, monkeypatch):
    hub.add("org/gated", files, gated="manual")
    monkeypatch.setenv("SPACE_ID", "org/space")
    for name in ("org/gated", "org/none"):
        with pytest.raises(ModelNotAvailable, match="press the button that signs in") as caught:
            find_model(name)
        assert "hf auth login" not in str(caught.value)


def test_without_network_the_error_says_whether_the_cache_has_it(hub, files, monkeypatch):
    hub.add("org/cached", files)
    folder = fetch(find_model("org/cached"), ("*",))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotAvailable, match=f"the Hub does not answer: a copy is in the cache, .*{folder}"):
        find_model("org/cached")
    with pytest.raises(ModelNotAvailable, match="the Hub does not answer: it is not in the cache either"):
        find_model("org/uncached")


def shard_of(files):
    return next(name for name in sorted(files) if name.endswith(".safetensors"))


def without(files, name):
    return {file: data for file, data in files.items() if file != name}


DAMAGES = {
    "truncated": (lambda f: {**f, shard_of(f): f[shard_of(f)][:5000]}, "has damaged weights"),
    "no header": (lambda f: {**f, shard_of(f): b"\xff" * 500}, "has damaged weights"),
    "empty file": (lambda f: {**f, shard_of(f): b""}, "has damaged weights"),
    "missing shard": (lambda f: without(f, shard_of(f)), "has damaged weights"),
    "index no JSON": (lambda f: {**f, "model.safetensors.index.json": b"{"}, "not JSON|damaged weights"),
    "index of numbers": (
        lambda f: {**f, "model.safetensors.index.json": b'{"weight_map": {"a": 3}}'},
        "damaged weights",
    ),
    "header of numbers": (lambda f: {**f, shard_of(f): struct.pack("<Q", 8) + b'{"a": 3}'}, "damaged weights"),
    "index empty": (lambda f: {**f, "model.safetensors.index.json": b"{}"}, "names no files"),
    "no config": (lambda f: without(f, "config.json"), r"(a folder without|has no) config\.json"),
    "no weights": (lambda f: {"config.json": f["config.json"]}, "index.json, and no other weights: name a model"),
    "pickle": (lambda f: {"config.json": f["config.json"], "pytorch_model.bin": b"x"}, "a pickle .* can run any code"),
    "other format": (lambda f: {"config.json": f["config.json"], "m.gguf": b"x"}, "has its weights as GGUF"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", ["hub", "folder"])
def test_damaged_model_is_one_sentence(hub, files, tmp_path, place, damage):
    break_files, sentence = DAMAGES[damage]
    broken = break_files(files)
    name = str(tmp_path)
    if place == "hub":
        name = f"org/{damage.replace(' ', '-')}"
        hub.add(name, broken)
    else:
        for file, data in broken.items():
            (tmp_path / file).write_bytes(data)
    with pytest.raises(ModelNotAvailable, match=sentence):
        find_model(name)


def test_token_of_the_user_is_used_at_home_but_never_on_a_space(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_fake_me")
    assert access_token() == "hf_fake_me"
    monkeypatch.setenv("SPACE_ID", "org/space")
    assert access_token() is False
    assert access_token("hf_fake_visitor") == "hf_fake_visitor"
