"""A chat with three models goes on from what they remember, and is its visitor's alone."""

import shutil
import threading
from collections import OrderedDict

import pytest

from linearizer.errors import RequestError
from linearizer.evaluate import side_by_side
from linearizer.page import limits, sending
from linearizer.page.calls import Browser
from linearizer.page.chat import answers, chats, compare
from linearizer.page.chat import cards as chat_cards
from linearizer.page.chat.chats import Message, Settings
from linearizer.page.visitors import find_visitor
from linearizer.progress import finish
from linearizer.run.results import Comparison, StateSizes
from linearizer.serve import kept_state
from linearizer.serve.state_files import describe

MEMORY = {"run": "run"}  # of a browser
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
    message = prompt if isinstance(prompt, Message) else Message(prompt)
    return list(answers.compare_models(visitor, "run", message, tokens, 0, False, settings, name))


def texts(values):
    talk, last = values[-1]
    return [side.text for side in (last.teacher, last.student, last.window)]


def test_a_chat_hears_what_the_template_of_the_model_writes(visitor, models):
    settings = Settings(system="Be brief.")
    *_, (talk, _) = answers.read_document(visitor, "run", TEXT, settings, "talk")
    for prompt in ("Where?", "When?"):
        (talk, last) = said(visitor, prompt, settings)[-1]
    for name in ("teacher", "student", "window"):
        first, second = (getattr(turn.answers, name).text for turn in talk.turns)
        turns = [f"{TEXT}\n\nWhere?", first, "When?", second]
        roles = [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
        written = models.tokenizer.apply_chat_template(
            [{"role": "system", "content": "Be brief."}, *roles], tokenize=False, add_generation_prompt=True
        )
        assert written.startswith(models.tokenizer.decode(talk.heard[name])), name
    assert last.teacher.tokens_read == talk.tokens - 1


def test_a_chat_goes_on_from_what_is_remembered_and_reads_again_where_that_is_gone(visitor, models):
    held = [held for _, held in answers.read_document(visitor, "run", TEXT, Settings(), "talk")]
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
    list(answers.read_document(visitor, "run", TEXT, RAW, "talk"))
    first, second = (said(visitor, "The ship", RAW) for _ in range(2))
    assert texts(first) == texts(second) and len(second[-1][0].turns) == 2  # which are shown
    assert not any(isinstance(now, StateSizes) and now.again for _, now in second)
    alone = said(visitor, "The ship", RAW, name="")
    assert alone[-1][1].teacher.tokens_read < first[-1][1].teacher.tokens_read


def shown(updates):
    """Name the parts of an update of the page."""
    return dict(zip(compare.OUTPUTS, updates, strict=True))


def column(updates, name="student"):
    return [message["content"] for message in shown(updates)[name]["value"]]


def ask_page(prompt, answer=""):
    """Send a message as the page does; what answers it goes on when it is iterated."""
    sent = compare.send(MEMORY, None, None, prompt, answer, (), 4, 0, False)
    return sent, compare.answer(MEMORY, None, None, 4, 0, False, True, "", True)


def test_messages_wait_in_view_and_all_turns_stay_also_on_a_page_that_is_opened_later(visitor, models):
    sent, answering = ask_page("Where?")
    assert column(sent) == ["Where?"] and "value" not in shown(sent)["prompt"], "another message is typed there by now"
    next(answering)
    later, answering_later = ask_page("When?")
    assert column(later)[-1] == "When?" and "waits for its turn" in shown(later)["chat_note"]
    *_, end = answering
    assert len(column(end)) == 3 and column(end)[::2] == ["Where?", "When?"]
    *_, end = answering_later
    kept = compare.show_kept(Browser(MEMORY))
    assert kept["student"] == shown(end)["student"] and column(end)[::2] == ["Where?", "When?"]
    assert kept["chat_note"] == shown(end)["chat_note"]
    assert all(column(end)[1::2]) and "memory at" in kept["student_head"]
    chats.ask(key := compare.key_of(Browser(MEMORY)), Message("Who?"))  # on a page that is gone
    *_, end = ask_page("Why?")[1]
    assert column(end)[4::2] == ["Who?", "Why?"] and not chats.asked(key)
    (nothing,) = compare.answer(MEMORY, None, None, 4, 0, False, True, "", True)
    assert shown(nothing)["student"] == shown(end)["student"]


def test_a_message_that_cannot_be_answered_is_refused_before_any_model_is_loaded(visitor, monkeypatch):
    monkeypatch.setattr(chats, "lent_models", None)
    for prompt in ("", " \n", None):
        refused = shown(compare.send(MEMORY, None, None, prompt, "", (), 4, 0, False))
        assert "the prompt is empty" in refused["chat_note"] and "Loading" not in str(refused)
    for number in range(chats.MAX_WAITING + 1):
        last = shown(compare.send(MEMORY, None, None, f"{number}", "", (), 4, 0, False))
    assert "8 messages wait for an answer" in last["chat_note"]
    stopped = shown(compare.stop(MEMORY, None, None, "typed", ()))
    assert stopped["prompt"] == "\n".join(["typed", *map(str, range(chats.MAX_WAITING))])


def test_a_retry_takes_the_last_turn_back_and_draws_another(visitor, models):
    for prompt in ("Where?", "When?"):
        *_, end = ask_page(prompt)[1]
    key = compare.key_of(Browser(MEMORY))
    before = chats.look_up(key)
    assert column(compare.retry(MEMORY, None, None)) == [*column(end)[:2], "When?"]
    *_, again = compare.answer(MEMORY, None, None, 4, 0, False, True, "", True)
    after = chats.look_up(key)
    assert column(again)[::2] == ["Where?", "When?"] and after.turns[0] == before.turns[0]
    (*_, first), (*_, second) = before.turns, after.turns
    assert second.message.tries == 1 and second.before == first.before
    assert second.answers.teacher.tokens_read == first.answers.teacher.tokens_read


def test_a_stop_ends_what_is_written_and_keeps_it(visitor, models, monkeypatch):
    monkeypatch.setattr(side_by_side, "UPDATE_SECONDS", 0.0)
    compare.send(MEMORY, None, None, "Where?", "", (), 200, 0, False)
    answering = compare.answer(MEMORY, None, None, 200, 0, False, True, "", True)
    while len(shown(next(answering))["student"].get("value", [])) < 2:
        pass
    compare.stop(MEMORY, None, None, "", ())
    *_, end = answering
    assert len(column(end)) == 2 and chats.look_up(compare.key_of(Browser(MEMORY))).turns[0].answers.teacher.tokens < 9
    assert not chats.is_answering(compare.key_of(Browser(MEMORY)))


def test_a_stop_leaves_what_was_read_by_then(visitor, models):
    reading = answers.read_document(visitor, "run", TEXT, Settings(), "talk")
    next(reading)
    talk, held = next(reading)
    reading.close()
    assert held.tokens < held.total and talk.document.tokens == held.tokens and not talk.document.whole
    values = said(visitor, "Where?")
    assert not any(isinstance(now, StateSizes) and now.again for _, now in values)
    assert held.tokens < values[-1][1].teacher.tokens_read < held.total
    writing = answers.compare_models(visitor, "run", Message("And?"), 200, 0, False, Settings(), "talk")
    for _, now in writing:
        if isinstance(now, Comparison):
            break
    writing.close()
    assert not any(isinstance(now, StateSizes) and now.again for _, now in said(visitor, "And?"))


def test_a_chat_has_as_many_tokens_as_the_model_reads_and_one_manner(visitor, models):
    *_, (talk, held) = answers.read_document(visitor, "run", TEXT * 40, WITHOUT, "talk")
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


def test_on_a_space_a_chat_is_its_visitors_alone_and_is_forgotten_after_an_hour(visitor, models, tmp_path, monkeypatch):
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
        next(answers.read_document(two[0], "run", "x" * (limits.MAX_DOCUMENT_CHARACTERS + 1), Settings(), "same"))
    assert own.kept and len(chats.CHATS) == 2
    monkeypatch.setattr(limits, "CHAT_SECONDS", 0.0)
    said(two[1], "Where?", name="new", tokens=2)
    assert [key[-1] for key in chats.CHATS] == ["new"] == [key[-1] for key in own.kept]


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
    reading = answers.read_document(visitor, "run", TEXT, Settings(), "talk")
    next(reading)
    chats.end_chat(chats.key_of(visitor, visitor.find_run("run"), "talk"))
    assert not list(reading) and not models.kept and not chats.CHATS


def test_no_thread_goes_through_all_chats_while_another_may_begin_one(visitor, monkeypatch):
    class Chats(OrderedDict):
        def __iter__(self):
            assert chats.CHATS_LOCK.locked()
            return super().__iter__()

    monkeypatch.setattr(chats, "CHATS", Chats())
    chats.keep_chat(key := chats.key_of(visitor, visitor.find_run("run"), "talk"), chats.Chat(RAW))
    chats.end_chat(key)
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


def test_a_prompt_that_needs_memory_begins_a_chat_of_its_own_and_its_answer_is_judged(visitor, models):
    list(answers.read_document(visitor, "run", TEXT, Settings(), compare.NAME))
    taken = shown(compare.take_prompt(answers.WORD)(MEMORY, None, None, 6))
    assert not taken["as_chat"] and "tokens back" in taken["chat_note"]
    compare.send(MEMORY, None, None, taken["prompt"], taken["answer"], (), 6, 0, False)
    *_, end = compare.answer(MEMORY, None, None, 6, 0, False, False, "", True)
    assert "the teacher wrong" in shown(end)["chat_note"] and f"“{taken['answer']}”" in shown(end)["chat_note"]
    assert chats.look_up(compare.key_of(Browser(MEMORY))).document is None


def saved(visitor, tmp_path, name):
    """The file of the student's state after a chat, as a visitor gets and sends it."""
    return shutil.copy(answers.save_state(visitor, "run", name), tmp_path / name)


def answer_of(values):
    return values[-1][1].student.text


def go_on(visitor, path, settings=Settings()):  # noqa: B008
    shutil.copy(path, file := chats.fresh_file())
    return list(answers.load_state(visitor, "run", file, settings, "loaded"))


@pytest.mark.parametrize("settings", [Settings(), RAW])
def test_a_student_goes_on_from_a_state_as_from_the_chat_that_was_saved(visitor, models, tmp_path, settings):
    list(answers.read_document(visitor, "run", TEXT, settings, "talk"))
    if settings.as_chat:
        said(visitor, "Where?", settings)
    path, expected = saved(visitor, tmp_path, "talk"), answer_of(said(visitor, "When?", settings))
    *_, (talk, sizes) = go_on(visitor, path, settings)
    assert talk.tokens == sizes.tokens == describe(path).tokens and [*sizes.bytes] == ["student"]
    written = [answer_of(said(visitor, "When?", settings, "loaded"))]
    key = chats.key_of(visitor, visitor.find_run("run"), "loaded")
    chats.keep_chat(key, chats.look_up(key).take_back())
    chats.forget_states(key)  # which are read from the file again
    written.append(answer_of(said(visitor, "When?", settings, "loaded")))
    if settings == RAW:  # what follows a document is not divided into tokens as what follows a state
        asked = kept_state.ask(visitor.find_run("run"), "When?", path, new_tokens=6, raw=True)
        expected = finish(asked).text
    assert written == [expected] * 2


def test_a_state_shows_in_the_students_column_and_is_gone_with_its_chat(visitor, models, tmp_path, monkeypatch):
    said(visitor, "Where?", name=compare.NAME)
    address, note = compare.save_state(MEMORY, None, None)
    assert not note
    *_, path = sending.OFFERED[address.removeprefix("state/")]
    *_, end = compare.load_state(MEMORY, None, None, str(shutil.copy(path, tmp_path / "mine")), True, "", True)
    assert "remembers" in shown(end)["chat_note"]
    parts = compare.show(key := compare.key_of(Browser(MEMORY)))
    first = {name: parts[name]["value"][0]["content"] for name in chat_cards.COLUMNS}
    assert first == {"teacher": chat_cards.ALONE, "student": "A state", "window": chat_cards.ALONE}
    chats.ask(key, Message("And?"))
    *_, end = compare.answer(MEMORY, None, None, 4, 0, False, True, "", True)
    assert len(shown(end)["student"]["value"]) == 3 and len(shown(end)["teacher"]["value"]) == 1
    file = chats.look_up(key).state
    compare.end(MEMORY, None, None)
    assert not file.exists() and not (tmp_path / "mine").exists()
    said(visitor, "Where?", name=compare.NAME)
    monkeypatch.setattr(limits, "MAX_FILE", 1)
    assert "loads files of at most 1 B" in compare.save_state(MEMORY, None, None)[1]


def test_what_is_no_state_of_this_student_is_refused_in_a_sentence_and_the_chat_stays(visitor, models, tmp_path):
    said(visitor, "Where?", name=compare.NAME)
    before = chats.look_up(key := compare.key_of(Browser(MEMORY)))
    whole = saved(visitor, tmp_path, compare.NAME).read_bytes()
    contents = {b"": "is damaged", whole[:-9]: "is damaged", whole[:-9] + b"x" * 9: "is damaged"}
    for content, sentence in contents.items():
        (path := tmp_path / "sent").write_bytes(content)
        *_, end = compare.load_state(MEMORY, None, None, str(path), True, "", True)
        assert f"the file {sentence}" in shown(end)["chat_note"] and not path.exists()
        assert chats.look_up(key) == before
    chats.end_chat(key)
    assert "has nothing that a state could keep" in compare.save_state(MEMORY, None, None)[1]
