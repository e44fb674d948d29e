"""A body is bounded, read outside the event loop, and refused in a sentence that says what is wrong with it."""

import json
import random
import socket
import threading
import time

import httpx
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from linearizer.serve.bodies import DRAINED_BYTES, ChatBody, CompletionBody, Refusal, parse_body
from linearizer.serve.row import Drawing, choose_tokens
from tests.support.serving import chat, complete

HEADERS = {"content-type": "application/json"}
POSITIONS = 512


def parsed(kind=CompletionBody, **fields):
    return parse_body(json.dumps({"model": "tiny", **fields}).encode(), kind, POSITIONS)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_while_others_are_answered(served, chunked):
    content = json.dumps({"model": "tiny", "prompt": "word " * 4_000_000}).encode()
    answers, root = [], f"http://127.0.0.1:{served.base_url.port}"

    def pieces():
        for begin in range(0, len(content), 2**16):
            yield content[begin : begin + 2**16]

    def post():
        body = pieces() if chunked else content
        answers.append(httpx.post(f"{root}/v1/completions", content=body, headers=HEADERS, timeout=60))

    thread, slowest = threading.Thread(target=post), 0.0
    with httpx.Client(base_url=root, timeout=60) as client:
        thread.start()
        while thread.is_alive():
            begin = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
    assert answers[0].status_code == 413 and "shorten the prompt" in answers[0].json()["error"]["message"]
    assert slowest < 2  # 200 seconds and more where the body was read whole in the event loop
    assert len(content) < DRAINED_BYTES


def test_a_client_that_leaves_while_it_sends_does_no_harm(served, capfd):
    with socket.create_connection((served.base_url.host, served.base_url.port)) as connection:
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        connection.sendall("\r\n".join([*head, "Content-Length: 1000", "", "{"]).encode())
    assert complete(served, max_tokens=1).status_code == 200
    assert "Traceback" not in capfd.readouterr().err


UNREADABLE = {
    "a lone surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', "hex escape"),
    "a lone surrogate in a name": (b'{"model": "\\uDFFF", "prompt": "a"}', "surrogate"),
    "a lone surrogate in a key": (b'{"model": "tiny", "prompt": "a", "\\ud83d": 1}', "hex escape"),
    "not UTF-8": (b'{"model": "tiny", "prompt": "\xff"}', "unicode"),
    "deep": (b"[" * 100_000, "recursion limit"),
    "a number of thousands of digits": (b'{"seed": ' + b"9" * 5000 + b"}", "out of range"),
    "empty": (b"", "not a JSON object ("),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_in_a_sentence(served, name):
    content, match = UNREADABLE[name]
    for path in ("completions", "chat/completions"):
        answer = served.post(path, content=content, headers=HEADERS)
        assert answer.status_code == 400 and match in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"])
def test_true_is_not_a_number(field):
    with pytest.raises(Refusal, match=f"{field}: true is not a number"):
        parsed(prompt="a", **{field: True})


@pytest.mark.parametrize("prompt", [[1, True], [[1], [True]], ["a", 1], [[1.5]], {"a": 1}])
def test_a_prompt_is_text_or_tokens(prompt):
    with pytest.raises(Refusal, match=r"prompt[.01]*: "):
        parsed(prompt=prompt)


def test_what_chat_front_ends_send_is_served(served):
    """As Open WebUI and LibreChat send it."""
    sent = dict(
        top_k=40, min_p=0.05, repetition_penalty=1.1, reasoning_effort="low", max_tokens=3, seed=1,
        chat_template_kwargs={"enable_thinking": False}, user="a", session_id="b", chat_id="c", keep_alive="5m",
        stream_options={"include_usage": True, "include_obfuscation": False}, n=1, logprobs=None, presence_penalty=0,
        tools=None, stop=None,
    )  # fmt: skip
    answer = chat(served, "Hello", **sent)
    assert answer.status_code == 200, answer.text
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", None), ("user", "b"))]
    answer = served.post("chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    answer = served.post("chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": None}]})
    assert answer.status_code == 400 and "no content" in answer.json()["error"]["message"]


def test_a_template_is_given_its_variables_and_nothing_else(served, monkeypatch):
    tokenizer = served.served.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ mood }} {{ reasoning_effort }}")
    said = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"}
    (prompt,) = parsed(ChatBody, **said, chat_template_kwargs={"mood": "merry"}).prompts(tokenizer)
    assert tokenizer.decode(prompt.tokens) == "merry low"
    for name in ("chat_template", "tokenize", "tools"):
        answer = chat(served, "a", chat_template_kwargs={name: "x"})
        assert answer.status_code == 400 and f"may not set {name}" in answer.json()["error"]["message"]


