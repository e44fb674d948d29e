"""Measures how quick the page is, and what it costs: python -m tests.benchmarks.page (three minutes; needs Chromium).

Every figure is what a person at the browser has: a real Chromium, a server in a process of its own, the demo model.
Times are wall time, so other work on the machine makes them longer; the load is written beside them.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)
from tests.support.page_server import (
    SMALL,
    browsing,
    client_of,
    finished,
    looking,
    process_of,
    server,
    serving,
    wait_for,
)

OUT = Path(__file__).parent / "results" / "page.json"
TARGETS = {  # figure -> the most that is accepted, and what it is
    "opens_seconds": (5.0, "from the start of the server's process until the first button can be pressed, seconds"),
    "slider_budget_ms": (150.0, "from the release of the slider of step 2 until its figures are there, ms"),
    "slider_share_ms": (150.0, "from the release of the slider of step 3 until its figures are there, ms"),
    "slider_bars_ms": (150.0, "from the release of the slider of step 3 until every head has its share, ms"),
    "tabs_cpu": (0.10, "processor time of the server while all tabs watch a run, as a share of one core"),
}
TICKS = os.sysconf("SC_CLK_TCK")


def opening(browser, times):
    """Start the page several times, and look at it at once."""
    result = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder, closing(browser.new_page()) as page:
            begin = time.perf_counter()
            with server(Path(folder) / "runs") as (url, log, process):
                wait_for(url, process, log)
                page.goto(url, wait_until="commit")
                page.wait_for_selector("#heard", state="attached")  # the page's own script has begun
                page.click("#demo", trial=True)
                result.append(time.perf_counter() - begin)
                page.goto("about:blank")
    return {"opens_seconds": result}


WATCH = """(selectors) => {
  window.seen = {};
  addEventListener('pointerup', () => { window.released = performance.now() }, true);
  for (const selector of selectors)
    new MutationObserver(() => { window.seen[selector] = performance.now() })
      .observe(document.querySelector(selector), {childList: true, subtree: true, characterData: true});
}"""


def slider(page, dial, answers, times):
    """Drag a slider and let go; return for each answer the milliseconds from the release until its last change."""
    page.evaluate(WATCH, list(answers.values()))
    track = page.locator(f"{dial} input[type=range]")
    track.scroll_into_view_if_needed()
    box, result = track.bounding_box(), {name: [] for name in answers}
    for turn in range(times):
        at = 0.2 + 0.6 * ((turn * 7) % 10) / 10
        page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * at, box["y"] + box["height"] / 2, steps=5)
        page.mouse.up()
        page.wait_for_timeout(2000)
        for name, answer in answers.items():
            result[name].append(page.evaluate("(selector) => window.seen[selector] - window.released", answer))
    return result


def sliding(browser, url, run, times):
    """Move both sliders."""
    with looking(browser, url) as page:
        page.click("#demo")
        page.wait_for_selector("#model-card .lz-good")
        page.click("#to-budget")
        page.wait_for_selector("#forecast .lz-message")
        result = slider(page, "#budget", {"slider_budget_ms": "#budget-card"}, times)
    with looking(browser, f"{url}?run={run}") as page:
        page.wait_for_selector("#verdict .lz-facts")
        page.click("#step-3-button")
        page.wait_for_selector("#bars .barlayer")
        answers = {"slider_share_ms": "#other-card", "slider_bars_ms": "#bars"}
        return result | slider(page, "#other", answers, times)


def processor_share(pid, seconds):
    """Return the share of one core that a process takes for some seconds, in itself and in the kernel."""

    def spent():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    begin, before = time.perf_counter(), spent()
    time.sleep(seconds)
    return (spent() - before) / (time.perf_counter() - begin)


@contextmanager
def tabs(browser, url, count):
    """Keep tabs open that watch one run, each with a context of its own: a browser has six connections to a server."""
    with ExitStack() as opened:
        pages = [opened.enter_context(closing(browser.new_context())).new_page() for _ in range(count)]
        for page in pages:
            page.goto(url, wait_until="commit")
        for page in pages:
            page.wait_for_selector("#run-card .lz-state", timeout=120_000, state="attached")
        yield


def watching(browser, url, count, seconds):
    """Let tabs watch a run that trains, and measure what that costs the server."""
    client, pid = client_of(url), process_of(url)
    run = client.predict("demo", 64, "Try it", {**SMALL, "steps": 100_000}, api_name="/start_run")
    while (client.predict(run, api_name="/run_status")["step"] or {}).get("event") != "distill":
        time.sleep(0.5)
    alone = processor_share(pid, seconds / 2)
    with tabs(browser, f"{url}?run={run}", count):
        time.sleep(5)  # what is sent once has been sent
        result = {"tabs_cpu": [processor_share(pid, seconds)], "tabs_cpu_alone": [alone]}
    client.predict(run, api_name="/stop_run")
    return result


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="repetitions; medians are compared with the targets")
    parser.add_argument("--tabs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which tabs watch")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        each = opening(browser, arguments.times)
        with serving(Path(folder) / "runs") as page:
            each |= sliding(browser, page.url, finished(page.url, {**SMALL, "steps": 2}), arguments.times)
            each |= watching(browser, page.url, arguments.tabs, arguments.seconds)
    figures = {name: statistics.median(values) for name, values in each.items()}
    result = {
        "load": os.getloadavg(),
        "cores": os.cpu_count(),
        "tabs": arguments.tabs,
        "figures": figures,
        "each": each,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, (target, meaning) in TARGETS.items():
        print(
            f"{figures[name]:10.3f}  at most {target:<7g} {'ok' if figures[name] <= target else 'MISSED':7} {meaning}"
        )


if __name__ == "__main__":
    main()
