"""Take the pictures of the README:  python -m tests.benchmarks.screenshots  (four minutes; needs Chromium).

The pictures of a profile and an evaluation are those of the finished example that comes with the package; only the one
in which both models write needs a run. `--only example` takes the former alone.
"""

import argparse
import tempfile
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)
from tests.support.page_server import browsing, looking, serving

ASSETS = Path(__file__).parents[2] / "assets"
PROMPT = "The for statement is used to iterate over"
SIZE = {"width": 1360, "height": 860}
WIDE = {"viewport": SIZE, "device_scale_factor": 2}
NARROW = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
WAIT = 900_000


def begin(page):
    """Press through to a run of the demo model."""
    page.click("#demo")
    page.wait_for_selector("#model-card .lz-good")
    page.click("#to-budget")
    page.get_by_role("spinbutton").first.fill("128")
    page.keyboard.press("Tab")
    page.get_by_label("Try it").check()
    page.wait_for_selector("#machine .lz-good")
    page.wait_for_timeout(1500)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=ASSETS / "page-budget.png")
    page.click("#start")
    page.wait_for_selector("#run-card .lz-done", timeout=WAIT)


def compare(page, scheme):
    """Let both models write, and picture it."""
    page.wait_for_selector("#compare:enabled")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_role("button", name="Write", exact=True).click()
    page.wait_for_selector("#compare-note .lz-message", timeout=WAIT)
    picture(page, f"compare-{scheme}")


def take_part(page, part, name, height):
    """Picture one part of an evaluation, from its heading on, in a window of a height that shows it."""
    before = page.viewport_size
    page.set_viewport_size({**before, "height": height})
    page.click("#step-5-button")
    page.wait_for_selector(f"#part-{part} .js-plotly-plot .legendtext, #part-{part} .heatmap-label")
    page.wait_for_timeout(1500)
    page.evaluate("(part) => document.querySelector(`#part-${part}`).scrollIntoView()", part)
    page.wait_for_timeout(500)
    page.screenshot(path=ASSETS / f"page-{name}.png")
    page.set_viewport_size(before)


def take_profile(page, name, top=None):
    """Picture the profile step once its maps and its bars are drawn; `top` is where the picture begins."""
    page.click("#step-3-button")
    page.wait_for_selector("#step-3 .heatmaplayer")
    page.wait_for_selector("#bars .barlayer .point", state="attached")
    picture(page, name, top)


def picture(page, name, top=None):
    page.wait_for_timeout(1500)
    page.evaluate("(top) => top ? document.querySelector(top).scrollIntoView() : window.scrollTo(0, 0)", top)
    page.wait_for_timeout(300)
    page.screenshot(path=ASSETS / f"page-{name}.png")


def take_example(browser, url):
    """Picture the finished example."""
    example = f"{url}?run=example-run"
    for scheme in ("light", "dark"):
        with looking(browser, example, color_scheme=scheme, **{**WIDE, "viewport": {**SIZE, "height": 1720}}) as page:
            take_profile(page, f"profile-{scheme}")
        with looking(browser, example, color_scheme=scheme, **WIDE) as page:
            take_part(page, "recall", f"evaluation-{scheme}", 680)
    with looking(browser, example, **NARROW) as page:
        take_part(page, "needle", "evaluation-narrow", 1320)
        take_profile(page, "narrow", "#step-3 .lz-chart")
    with looking(browser, url, **WIDE) as page:
        page.wait_for_selector("#hero svg")
        picture(page, "landing")


def take_run(browser, url):
    """Picture the choice of a budget, and what both models of its run write."""
    with looking(browser, url, **WIDE) as page:
        begin(page)
        address = page.url
    for scheme in ("light", "dark"):
        with looking(browser, address, color_scheme=scheme, **{**WIDE, "viewport": {**SIZE, "height": 1240}}) as page:
            compare(page, scheme)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("example", "run"))
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "runs") as (url, *_), browsing() as browser:
        for name, take in (("example", take_example), ("run", take_run)):
            if only in (None, name):
                take(browser, url)


if __name__ == "__main__":
    main()
