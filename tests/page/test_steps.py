"""What each step of the page shows, and what its fields refuse, in a real browser."""

import json
import re
import shutil
import time
from pathlib import Path

from linearizer.hub.models import find_model
from linearizer.page import plan_form
from linearizer.page.chat import recorded
from linearizer.page.chat.cards import COLUMNS, answer_in
from linearizer.page.plan_form import WAYS
from linearizer.plan.plan import Plan
from linearizer.report.verdict import judge_run
from linearizer.run.folder import Run
from tests.support.page_server import FITS, LONG, looking, shown, wait_until_true, wrong_in_both_schemes
from tests.support.page_steps import choose_demo, choose_way, field, number_at, unfold, upload


def test_the_slider_says_at_once_what_a_budget_means(local, browser):
    with looking(browser, local.url) as page:
        choose_demo(page)
        shown(page, "#budget-card", "from 64 tokens on")
        shown(page, "#budget", "a whole number from 32 to 512")
        typed = page.get_by_role("spinbutton", name=re.compile("Tokens of cache"))
        for text, taken in (("96.7", "97"), ("9000", "512"), ("64", "64"), ("", "64")):  # empty: the last one stays
            typed.fill(text)
            shown(page, "#budget-card", f"from {taken} tokens on")
            typed.blur()
            assert typed.input_value() == taken
            told = f"budget {text} is not allowed here: it should be a whole number from 32 to 512. {taken} is taken."
            assert page.locator(".lz-taken").inner_text() == (told if text not in ("", taken) else "")
        assert number_at(page, "#budget-card", "state").startswith("at most 262 kB")
        shown(page, "#forecast", "it takes about")
        assert page.locator("#start").bounding_box()["y"] < 860  # on the first screen
        assert not page.locator("#way").is_visible()
        unfold(page, "Change how")
        for way in WAYS:  # each card says how long it takes here
            card = page.locator(f"#way label:has(input[value={way}])").inner_text()
            assert card.startswith(WAYS[way].title) and re.search(r"About \d+ (s|min) here", card), card
        efforts = page.locator("#effort label").all_inner_texts()
        assert all(re.search(r", about \d+ (s|min|h)$", text.strip()) for text in efforts) and len(efforts) == 3
        page.get_by_label("Thorough").check()
        assert page.get_by_label("Thorough").is_checked()
        unfold(page, "All ways as points")
        for recipe, chosen in (("gdn", "#recipe input[value=gdn]"), ("windows", "#recipe input[value=windows]")):
            page.locator(f"#methods [data-recipe={recipe}] circle").first.dispatch_event("click")  # others lie above it
            wait_until_true(page, "([at]) => document.querySelector(at)?.checked", [chosen])
        page.locator("#methods [data-recipe=best] circle").first.click()
        wait_until_true(page, "([at]) => document.querySelector(at)?.checked", ["#way input[value=measured]"])
        page.wait_for_selector("#recipe", state="hidden")


