"""The page in a real browser: the whole journey, reloads, stopping, the list of runs, the keyboard."""

import re
import shutil

from linearizer.amounts import size
from linearizer.page.visitors import EXAMPLE_NAME
from linearizer.plan.plan import Plan
from linearizer.report.verdict import judge_run
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.page_server import FITS, LONG, looking, shown, wait_until_true
from tests.support.page_steps import number_at, start, unfold

STEPS = 20_000  # of a training that is stopped
ANSWERED = "document.querySelectorAll('#student .bot.message').length == 3"


def test_the_whole_journey_with_a_reload_in_the_middle_ends_in_a_published_model(local, browser, hub):
    url, runs, log = local
    with looking(browser, url) as page:
        name = start(page, 3, "paper", "paper")
        page.wait_for_selector("#run-card .lz-state")
        page.reload()  # what was begun goes on, and the page finds it again
        page.wait_for_url(f"**/?run={name}")
        shown(page, "#run-card", "done", LONG)
        page.wait_for_selector("#verdict svg text:has-text('student')")
        page.get_by_role("button", name="All measurements").click()
        page.wait_for_selector("#part-language table", state="attached")  # folded
        assert [table.locator("tbody tr").count() for table in page.locator("#part-language table").all()].count(3)
        page.click("#to-chat")
        message = page.locator("#prompt textarea")
        message.press("Enter")
        shown(page, "#chat-note", "the prompt is empty")
        message.fill("Once upon")
        message.press("Shift+Enter")
        message.press_sequentially("a time")
        message.press("Enter")
        for text in ("The old man", "She said"):  # they wait for their turns, and all stay
            message.fill(text)
            message.press("Enter")
        run = Run(runs / name)
        wait_until_true(page, ANSWERED, timeout=LONG)
        shown(page, "#chat-note", "write the same", LONG)  # within the budget a student is its teacher
        read, bytes = re.search(r"memory at (\d+) tokens\s+(\S+ .?B)", page.inner_text("#teacher-head")).groups()
        assert bytes == size(int(read) * run.inspection.cache_bytes_per_token)  # in the units of every other card
        assert float(number_at(page, "#teacher-head", "tokens/s")) > 0  # that of a few tokens would not be told
        assert len(page.inner_text("#student .bot.message >> nth=1")) > 20
        assert page.inner_text("#student") == page.inner_text("#teacher")
        page.reload()
        wait_until_true(page, ANSWERED)
        page.wait_for_selector("#prompt", state="visible")  # the step, too, is as it was
        texts = [turn.inner_text() for turn in page.locator("#student .user.message").all()]
        assert texts == ["Once upon\na time", "The old man", "She said"]
        page.get_by_role("button", name="A word hidden").click()
        shown(page, "#chat-note", "tokens back")
        assert page.locator("#prompt textarea").input_value().endswith(" is")
        assert page.evaluate(FITS)
        page.click("#step-5-button")
        with page.expect_download() as fetched:
            page.get_by_role("button", name="Download the student").click()
        assert fetched.value.suggested_filename == "demo-linearized.zip" and fetched.value.failure() is None
        unfold(page, "Publish to the Hub")
        wait_until_true(page, "document.querySelector('#owner input')?.value == 'ann'")
        page.get_by_label("Name", exact=True).fill("from-the-page")
        page.get_by_role("button", name="Show what will be sent").click()
        page.locator("#files summary").click()
        shown(page, "#files", "config.json")
        assert ("models", "ann/from-the-page") not in hub.repos
        page.click("#publish")
        shown(page, "#sent", "Published as ann/from-the-page", LONG)
        shown(page, "#snippet", "from_pretrained")
    assert hub.repos["models", "ann/from-the-page"].private
    assert run.plan.steps == 3
    assert "Traceback" not in log.read_text()


