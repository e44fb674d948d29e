"""An endpoint asks for its key, gives up what lasts too long, and turns away what has no room."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from linearizer.serve import endpoint
from linearizer.serve import engine as engines
from linearizer.serve.bodies import CompletionBody
from tests.support.runs import wait_until
from tests.support.serving import complete, listening


def limited(served, **changes):
    """The same model, with limits of its own."""
    return replace(served.served, **changes)


def test_without_its_key_nothing_is_served_but_its_health(served):
    with (
        listening(limited(served), local=False, keys=["s3cret", "other-key"]) as url,
        httpx.Client(base_url=url) as client,
    ):
        for header in (None, "Bearer other", "Bearer s3cret2", "Basic s3cret", "s3cret", "Bearer s3crét"):
            headers = {} if header is None else {"Authorization": header.encode()}
            for answer in (
                client.get("models", headers=headers),
                client.post("completions", json={"model": "tiny", "prompt": "a"}, headers=headers),
            ):
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", header
            assert client.get("../health", headers=headers).status_code == 200
        for key in ("s3cret", "other-key"):
            assert client.get("models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_lasts_too_long_is_given_up_and_frees_its_place(served, stream):
    with listening(limited(served, max_seconds=0.05)) as url, httpx.Client(base_url=url, timeout=60) as client:
        answer = complete(client, max_tokens=500, stream=stream)
        content = [line for line in answer.text.splitlines() if line][-1].removeprefix("data: ")
        assert answer.status_code == (200 if stream else 504)
        assert "0.05 seconds" in json.loads(content)["error"]["message"]
        engine = served.served.engine
        wait_until(lambda: not engine.rows and not engine.unread)
        assert max(kept.tokens for kept in engine.kept.states.values()) < 400  # it did not write to the end
    assert complete(served, max_tokens=2).status_code == 200


def test_a_stream_that_nobody_reads_ends_with_its_time(served, monkeypatch):
    monkeypatch.setattr(endpoint, "LATE_SECONDS", 0.05)
    known, sent = limited(served, max_seconds=0.05), []

    async def wait(*_):
        sent.append(1)
        await asyncio.Event().wait()

    async def stream():
        body = CompletionBody(model="tiny", prompt="Once", max_tokens=500, stream=True)
        work = await endpoint.begin(known, body, asyncio.get_running_loop().time() + known.max_seconds)
        await endpoint.Stream(known, work)({"type": "http", "asgi": {"spec_version": "2.4"}}, wait, wait)
        return work.rows

    (row,) = asyncio.run(asyncio.wait_for(stream(), 60))
    assert sent and (row.abandoned or row.done)


def test_a_stream_whose_request_came_too_late_is_refused_in_a_sentence(served):
    known, sent = limited(served, max_seconds=0.5), []

    async def send(message):
        sent.append(message)

    async def stream():
        body = CompletionBody(model="tiny", prompt="Once", max_tokens=500, stream=True)
        late = asyncio.get_running_loop().time() - endpoint.LATE_SECONDS - 1  # as if its body took all of the time
        work = await endpoint.begin(known, body, late)
        await endpoint.Stream(known, work)({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)

    asyncio.run(asyncio.wait_for(stream(), 60))
    assert sent[0]["status"] == 504 and "only after the 0.5 seconds" in json.loads(sent[1]["body"])["error"]["message"]


def test_what_has_no_room_may_come_again(served, monkeypatch):
    monkeypatch.setattr(engines, "MAX_WAITING", 0)
    answer = complete(served)
    assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0
    assert answer.json()["error"]["type"] == "rate_limit_error"
    monkeypatch.setattr(engines, "MAX_WAITING", 3)
    answer = complete(served, prompt=["a"] * 4)  # all of its texts, or none
    assert answer.status_code == 429 and not served.served.engine.unread
    monkeypatch.undo()
    assert complete(served, max_tokens=1).status_code == 200
