"""A student reads a text once, and is asked about it as often as one likes."""

import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load

from linearizer import ask, finish, read
from linearizer.cli.text import describe_states
from linearizer.hub.models import find_model
from linearizer.run.files import unseal
from linearizer.run.folder import Run
from linearizer.serve.state_files import StateFile, fork, load_state
from linearizer.teacher.text import read_whole
from tests.support.publishing import HOW_THE_HUB_SENDS, ME, files_of, written


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(("The import statement finds a module. " * 40).strip(), encoding="utf-8")
    return tmp_path / "text.txt"


def test_what_was_read_is_answered_from(quick_run, text, tmp_path, said):
    state = tmp_path / "state"
    code, out, _ = said("read", quick_run, text, "--state", state, "--json")
    reading = json.loads(out)
    assert code == 0 and reading["cache_bytes"] == reading["tokens"] * 2 * 4096  # fp32: twice as much as bf16
    assert reading["state_bytes"] < reading["cache_bytes"]
    before = state.read_bytes()
    prompt = " The import statement"
    code, whole, _ = said("ask", quick_run, "--prompt", read_whole(text) + prompt, "--tokens", 12, "--json")
    code, out, _ = said("ask", quick_run, "--state", state, "--prompt", prompt, "--tokens", 12, "--json")
    assert code == 0 and state.read_bytes() == before
    answer = json.loads(out)
    assert answer["tokens"] == 12 and answer["text"] == json.loads(whole)["text"]
    assert said("ask", quick_run, "--state", state, "--prompt", prompt, "--tokens", 12)[1] == answer["text"] + "\n"


def test_a_state_reads_on(quick_run, text, tmp_path, said, monkeypatch):
    state = tmp_path / "state"
    assert "the teacher's cache would be" in said("read", quick_run, text, "--state", state)[1]
    code, _, err = said("read", quick_run, text, "--state", state)
    assert code == 2 and "--more" in err
    code, _, err = said("ask", quick_run, "--state", state, "--take-back", "--tokens", 3)
    assert code == 2 and "--tokens is for a prompt" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"%PDF-\xff")))
    code, _, err = said("read", quick_run, "-", "--state", state, "--more")
    assert code == 2 and "PDF" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"And so on. ")))
    before = state.read_bytes()
    held = load(before)
    code, out, _ = said("read", quick_run, "-", "--state", state, "--more", "--json")
    first = json.loads(out)["tokens"]
    assert code == 0 and state.read_bytes() != before
    code, out, _ = said("ask", quick_run, "--state", state, "--prompt", "It", "--tokens", 5, "--keep", "--json")
    answer = json.loads(out)
    run = Run.open(quick_run)
    from linearizer.method.checkpoint import load_of_run

    student, tokenizer = load_of_run(run)
    assert answer["reading"]["tokens"] == load_state(student, state).get_seq_length()
    assert answer["reading"]["tokens"] == first + len(tokenizer("It", add_special_tokens=False)["input_ids"]) + 5
    for expected in (first, first - len(tokenizer("And so on. ", add_special_tokens=False)["input_ids"])):
        code, out, _ = said("ask", quick_run, "--state", state, "--take-back", "--json")
        assert code == 0 and json.loads(out)["tokens"] == expected
    back = load(before := state.read_bytes())
    assert back.keys() == held.keys() and all(torch.equal(back[name], held[name]) for name in held)
    code, _, err = said("ask", quick_run, "--state", state, "--take-back")
    assert code == 2 and "nothing to take back" in err and state.read_bytes() == before


def test_python_asks_too_and_takes_names_of_files_as_text(quick_run, tmp_path):
    run, state, other = Run.open(quick_run), str(tmp_path / "state"), str(tmp_path / "other")
    reading = finish(read(run, "The import statement finds a module.", state))
    assert fork(state, other).tokens == reading.tokens > 4
    written = "".join(ask(run, " It", state, new_tokens=6, sample=True, seed=3))
    assert written == "".join(ask(run, " It", other, new_tokens=6, sample=True, seed=3))


