"""A student is evaluated from the page and by its API: it survives a reload, is stopped, goes on, and is one's own."""

import shutil

import pytest

from linearizer.report.parts import PART_VIEWS
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.evaluation_results import STORED
from tests.support.page_server import FITS, LONG, client_of, looking, shown, wait_until_true, wrong_in_both_schemes

QUICK = {"texts": 2, "seconds": 0.2, "lengths": [160]}


@pytest.fixture(scope="module")
def done(local, done):
    """Name a run that has a student, of which nothing was measured besides."""
    shutil.copytree(local.runs / done, local.runs / "evaluated")
    return "evaluated"


def choose(page, *parts):
    if not page.locator("#parts").is_visible():
        page.get_by_role("button", name="All measurements").click()
    for view in PART_VIEWS.values():
        page.get_by_label(view.title, exact=True).and_(page.locator("#parts input")).set_checked(view.title in parts)


def test_an_evaluation_is_watched_through_a_reload_and_its_charts_appear(local, browser, done):
    url, runs, log = local
    with looking(browser, f"{url}?run={done}") as page:
        shown(page, "#run-card", "done")
        choose(page, "Language", "Hidden pairs")
        page.wait_for_selector("#evaluate:not([disabled])")
        page.locator("#part-texts input[type=number]").fill("2")
        page.click("#evaluate")
        page.wait_for_selector("#evaluating .lz-state")
        page.reload()
        page.get_by_role("button", name="All measurements").click()
        page.wait_for_selector("#part-language .lz-table", state="attached", timeout=LONG)  # folded
        shown(page, "#evaluating", "Evaluated", LONG)
        wait_until_true(page, "document.querySelector('#heard').textContent.startsWith('Evaluated')")
        shown(page, "#part-needle", "the teacher itself recalls less than half")  # so there is no chart
        assert page.locator("#part-speed").count() == 0 or not page.locator("#part-speed").is_visible()
        page.wait_for_selector("#stop-evaluating", state="hidden")
        assert page.evaluate(FITS)
    assert set(Run(runs / done).evaluation_parts) == {"language", "recall", "needle"}  # recall: by the judging
    assert "Traceback" not in log.read_text()


def test_it_is_stopped_and_goes_on_from_the_page(local, browser, done):
    url, runs, _ = local
    long = {**QUICK, "seconds": 60, "lengths": [2**power for power in range(6, 14)]}
    client_of(url).predict(done, ["language", "speed"], long, api_name="/evaluate_run")
    with looking(browser, f"{url}?run={done}") as page:
        page.get_by_role("button", name="All measurements").click()
        page.click("#stop-evaluating", timeout=LONG)
        shown(page, "#evaluating", "Stopped; the finished parts are kept", LONG)
        assert control.state_of(Run(runs / done).evaluating) == "stopped"
        choose(page, "Recall")
        page.locator("#part-texts input[type=number]").fill("2")
        page.click("#evaluate")
        shown(page, "#evaluating", "Evaluated", LONG)  # no later test meets it at work
        page.wait_for_selector("#part-recall .js-plotly-plot", timeout=LONG)
    assert "recall" in Run(runs / done).evaluation_parts


def test_a_narrow_screen_shows_all_parts_and_no_place_for_what_cannot_be_drawn(local, browser, done):
    url, runs, _ = local
    run = Run(runs / "made-up")
    shutil.copytree(runs / done, run.folder)
    run.write_evaluation(parts=STORED)
    with looking(browser, f"{url}?run={run.folder.name}", viewport={"width": 390, "height": 844}) as page:
        page.get_by_role("button", name="All measurements").click()
        for part in ("recall", "needle"):
            page.wait_for_selector(f"#part-{part} .js-plotly-plot")
        for part in ("generation", "speed", "tasks"):  # speed has one length, and one point is no chart
            page.wait_for_selector(f"#part-{part} table", state="attached")
            assert not page.locator(f"#part-{part} .empty").is_visible()
        assert wrong_in_both_schemes(page) == []
        assert page.evaluate(FITS)
