"""A chat shows pictures to models that read them, and shows them again to models that have lost what they remember."""

import io
import shutil
from base64 import b64encode
from functools import partial

import pytest
from PIL import Image

from linearizer import pipeline
from linearizer.errors import RequestError
from linearizer.page import actions, plan_form, planning
from linearizer.page.calls import Browser
from linearizer.page.chat import answers, chats, compare
from linearizer.page.chat import cards as chat_cards
from linearizer.page.chat.chats import Message, Settings
from linearizer.page.visitors import find_visitor
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.results import Comparison, StateSizes
from linearizer.teacher import picture_files
from tests.support.page_server import LONG, looking, shown, wait_until_true
from tests.support.page_steps import upload
from tests.support.whole_models import save_picture, save_with_processor

MEMORY = {"run": "run"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% else %}<{{ m.role[0] }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '</end>\n' if m.role == 'assistant' else '\n' }}{% endif %}{% endfor %}<a>"
)
PARTS = dict(texts=2, length=64, sinks=2, steps=0, dtype="float32", strategy="window", budget=64)


def sent(folder, colour):
    """A picture as the page keeps it."""
    return chat_cards.take_picture(save_picture(folder / "sent.png", colour))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of runs of a student that reads pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    save_with_processor(folder / "whole")
    run = pipeline.begin(folder / "runs" / "run", Plan(str(folder / "whole"), **PARTS))
    finish(pipeline.linearize(run))
    return folder / "runs"


@pytest.fixture
def visitor(whole_run, monkeypatch):
    monkeypatch.setenv("LINEARIZER_RUNS", str(whole_run))
    yield find_visitor()
    chats.CHATS.clear()
    chats.LOADED.clear()


def said(visitor, message, settings=Settings(), name="talk"):  # noqa: B008
    values = list(answers.compare_models(visitor, "run", message, 5, 0, False, settings, name))
    parted = [side.difference for side in (values[-1][1].student, values[-1][1].window) if side.difference]
    assert all(0 <= chance <= 1 for each in parted for pair in each.chances for chance in pair)
    return values


def texts(values):
    return [getattr(values[-1][1], name).text for name in chat_cards.COLUMNS]


@pytest.mark.parametrize(
    ("template", "settings"),
    [(TEMPLATE, Settings()), (TEMPLATE, Settings(system="Be brief.")), (None, Settings())],
)
def test_models_that_lost_what_they_remember_see_the_pictures_of_earlier_turns_again(
    visitor, tmp_path, template, settings
):
    run, seen = visitor.find_run("run"), {}
    for colour in ("red", "blue"):
        key = chats.key_of(visitor, run, colour)
        with chats.lent_models(run, visitor) as models:
            models.tokenizer.chat_template = models.processor.chat_template = template
        first = Message("What is it?", pictures=(sent(tmp_path, colour),))
        for message in (Message("Look."), first, Message("And now?")):
            seen[colour, message.text] = texts(said(visitor, message, settings, colour))
        last = chats.look_up(key)
        chats.keep_chat(key, last.take_back())
        chats.forget_states(key)
        again = said(visitor, Message("And now?"), settings, colour)
        assert texts(again) == seen[colour, "And now?"] and chats.look_up(key).heard == last.heard
        assert any(isinstance(news, StateSizes) and news.again for _, news in again) == bool(template)
    assert seen["red", "What is it?"] != seen["blue", "What is it?"]


def test_the_first_picture_of_a_chat_is_answered_as_on_the_command_line(visitor, tmp_path):
    run, red = visitor.find_run("run"), sent(tmp_path, "red")
    *_, (_, last) = said(visitor, Message("What is it?", pictures=(red,)))
    asked = pipeline.compare_run(run, "What is it?", 5, 0, False, pictures=[chats.open_picture(red)])
    expected: Comparison = finish(asked)
    assert (last.teacher.text, last.student.text) == (expected.teacher.text, expected.student.text)
    assert last.prompt_tokens == expected.prompt_tokens


def test_a_call_of_the_api_shows_pictures_as_the_page_does_and_a_chat_shows_a_few(visitor, tmp_path):
    red = "data:image/png;base64," + b64encode(save_picture(tmp_path / "red.png", "red").read_bytes()).decode()
    *_, (_, last) = said(visitor, Message("What is it?", pictures=(sent(tmp_path, "red"),)))
    ask = partial(actions.compare_models, visitor, "run", "What is it?", 5, chat="called")
    called = ask(pictures=[red])
    assert called["teacher"]["text"] == last.teacher.text and called["prompt_tokens"] == last.prompt_tokens
    for pictures, why in (
        ([red] * chat_cards.MAX_PICTURES, "at most 8 pictures"),
        (["https://example.org/red.png"], "nothing is fetched"),
        (["data:image/png;base64,?"], "no picture that can be read"),
        (["data:image/png;base64,AAAA"], "no picture that can be read"),
    ):
        with pytest.raises(RequestError, match=why):
            ask(pictures=pictures)