def test_draws_are_limited_as_transformers_limits_them():
    row, text = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2, [3, 7, 7, 9]
    for penalty, temperature, top_k, top_p, min_p in [
        (1.0, 1e-320, None, 1.0, 0.0),
        (1.0, 1.0, 5, 1.0, 0.0),
        (1.0, 0.7, None, 1.0, 0.2),
        (1.5, 1.3, 20, 0.8, 0.05),
    ]:
        scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), row)
        scores = TemperatureLogitsWarper(max(temperature, 1e-30))(None, scores - scores.max())
        scores = scores if top_k is None else TopKLogitsWarper(top_k)(None, scores)
        shares = MinPLogitsWarper(min_p)(None, TopPLogitsWarper(top_p)(None, scores)).softmax(-1)[0]
        drawing, count = Drawing(temperature, top_p, random.Random(0), top_k, min_p, penalty), 3000
        drawn = choose_tokens(row.repeat(count, 1), [drawing] * count, [text] * count)
        found = torch.bincount(torch.tensor(drawn), minlength=50) / count
        assert found[shares == 0].sum() == 0
        assert (found - shares).abs().max() < 4 * 0.5 / count**0.5


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e300])
def test_a_penalty_of_any_size_draws_a_token_of_the_vocabulary(penalty):
    """Another would end all texts of the batch."""
    row = torch.tensor([[1.0, -2.0, 0.0]])
    drawn = choose_tokens(row.repeat(9, 1), [Drawing(1.0, repetition_penalty=penalty)] * 9, [[0, 1, 2]] * 9)
    assert {*drawn} <= {0, 1, 2}


def test_each_row_is_drawn_by_its_own_options():
    row = torch.tensor([[1.0, 2.0, 1.9]])
    drawings = [Drawing(repetition_penalty=2.0), Drawing(), *(Drawing(1.0, random=random.Random("7 0")) for _ in "ab")]
    first, second, third, fourth = choose_tokens(row.repeat(4, 1), drawings, [[1]] * 4)
    assert (first, second) == (2, 1) and third == fourth


def test_a_row_draws_the_same_alone_and_in_any_batch():
    """By its own seed; rows of many kinds are drawn at once."""
    kinds = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"repetition_penalty": 1.3}, {"temperature": 0.0}]
    rows = torch.randn(24, 1000, generator=torch.Generator().manual_seed(1)) * 3

    def drawing(row):
        return Drawing(**{"temperature": 1.0, "random": random.Random(row), **kinds[row % len(kinds)]})

    together = [drawing(row) for row in range(24)]
    alone = [drawing(row) for row in range(24)]
    for _ in range(20):
        drawn = choose_tokens(rows.clone(), together, [[1, 2]] * 24)
        assert drawn == [choose_tokens(rows[row : row + 1].clone(), [alone[row]], [[1, 2]])[0] for row in range(24)]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_no_token_is_drawn_that_cannot_be(size):
    """Not even by the numbers at the ends of what is drawn from."""
    row = torch.full((1, size), -torch.inf)
    row[0, ::3] = 0.0

    class Ends(random.Random):
        def random(self):
            return ends.pop()

    ends = [0.0, 1 - 2**-53, 0.5, 2**-53] * 2
    while ends:
        (token,) = choose_tokens(row.clone(), [Drawing(1.0, random=Ends())], [[]])
        assert token < size and token % 3 == 0
