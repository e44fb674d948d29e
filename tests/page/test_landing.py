"""The first page shows what was measured, is light, and leads to a run on every screen."""

import re
import shutil

import pytest

from linearizer.page import landing
from linearizer.page.visitors import EXAMPLE_NAME
from linearizer.run.files import find_carried
from tests.benchmarks.landing import SHOWN_AT, is_right, recorded, shown_model
from tests.benchmarks.recorded_texts import write_contract, write_log
from tests.support.page_server import FITS, looking, wait_until_true, wrong_in_both_schemes

REMAKE = "python -m tests.benchmarks.landing"
MAX_REQUESTS, MAX_BYTES, MAX_OWN_BYTES = 105, 650_000, 60_000


def test_what_is_shown_is_what_the_results_say():
    assert landing.read_model() == shown_model(), REMAKE
    model = landing.read_model()
    assert [(each.asked.text, each.asked.budget) for each in model.recordings] == [*SHOWN_AT.items()]
    assert len(model.asked) == len(SHOWN_AT) ** 2 and all(asked.count == 10 for asked in model.asked)
    for asked in model.asked:  # also those that are in the table alone
        counted = [each for each in recorded() if (each["recording"], each["budget"]) == (asked.text, asked.budget)]
        assert asked.right == {side: sum(is_right(each, side) for each in counted) for side, _ in landing.SIDES}
    assert {write_contract(), write_log()} <= {each.get("read") for each in recorded()}
    for shown in model.recordings:
        assert [shown.answers[side] == shown.fact for side, _ in landing.SIDES] == [True, True, False]
        assert shown.asked in model.asked and shown.fact in " ".join(shown.text.split())
    html = landing.hero_html() + landing.real_model_html()
    assert len(html.encode()) < MAX_OWN_BYTES
    budgets, lengths = landing.read_model().budgets, landing.read_model().lengths
    assert html.count(">length of the text, tokens<") == 3 * len(budgets)
    assert html.count('class="lz-bar') == sum(len(budget.rows) for budget in budgets) * len(lengths)
    for budget in budgets:
        for row in budget.rows:
            assert all(f"{mean:.4f} [{low:.4f}, {high:.4f}]" in html for mean, low, high in row.kl), row.name


def test_what_a_run_of_each_suggested_model_takes_stands_beside_it_without_a_network(root):
    listed = landing.forecast_models({}, None, None)
    for name in landing.MODELS.values():
        assert re.search(rf"<b>{name.rpartition('/')[2]}</b> .*\d (s|min|h).*, [\d.]+ [MG]B of memory", listed), name
    known = landing.KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"].examine("name").inspection
    assert known.supported and known.cache_bytes_per_token == 23_040 and known.number_bytes == 2


SHIFTS = """() => new Promise(done => {
  let sum = 0;
  new PerformanceObserver(list => list.getEntries().forEach(each => sum += each.hadRecentInput ? 0 : each.value))
    .observe({type: 'layout-shift', buffered: true});
  setTimeout(() => done(sum), 500);
})"""


@pytest.mark.parametrize("width, path", [(1280, f"?run={EXAMPLE_NAME}"), (390, "")])
def test_what_was_painted_stays_in_its_place(local, browser, width, path):
    with looking(browser, local.url + path, viewport={"width": width, "height": 900}, anew=True) as page:
        page.wait_for_selector("#verdict .lz-verdict" if path else "#takes li:has-text('of memory') >> nth=2")
        assert page.evaluate(SHIFTS) < 0.1
        assert page.locator("footer .show-api").is_visible()


