"""What is said in a chat is not lost, and what has ended is not kept. No model is loaded here."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from linearizer.errors import RequestError
from linearizer.page import actions, limits, sending
from linearizer.page.calls import Browser
from linearizer.page.chat import answers, chats, compare
from linearizer.page.chat.chats import USUAL, Chat, Message, Settings
from linearizer.page.visitors import EXAMPLE_NAME, find_visitor
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.results import Comparison, StateSizes

MEMORY = {"run": EXAMPLE_NAME}  # of a browser


@pytest.fixture
def visitor(root):
    yield find_visitor()
    chats.CHATS.clear()
    chats.ASKED.clear()
    chats.LOADED.clear()


@pytest.fixture
def key(visitor):
    """The key of the chat that the page shows."""
    return chats.key_of(visitor, visitor.find_run(EXAMPLE_NAME), compare.NAME)


READ = Chat(USUAL, {"student": [1, 2, 3]})


def steps(*talks):
    """What models yield while they read."""
    yield from ((talk, StateSizes(1, 2, {})) for talk in talks)


def fresh_state(content=b"state"):
    (file := chats.fresh_file()).write_bytes(content)
    return file


def test_a_message_whose_page_is_gone_returns_to_the_field_of_the_next_page(key):
    for text in ("Who?", "When?"):
        chats.ask(key, Message(text))
    with chats.answering(key):
        assert "prompt" not in compare.show_kept(Browser(MEMORY)) and len(chats.asked(key)) == 2
    assert compare.show_kept(Browser(MEMORY))["prompt"] == "Who?\nWhen?"
    assert not chats.asked(key) and "prompt" not in compare.show_kept(Browser(MEMORY))


def test_a_message_waits_while_any_chat_is_answered(key):
    with chats.answering((*key[:2], "another")):
        sent = compare.send(MEMORY, None, None, "Who?", "", (), 4, 0, False)
    assert "waits for its turn" in dict(zip(compare.OUTPUTS, sent, strict=True))["chat_note"]


def test_a_new_chat_stays_when_models_answer_in_the_old_one(key):
    chats.keep_chat(key, READ)
    answering = answers.keep_while_answering(key, steps(READ, READ))
    next(answering)
    compare.end(MEMORY, None, None)  # the example keeps an empty chat at once
    assert not list(answering) and chats.look_up(key) == Chat(Settings())


def test_what_is_refused_changes_no_chat(visitor, key):
    chats.keep_chat(key, READ)
    for text in ("", " \n"):
        with pytest.raises(RequestError, match="the document is empty"):
            next(answers.read_document(visitor, EXAMPLE_NAME, text, USUAL, compare.NAME))
    answering = answers.keep_while_answering(key, steps(READ))
    next(answering)
    with pytest.raises(RequestError, match="in this chat already"):
        next(answers.keep_while_answering(key, steps(Chat(Settings(window=False)))))
    answering.close()
    assert chats.look_up(key) == READ and not chats.is_answering(key)


def test_other_settings_lose_no_state_and_no_message_that_waits(key):
    chats.ask(key, Message("Who?"))
    chats.keep_chat(key, READ)
    assert chats.find_chat(key, without := Settings(window=False)) == Chat(without)
    chats.keep_chat(key, replace(READ, state=fresh_state()))
    with pytest.raises(RequestError, match="the state was loaded with another template"):
        chats.find_chat(key, without)
    assert chats.look_up(key).state.exists() and chats.asked(key)


def test_files_of_states_are_deleted_when_another_chat_begins_and_when_they_are_fetched_too_late(visitor, key):
    first, second = (replace(READ, state=fresh_state()) for _ in range(2))
    chats.keep_chat(key, first)
    chats.keep_chat(key, replace(first, heard={}))
    assert first.state.exists()
    chats.keep_chat(key, second)
    assert not first.state.exists() and second.state.exists()
    ticket = sending.offer_state(run := visitor.find_run(EXAMPLE_NAME), late := fresh_state()).removeprefix("state/")
    sending.OFFERED[ticket] = (0.0, run, late)
    response = sending.send_state(SimpleNamespace(path_params={"ticket": ticket}))
    assert response.status_code == 404 and not late.exists()


def test_a_file_that_did_not_arrive_is_refused_in_a_sentence_and_the_chat_stays(key, tmp_path):
    chats.keep_chat(key, READ)
    for take in (compare.read_file, compare.load_state):
        for path in (None, str(tmp_path / "taken by another visitor")):
            *_, end = take(MEMORY, None, None, path, True, "", True)
            note = dict(zip(compare.OUTPUTS, end, strict=True))["chat_note"]
            assert "the file did not arrive" in note and "send it again" in note
    assert chats.look_up(key) == READ


def test_a_call_whose_chat_is_ended_before_an_answer_returns_none(key):
    def ended():
        yield from steps(READ)
        chats.end_chat(key)
        yield from steps(READ)

    for models, kind in ((ended(), Comparison), (steps(), StateSizes)):
        with pytest.raises(RequestError, match="ended or stopped"):
            actions.last_of(answers.keep_while_answering(key, models), kind)


def test_a_chat_ends_an_hour_after_its_last_turn_also_if_nobody_chats(key):
    chats.keep_chat(key, talk := replace(READ, state=fresh_state()))
    chats.CHATS[key] = time.monotonic() - limits.CHAT_SECONDS, talk
    with chats.answering(key):
        assert chats.look_up(key) == talk, "the models answer"
    assert chats.look_up(key) is None and not talk.state.exists()


def test_a_chat_stays_with_a_run_that_is_renamed_and_ends_with_one_that_is_deleted(visitor, root):
    run = Run.create(root / "run", Plan("demo", budget=64))
    chats.keep_chat(chats.key_of(visitor, run, "talk"), READ)
    actions.rename_run(visitor, "run", "new")
    ((key, (_, talk)),) = chats.CHATS.items()
    assert talk == READ and key == chats.key_of(visitor, visitor.find_run("new"), "talk")
    chats.LOADED.append(chats.Models(visitor.find_run("new"), key[1], (), None))
    sending.FETCHED[key[1]] += 1
    with pytest.raises(RequestError, match="is being downloaded"):
        actions.delete_run(visitor, "new")
    del sending.FETCHED[key[1]]
    actions.delete_run(visitor, "new")
    assert not chats.CHATS and not chats.LOADED
