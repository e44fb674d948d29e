"""The page is for everybody: contrast, names, focus, the keyboard alone, and what a listener hears."""

import pytest

from linearizer.page.visitors import EXAMPLE_NAME
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from tests.support.page_server import FITS, LONG, SCHEMES, looking, show_in, wait_until_true, wrong_in_both_schemes
from tests.support.page_steps import unfold


@pytest.mark.parametrize("width", [1280, 390])
def test_every_step_passes_axe_in_both_schemes_wide_and_narrow(local, browser, done, width):
    with looking(browser, local.url, viewport={"width": width, "height": 860}) as page:
        assert wrong_in_both_schemes(page) == []
        page.click("#demo")
        page.wait_for_selector("#model-card .lz-good")
        assert wrong_in_both_schemes(page) == []
        page.click("#to-budget")
        page.wait_for_selector("#forecast .lz-good")
        unfold(page, "Change how")
        page.wait_for_selector("#effort label:has-text('about')")
        page.locator("#way input[value=paper]").check()
        for folded in ("Advanced", "Do this elsewhere"):
            unfold(page, folded)
        assert wrong_in_both_schemes(page) == []
        page.goto(f"{local.url}?run={done}")
        page.wait_for_selector("#verdict .lz-facts")
        page.get_by_role("button", name="All measurements").click()
        page.wait_for_selector("#part-recall .js-plotly-plot")
        unfold(page, "Publish to the Hub")
        assert wrong_in_both_schemes(page) == []
        for step in (4, 3):
            page.click(f"#step-{step}-button")
            page.wait_for_selector(f"#step-{step} .js-plotly-plot")
            assert wrong_in_both_schemes(page) == [] and page.evaluate(FITS)
        page.goto(f"{local.url}?run={EXAMPLE_NAME}")
        for step, there in ((6, "#recorded button"), (5, "#verdict svg"), (3, "#needs .js-plotly-plot")):
            page.click(f"#step-{step}-button")
            page.wait_for_selector(there)
            assert wrong_in_both_schemes(page) == [] and page.evaluate(FITS)
        page.goto(f"{local.url}runs")
        page.wait_for_selector("#runs article")
        assert wrong_in_both_schemes(page) == []


def test_a_run_that_has_nothing_to_draw_yet_passes_axe(local, browser):
    Run.create(local.runs / "new", Plan.of(model="demo", budget=64))
    with looking(browser, f"{local.url}?run=new") as page:
        page.wait_for_selector("#step-3 .lz-later")
        assert wrong_in_both_schemes(page) == []
        assert not page.locator(":is(#other, #branch, .empty)").and_(page.locator(":visible")).count()
        assert page.locator("#step-3 .lz-later:visible").count() == 2  # what will be there
        page.click("#step-5-button")
        page.wait_for_selector("#awaited >> text=is not judged yet")


CHARTS = ".js-plotly-plot, .lz-figure > svg"
CONTRAST = """
  const light = rgb => { const [r, g, b] = rgb.match(/[\\d.]+/g).slice(0, 3).map(c => c / 255)
      .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b };
  const contrast = (ground, ink) => {
    const [low, high] = [light(ground), light(ink)].sort((a, b) => a - b);
    return (high + .05) / (low + .05);
  };
  const words = at => [...at.querySelectorAll('text')].filter(one => one.textContent.trim());"""
INK = f"""() => {{ {CONTRAST}
  const ground = getComputedStyle(document.body).backgroundColor;
  return [...document.querySelectorAll('{CHARTS}')].flatMap(words)
    .filter(one => one.getBoundingClientRect().width && !one.closest('.heatmap-label'))
    .map(one => [one.textContent, contrast(ground, getComputedStyle(one).fill)]);
}}"""
HOVER = f"""() => {{ {CONTRAST}
  return [...document.querySelectorAll('.hovertext')].flatMap(box => words(box)
    .map(one => contrast(getComputedStyle(box.querySelector('path')).fill, getComputedStyle(one).fill)));
}}"""