@pytest.mark.parametrize("width, height", [(1440, 900), (390, 844)])
def test_a_budget_is_chosen_among_recorded_ones_and_the_field_is_on_the_first_screen(local, browser, width, height):
    with looking(browser, local.url, viewport={"width": width, "height": height}) as page:
        page.wait_for_selector("#gain svg:visible >> nth=0")
        for part in ("#model", "#to-budget", ".lz-replays"):
            box = page.locator(part).bounding_box()
            assert box["y"] + box["height"] < height, part
        assert page.locator(".lz-replay:visible button").inner_text() == "Play again"  # motion is not welcome here
        for place, budget in enumerate(landing.read_model().budgets):
            if len(landing.read_model().budgets) > 1:
                page.locator("#real-budget").fill(str(place))
            shown = page.locator("[data-budget]:visible")
            shown.get_by_text(f"{budget.tokens} tokens", exact=True).wait_for()
            assert shown.count() == 1 and shown.locator("svg").count() == 3
            assert shown.get_by_text(f"{budget.rows[0].agreement[-1]:.1%}").is_visible()
        assert page.evaluate(FITS) and wrong_in_both_schemes(page) == []


def test_the_recording_is_played_paused_and_ends_as_it_is_written(local, browser):
    shown, title = landing.read_model().recordings[0], "document.querySelector('#replay-0 button').textContent"
    with looking(browser, local.url) as page:
        page.wait_for_selector("#replay-0 [data-held]")
        read = page.locator("#replay-0 [data-read]")
        end = page.inner_text("#replay-0")
        assert shown.fact in end and shown.question in end and shown.answers["window"] in end
        page.click("#replay-0 button")
        wait_until_true(page, f"{title} == 'Pause'")
        wait_until_true(page, "document.querySelector('#replay-0').dataset.stage == 'reads'")
        assert not page.locator(".lz-side .lz-later >> nth=0").is_visible()
        page.click("#replay-0 button")
        paused = read.inner_text()
        page.wait_for_timeout(600)
        assert read.inner_text() == paused and int(paused.replace(",", "")) in dict(r[:2] for r in shown.readings)
        page.click("#replay-0 button")
        wait_until_true(page, f"{title} == 'Play again'")
        assert page.inner_text("#replay-0") == end


def test_arrow_keys_switch_between_three_recordings_each_with_its_counts(local, browser):
    with looking(browser, local.url, viewport={"width": 390, "height": 844}) as page:
        page.focus("#recording-0")
        for place, shown in [*enumerate(landing.read_model().recordings)][1:]:
            page.keyboard.press("ArrowRight")
            page.wait_for_selector(f"#replay-{place}", state="visible")
            assert page.evaluate("document.activeElement.id") == f"recording-{place}"
            assert page.locator("[role=tab][aria-selected=true][id^=recording]").count() == 1
            assert page.locator(".lz-replay:visible").count() == 1
            text = page.inner_text(f"#replay-{place}")
            assert shown.fact in text and f"{shown.asked.right['student']} of {shown.asked.count} right" in text
        assert page.evaluate(FITS)
        page.keyboard.press("ArrowRight")  # from the last to the first
        page.wait_for_selector("#replay-0", state="visible")


LOADED = """() => performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))
  .map(each => [each.name, each.transferSize])"""


def check_weight(page):
    """Hold what a page has loaded within limits: Plotly is not among it."""
    loaded = page.evaluate(LOADED)
    assert len(loaded) < MAX_REQUESTS and sum(size for _, size in loaded) < MAX_BYTES, loaded
    assert not [name for name, _ in loaded if "plotly" in name.lower()]


def test_the_first_page_is_light_and_loads_no_plotly(local, browser):
    with looking(browser, local.url, anew=True) as page:
        charts = 3 * len(landing.read_model().budgets)
        wait_until_true(page, f"document.querySelectorAll('#gain svg').length == {charts}")
        check_weight(page)


def test_a_finished_run_draws_two_charts_and_loads_plotly_when_it_is_needed(local, browser):
    shutil.copytree(
        find_carried(f"assets/{EXAMPLE_NAME}"), local.runs / "unasked"
    )  # without a chat, whose parts would be loaded, too
    with looking(browser, f"{local.url}?run=unasked", anew=True) as page:
        wait_until_true(page, "document.querySelectorAll('#verdict .lz-save').length == 2")
        check_weight(page)
        page.get_by_role("button", name="All measurements").click()
        page.wait_for_selector("#part-recall .js-plotly-plot")
        assert sum("plotly" in name.lower() for name, _ in page.evaluate(LOADED)) == 1
