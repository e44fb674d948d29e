"""A chat with three models goes on from what they remember, and is its visitor's alone."""

import re
import shutil
import threading
from collections import OrderedDict
from types import SimpleNamespace

import pytest

from linearizer.errors import RequestError
from linearizer.page import chat, chats, handlers, limits
from linearizer.page.chats import Settings
from linearizer.page.visitors import find_visitor
from linearizer.run.results import Comparison, StateSizes

ANN, BOB = "a" * 16, "b" * 16
TEXT = "The sea was calm, and the ship lay still. " * 12
RAW, WITHOUT = Settings(as_chat=False), Settings(window=False)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% else %}<{{ m.role[0] }}>{{ m.content }}"
    "{{ '</end>\n' if m.role == 'assistant' else '\n' }}{% endif %}{% endfor %}<a>"
)


@pytest.fixture
def visitor(tmp_path, monkeypatch, quick_run):
    """A visitor who has a run with a student, whose tokenizer has a template."""
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path))
    shutil.copytree(quick_run, tmp_path / "run")
    yield find_visitor()
    chats.CHATS.clear()
    chats.LOADED.clear()


@pytest.fixture
def models(visitor):
    with chats.lent_models(visitor.find_run("run"), visitor) as models:
        models.tokenizer.chat_template = TEMPLATE
    return models


def said(visitor, prompt, settings=Settings(), name="talk", tokens=6):  # noqa: B008
    return list(chat.compare_models(visitor, "run", prompt, tokens, 0, False, settings, name))


def texts(values):
    talk, last = values[-1]
    return [side.text for side in (last.teacher, last.student, last.window)]