def test_a_plan_that_leaves_pictures_out_is_judged_by_the_text_tower(whole_run, root):
    chosen = planning.examine_model(find_visitor(), str(whole_run.parent / "whole"))
    whole, text = (chosen.plan(chosen.inspection.name, 64, "Quick", {"text_only": only}) for only in (False, True))
    assert chosen.part_for(whole).reads_pictures and not chosen.part_for(text).reads_pictures
    assert chosen.forecast(text).memory_bytes < chosen.forecast(whole).memory_bytes
    assert planning.examine_model(find_visitor(), "demo").tower is None
    place = plan_form.FORM.index("text_only")
    forms = [plan_form.show_form(512, None, pictures=reads)[place]["visible"] for reads in (True, False)]
    assert forms == [True, False]


def test_a_picture_is_sent_with_a_message_and_is_shown_in_its_turn(whole_run, local, browser):
    shutil.copytree(whole_run / "run", local.runs / "pictures")
    Image.new("RGB", (20, 24), "red").save(file := io.BytesIO(), "PNG")
    with looking(browser, f"{local.url}?run=pictures") as page:
        page.click("#to-chat")
        page.wait_for_selector("#picture", state="visible", timeout=LONG)
        upload(page, "#picture", b"words", "words.png", "image/png")
        shown(page, "#chat-note", "is no picture that can be read")
        upload(page, "#picture", file.getvalue(), "red.png", "image/png")
        page.wait_for_selector("#drafts img", timeout=LONG)
        page.locator("#prompt textarea").fill("What is it?")
        page.locator("#prompt textarea").press("Enter")
        page.wait_for_selector("#drafts img", state="detached")
        wait_until_true(page, "document.querySelectorAll('#student .bot.message').length == 1", timeout=LONG)
        assert page.locator("#student img.lz-picture").count() == 1


def test_a_file_that_is_no_picture_is_refused_in_a_sentence_and_deleted(visitor, tmp_path):
    whole = save_picture(tmp_path / "whole.png", "red").read_bytes()
    Image.new("1", (8000, 8000)).save(bomb := tmp_path / "bomb.png")
    files = {
        "empty": b"",
        "words": b"%!PS-Adobe-3.0 EPSF-3.0\nshowpage",
        "cut": whole[: len(whole) // 2],
        "bomb": bomb.read_bytes(),
    }
    for name, content in files.items():
        (path := tmp_path / name).write_bytes(content)
        updates = dict(zip(compare.OUTPUTS, compare.add_picture(MEMORY, None, None, str(path), ()), strict=True))
        assert (picture_files.TOO_LARGE if name == "bomb" else picture_files.NO_PICTURE) in updates["chat_note"]
        assert not path.exists() and "value" not in str(updates["drafted"])


def test_a_picture_waits_with_its_message_and_returns_to_its_field(visitor, tmp_path):
    key = compare.key_of(Browser(MEMORY))

    def done(updates):
        return dict(zip(compare.OUTPUTS, updates, strict=True))

    (path := tmp_path / "large.png").write_bytes(b"")
    Image.new("RGB", (4000, 100), "red").save(path)
    drafted = done(compare.add_picture(MEMORY, None, None, str(path), ()))["drafted"]
    assert Image.open(io.BytesIO(drafted[0])).width == picture_files.MAX_SIDE
    waiting = done(compare.send(MEMORY, None, None, "What?", "", drafted, 4, 0, False))
    shown, text = waiting["student"]["value"][0]["content"]
    assert "data:image/jpeg;base64," in shown.value and text == "What?" and waiting["drafted"] == ()
    assert chats.asked(key) == [Message("What?", pictures=drafted)]
    assert done(compare.stop(MEMORY, None, None, "", ()))["drafted"] == drafted
    (path := tmp_path / "more.png").write_bytes(drafted[0])
    full = done(compare.add_picture(MEMORY, None, None, str(path), drafted * chat_cards.MAX_PICTURES))
    assert "at most 8 pictures" in full["chat_note"]