def test_states_are_listed_forked_and_deleted(quick_run, tmp_path, said):
    states = tmp_path / "states"
    states.mkdir()
    (states / "notes.txt").write_text("no state", encoding="utf-8")
    state, new = states / "a", states / "b"
    assert "no states" in said("state", "list", states)[1]
    assert describe_states([StateFile("a", 3, 100, "\x1b]0;a\x07", 0.0)]).isprintable()
    tokens = finish(read(Run.open(quick_run), "The import statement", state)).tokens
    assert said("state", "fork", state, new)[0] == 0 and new.read_bytes() == (before := state.read_bytes())
    assert said("ask", quick_run, "--state", new, "--prompt", "It", "--tokens", 3, "--keep")[0] == 0
    assert state.read_bytes() == before != new.read_bytes()
    listed = json.loads(said("state", "list", states, "--json")[1])
    assert [each["name"] for each in listed] == ["a", "b"] and listed[0]["tokens"] == tokens < listed[1]["tokens"]
    for words, match in [
        (("fork", state, new), "exists already"),
        (("fork", state), "needs S and NEW"),
        (("fork", states / "notes.txt", states / "c"), "is not the state"),
        (("delete", states / "notes.txt"), "is not the state"),
        (("delete", states / "none"), "there is no state"),
        (("list", states / "none"), "there is no folder"),
    ]:
        code, out, err = said("state", *words)
        assert code == 2 and match in err and not out and err.count("\n") == 1, (words, err)
    assert said("state", "delete", new)[0] == 0
    assert sorted(path.name for path in states.iterdir()) == ["a", "notes.txt"]


def test_of_two_processes_that_add_to_a_state_none_loses_a_turn(quick_run, tmp_path, said):
    state = tmp_path / "state"
    run = Run.open(quick_run)
    read_first = finish(read(run, "The import statement", state)).tokens
    asking = ask(run, " It", state, keep=True, new_tokens=200)
    next(asking)
    other = [sys.executable, "-m", "linearizer", "ask", quick_run, "--state", state, "--prompt", "a", "--keep"]
    done = subprocess.run(other, capture_output=True, text=True)
    assert done.returncode == 2 and "another process is writing the state" in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout.strip()
    code, _, err = said("ask", quick_run, "--state", state, "--take-back")
    assert code == 2 and "another process is writing the state" in err
    assert said("ask", quick_run, "--state", state, "--prompt", "a", "--tokens", 1)[0] == 0  # it only reads
    kept = finish(asking).reading.tokens
    assert kept > read_first + 100
    code, out, _ = said("ask", quick_run, "--state", state, "--prompt", " It", "--tokens", 2, "--keep", "--json")
    assert code == 0 and json.loads(out)["reading"]["tokens"] > kept
    ask(run, " It", state, keep=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_cannot_be_is_said(quick_run, text, tmp_path, said):
    state = tmp_path / "state"
    for words, match in [
        (("ask", quick_run, "--prompt", "a", "--state", state), "there is no state"),
        (("ask", quick_run, "--prompt", "a", "--keep"), "--state"),
        (("ask", quick_run, "--take-back"), "--state"),
        (("ask", quick_run, "--state", state), "--take-back"),
        (("ask", quick_run, "--state", state, "--take-back"), "there is no state"),
        (("ask", quick_run, "--prompt", "a", "--tokens", 0), "at least one"),
        (("ask", quick_run, "--prompt", "", "--state", text), "is damaged"),
        (("read", quick_run, text, "--state", tmp_path / "none" / "state"), "cannot be written"),
        (("read", quick_run, text, "--state", tmp_path), "is a folder"),
        (("read", quick_run, tmp_path / "none", "--state", state), "does not exist"),
        (("read", tmp_path / "none", text, "--state", state), "there is no run"),
    ]:
        code, out, err = said(*words)
        assert code == 2 and match in err and not out.strip() and err.count("\n") == 1, (words, err)
    assert not state.exists()


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}</a>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_run(quick_run, tmp_path):
    """A run whose teacher and student have a chat template."""
    run, model = (tmp_path / name for name in ("chat", "model"))
    shutil.copytree(quick_run, run)
    shutil.copytree(find_model("demo").folder, model)
    for folder in (model, run / "checkpoint"):
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    plan = json.loads(unseal((run / "plan.json").read_text(encoding="utf-8")))
    (run / "plan.json").write_text(json.dumps({**plan, "model": str(model)}), encoding="utf-8")
    return run