def test_home_is_home_and_links_to_the_last_runs(local, browser, done):
    url = local.url
    with looking(browser, f"{url}?run={done}") as page:
        shown(page, "#run-card", "done")
        again = page.context.new_page()
        again.goto(url)  # without a name, also where a run was watched before
        again.wait_for_selector("#hero", state="visible")
        assert "run=" not in again.url and not again.locator("#run-card .lz-state").count()
        again.click(f"#last-runs a[href$='run={done}']")
        again.wait_for_url(f"**/?run={done}")
        shown(again, "#run-card", "done")
        again.get_by_role("link", name="Home").click()
        again.wait_for_selector("#hero", state="visible")
        again.close()


def test_a_run_is_stopped_and_resumed(local, browser):
    url, runs, _ = local
    with looking(browser, url, viewport={"width": 390, "height": 844}) as page:  # all of it on a phone
        name = start(page, STEPS)
        page.click("#step-1-button")  # before the run is first drawn
        page.get_by_role("button", name="Stop", exact=True).click(timeout=LONG)
        shown(page, "#run-model", "demo")  # and it stays there
        shown(page, "#run-card", "stopped; everything that was finished is kept", LONG)
        assert control.state_of(Run(runs / name)) == "stopped"
        page.get_by_role("button", name="Resume").click()
        shown(page, "#run-card", "trains the student", LONG)
        page.get_by_role("button", name="End training now").click()
        shown(page, "#run-card", "done", LONG)
        page.click("#step-4-button")
        shown(page, "#training", f"of {STEPS} steps")
    events = [event for event in Run(runs / name).events() if event["event"] == "distilled"]
    assert 1 <= events[0]["steps"] < STEPS
    assert f"for {events[0]['steps']:,} of {STEPS:,} steps" in (Run(runs / name).checkpoint / "README.md").read_text()


def test_another_budget_is_shared_out_without_the_model(local, browser, done):
    with looking(browser, f"{local.url}?run={done}") as page:
        shown(page, "#run-card", "done")
        page.click("#step-3-button")
        shown(page, "#other-card", "from 64 tokens on")
        page.wait_for_selector("#step-3 .heatmaplayer")
        page.wait_for_selector("#needs .barlayer")
        top = "Math.max(...document.querySelector('#needs .js-plotly-plot').data.at(-1).y)"
        before = page.evaluate(top)
        page.get_by_role("spinbutton", name=re.compile("Another budget")).fill("100")
        wait_until_true(page, "document.querySelector('#heard').textContent.includes('from 100 tokens on')")
        wait_until_true(page, f"{top} > {before}")
        shown(page, "#other-card", "What this budget would buy")
        page.get_by_role("spinbutton", name=re.compile("Another budget")).fill("64")
        shown(page, "#other-card", "What this run holds.")


def test_every_step_of_a_run_opens_in_any_order_and_another_run_begins_with_its_choices(local, browser, done):
    with looking(browser, local.url) as page:
        assert [page.locator(f"#step-{step}-button").is_disabled() for step in (1, 2, 3, 5, 6)] == [False] + [True] * 4
        assert page.locator("#step-4-button").count() == 0  # nothing is trained until a run trains
    with looking(browser, f"{local.url}?run={done}") as page:
        page.wait_for_selector("#step-5 h2", state="visible")  # where the page itself goes first
        for step in (1, 5, 2, 4, 6, 3, 1):
            page.click(f"#step-{step}-button")
            page.wait_for_selector(f"#step-{step} h2", state="visible")
        page.go_back()  # a step, and to go on is no visit of another page
        page.wait_for_selector("#step-3 h2", state="visible")
        wait_until_true(page, f"document.title == 'Measure · {done} · Linearizer'")
        page.goto(f"{page.url.partition('&')[0]}&tab=model")  # a link that was sent
        page.wait_for_selector("#step-1 h2", state="visible")
        shown(page, "#run-model", "demo")
        assert page.locator("#model").count() == 0  # nothing to choose beside what was chosen
        page.click("#step-2-button")
        shown(page, "#run-plan", "features: degrees of freedom, trained features")
        page.get_by_role("button", name="Change and start again").click()
        page.wait_for_selector("#model-card .lz-good", timeout=LONG)
        wait_until_true(page, "!location.search.includes('run=')")
        page.wait_for_selector("#step-5-button:disabled")  # the run is left
        page.click("#to-budget")
        shown(page, "#budget-card", "from 64 tokens on")
        for folded in ("Change how", "Do this elsewhere"):
            unfold(page, folded)
        shown(page, "#step-2", "linearizer run demo --recipe features --budget 64")
        assert page.locator("#step-5-button").is_disabled()


