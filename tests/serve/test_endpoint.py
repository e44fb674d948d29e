"""The endpoint answers like OpenAI's: at once, streamed, with its errors; a client that goes away frees its place."""

import json
import shlex
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from linearizer.page.cards import write_causal_ways
from linearizer.run.folder import Run
from linearizer.serve import endpoint
from tests.support.runs import wait_until
from tests.support.serving import chat, complete


def expected(client, prompt, count):
    """What `generate` writes after a prompt."""
    known = client.served
    ids = known.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return known.tokenizer.decode(known.model.generate(ids, **options)[0, ids.shape[1] :], skip_special_tokens=True)


def streamed(client, path, **options):
    """Return the events of a stream without the last."""
    with client.stream("POST", path, json={"model": "tiny", "temperature": 0, "stream": True, **options}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_it_writes_what_generate_writes(served):
    answer = complete(served, max_tokens=12).json()
    (choice,) = answer["choices"]
    assert choice["text"] == expected(served, "Once upon", 12) and choice["finish_reason"] == "length"
    used = answer["usage"]
    assert used["completion_tokens"] == 12 and used["total_tokens"] == 12 + used["prompt_tokens"]
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    texts = [choice["text"] for choice in complete(served, prompt=["Once upon", "A"], max_tokens=6).json()["choices"]]
    assert texts == [expected(served, prompt, 6) for prompt in ("Once upon", "A")]
    assert len(complete(served).json()["choices"][0]["text"]) > 0


def test_it_writes_several_answers_to_each_prompt(served):
    once = complete(served, prompt=["Once upon", "A"], max_tokens=6).json()
    twice = complete(served, prompt=["Once upon", "A"], max_tokens=6, n=2).json()
    texts = [[choice["text"] for choice in answer["choices"]] for answer in (once, twice)]
    assert texts[1] == [text for text in texts[0] for _ in range(2)]
    assert [choice["index"] for choice in twice["choices"]] == [0, 1, 2, 3]
    used = [answer["usage"] for answer in (once, twice)]
    assert used[0]["prompt_tokens"] == used[1]["prompt_tokens"] and used[1]["completion_tokens"] == 24
    drawn = complete(served, max_tokens=12, n=3, temperature=1.5, seed=1).json()["choices"]
    assert len({choice["text"] for choice in drawn}) == 3


def test_what_the_page_says_to_ask_is_answered(served):
    body = shlex.split(write_causal_ways(Run(Path("run")))["Ask the server"])[-1]
    answer = served.post("completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == json.loads(body)["max_tokens"]


def test_a_stream_adds_up_to_the_answer(served):
    events = streamed(
        served,
        "completions",
        prompt="Once upon",
        max_tokens=12,
        stream_options={"include_usage": True, "include_obfuscation": None},
    )
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected(served, "Once upon", 12)
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "length"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 12
    said = [{"role": "user", "content": "Once"}]
    events = streamed(served, "chat/completions", messages=said, max_tokens=5)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant"}
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    assert text == expected(served, "user: Once\nassistant: ", 5)


def test_a_stream_that_waits_is_not_silent(served, monkeypatch):
    monkeypatch.setattr(endpoint, "QUIET_SECONDS", 0.001)
    lines = complete(served, max_tokens=30, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(each["choices"][0]["text"] for each in events) == expected(served, "Once upon", 30)
    assert any(line.startswith(":") for line in lines) and lines[-2] == "data: [DONE]"


def test_a_conversation_goes_on_from_its_kept_state(served):
    first = chat(served, "Tell me of modules.", max_tokens=10).json()
    text = first["choices"][0]["message"]["content"]
    second = chat(served, "Tell me of modules.", text, "More.", max_tokens=10).json()
    options = f"user: Tell me of modules.\nassistant: {text}\nuser: More.\nassistant: "
    assert second["choices"][0]["message"]["content"] == expected(served, options, 10)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


def test_a_text_ends_before_what_it_stops_at(served):
    whole = expected(served, "Once upon", 30)
    stop = whole[10:13]
    answer = complete(served, max_tokens=30, stop=[stop, "never said"]).json()["choices"][0]
    assert answer["text"] == whole[: whole.index(stop)] and answer["finish_reason"] == "stop"
    events = streamed(served, "completions", prompt="Once upon", max_tokens=30, stop=stop)
    assert "".join(e["choices"][0]["text"] for e in events) == answer["text"]


def test_a_seed_draws_the_same_text(served):
    texts = [complete(served, temperature=1.5, top_p=0.9, seed=seed, max_tokens=20).json() for seed in (1, 1, 2)]
    first, again, other = (answer["choices"][0]["text"] for answer in texts)
    assert first == again != other


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(served, stream):
    engine, begun = served.served.engine, threading.Event()
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 500, "stream": stream, "ignore_eos": True}
    content = json.dumps(body).encode()
    before, last = engine.model.forward, time.monotonic() + 60

    def wait_for_leaving(*args, **kwargs):
        begun.set()
        while engine.rows and engine.rows[0].written > 20 and not engine.rows[0].abandoned and time.monotonic() < last:
            time.sleep(0.01)
        return before(*args, **kwargs)

    engine.model.forward = wait_for_leaving
    try:
        address = served.base_url.host, served.base_url.port
        with socket.create_connection(address) as connection:
            head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            head += [f"Content-Length: {len(content)}", "", ""]
            connection.sendall("\r\n".join(head).encode() + content)
            assert begun.wait(60)
            if stream:
                connection.recv(100)
        wait_until(lambda: not engine.rows and not engine.unread)
        assert max(kept.tokens for kept in engine.kept.states.values()) < 400  # it did not write to the end
    finally:
        del engine.model.forward
    assert complete(served, max_tokens=4).status_code == 200


REFUSED = {
    "no such model": (dict(model="gpt"), 404, "there is no model 'gpt'"),
    "hot": (dict(temperature=3), 400, "temperature"),
    "cold": (dict(temperature=-1), 400, "temperature"),
    "none": (dict(max_tokens=0), 400, "max_tokens"),
    "huge": (dict(max_tokens=10**9), 400, "more than the 512"),
    "empty": (dict(prompt=""), 400, "empty"),
    "numbers": (dict(prompt=[10**9]), 400, "a token is not one"),
    "long": (dict(prompt="word " * 3000), 400, "more than the 512"),
    "many tokens": (dict(prompt=[1] * 600), 400, "600 tokens are more than the 512"),
    "many": (dict(prompt=["a"] * 100), 400, "100 prompts"),
    "several": (dict(best_of=2), 400, "best_of = 2 is not served"),
    "true": (dict(best_of=True), 400, "best_of = True is not served"),
    "no number": (dict(n=True), 400, "n: true is not a number"),
    "many answers": (dict(n=40, prompt=["a", "b"]), 400, "80 answers are more than the 64"),
    "misspelt option": (dict(stream_options={"include_usag": True}), 400, "include_usag"),
    "a logprob": (dict(logprobs=0), 400, "logprobs = 0 is not served"),
    "misspelt": (dict(temprature=1), 400, "temprature: there is no such field here"),
    "no stop": (dict(stop=[""]), 400, "stop"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_said_in_the_shape_of_openai(served, name):
    options, status, match = REFUSED[name]
    answer = complete(served, **options)
    error = answer.json()["error"]
    assert answer.status_code == status and match in error["message"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_what_is_no_request_is_said_too(served):
    headers = {"content-type": "application/json"}
    for path, content, status, param, match in [
        ("completions", b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "temperature", "temperature: "),
        ("completions", b'{"model": "tiny", "prompt": [1, "a"]}', 400, "prompt", "prompt.1: "),
        ("completions", b'{"model": "tiny", "prompt": [1.0]}', 400, "prompt", "prompt.0: Input should be a valid int"),
        ("completions", b'{"model": "tiny", "prompt": "a", "stream_options": []}', 400, "stream_options",
         "stream_options: it should be an object"),
        ("completions", b'{"model": "tiny", "prompt": "a", "best_of": 2}', 400, "best_of", "best_of = 2 is"),
        ("completions", b'{"model": "tiny", "prompt": "a", "stream": "yes, please"}', 400, "stream", "stream: "),
        ("completions", b"{", 400, None, "the body is not a JSON object ("),
        ("completions", b"[]", 400, None, "the body is not a JSON object ("),
        ("chat/completions", b'{"model": "tiny", "messages": []}', 400, "messages", "messages: "),
        ("chat/completions", b'{"model": "tiny"}', 400, "messages", "messages: "),
        ("chat/completions", b'{"model": "tiny", "messages": ["hi"]}', 400, "messages", "messages.0: it should be"),
        ("chat/completions", b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url", '
         b'"image_url": "data:"}]}]}', 400, "messages", "messages.0.content.0.image_url.image_url: it should be"),
        ("chat/completions", b'{"model": "tiny", "messages": [{"role": "king", "content": "a"}]}', 400, "messages",
         "messages.0.role: "),
        ("embeddings", b"{}", 404, None, "POST /v1/embeddings"),
    ]:  # fmt: skip
        answer = served.post(path, content=content, headers=headers)
        error = answer.json()["error"]
        assert answer.status_code == status and error["message"].startswith(match), (content, answer.text)
        assert error["param"] == param
    assert served.get("completions").status_code == 405
    assert served.get("models").json()["data"][0]["id"] == "tiny"
    assert served.get("models/tiny").json()["max_model_len"] == 512
    assert served.get("models/other").json()["error"]["code"] == "model_not_found"
    health = httpx.get(f"http://127.0.0.1:{served.base_url.port}/health").json()
    assert health["rows"] == health["waiting"] == 0 and health["kept_state_bytes"] <= 2**24


@pytest.mark.parametrize(
    ("template", "match"),
    [(None, "/v1/completions"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")],
)
def test_a_template_that_is_missing_or_refuses_is_said(served, monkeypatch, template, match):
    monkeypatch.setattr(served.served.tokenizer, "chat_template", template)
    answer = chat(served, "Hello")
    assert answer.status_code == 400 and match in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "[::1]:8000", "Origin": "http://localhost:3000"}, 200),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 400),
    ],
)
def test_requests_of_other_sites_are_refused(served, headers, status):
    content, headers = b'{"model": "tiny", "prompt": "a"}', {"Content-Type": "application/json", **headers}
    answer = served.post("completions", content=content, headers=headers)
    assert answer.status_code == status and (status != 403 or "--host" in answer.json()["error"]["message"])
