"""Measures how quick the page is, and what it costs: python -m tests.benchmarks.page (five minutes; needs Chromium).

Every figure is what a person at the browser has: a real Chromium, a server in a process of its own, the demo model.
Times are wall time, so other work on the machine makes them longer; the load is written beside them.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)
from tests.support.page_server import SMALL, browsing, looking, server, wait_for

OUT = Path(__file__).parent / "results" / "page.json"
TARGETS = {
    "opens_seconds": 5.0,
    "slider_budget_ms": 150.0,
    "slider_share_ms": 150.0,
    "tabs_cpu": 0.10,
    "updates_per_second": 10.0,
    "streaming_slows": 0.05,
}
SAYS = {
    "opens_seconds": "from the start of its process until the first button of the page can be pressed, seconds",
    "slider_budget_ms": "from letting go of the slider of step 2 until its figures stand, ms",
    "slider_share_ms": "from letting go of the slider of step 3 until every head has its share and stands, ms",
    "tabs_cpu": "processor time of the server with all tabs open, in shares of one core",
    "updates_per_second": "changes of a column in a tab, from the first to the last of two streams",
    "streaming_slows": "by how much longer both models write while a tab shows it than while nobody looks, as a share",
}
PARTS = ("opening", "sliding", "streaming", "watching")
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT, TOKENS = "The for statement is used to iterate over", 192


def opening(browser, times):
    """Start the page anew so many times, and look at it at once."""
    result, worked = [], []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder, closing(browser.new_page()) as page:
            begin = time.perf_counter()
            with server(Path(folder) / "runs") as (url, _, process):
                while not answers(url):
                    time.sleep(0.02)
                page.goto(url, wait_until="commit")
                page.wait_for_selector("#heard", state="attached")  # the page's own script has begun
                page.click("#demo", trial=True)
                result.append(time.perf_counter() - begin)
                worked.append(processor_seconds(process.pid))
                page.goto("about:blank")
    return {
        "opens_seconds": statistics.median(result),
        "opens_each": result,
        "opens_processor_seconds": statistics.median(worked),
    }


def answers(url):
    """Tell whether a server listens."""
    try:
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].strip("/"))), 1).close()
    except OSError:
        return False
    return True


WATCH = """(selectors) => {
  window.seen = {};
  addEventListener('pointerup', () => { window.released = performance.now() }, true);
  for (const one of selectors)
    new MutationObserver(() => { window.seen[one] = performance.now() })
      .observe(document.querySelector(one), {childList: true, subtree: true, characterData: true});
}"""


def slider(page, dial, answers, times):
    """Drag a slider and let go, and say when each of its answers stood still: milliseconds after the release."""
    page.evaluate(WATCH, answers)
    track = page.locator(f"{dial} input[type=range]")
    track.scroll_into_view_if_needed()
    box, result = track.bounding_box(), {answer: [] for answer in answers}
    for turn in range(times):
        at = 0.2 + 0.6 * ((turn * 7) % 10) / 10
        page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * at, box["y"] + box["height"] / 2, steps=5)
        page.mouse.up()
        page.wait_for_timeout(2000)
        for answer in answers:
            result[answer].append(page.evaluate("(one) => window.seen[one] - window.released", answer))
    return result


def sliding(browser, url, run, times):
    """Move both sliders."""
    with looking(browser, url) as page:
        page.click("#demo")
        page.wait_for_selector("#model-card .lz-good")
        page.click("#to-budget")
        page.wait_for_selector("#efforts td")
        card = slider(page, "#budget", ["#budget-card"], times)["#budget-card"]
    with looking(browser, f"{url}?run={run}") as page:
        page.wait_for_selector("#evaluation table", state="attached")
        page.click("#step-3-button")
        page.wait_for_selector("#bars .barlayer")
        sliders = slider(page, "#other", ["#other-card", "#bars"], times)
    return {
        "slider_budget_ms": statistics.median(card),
        "slider_budget_each": card,
        "slider_share_ms": statistics.median(sliders["#other-card"]),
        "slider_share_each": sliders["#other-card"],
        "slider_bars_ms": statistics.median(sliders["#bars"]),
        "slider_bars_each": sliders["#bars"],
    }


def answering(folder, times):
    """Time what the server does for a slider, without Gradio, network and browser, in milliseconds."""
    from linearizer import pipeline
    from linearizer.page import plan_cards, planning
    from linearizer.page.shares import draw_shares
    from linearizer.run.folder import Run

    run, inspection = Run.open(folder), pipeline.inspect("demo")
    layers, positions = inspection.layers, inspection.max_positions
    budgets = [64 + 8 * n for n in range(times)]
    of_budget = [
        clocked(lambda b=b: plan_cards.budget_card(planning.make_plan("demo", b, "Quick", {}), layers, positions))
        for b in budgets
    ]
    both = [clocked(lambda b=b: draw_shares(run, b)) for b in budgets]
    return {"server_budget_ms": statistics.median(of_budget), "server_share_ms": statistics.median(both)}


def clocked(work):
    """Time one piece of work, in milliseconds."""
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)


def processor_seconds(pid):
    """Say how long a process has had a processor, in itself and in the system's behalf."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def spent(pid, seconds):
    """Give the share of one core that a process takes over some seconds."""
    begin, before = time.perf_counter(), processor_seconds(pid)
    time.sleep(seconds)
    return (processor_seconds(pid) - before) / (time.perf_counter() - begin)