def test_a_model_with_a_chat_template_is_asked_through_it(chat_run, tmp_path, said, text):
    def answer(*words):
        code, out, err = said("ask", chat_run, "--tokens", 6, "--json", *words)
        assert code == 0, err
        return json.loads(out)["text"]

    whole = "<user>Where?<assistant>"
    first = answer("--prompt", "Where?")
    assert first == answer("--prompt", whole, "--raw") != answer("--prompt", "Where?", "--raw")
    document, state = text.read_text(encoding="utf-8"), tmp_path / "state"
    assert said("read", chat_run, text, "--state", state)[0] == 0
    whole = f"<user>{document}\n\nWhere?<assistant>"
    first = answer("--prompt", "Where?", "--state", state, "--keep")
    assert first == answer("--prompt", whole, "--raw")
    whole += f"{first}</a><user>When?<assistant>"
    assert answer("--prompt", "When?", "--state", state) == answer("--prompt", whole, "--raw")


def test_all_models_are_compared_through_the_chat_template(chat_run, said):
    texts = []
    for words in (["Where?"], ["<user>Where?<assistant>", "--raw"], ["Where?", "--raw"]):
        compared = json.loads(said("compare", chat_run, "--tokens", 6, "--json", "--prompt", *words)[1])
        texts.append([compared[name]["text"] for name in ("teacher", "student", "window")])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.filterwarnings(HOW_THE_HUB_SENDS)
def test_a_state_is_published_privately_and_another_machine_goes_on_from_it(
    hub, quick_run, text, tmp_path, said, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", ME)
    state, got = tmp_path / "state", tmp_path / "got"
    tokens = json.loads(said("read", quick_run, text, "--state", state, "--json")[1])["tokens"]
    code, out, err = said("push", "--state", state, "me/book", "--json")
    assert code == 0, err
    published = json.loads(out)
    assert code == 0 and published["url"] == f"{hub.url}/datasets/me/book/tree/{published['revision']}"
    files = files_of(hub, "me/book", "datasets")
    assert hub.repos["datasets", "me/book"].private and files["state.safetensors"] == state.read_bytes()
    card = files["README.md"].decode()
    assert f"{tokens:,} tokens" in card and "demo" in card and not any(ME.encode() in x for x in files.values())
    code, out, _ = said("state", "get", f"me/book@{published['revision']}", got, "--json")
    assert code == 0 and json.loads(out)["tokens"] == tokens and got.read_bytes() == state.read_bytes()
    asked = [said("ask", quick_run, "--state", path, "--prompt", "It", "--tokens", 5)[1] for path in (state, got)]
    assert asked[0] == asked[1]
    assert said("push", "--state", state, "me/book")[0] == 0  # again, with nothing to send
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = said("state", "get", "me/book", tmp_path / "other")
    assert code == 2 and "me/book" in err and not (tmp_path / "other").exists()


@pytest.mark.filterwarnings(HOW_THE_HUB_SENDS)
def test_what_is_no_state_is_neither_published_nor_got(hub, text, tmp_path, said, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", ME)
    code, _, err = said("push", "--state", text, "me/book")
    assert code == 2 and "is not the state" in err and not written(hub)
    hub.add("me/else", {"state.safetensors": b"no state", "a.csv": b"a"}, "datasets")
    code, _, err = said("state", "get", "me/else", tmp_path / "got")
    assert code == 2 and "is not the state" in err and not (tmp_path / "got").exists()
    hub.add("me/none", {"a.csv": b"a"}, "datasets")
    code, _, err = said("state", "get", "me/none", tmp_path / "got")
    assert code == 2 and "has no state.safetensors" in err
    (tmp_path / "got").write_text("mine")
    code, _, err = said("state", "get", "me/none", tmp_path / "got")
    assert code == 2 and "exists already" in err and (tmp_path / "got").read_text() == "mine"