def test_words_in_figures_stand_out_from_the_ground_in_both_schemes(local, browser, done):
    with looking(browser, f"{local.url}?run={done}") as page:
        for step, least in ((5, 15), (4, 8), (3, 20)):
            page.click(f"#step-{step}-button")
            wait_until_true(page, f"document.querySelectorAll('#step-{step} :is({CHARTS}) text').length > {least}")
            for scheme in SCHEMES:
                show_in(page, scheme)
                words = page.evaluate(INK)
                assert words and not [word for word in words if word[1] < 4.5], (scheme, step)
        page.locator("#step-3 .heatmaplayer").first.hover(force=True)  # what listens lies above it
        page.wait_for_selector(".hovertext")
        for scheme in SCHEMES:
            show_in(page, scheme)
            assert page.evaluate(HOVER) and all(contrast >= 4.5 for contrast in page.evaluate(HOVER)), scheme


FOCUSED = """() => {
  const at = document.activeElement, look = getComputedStyle(at), box = at.getBoundingClientRect();
  const list = at.matches('[role=listbox], [role=combobox]');  // what is chosen lies in the frame, too
  const frame = list ? getComputedStyle(at.closest('.wrap:has(> .wrap-inner)')) : look;
  const ring = frame.outlineStyle !== 'none' && parseFloat(frame.outlineWidth) > 0 || frame.boxShadow !== 'none';
  const inside = box.width > 0 && box.right > 0 && box.left < innerWidth;
  return [at.tagName, at.id || at.ariaLabel || at.innerText.slice(0, 30), ring, inside,
    look.visibility === 'visible' && look.display !== 'none'];
}"""


def tab_to(page, there, limit=40, back=False):
    """Press Tab until a place has the focus, which is seen wherever it goes."""
    for _ in range(limit):
        if page.evaluate("(there) => document.activeElement.matches(there)", there):
            return
        page.keyboard.press("Shift+Tab" if back else "Tab")
        result = page.evaluate(FOCUSED)
        assert result[0] == "BODY" or all(result[2:]), result
    raise AssertionError(f"the keyboard does not come to {there}")


def heard(page, words):
    wait_until_true(
        page, "(words) => document.querySelector('#heard').textContent.includes(words)", words, timeout=LONG
    )


def test_the_whole_journey_goes_by_keyboard_alone_and_is_heard(local, browser):
    with looking(browser, local.url) as page:
        tab_to(page, "#demo")
        page.keyboard.press("Enter")
        heard(page, "Supported.")
        tab_to(page, "#to-budget")
        page.keyboard.press("Enter")
        page.wait_for_selector("#forecast .lz-good")
        wait_until_true(page, "document.activeElement.tagName === 'H2'")  # the new step's, not the top of the page
        tab_to(page, "#budget input[type=number]")
        page.keyboard.type("64")
        page.keyboard.press("Tab")
        heard(page, "smaller than the cache from 64 tokens on")
        tab_to(page, "#how button")
        page.keyboard.press("Enter")
        page.wait_for_selector("#way input")
        tab_to(page, "#way input[value=paper]")
        page.keyboard.press("Space")
        page.wait_for_selector("#recipe input")
        tab_to(page, "#recipe input[value=swa]")  # a run of seconds
        page.keyboard.press("Space")
        tab_to(page, "#effort input")
        page.keyboard.press("Space")  # Gradio's radio buttons are no group: each is a stop of its own
        page.wait_for_selector("#effort input:checked >> nth=0", state="attached")
        tab_to(page, "#start", back=True)
        page.keyboard.press("Enter")
        page.wait_for_url("**/?run=*")
        heard(page, "demo: ")  # that it waits or is at work: a fast machine is done before the page looks again
        heard(page, "demo: done")
        page.wait_for_selector("#verdict .lz-facts")
        tab_to(page, "#step-6-button")
        page.keyboard.press("Enter")
        page.wait_for_selector("#compare:enabled")
        tab_to(page, "#prompt textarea")
        page.keyboard.type("Once upon a time")
        page.keyboard.press("Enter")
        wait_until_true(page, "document.querySelector('#student').innerText.length > 40", timeout=LONG)
