"""A state is a file that a client owns: made, listed, moved, forked, continued and deleted over HTTP."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save

from linearizer.serve.engine import Engine
from linearizer.serve.saved_state import WITH_TURNS, as_bytes, checksum, write_state
from linearizer.teacher.chat_template import next_turn_tokens, turn_tokens
from tests.support.models import student_of
from tests.support.serving import chat, complete, listening

TEXT = "The import statement finds a module."
FILE = {"Content-Type": "application/octet-stream"}
MANY_TRIES = 10_000  # of a writer, each of milliseconds, while another one writes


@contextmanager
def server(served, folder, keys=(), **changes):
    known = replace(served.served, states=folder, **changes)
    with listening(known, keys=keys) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def client(served, tmp_path):
    with server(served, tmp_path / "states") as client:
        yield client


def read(client, text=TEXT, **options):
    answer = client.post("states", json={"text": text, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def written(answer):
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def bits(client, name):
    return bits_of(client.get(f"states/{name}").content)


def bits_of(content):
    """Return the tensors of a state: the order of its description in the file may differ."""
    return {name: as_bytes(tensor) for name, tensor in load(content).items()}


def forge(content, folder, tensors=None, **facts):
    """Change what the file of a state says, with a checksum that fits."""
    (folder / "forged").write_bytes(content)
    with safe_open(folder / "forged", "pt") as file:
        said = {name: text for name, text in {**file.metadata(), **facts}.items() if text and name != "checksum"}
    stored = load(content) if tensors is None else tensors
    return save(stored, {**said, "checksum": checksum(stored, said)})


def tokens_of(client, name):
    return next(state["tokens"] for state in client.get("states").json()["data"] if state["id"] == name)


def generate(served, ids):
    """What the model writes after tokens, as tokens and as text."""
    known, prompt = served.served, torch.tensor([ids])
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0)
    new = known.model.generate(prompt, **options)[0, len(ids) :].tolist()
    return new, known.tokenizer.decode(new, skip_special_tokens=True)


def test_a_chat_goes_on_after_a_text_that_was_read_once(served, client):
    tokenizer = served.served.tokenizer
    ids = turn_tokens(tokenizer, TEXT, asks=False) + turn_tokens(tokenizer, "Where?", begins=False)
    new, first = generate(served, ids)
    state = read(client)
    answer = chat(client, "Where?", state=state, keep=True, max_tokens=8)
    assert written(answer) == first
    used = answer.json()["usage"]
    assert used["prompt_tokens"] == len(ids)
    assert used["prompt_tokens_details"]["cached_tokens"] == len(turn_tokens(tokenizer, TEXT, asks=False))
    ids += new + next_turn_tokens(tokenizer)
    assert tokens_of(client, state) == len(ids)
    before = client.get(f"states/{state}").content
    _, second = generate(served, ids + turn_tokens(tokenizer, "When?", begins=False))
    assert written(chat(client, "When?", state=state, max_tokens=8)) == second
    assert client.get(f"states/{state}").content == before  # nothing was to be kept


def test_a_completion_goes_on_after_a_state(client):
    state = read(client, raw=True)
    assert written(complete(client, prompt=" It", state=state, max_tokens=8, keep=True)) == written(
        complete(client, prompt=TEXT + " It", max_tokens=8)
    )
    assert tokens_of(client, state) == len(client_tokens(client, TEXT + " It")) + 8


def client_tokens(client, text):
    return range(complete(client, prompt=text, max_tokens=1).json()["usage"]["prompt_tokens"])


def test_what_a_stream_wrote_is_kept_when_it_ends(client):
    state = read(client, raw=True)
    before = tokens_of(client, state)
    answer = complete(client, prompt=" It", state=state, max_tokens=8, keep=True, stream=True)
    assert answer.text.endswith("data: [DONE]\n\n") and tokens_of(client, state) >= before + 8


def test_a_stream_says_that_its_state_cannot_be_kept(client, tmp_path):
    options = dict(model="tiny", prompt=" It", state=read(client), keep=True, max_tokens=300, stream=True)
    with client.stream("POST", "completions", json=options) as answer:
        lines = answer.iter_lines()
        next(lines)
        shutil.rmtree(tmp_path / "states")
        assert "the state was not kept" in [line for line in lines if line][-1]


def test_a_file_is_read_into_a_state(client):
    answer = client.post("states?raw=true", content=TEXT.encode(), headers=FILE)
    assert answer.status_code == 200
    assert bits(client, answer.json()["id"]) == bits(client, read(client, raw=True))
    assert client.post("states", content=b"\xff\xfe\x00", headers=FILE).status_code == 400
    assert client.post("states", content=TEXT, headers={"Content-Type": "text/plain"}).status_code == 400
    large = client.post("states", content=b"a" * 2**21, headers=FILE)
    assert large.status_code == 413 and "application/pdf" in large.text and "prompt" not in large.text
    scan = client.post("states", content=b"%PDF-" + b"0" * 2**21, headers={"Content-Type": "application/pdf"})
    assert scan.status_code == 400 and "PDF" in scan.text
    assert client.post("states", json={"text": TEXT, "temperature": 1}).status_code == 400
    assert client.post("states", json={"text": TEXT, "model": "other"}).json()["error"]["code"] == "model_not_found"
    assert client.post("states", json={"text": "word " * 3000}).json()["error"]["code"] == "context_length_exceeded"


def test_a_fork_goes_its_own_way(client):
    state = read(client, raw=True)
    fork = client.post(f"states/{state}/fork").json()["id"]
    before = client.get(f"states/{fork}").content
    assert before == client.get(f"states/{state}").content
    complete(client, prompt=" It", state=state, max_tokens=4, keep=True)
    assert client.get(f"states/{fork}").content == before != client.get(f"states/{state}").content


def test_a_state_is_moved_to_another_server_and_continued_with_the_same_bits(served, client, tmp_path):
    state = read(client, raw=True)
    complete(client, prompt=" It", state=state, max_tokens=4, keep=True)
    content = client.get(f"states/{state}").content
    with Engine(served.served.model, 2**24) as engine, server(served, tmp_path / "other", engine=engine) as other:
        assert other.put(f"states/{state}", content=content, headers=FILE).status_code == 200
        texts = [
            written(complete(each, prompt=" and", state=state, max_tokens=8, keep=True, temperature=1, seed=3))
            for each in (client, other)
        ]
        assert texts[0] == texts[1]
        assert bits(other, state) == bits(client, state) != bits_of(content)


def test_what_is_no_state_of_this_model_is_refused_and_changes_nothing(served, client, tmp_path):
    state = read(client)
    content = client.get(f"states/{state}").content
    other = student_of("llama", vocab_size=served.served.model.config.vocab_size, max_position_embeddings=512, sinks=1)
    cache = other.empty_cache()
    other(input_ids=served.served.tokenizer("a b", return_tensors="pt")["input_ids"], past_key_values=cache)
    write_state(other, cache, tmp_path / "foreign")
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 1
    for sent, match in [
        (bytes(flipped), "damaged"),
        (content.replace(b"linearized state 4", b"linearized state 9"), "linearized state 9"),
        ((tmp_path / "foreign").read_bytes(), "another model"),
        (content[:-1], "damaged"),
        (b"", "damaged"),
        (forge(content, tmp_path, tokens=str(10**18)), "more than the 512"),
        (forge(content, tmp_path, tokens=None), "damaged"),
        (forge(content, tmp_path, tokens="0"), "damaged"),
        (forge(content, tmp_path, texts="2"), "of several texts"),
        (forge(content, tmp_path, format=WITH_TURNS, turns="[[0, 0]]" * 2), "damaged"),
        (forge(content, tmp_path, format=WITH_TURNS, turns="5"), "damaged"),
        (forge(content, tmp_path, format=WITH_TURNS, turns=f"[{'[0, 0],' * 8}[0, 0]]"), "damaged"),
        (forge(content, tmp_path, {"weights": load(content)["weights"]}), "damaged"),
        (forge(content, tmp_path, {**load(content), "x": torch.zeros(1)}), "damaged"),
        (forge(content, tmp_path, {name: x.sum() for name, x in load(content).items()}), "another model"),
        (forge(content, tmp_path, {n: x if n == "weights" else x.sum() for n, x in load(content).items()}), "damaged"),
    ]:
        for name in (state, "0" * 32):
            answer = client.put(f"states/{name}", content=sent, headers=FILE)
            assert answer.status_code == 400 and match in answer.json()["error"]["message"], answer.text
            assert str(tmp_path) not in answer.text
    assert client.get(f"states/{state}").content == content
    assert [each["id"] for each in client.get("states").json()["data"]] == [state]


def reused(client, prompt):
    """Count the tokens of a prompt that are not read again."""
    used = complete(client, prompt=prompt, max_tokens=1).json()["usage"]
    return used["prompt_tokens_details"]["cached_tokens"]


def test_one_key_does_not_see_the_states_of_another(served, tmp_path):
    with server(served, tmp_path / "states", keys=["ann-key", "bob-key"]) as client:
        ann, bob = ({"Authorization": f"Bearer {name}-key"} for name in ("ann", "bob"))
        client.headers = httpx.Headers(ann)
        prompt = "Nobody else has sent this text"
        assert [reused(client, prompt) > 0 for _ in range(2)] == [False, True]
        state = read(client)
        assert client.get(f"states/{state}").status_code == 200
        client.headers = httpx.Headers(bob)
        assert reused(client, prompt) == 0
        assert client.get("states").json()["data"] == []
        for answer in (
            client.get(f"states/{state}"),
            client.post(f"states/{state}/fork"),
            client.delete(f"states/{state}"),
            complete(client, state=state),
            complete(client, state=state, keep=True),
        ):
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "state_not_found"
    names = [path.name for path in (tmp_path / "states").iterdir()]
    assert len(names) == 2 and not any("key" in name for name in names)


@pytest.mark.parametrize("name", ["../../x", "..%2f..%2fx", "A" * 32, "0" * 31, "0" * 32, "%00", "x" * 300])
def test_no_other_file_has_the_name_of_a_state(client, name):
    for method in ("GET", "PUT", "DELETE"):
        answer = client.request(method, f"states/{name}", content=b"x", headers=FILE)
        assert answer.status_code in (400, 404)
    assert complete(client, state=name).status_code == 404


def test_states_have_a_quota(served, tmp_path):
    with server(served, tmp_path / "states") as client:
        size = len(client.get(f"states/{read(client)}").content)
    with Engine(served.served.model, 2 * size + 10) as engine, server(served, tmp_path / "few", engine=engine) as few:
        state, other = read(few), read(few)
        content = few.get(f"states/{state}").content
        for answer in (
            few.post("states", json={"text": TEXT}),
            few.post(f"states/{state}/fork"),
            few.put(f"states/{'0' * 32}", content=content, headers=FILE),
        ):
            assert answer.status_code == 413 and "--max-state-bytes" in answer.json()["error"]["message"]
        assert few.put(f"states/{state}", content=content, headers=FILE).status_code == 200  # it takes its own place
        assert few.delete(f"states/{other}").json()["deleted"]
        parts = tmp_path / "few" / "everyone" / "x.received", tmp_path / "few" / "everyone" / "new-x.unfinished"
        parts[0].write_bytes(content)
        parts[1].mkdir()
        assert few.post(f"states/{state}/fork").status_code == 413  # another request sends a state
        for part in parts:
            os.utime(part, (0, 0))  # a killed server left them
        assert few.post(f"states/{state}/fork").status_code == 200
    assert len([*(tmp_path / "few" / "everyone").iterdir()]) == 2


def test_a_state_that_is_deleted_meanwhile_is_not_there(client):
    content, over = client.get(f"states/{read(client)}").content, threading.Event()

    def come_and_go():
        for _ in range(20):
            assert client.put(f"states/{'0' * 32}", content=content, headers=FILE).status_code == 200
            assert client.delete(f"states/{'0' * 32}").status_code in (200, 409)
        over.set()

    def ask():
        answers = []
        while not over.is_set():
            answers += [client.get("states"), client.post(f"states/{'0' * 32}/fork")]
            answers += [client.get(f"states/{'0' * 32}"), complete(client, state="0" * 32, max_tokens=1)]
        return answers

    with ThreadPoolExecutor(2) as pool:
        coming, asked = pool.submit(come_and_go), pool.submit(ask)
        coming.add_done_callback(lambda _: over.set())
        assert {answer.status_code for answer in asked.result()} <= {200, 404}
        coming.result()


def test_the_list_of_states_has_no_files_that_are_not_complete(client, tmp_path):
    state = read(client)
    folder = tmp_path / "states" / "everyone"
    for name in (f"{'0' * 32}.received", "new-0"):
        (folder / name).write_bytes((folder / state).read_bytes())
    assert [each["id"] for each in client.get("states").json()["data"]] == [state]


def test_a_folder_that_is_not_to_be_written_is_no_other_request(client, tmp_path):
    content = client.get(f"states/{read(client)}").content
    (tmp_path / "states" / "everyone" / ("0" * 32)).mkdir()
    answer = client.put(f"states/{'0' * 32}", content=content, headers=FILE)
    assert answer.status_code == 500 and "is a folder" in answer.text and str(tmp_path) not in answer.text


def test_of_many_writers_of_a_state_none_loses_a_turn(client):
    state = read(client, raw=True)
    before, barrier = tokens_of(client, state), threading.Barrier(4)

    def add(_):
        barrier.wait()
        for _ in range(MANY_TRIES):
            answer = complete(client, prompt=" It", state=state, max_tokens=5, keep=True)
            assert answer.status_code in (200, 409), answer.text
            if answer.status_code == 200:
                return 1
        return 0

    with ThreadPoolExecutor(4) as pool:
        turns = sum(pool.map(add, range(4)))
    added = len(client_tokens(client, " It")) + 5
    assert turns == 4 and tokens_of(client, state) == before + turns * added


def test_a_state_that_is_being_written_is_not_deleted_or_replaced(served, client):
    state = read(client, raw=True)
    content, model, begun = client.get(f"states/{state}").content, served.served.model, threading.Event()
    before, go_on = model.forward, threading.Event()

    def wait(*args, **kwargs):
        begun.set()
        go_on.wait(60)
        return before(*args, **kwargs)

    with ThreadPoolExecutor(1) as pool:
        try:
            model.forward = wait
            asked = pool.submit(complete, client, prompt=" It", state=state, max_tokens=2, keep=True)
            assert begun.wait(60)
            assert client.delete(f"states/{state}").status_code == 409
            assert client.get(f"states/{state}").content == content
        finally:
            go_on.set()
            del model.forward
        assert asked.result().status_code == 200
    assert client.delete(f"states/{state}").status_code == 200
    assert client.get(f"states/{state}").status_code == 404


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(keep=True), "there is no state"),
        (dict(state="STATE", keep=True, stop=["x"]), "stop"),
        (dict(state="STATE", prompt=["a", "b"]), "fork it"),
        (dict(state="STATE", prompt=""), "empty"),
        (dict(state="STATE", max_tokens=600), "more than the 512"),
    ],
)
def test_what_cannot_go_on_is_said(client, options, match):
    state = read(client)
    answer = complete(client, **{name: state if value == "STATE" else value for name, value in options.items()})
    assert answer.status_code == 400 and match in answer.json()["error"]["message"]
    assert client.delete(f"states/{state}").status_code == 200  # nobody holds it


def test_no_system_message_follows_a_state(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
    answer = client.post("chat/completions", json={"model": "tiny", "messages": messages, "state": read(client)})
    assert answer.status_code == 400 and "no system message" in answer.json()["error"]["message"]


def test_a_server_without_a_folder_keeps_no_states(served):
    answer = served.get("states")
    assert answer.status_code == 404 and "--states" in answer.json()["error"]["message"]
