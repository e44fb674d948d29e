"""Take the pictures of the README:  python -m tests.benchmarks.screenshots  (four minutes; needs Chromium)."""

import tempfile
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)
from tests.support.page_server import browsing, looking, serving

ASSETS = Path(__file__).parents[2] / "assets"
PROMPT = "The for statement is used to iterate over"
SIZE = {"width": 1360, "height": 860}
EVALUATED = ("Language", "Recall", "Hidden pairs")


def begin(page):
    """Press through to a run of the demo model."""
    page.click("#demo")
    page.wait_for_selector("#model-card .lz-good")
    page.click("#to-budget")
    page.get_by_role("spinbutton").first.fill("128")
    page.keyboard.press("Tab")
    page.get_by_label("Try it").check()
    page.wait_for_timeout(1500)
    page.screenshot(path=ASSETS / "page-budget.png")
    page.click("#start")
    page.wait_for_selector("#run-card .lz-done", timeout=900_000)


def evaluate(page):
    """Press through to an evaluation, and wait until it is done."""
    page.wait_for_selector("#evaluate:not([disabled])")
    for box in page.locator("#parts label").all():
        box.locator("input").set_checked(box.inner_text().strip() in EVALUATED)
    page.click("#evaluate")
    page.wait_for_selector("#evaluating .lz-good", timeout=900_000)


def take_part(page, part, name, height):
    """Picture one part of an evaluation, from its heading on, in a window of a height that shows it."""
    before = page.viewport_size
    page.set_viewport_size({**before, "height": height})
    page.wait_for_selector(f"#part-{part} .js-plotly-plot .legendtext, #part-{part} .heatmap-label")
    page.wait_for_timeout(1500)
    page.evaluate("(part) => document.querySelector(`#part-${part}`).scrollIntoView()", part)
    page.wait_for_timeout(500)
    page.screenshot(path=ASSETS / f"page-{name}.png")
    page.set_viewport_size(before)


def take(page, step, name):
    page.click(f"#step-{step}-button")
    page.wait_for_timeout(1500)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=ASSETS / f"page-{name}.png")


def main():
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "runs") as (url, *_), browsing() as browser:
        how = {"viewport": SIZE, "device_scale_factor": 2}
        with looking(browser, url, **how) as page:
            begin(page)
            evaluate(page)
            address = page.url
        for scheme in ("light", "dark"):
            with looking(browser, address, color_scheme=scheme, **how) as page:
                page.wait_for_selector("#evaluation table", state="attached")
                page.get_by_label("Prompt").fill(PROMPT)
                page.get_by_role("button", name="Write", exact=True).click()
                page.wait_for_timeout(12_000)
                take(page, 5, f"compare-{scheme}")
                take_part(page, "recall", f"evaluation-{scheme}", 930)
                take(page, 3, f"profile-{scheme}")
        with looking(browser, address, viewport={"width": 390, "height": 844}, device_scale_factor=2) as page:
            page.wait_for_selector("#evaluation table", state="attached")
            take_part(page, "needle", "evaluation-narrow", 1320)
            take(page, 3, "narrow")


if __name__ == "__main__":
    main()