def test_a_chat_hears_what_the_template_of_the_model_writes(visitor, models):
    settings = Settings(system="Be brief.")
    *_, (talk, _) = chat.read_document(visitor, "run", TEXT, settings, "talk")
    for prompt in ("Where?", "When?"):
        (talk, last) = said(visitor, prompt, settings)[-1]
    for name in ("teacher", "student", "window"):
        first, second = (getattr(turn, name).text for turn in talk.turns)
        turns = [f"{TEXT}\n\nWhere?", first, "When?", second]
        roles = [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
        written = models.tokenizer.apply_chat_template(
            [{"role": "system", "content": "Be brief."}, *roles], tokenize=False, add_generation_prompt=True
        )
        assert written.startswith(models.tokenizer.decode(talk.heard[name])), name
    assert last.teacher.tokens_read == talk.tokens - 1


def test_a_chat_goes_on_from_what_is_remembered_and_reads_again_where_that_is_gone(visitor, models):
    held = [held for _, held in chat.read_document(visitor, "run", TEXT, Settings(), "talk")]
    assert [each.tokens for each in held][-1] == held[-1].total > 3 * 32
    for name in ("student", "window"):
        sizes = [each.bytes[name] for each in held]
        assert len({*sizes[2:]}) == 1 and max(sizes) <= held[1].bytes["teacher"]  # of 64 tokens, which are read exactly
    assert [each.bytes["teacher"] for each in held] == sorted({each.bytes["teacher"] for each in held})
    talk, after = chats.look_up(key := chats.key_of(visitor, visitor.find_run("run"), "talk")), []
    for forget in (False, True):
        chats.keep_chat(key, talk)
        if forget:
            chats.forget_states(key)
        after.append(said(visitor, "Where?"))
    read = [{now.total for _, now in values if isinstance(now, StateSizes) and now.again} for values in after]
    assert read == [set(), {held[-1].total}] and texts(after[0]) == texts(after[1])


def test_without_a_template_every_prompt_follows_the_document_alone(visitor, models):
    list(chat.read_document(visitor, "run", TEXT, RAW, "talk"))
    first, second = (said(visitor, "The ship", RAW) for _ in range(2))
    assert texts(first) == texts(second) and len(second[-1][0].turns) == 1
    assert not any(isinstance(now, StateSizes) and now.again for _, now in second)
    alone = said(visitor, "The ship", RAW, name="")
    assert alone[-1][1].teacher.tokens_read < first[-1][1].teacher.tokens_read


def test_the_meter_shows_one_reading_at_a_time(visitor, models):
    list(chat.read_document(visitor, "run", TEXT, RAW, "talk"))
    chats.forget_states(chats.key_of(visitor, visitor.find_run("run"), "talk"))
    shown = handlers.compare_models({"run": "run"}, None, None, "talk", TEXT, 4, 0, False, False, "", True)
    *_, card = [parts[handlers.COMPARED.index("meter")] for parts in shown if "lz-meter" in str(parts)]
    assert "Read the prompt" in card
    lines = [[float(x) for x in re.findall(r"([\d.]+) [\d.]+", path)] for path in re.findall(r' d="(M[^"H]+)"', card)]
    assert len(lines) == 3 and all(line == sorted({*line}) for line in lines)


def test_a_stop_leaves_what_was_read_by_then(visitor, models):
    reading = chat.read_document(visitor, "run", TEXT, Settings(), "talk")
    next(reading)
    talk, held = next(reading)
    reading.close()
    assert held.tokens < held.total and talk.document.tokens == held.tokens and not talk.document.whole
    values = said(visitor, "Where?")
    assert not any(isinstance(now, StateSizes) and now.again for _, now in values)
    assert held.tokens < values[-1][1].teacher.tokens_read < held.total
    writing = chat.compare_models(visitor, "run", "And?", 200, 0, False, Settings(), "talk")
    for _, now in writing:
        if isinstance(now, Comparison):
            break
    writing.close()
    assert not any(isinstance(now, StateSizes) and now.again for _, now in said(visitor, "And?"))


def test_a_chat_has_as_many_tokens_as_the_model_reads_and_one_manner(visitor, models):
    *_, (talk, held) = chat.read_document(visitor, "run", TEXT * 40, WITHOUT, "talk")
    room = visitor.find_run("run").positions
    assert talk.document.tokens == held.total == room - room // 4 and not talk.document.whole
    assert set(held.bytes) == {"teacher", "student"}
    with pytest.raises(RequestError, match="after .* tokens of this chat.*or begin a new chat"):
        said(visitor, TEXT, WITHOUT)
    with pytest.raises(RequestError, match="read with another template.*begin a new chat"):
        said(visitor, "Where?")
    chats.end_chat(chats.key_of(visitor, visitor.find_run("run"), "talk"))
    assert len(said(visitor, "Where?")[-1][0].turns) == 1
    assert said(visitor, "Where?", WITHOUT)[-1][1].window is None  # without a document another manner begins anew
    models.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(RequestError, match="refuses these messages .*no system role.: leave the system prompt out"):
        said(visitor, "Where?", Settings(system="Be brief."))


def test_on_a_space_a_chat_is_its_visitors_alone_and_is_forgotten_when_the_page_is_left(
    visitor, models, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPACE_ID", "owner/linearizer")
    two = [find_visitor(secret=secret) for secret in (ANN, BOB)]
    for each in two:
        shutil.copytree(tmp_path / "run", each.home / "run")
        monkeypatch.setattr(chats, "LOADED", [])
        with chats.lent_models(each.find_run("run"), each) as own:
            own.tokenizer.chat_template = TEMPLATE
        *_, (talk, _) = said(each, "Where?", name="same")
        assert len(talk.turns) == 1
    with pytest.raises(RequestError, match=f"more than this Space reads .{limits.MAX_DOCUMENT_CHARACTERS:,}."):
        next(chat.read_document(two[0], "run", "x" * (limits.MAX_DOCUMENT_CHARACTERS + 1), Settings(), "same"))
    assert own.kept and len(chats.CHATS) == 2
    chats.end_chats_named("same")
    assert not own.kept and not chats.CHATS


def test_only_the_newest_chats_and_states_are_kept(visitor, models, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CHATS", 3)
    monkeypatch.setattr(limits, "MAX_STATE_BYTES", 1)
    for number in range(5):
        said(visitor, "Where?", name=f"talk {number}", tokens=2)
    assert [key[-1] for key in chats.CHATS] == ["talk 2", "talk 3", "talk 4"]
    assert [key[-1] for key in models.kept] == ["talk 4"]
    chats.keep_chat(other := (visitor.home / "other", visitor.find_run("run").key, "other"), chats.Chat(RAW))
    for number in (5, 6):  # which push out no chat of another visitor
        said(visitor, "Where?", name=f"talk {number}", tokens=2)
    assert [key[-1] for key in chats.CHATS] == ["other", "talk 5", "talk 6"]
    chats.end_chat(other)
    monkeypatch.setattr(limits, "CHAT_SECONDS", 0.0)
    said(visitor, "Where?", name="new", tokens=2)
    assert [key[-1] for key in chats.CHATS] == ["new"]


def test_a_chat_that_is_ended_while_the_models_read_ends_their_work(visitor, models):
    reading = chat.read_document(visitor, "run", TEXT, Settings(), "talk")
    next(reading)
    chats.end_chats_named("talk")
    assert not list(reading) and not models.kept and not chats.CHATS


def test_no_thread_goes_through_all_chats_while_another_may_begin_one(visitor, monkeypatch):
    class Chats(OrderedDict):
        def __iter__(self):
            assert chats.CHATS_LOCK.locked()
            return super().__iter__()

    monkeypatch.setattr(chats, "CHATS", Chats())
    chats.keep_chat(chats.key_of(visitor, visitor.find_run("run"), "talk"), chats.Chat(RAW))
    chats.end_chats_named("talk")
    assert not chats.CHATS


def test_a_chat_is_not_ended_while_another_thread_goes_through_all_chats(visitor):
    key = chats.key_of(visitor, visitor.find_run("run"), "talk")
    chats.keep_chat(key, chats.Chat(RAW))
    ending = threading.Thread(target=chats.end_chat, args=[key])
    with chats.CHATS_LOCK:
        ending.start()
        ending.join(0.2)
        assert key in chats.CHATS
    ending.join()
    assert not chats.CHATS


def test_states_make_room_also_where_their_chats_are_ended_meanwhile(visitor, models, monkeypatch):
    for name in ("first", "second"):
        said(visitor, "Where?", name=name, tokens=2)
    (_, held), *_ = models.kept.items()
    monkeypatch.setattr(limits, "MAX_STATE_BYTES", 1)
    monkeypatch.setattr(held[0], "bytes", lambda: models.kept.clear() or 2**40)  # while sizes are counted
    models.keep(("other", "run", "third"), [*held])
    assert not models.kept


def test_a_page_that_is_left_ends_its_own_chats_alone_whatever_its_session_is_called(visitor, models):
    left = SimpleNamespace(session_hash="talk")  # which the browser chooses
    for name in ("talk", handlers.name_chat(left)):
        said(visitor, "Where?", name=name, tokens=2)
    handlers.leave_page(left)
    assert [key[-1] for key in chats.CHATS] == ["talk"]


def test_a_prompt_that_needs_memory_begins_a_chat_of_its_own_also_after_a_document(visitor, models):
    list(chat.read_document(visitor, "run", TEXT, Settings(), "talk"))
    as_chat, prompt, note, *_ = handlers.take_prompt(chat.WORD)({"run": "run"}, None, None, "talk", 6)
    assert not as_chat and "tokens back" in note
    talk, now = said(visitor, prompt, RAW)[-1]
    assert talk.document is None and now.student.tokens == 6
