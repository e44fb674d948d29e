"""Take the README's picture of the page:  python -m tests.benchmarks.screenshots  (a minute; needs Chromium).

With `--look FOLDER` the page is pictured there instead, at three widths (or at some `--width`), light and dark: the
first two steps, every step of the finished example, of a run without results and of a finished run, and the list of
runs. A line names what scrolls sideways.
"""

import argparse
import tempfile
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)
from tests.support.page_server import FITS, SCHEMES, SMALL, browsing, finished, looking, serving, show_in
from tests.support.page_steps import unfold

ASSETS = Path(__file__).parents[2] / "assets"
SIZE = {"width": 1360, "height": 1720}
WIDTHS = {1440: 1000, 768: 1024, 390: 844}  # pixels of screens, with their heights
SETTLES = 1500  # milliseconds until charts stand


def take_profile(browser, url):
    """Picture the profile step of the finished example."""
    with looking(browser, f"{url}?run=example-run", viewport=SIZE, device_scale_factor=2) as page:
        page.click("#step-3-button")
        page.wait_for_selector("#step-3 .heatmaplayer")
        page.wait_for_selector("#needs .barlayer .point", state="attached")
        page.wait_for_timeout(SETTLES)
        page.screenshot(path=ASSETS / "page-profile-light.png")


def take(page, path):
    """Picture the whole page in both schemes."""
    for scheme in SCHEMES:
        show_in(page, scheme)
        page.wait_for_timeout(SETTLES)
        if not page.evaluate(FITS):
            print(f"{path.name} scrolls sideways, {scheme}")
        page.screenshot(path=path.with_name(f"{path.name}-{scheme}.png"), full_page=True)


def take_all(browser, server, folder, widths):
    """Picture every step at some widths in both schemes."""
    from linearizer.plan.plan import Plan
    from linearizer.run.folder import Run

    folder.mkdir(parents=True, exist_ok=True)
    runs = {"example": "example-run", "new": "new", "own": finished(server.url, SMALL)}
    Run.create(server.runs / "new", Plan.of(model="demo", budget=64))
    for width in widths:
        with looking(browser, server.url, viewport={"width": width, "height": WIDTHS[width]}) as page:
            take(page, folder / f"1-landing-{width}")
            page.click("#demo")
            page.wait_for_selector("#model-card .lz-good")
            take(page, folder / f"1-model-{width}")
            page.click("#to-budget")
            page.wait_for_selector("#forecast .lz-good")
            take(page, folder / f"2-start-{width}")
            for folded in ("Change how", "Advanced"):
                unfold(page, folded)
            take(page, folder / f"2-budget-{width}")
            for name, run in runs.items():
                page.goto(f"{server.url}?run={run}")
                page.wait_for_selector("#heard", state="attached")
                for step in range(1, 7):
                    if not page.locator(f"#step-{step}-button").count():
                        continue  # this run trains nothing
                    page.click(f"#step-{step}-button")
                    page.wait_for_selector(f"#step-{step} h2", state="visible")
                    take(page, folder / f"{step}-{name}-{width}")
            page.goto(f"{server.url}runs")
            page.wait_for_selector("#runs article")
            take(page, folder / f"6-runs-{width}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", type=Path, metavar="FOLDER")
    parser.add_argument("--width", type=int, choices=WIDTHS, nargs="*", default=[*WIDTHS])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs, serving(Path(runs) / "runs", HF_TOKEN="hf_fake_ann") as server:
        with browsing() as browser:
            if arguments.look:
                take_all(browser, server, arguments.look, arguments.width)
            else:
                take_profile(browser, server.url)


if __name__ == "__main__":
    main()
