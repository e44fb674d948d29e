"""What goes wrong while a student is published is a sentence, and loses nothing."""

import hashlib
import time
from itertools import cycle

import huggingface_hub
import pytest

from linearizer.errors import FaultError, PublishError
from linearizer.hub import repository
from linearizer.publish import push
from tests.support.publishing import HOW_THE_HUB_SENDS, ME, WEIGHTS, copy_run, files_of, publish, refused, written

pytestmark = [pytest.mark.filterwarnings(HOW_THE_HUB_SENDS), pytest.mark.usefixtures("slept")]


def test_an_upload_that_broke_goes_on_where_it_was(hub, run):
    hub.fail_next("/commit/", 503, times=9)
    sentence = refused(run, kind=FaultError)
    assert "'me/student' cannot be written now, the Hub answered 503: try again later" in sentence
    assert "uploaded files will not be sent again" in sentence and set(files_of(hub)) == {".gitattributes"}
    hub.faults.clear()
    hub.requests.clear()
    publish(run)
    assert not [line for line in written(hub) if line.startswith("PUT")] and WEIGHTS in files_of(hub)


def test_a_long_upload_shows_that_it_goes_on_and_can_be_left(hub, run, monkeypatch):
    monkeypatch.setattr(repository, "HEARTBEAT_SECONDS", 0.01)
    hub.fail_next("PUT /lfs/", "hold")
    steps = push.publish(run, "me/student", token=ME)
    said = []
    while "seconds" not in (progress := next(steps)).details or "preupload" not in "".join(hub.requests):
        said.append(progress)
    begin = time.monotonic()
    steps.close()
    assert time.monotonic() - begin < 60 and said
    hub.released.set()
    assert publish(run).revision and WEIGHTS in files_of(hub)


@pytest.mark.parametrize("status", [429, 500, 504, 0])
def test_what_passes_is_waited_for(hub, run, slept, status):
    hub.fail_next("/commit/", status, times=2)
    said = [progress.details for progress in push.publish(run, "me/student", token=ME)]
    assert [step["waiting"] for step in said if "waiting" in step] == [1, 2, 1] and sum(slept) >= 3
    assert WEIGHTS in files_of(hub)


def test_an_answer_that_was_lost_makes_no_second_commit(hub, run):
    hub.fail_next("/commit/", 503, done=True)
    done = publish(run)
    assert list(hub.repos["models", "me/student"].commits)[1:] == [done.revision]


def test_a_commit_that_someone_else_makes_during_an_upload_is_not_overwritten(hub, run, tmp_path):
    publish(run)
    other = copy_run(run.folder, tmp_path / "other")
    (other.checkpoint / "NOTICE").write_text("another student")
    with pytest.raises(PublishError, match="someone else has changed it meanwhile: look at it, then try again"):
        for progress in push.publish(other, "me/student", token=ME):
            if progress.details.get("file") == "the commit":
                hub.repos["models", "me/student"].replace({"theirs": b""})
    assert files_of(hub) == {"theirs": b""}


def test_the_hub_says_how_long_to_wait(hub, run, slept):
    hub.fail_next("/commit/", 429, **{"Retry-After": "7"})
    publish(run)
    assert sum(slept) == 7
    hub.clear()
    hub.fail_next("/commit/", 429, **{"Retry-After": "3600"})
    assert "received too many requests (429): try again in 3600 seconds" in refused(run, kind=FaultError)


REFUSALS = {
    400: "the Hub does not accept it (400: injected fault)",
    401: "the token in use was refused: sign in",
    402: "the account's plan does not allow it",
    403: "may not write there (injected fault)",
    404: "it does not exist",
    409: "the name is taken, or it is being changed",
    412: "someone else has changed it meanwhile",
}


@pytest.mark.parametrize(
    "status, place", [*zip(REFUSALS, cycle(["repos/create", "PUT /lfs/", "/commit/"]), strict=False)]
)
def test_what_the_hub_refuses_is_a_sentence_that_says_what_was_kept(hub, run, status, place):
    hub.fail_next(place, status)
    sentence = refused(run)
    assert "'me/student' cannot be written" in sentence and REFUSALS[status] in sentence
    assert ("nothing was sent" if "create" in place else "uploaded files will not be sent again") in sentence
    assert WEIGHTS not in (files_of(hub) if hub.repos else {})
    publish(run)
    assert WEIGHTS in files_of(hub)


@pytest.mark.parametrize(
    "status, place", [(429, "validate-yaml"), (500, "/preupload/"), (503, "PUT /lfs/"), (0, "revision")]
)
def test_a_hub_that_stays_broken_is_a_sentence(hub, run, status, place):
    hub.fail_next(place, status, times=99)
    sentence = refused(run, kind=FaultError)
    assert {429: "(429)", 0: "does not answer"}.get(status, f"answered {status}") in sentence


@pytest.mark.parametrize(
    ("name", "token", "sentence"),
    [
        ("me/student", None, "nobody is signed in, so nothing can be published: sign in"),
        ("me/student", "hf_read_me", "the token of 'me' may only read: make a token that may write at http"),
        ("me/student", "hf_wrong", "the token in use was refused: sign in"),
        ("org/student", ME, "'org' is not an owner that 'me' may publish for: choose from me"),
        ("me/no such", ME, "'me/no such' is not a name for a repository: write OWNER/NAME"),
        ("me/a--b", ME, "is not a name for a repository"),
        ("a/b/c", ME, "is not a name for a repository"),
        ("", ME, "is not a name for a repository"),
        ("me/" + "x" * 99, ME, "is not a name for a repository"),
        ("me/other", ME, "'me/other' exists and holds something else (1 files: pytorch_model.bin"),
        ("me/config", ME, "'me/config' exists and holds something else"),
        ("me/odd", ME, "'me/odd' exists and holds something else"),
        ("me/open", ME, "'me/open' exists and is public: add --public"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_sent(hub, run, name, token, sentence):
    hub.add("me/other", {"pytorch_model.bin": b"x"}, private=True)
    hub.add("me/config", {"config.json": b'{"model_type": "llama"}'}, private=True)
    hub.add("me/odd", {"config.json": b"\xff[]"}, private=True)
    hub.add("me/open", {"README.md": b""})
    result = refused(run, name, token)
    assert sentence in result and (token is None or "nothing was sent" in result or "choose from" in result)
    assert not written(hub)


def test_what_differs_on_the_hub_from_what_was_sent_is_found(hub, run):
    sha = hashlib.sha256((run.checkpoint / WEIGHTS).read_bytes()).hexdigest()
    hub.objects[sha] = b"something else"
    assert f"has another {WEIGHTS} than was sent" in refused(run, kind=FaultError)


def test_a_card_that_the_hub_finds_wrong_is_said(hub, run):
    hub.yaml_errors.append({"message": '"license" must be one of the known ones'})
    assert '"license" must be one of the known ones' in refused(run)
    assert not hub.repos


def test_without_a_network_nothing_is_lost(hub, run, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub does not answer: connect, then try again; nothing was sent" in refused(run, kind=FaultError)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "no network: connect, then try again; nothing was sent" in refused(run, kind=FaultError)


def test_on_a_space_no_token_but_the_visitors_is_used(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", ME)
    monkeypatch.setenv("SPACE_ID", "org/space")
    assert "press the button that signs in" in refused(run, token=None)
    assert publish(run, "you/student", "hf_fake_you").repo_id == "you/student"