@contextmanager
def tabs(browser, url, count):
    """Keep so many tabs open that watch one run, each of a visitor's own: a browser has six connections to a server."""
    with ExitStack() as opened:
        pages = [opened.enter_context(closing(browser.new_context())).new_page() for _ in range(count)]
        for page in pages:
            page.goto(url, wait_until="commit")
        for page in pages:
            page.wait_for_selector("#run-card .lz-state", timeout=120_000, state="attached")
        yield pages


LOOKS = "performance.getEntriesByType('resource').filter(one => one.name.includes('run/predict')).length"


def watching(browser, client, url, pid, count, seconds):
    """Let so many tabs watch a run that trains, and say what that costs the server."""
    run = client.predict("demo", 64, "Try it", {**SMALL, "steps": 100_000}, api_name="/start_run")
    while (client.predict(run, api_name="/run_status")["step"] or {}).get("event") != "distill":
        time.sleep(0.5)
    alone = spent(pid, seconds / 2)
    with tabs(browser, f"{url}?run={run}", count) as pages:
        time.sleep(5)  # what is sent once has been sent
        before = sum(page.evaluate(LOOKS) for page in pages)
        begin, cost = time.monotonic(), spent(pid, seconds)
        looks = (sum(page.evaluate(LOOKS) for page in pages) - before) / (time.monotonic() - begin)
    client.predict(run, api_name="/stop_run")
    return {"tabs": count, "tabs_cpu": cost, "tabs_cpu_alone": alone, "tabs_looks_per_second": looks}


COUNT = """(selectors) => {
  window.changes = Object.fromEntries(selectors.map(one => [one, []]));
  const mine = window.counting = (window.counting ?? 0) + 1;  // an earlier count ends
  for (const one of selectors) {
    const area = document.querySelector(one);
    let last = area.innerText;
    const look = () => { if (area.innerText !== last) { last = area.innerText; changes[one].push(performance.now()) }
      if (window.counting === mine) requestAnimationFrame(look) };
    look();
  }
}"""


def streaming(browser, client, url, run, times):
    """Let both models write, in turn before a tab and with nobody looking, and compare their own clocks."""
    shown, alone, most, busy = [], [], 0.0, 0
    with looking(browser, f"{url}?run={run}") as page:
        page.wait_for_selector("#evaluation table", state="attached")
        page.get_by_label("Prompt").fill(PROMPT)
        page.get_by_role("spinbutton", name="number input for Tokens").last.fill(str(TOKENS))
        page.keyboard.press("Tab")
        client.predict(run, PROMPT, 8, api_name="/compare_models")  # loads both
        for _ in range(times):
            result = client.predict(run, PROMPT, TOKENS, api_name="/compare_models")
            alone.append(sum((TOKENS - 1) / result[side]["tokens_per_second"] for side in ("teacher", "student")))
            page.evaluate(COUNT, ["#teacher", "#student"])
            page.click("#compare")
            page.wait_for_function(STILL, timeout=120_000)
            rates = [float(page.locator(f"#{side}-card dd").first.inner_text()) for side in ("teacher", "student")]
            shown.append(sum((TOKENS - 1) / rate for rate in rates))
            changes = list(page.evaluate("changes").values())
            most = max(most, *map(rate_of, changes))
            busy = max(busy, *map(busiest, changes))
    return {
        "updates_per_second": most,
        "updates_in_the_busiest_second": busy,
        "streaming_slows": statistics.median(shown) / statistics.median(alone) - 1,
        "streaming_slows_at_best": min(shown) / min(alone) - 1,
        "streamed_seconds": shown,
        "unseen_seconds": alone,
    }


STILL = """() => Object.values(changes).every(one => one.length > 3)
  && performance.now() - Math.max(...Object.values(changes).flat()) > 3000"""


def rate_of(moments):
    """Give the changes a second, from the first to the last."""
    return 1000 * (len(moments) - 1) / (moments[-1] - moments[0])


def busiest(moments):
    """Count the changes in the second that had most."""
    return max((sum(begin <= moment < begin + 1000 for moment in moments) for begin in moments), default=0)


def measured(arguments):
    """Take all figures."""
    from gradio_client import Client

    result = {"load": os.getloadavg(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        if "opening" in arguments.parts:
            result |= opening(browser, arguments.times)
        root = Path(folder) / "runs"
        with server(root) as (url, log, process):
            wait_for(url, process, log)
            client = Client(url, verbose=False, analytics_enabled=False)
            run = client.predict("demo", 128, "Try it", {**SMALL, "steps": 2}, api_name="/start_run")
            while client.predict(run, api_name="/run_status")["state"] != "done":
                time.sleep(0.5)
            if "sliding" in arguments.parts:
                result |= sliding(browser, url, run, arguments.times) | answering(root / run, arguments.times)
            if "streaming" in arguments.parts:
                result |= streaming(browser, client, url, run, arguments.times)
            if "watching" in arguments.parts:
                result |= watching(browser, client, url, process.pid, arguments.tabs, arguments.seconds)
    return result


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="repetitions; medians are compared with the targets")
    parser.add_argument("--tabs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which tabs watch")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="others keep their figures")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(arguments)
    kept = json.loads(arguments.out.read_text())["figures"] if arguments.out.exists() else {}
    result = kept | measured(arguments)
    arguments.out.write_text(json.dumps({"figures": result, "targets": TARGETS, "means": SAYS}, indent=1) + "\n")
    for name, target in ((name, target) for name, target in TARGETS.items() if name in result):
        verdict = "ok" if result[name] <= target else "MISSED"
        print(f"{result[name]:10.3f}  at most {target:<7g} {verdict:7} {SAYS[name]}")


if __name__ == "__main__":
    main()