def test_a_budget_is_lowered_to_what_the_next_model_reads(local, browser, tmp_path):
    short = shutil.copytree(find_model("demo").folder, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    with looking(browser, local.url) as page:
        choose_demo(page)
        page.get_by_role("spinbutton", name=re.compile("Tokens of cache")).fill("256")
        shown(page, "#budget-card", "from 256 tokens on")
        page.get_by_role("tab", name="Model").click()
        page.locator("#model input").fill(str(short))
        page.keyboard.press("Enter")
        shown(page, "#model-card", "at most 128")
        page.click("#to-budget")
        shown(page, "#budget-card", "from 128 tokens on")
        wait_until_true(page, "document.querySelector('#budget input[type=number]').value == '128'")


def test_what_is_left_empty_is_left_to_the_recipe(local, browser):
    with looking(browser, local.url) as page:
        choose_demo(page)
        for folded in ("Change how", "Advanced", "Do this elsewhere"):
            unfold(page, folded)
        choose_way(page, "features")
        shown(page, "#step-2", "linearizer run demo --recipe features --budget 64")
        field(page, "steps").fill("7")
        shown(page, "#step-2", "--steps 7")
        field(page, "window").fill("half")
        shown(page, "#budget-card", "window 'half' is not allowed: it should be a valid integer")
        hidden = ["text_only"]  # which only a model that reads pictures has
        assert page.locator("[id^=option-]").count() == len(plan_form.OPTIONS) - len(hidden)
        plan = Plan.of("hedgehog", model="demo", budget=96, texts=3, dtype="float32", seed=7)
        upload(page, "#take-plan", b"{")
        page.wait_for_selector("text=cannot be read")
        upload(page, "#take-plan", plan.to_json().encode())
        shown(page, "#step-2", plan.command())
        assert page.locator("#recipe input[value=hedgehog]").is_checked()
        assert field(page, "seed").input_value() == "7" and field(page, "window").input_value() == ""
        upload(page, "#take-plan", Plan("demo", budget=8192).to_json().encode())  # more than the slider reaches
        shown(page, "#step-2", "linearizer run demo --budget 8192")


def name_model(field, text):
    """Type the name of a model, and take it."""
    field.fill(text)
    field.press("Enter")


def test_a_refused_start_says_why_until_something_else_is_chosen(local, browser):
    with looking(browser, local.url, viewport={"width": 390, "height": 844}) as page:
        choose_demo(page)
        unfold(page, "Change how")
        unfold(page, "Advanced")
        field(page, "text").fill("file:nowhere.txt")
        field(page, "text").press("Tab")
        page.click("#start")
        shown(page, "#start-note", "nowhere.txt")
        wait_until_true(page, "document.querySelector('#heard').textContent.includes('nowhere.txt')")
        assert page.locator("#start-note").is_visible() and "run=" not in page.url
        field(page, "text").fill("builtin")
        field(page, "text").press("Tab")
        wait_until_true(page, "!document.querySelector('#start-note').innerText.trim()")


def test_an_unsupported_model_and_a_gated_one_are_refused_in_words(local, browser, hub, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("falcon", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "falcon")
    hub.add("org/falcon", tmp_path / "falcon")
    hub.add("org/gated", tmp_path / "falcon", gated="manual")
    with looking(browser, local.url) as page:
        model = page.get_by_label("Model", exact=True)
        model.press_sequentially("org/fal", delay=50)
        page.get_by_role("option", name="org/falcon").click()
        shown(page, "#model-card", "Not supported, because")
        assert page.locator("#to-budget").is_disabled()
        name_model(model, "org/gated")
        shown(page, "#model-card", "accept its terms")
        name_model(model, "<img src=x onerror=alert(1)>")
        shown(page, "#model-card", "img src=x")
        assert page.locator("#model-card img").count() == 0
        name_model(model, "a" * 3000)
        wait_until_true(page, "document.querySelector('#model-card').innerText.includes('aaa')")
        assert len(page.locator("#model-card").inner_text()) < 500
        page.click("#demo")
        page.wait_for_selector("#to-budget:enabled")
        name_model(model, "")
        page.wait_for_selector("#to-budget:disabled")
        shown(page, "#model-card", "No model is named: type one, or take the demo.")
        name_model(model, "https://huggingface.co/org/falcon")
        shown(page, "#model-card", "Not supported, because")
        hub.fail_next("/api/models", 0, times=100)  # connections break
        begun = time.monotonic()
        model.press_sequentially("x")
        shown(page, "#model", "the Hub cannot be searched")
        assert time.monotonic() - begun < 10
        assert model.input_value() == "xhttps://huggingface.co/org/falcon"  # what was typed stays


def test_enter_takes_the_typed_model_unless_an_arrow_key_chose_a_suggestion(local, browser, hub, tmp_path):
    for name in ("org/longer-name", "org/long", "org/other"):
        hub.add(name, find_model("demo").folder)
    with looking(browser, local.url) as page:
        model = page.get_by_label("Model", exact=True)
        suggestion = page.get_by_role("option", name="org/longer-name")
        model.press_sequentially("org/lo", delay=50)
        suggestion.wait_for()
        model.press_sequentially("ng")  # the suggestions are still those of less
        model.press("Enter")
        shown(page, "#model-card h3", "org/long")
        assert model.input_value() == "org/long"
        model.press("Backspace")
        suggestion.wait_for()
        model.press("ArrowDown")
        model.press("Enter")
        shown(page, "#model-card h3", "org/longer-name")
        for _ in range(4):  # whatever is suggested by now, an empty field names nothing
            page.click("#demo")
            page.wait_for_selector("#to-budget:enabled")
            name_model(model, "")
            shown(page, "#model-card", "No model is named")
            page.wait_for_selector("#to-budget:disabled")  # the card is drawn before the button


def test_the_result_begins_with_its_verdict_and_its_tables_are_below_its_charts(local, browser, done):
    run = Run(local.runs / done)
    verdict = judge_run(run)
    with looking(browser, f"{local.url}?run={done}") as page:
        for part in verdict.sentence.split(". ", 1):
            shown(page, "#verdict", part)
        page.wait_for_selector("#awaited", state="hidden")
        assert page.locator(f"#verdict .lz-{verdict.kind}").count() == 1
        assert page.locator("#verdict dt").count() == 4
        page.click("#to-publish")
        page.wait_for_selector("#preview", state="visible")
        shown(page, "#use-card", f"linearizer serve {run.folder}")
        wait_until_true(page, "document.querySelectorAll('#verdict .lz-save').length == 2")
        page.wait_for_selector("#step-5 .js-plotly-plot")
        assert page.locator("#step-5 .js-plotly-plot").count() == 1  # need, price and purchase; the rest is folded
        assert page.locator("#step-5 table").count() == 0
        for kind, begin in (("PNG", b"\x89PNG"), ("SVG", b"<svg xmlns"), ("CSV", b'"line","state or cache, bytes"')):
            with page.expect_download() as saved:
                page.get_by_role("button", name=f"Save “Quality by bytes” as {kind}").click()
            content = Path(saved.value.path()).read_bytes()
            assert content.startswith(begin) and saved.value.suggested_filename.startswith(f"{done}-quality-by-bytes.")
            assert (f">{done}: Quality by bytes<".encode() in content) == (kind == "SVG")  # it says what it shows
        page.get_by_role("button", name="All measurements").click()
        page.wait_for_selector("#part-recall .js-plotly-plot")
        for title in ("Quality by length", "Quality by bytes", "Recall"):  # each chart once
            assert page.locator("#step-5 .lz-chart h3:not(.lz-part):visible", has_text=title).count() == 1, title
        assert page.locator("#step-5 .lz-later:visible").count() == 0  # all is drawn
        page.wait_for_selector("#part-language table", state="attached")
        assert page.locator("#step-5 table").count() == page.locator("#step-5 details table").count() >= 3  # folded


def test_the_example_shows_recorded_chats_with_right_and_wrong_answers(local, browser):
    reading = recorded.read_recorded().readings[0]
    with looking(browser, local.url, viewport={"width": 390, "height": 844}) as page:
        page.click("#example")
        page.wait_for_url("**/?run=*")
        page.click("#to-chat")
        for question in reading.questions[:2]:
            page.get_by_role("button", name=question.text).click()
            shown(page, "#recorded-text", question.fact)
            for side in COLUMNS:
                answer = getattr(question.answers, side)
                shown(page, f"#{side}", answer.text.strip().splitlines()[0])
                shown(page, f"#{side}-head", "✓ right" if answer_in(answer, question.answer) else "✗ wrong")
        page.click("#recorded-text summary")
        assert page.locator("#recorded-text mark").inner_text() == question.fact
        assert not page.locator("#prompts").is_visible()
        assert page.evaluate(FITS) and wrong_in_both_schemes(page) == []


def test_a_visitor_lets_all_three_models_read_a_file_and_asks_about_it(local, browser, done):
    text = ("The sea was calm, and the ship lay still. " * 60).encode()
    with looking(browser, f"{local.url}?run={done}", viewport={"width": 390, "height": 844}) as page:  # on a phone
        page.click("#step-6-button")
        page.wait_for_selector("#file:enabled")
        assert not page.locator("#recorded").is_visible()
        page.evaluate(
            """() => {
                window.sizes = [];
                new MutationObserver(() => {
                    const now = [...document.querySelectorAll('[id$=-head] dl > :first-child dd')];
                    window.sizes.push(now.map((each) => each.innerText).join());
                }).observe(document.querySelector('#step-6'), {childList: true, subtree: true, characterData: true});
            }"""
        )
        upload(page, "#file", text, "sea.md", "text/markdown")
        shown(page, "#chat-note", "Now ask about the document.", LONG)
        shown(page, "#student", "The beginning of a document, 384 tokens")  # which leaves room for a question
        teacher, student, window = (list(dict.fromkeys(sizes)) for sizes in zip(*split(page), strict=True))
        assert len(teacher) >= 5 and teacher[-1] == "1.57 MB" and student == ["–", "131 kB", "262 kB"]
        assert window == ["–", "131 kB", "262 kB", "258 kB"]
        page.locator("#prompt textarea").fill("The ship")
        page.click("#compare:enabled")
        shown(page, "#chat-note", "of 64 (", LONG)  # the share of each
        for side in ("teacher", "student", "window"):
            page.wait_for_selector(f"#{side} .bot.message")
            assert "The ship" in page.inner_text(f"#{side} .user.message")
            assert int(re.search(r"memory at (\d+) tokens", page.inner_text(f"#{side}-head"))[1]) > 384
        assert wrong_in_both_schemes(page) == []
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            wait_until_true(page, FITS)
            boxes = [page.locator(f"#{side}").bounding_box() for side in ("teacher", "window")]
            assert (boxes[1]["y"] > boxes[0]["y"]) == (width == 390)  # on a phone the columns stack
        unfold(page, "Template, length and more")
        page.get_by_label("A plain window, too").uncheck()
        page.wait_for_selector("#window", state="hidden")
        page.get_by_role("button", name="New chat").click()
        wait_until_true(page, "!document.querySelector('#student .bot.message')")


def split(page):
    return [sizes.split(",") for sizes in page.evaluate("window.sizes")]


def test_a_lost_connection_comes_back_by_itself_and_nothing_that_was_chosen_is_lost(local, browser):
    requests = "**/run/predict**"
    with looking(browser, local.url) as page:
        choose_demo(page)
        shown(page, "#budget-card", "from 64 tokens on")
        page.route(requests, lambda route: route.abort("connectionreset"))
        with page.expect_event("requestfailed"):
            page.get_by_role("spinbutton", name=re.compile("Tokens of cache")).fill("96")
        page.unroute(requests)
        shown(page, "#budget-card", "from 96 tokens on")
        assert page.locator(".toast-body").count() == 0 and page.locator("#model input").input_value() == "demo"