def test_runs_are_listed_with_what_came_of_them_and_two_are_set_side_by_side(local, browser, done):
    url, runs, _ = local
    with looking(browser, url) as page:
        page.goto(f"{url}runs")
        card, verdict = page.locator(f"#runs [data-run='{done}']"), judge_run(Run(runs / done))
        card.locator(".lz-done").wait_for()
        said = card.inner_text()
        assert "features" in said and f"{verdict.kl:.4f}" in said and f"{verdict.agreement:.1%}" in said
        assert card.locator("svg").count() == (len(verdict.lengths) > 1)
        for place, name in (("#first", done), ("#second", EXAMPLE_NAME)):
            page.locator(f"{place} input").fill(name)
            page.locator(f"{place} input").press("Enter")
        shown(page, "#compared", "Options of the plan that differ")
        facts = page.locator("#compared tbody tr").all_inner_texts()
        for fact in ("KL, texts of", "agreement", "state", "heads hold", "recipe"):
            assert any(fact in row for row in facts), fact
        page.locator("#second input").fill("none")
        page.locator("#second input").press("Enter")
        shown(page, "#compared", "'none' is not one of your runs")
        card.get_by_role("link", name="Open").click()
        shown(page, "#run-card", "done")


def test_on_its_card_a_run_is_resumed_renamed_copied_and_deleted(local, browser, done):
    url, runs, _ = local
    shutil.copytree(runs / done, runs / "unwanted")
    log = runs / "unwanted" / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"event": "done"' not in line))
    with looking(browser, url, viewport={"width": 390, "height": 844}) as page:
        page.goto(f"{url}runs")
        card = page.locator("[data-run=unwanted]")
        card.locator(".lz-lost").wait_for()
        card.get_by_role("button", name="Resume").click()
        card.locator(".lz-done").wait_for(timeout=LONG)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        card.get_by_role("button", name="Copy the plan").click()
        wait_until_true(page, "document.querySelector('#heard').textContent == 'Copied'")
        assert Plan.from_json(page.evaluate("navigator.clipboard.readText()")) == Run(runs / "unwanted").plan
        card.get_by_text("Rename", exact=True).click()
        for name, refusal in ((done, "beside this run already"), ("a/../b", "cannot be the name of a run")):
            card.locator("input").fill(name)
            card.get_by_role("button", name="Rename it").click()
            page.get_by_text(refusal).first.wait_for()
        page.wait_for_timeout(5500)  # the list is looked at again
        assert card.locator("input").input_value() == "a/../b", "what is typed stays"
        assert page.evaluate(FITS)
        card.locator("input").fill("better")
        card.get_by_role("button", name="Rename it").click()
        card = page.locator("[data-run=better]")
        watching = page.context.new_page()
        watching.goto(f"{url}?run=better&tab=measure")
        watching.wait_for_selector("#step-3 .lz-save", state="visible", timeout=LONG)
        card.get_by_text("Delete", exact=True).press("Enter")  # by keyboard
        assert "Delete better (demo" in card.inner_text() and (runs / "better" / "checkpoint").is_dir()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Delete it for good"
        page.keyboard.press("Enter")
        card.wait_for(state="detached")
        watching.wait_for_selector("#model", state="visible")  # no chart of the run is left to look at
        shown(watching, "#run-card", "'better' is not one of your runs")
        assert watching.locator(".lz-save:visible").count() == 0
    assert not {"better", "unwanted"} & {path.name for path in runs.iterdir()} and (runs / done).is_dir()
