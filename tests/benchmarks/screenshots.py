"""Take the README's picture of the page:  python -m tests.benchmarks.screenshots  (a minute; needs Chromium).

With `--look FOLDER` every step is pictured there instead, at three widths (or at some `--width`), light and dark, to be
looked at: before and after a choice, of the finished example, of a run that has nothing to show yet, of a finished run,
and the list of runs. A line says what scrolls sideways.
"""

import argparse
import tempfile
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)
from tests.support.page_server import FITS, SCHEMES, SMALL, browsing, finished, looking, serving, show_in

ASSETS = Path(__file__).parents[2] / "assets"
SIZE = {"width": 1360, "height": 1720}
WIDTHS = {1440: 1000, 768: 1024, 390: 844}  # pixels of screens, with their heights
STEPS = (5, 4, 3, 2, 1)
FOLDED = ("Advanced", "Do this elsewhere", "Work in a job")


def take_profile(browser, url):
    """Picture the profile step of the finished example."""
    with looking(browser, f"{url}?run=example-run", viewport=SIZE, device_scale_factor=2) as page:
        page.click("#step-3-button")
        page.wait_for_selector("#step-3 .heatmaplayer")
        page.wait_for_selector("#bars .barlayer .point", state="attached")
        page.wait_for_timeout(1500)
        page.screenshot(path=ASSETS / "page-profile-light.png")


class Pictures:
    """Pictures of one page, which is shown in the light and in the dark."""

    def __init__(self, page, folder, width):
        self.page, self.folder, self.width = page, folder, width

    def take(self, name):
        """Picture the whole page in both schemes."""
        for scheme in SCHEMES:
            show_in(self.page, scheme)
            self.page.wait_for_timeout(700)
            if not self.page.evaluate(FITS):
                print(f"{name} scrolls sideways at {self.width} pixels, {scheme}")
            self.page.screenshot(path=self.folder / f"{name}-{self.width}-{scheme}.png", full_page=True)

    def take_choices(self):
        """Picture the first two steps, from the landing page on."""
        self.take("1-landing")
        self.page.click("#demo")
        self.page.wait_for_selector("#model-card .lz-good")
        self.take("1-model")
        self.page.click("#to-budget")
        self.page.wait_for_selector("#machine .lz-good")
        self.take("2-budget")
        self.page.locator("#way input[value=paper]").check()
        self.page.wait_for_selector("#recipe")
        for title in FOLDED:
            self.page.get_by_role("button", name=title).click()
        self.page.locator("#flavor input").click()
        self.page.get_by_role("option", name="Nvidia L4").click()
        self.page.click("#job-offer")
        self.page.wait_for_selector("#job-question .lz-message")
        self.take("2-unfolded")

    def take_run(self, name, ready):
        """Picture every step of a run, from the last on."""
        for step in STEPS:
            self.page.click(f"#step-{step}-button")
            self.page.wait_for_selector(f"#step-{step} h2", state="visible")
            if step in ready:
                self.page.wait_for_selector(ready[step])
            self.take(f"{step}-{name}")

    def take_publishing(self):
        """Picture a document that was read, and what would be sent."""
        self.page.get_by_label("Prompt").fill("The for statement is used to iterate over")
        self.page.get_by_role("button", name="Write", exact=True).click()
        self.page.wait_for_selector("#compare-note .lz-message")
        for title in ("Read a document once", "Publish to the Hub"):
            self.page.get_by_role("button", name=title).click()
        self.page.get_by_role("button", name="Show what will be sent").click()
        self.page.wait_for_selector("#files details")
        self.take("5-published")

    def take_list(self, *names):
        """Picture the list of runs, and two of them side by side."""
        for place, name in zip(("#first", "#second"), names, strict=True):
            self.page.locator(f"{place} input").fill(name)
            self.page.locator(f"{place} input").press("Enter")
        self.page.wait_for_selector("#compared table")
        self.take("6-runs")


def take_all(browser, server, folder, widths):
    """Picture every step at some widths in both schemes."""
    from linearizer.plan.plan import Plan
    from linearizer.run.folder import Run

    folder.mkdir(parents=True, exist_ok=True)
    own = finished(server.url, SMALL)
    Run.create(server.runs / "new", Plan.of(model="demo", budget=64))
    drawn = {5: "#part-speed .js-plotly-plot", 3: "#step-3 .heatmaplayer"}
    for width in widths:
        for address, work in (
            ("", lambda pictures: pictures.take_choices()),
            ("?run=example-run", lambda pictures: pictures.take_run("example", drawn)),
            ("?run=new", lambda pictures: pictures.take_run("new", {})),
            (f"?run={own}", lambda pictures: pictures.take_run("own", {4: "#step-4 .js-plotly-plot"})),
            (f"?run={own}", lambda pictures: pictures.take_publishing()),
            ("runs", lambda pictures: pictures.take_list(own, "example-run")),
        ):
            with looking(browser, server.url, viewport={"width": width, "height": WIDTHS[width]}) as page:
                page.goto(server.url + address)
                page.wait_for_selector("#runs table" if address == "runs" else "#heard", state="attached")
                work(Pictures(page, folder, width))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--look", type=Path, metavar="FOLDER")
    parser.add_argument("--width", type=int, choices=WIDTHS, nargs="*", default=[*WIDTHS])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs, serving(Path(runs) / "runs", HF_TOKEN="hf_fake_ann") as server:
        with browsing() as browser:
            take_all(browser, server, asked.look, asked.width) if asked.look else take_profile(browser, server.url)


if __name__ == "__main__":
    main()
