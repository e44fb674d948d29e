"""A server of the page in a process of its own, a browser to look at it, and runs brought to an end afterwards."""

import base64
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.runs import end_runs

ARGUMENTS = [
    *"--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync".split(),
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # no test reaches the world outside
]
RULES = ["color-contrast", "link-in-text-block"]  # of axe, that another scheme may break
COLOURS = {"runOnly": {"type": "rule", "values": RULES}}
GRADIO = {"image-redundant-alt"}  # the pictures in Gradio's footer repeat the words beside them; they cannot be set
SMALL = {
    "recipe": "features",
    "texts": 2,
    "length": 128,
    "steps": 4,
    "dtype": "float32",
}  # a run of seconds
SPACE = {  # what the Hub sets in a Space
    "SYSTEM": "spaces",
    "SPACE_ID": "owner/linearizer",
    "OAUTH_CLIENT_ID": "client",
    "OAUTH_CLIENT_SECRET": "client-secret",
    "OAUTH_SCOPES": "openid profile",
    "OPENID_PROVIDER_URL": "http://127.0.0.1:9",
}

SPACE_MINUTES = 4  # that a run may work on the Space of the tests
LONG = 120_000  # milliseconds that a run on a busy machine may take
FITS = "() => document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(runs, command=None, folder=None, **environment):
    """Start a server of the page, and give its address, what it writes to its log, and its process, at once."""
    port, log = free_port(), Path(runs).parent / f"server-{free_port()}.log"
    known = {**os.environ, "LINEARIZER_RUNS": str(runs), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "GRADIO_SSR_MODE": "0"}
    known.pop("TRITON_INTERPRET", None)
    known.update(GRADIO_SERVER_PORT=str(port))
    page = [sys.executable, "-m", "linearizer", "app", "--port", str(port), "--host", "127.0.0.1"]
    with log.open("wb") as said:
        process = subprocess.Popen(command or page, cwd=folder, env={**known, **environment}, stdout=said, stderr=said)
    try:
        yield f"http://127.0.0.1:{port}/", log, process
    finally:
        process.terminate()
        process.wait(20)
        end_runs(Path(runs))


class Served(NamedTuple):
    """A server that answers."""

    url: str
    runs: Path  # the folder of its runs
    log: Path


@contextmanager
def serving(runs, command=None, folder=None, **environment):
    """Serve the page until the block ends."""
    with server(runs, command, folder, **environment) as (url, log, process):
        wait_for(url, process, log)
        yield Served(url, Path(runs), log)


def wait_for(url, process, log):
    for _ in range(3000):  # a very busy machine takes minutes to start it
        assert process.poll() is None, log.read_text()
        try:
            return urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the page does not open: " + log.read_text())


def client_of(url, **how):
    """Connect to the API of a server, which may be slow to answer on a busy machine."""
    from gradio_client import Client

    return Client(url, verbose=False, analytics_enabled=False, httpx_kwargs={"timeout": 120}, **how)


def finished(url, options):
    """Make a run of the demo model through the API, and give its name once it is done."""
    client = client_of(url)
    name = client.predict("demo", 64, "Try it", options, api_name="/start_run")
    assert ended(client, name)["state"] == "done"
    return name


def ended(client, run, *secret):
    """Wait until a run is neither queued nor running, and give its status."""
    end = time.monotonic() + 180
    while (status := client.predict(run, *secret, api_name="/run_status"))["state"] in ("queued", "running"):
        assert time.monotonic() < end, status
        time.sleep(0.2)
    return status


def process_of(url):
    """Find the process of the server at an address."""
    port = f"--port\0{url.strip('/').rpartition(':')[2]}\0".encode()
    return next(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if port in path.read_bytes())


def chromium():
    """Find the browser; where pages must be tested and there is none, fail."""
    result = shutil.which("chromium")
    if result is None and os.environ.get("LINEARIZER_PAGE_TESTS") == "1":
        pytest.fail("LINEARIZER_PAGE_TESTS=1 and no chromium here: install it")
    if result is None:
        pytest.skip("no chromium here")
    return result


@contextmanager
def browsing():
    """Open a browser."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


IDLE = {}  # browser -> pages with nothing of a visitor but the page's own scripts, compiled
SCREEN = {"width": 1280, "height": 900}
SCHEMES = ("light", "dark")


@contextmanager
def looking(browser, url, viewport=SCREEN, color_scheme="light", anew=False, **how):
    """Open a page as a visitor of their own; afterwards nothing may have gone wrong in its console.

    Gradio aborts its stream when a page is left or loaded again, and the browser says so. Unless the browser starts
    `anew`, it has what visitors before have loaded of the page's own scripts. Nothing moves: a browser that draws
    without a graphics card is busy with what does.
    """
    idle, own = IDLE.setdefault(browser, []), anew or bool(how)
    page = browser.new_context(viewport=viewport, **how).new_page() if own or not idle else idle.pop()
    context, wrong, origin = page.context, [], "/".join(url.split("/")[:3])
    page.set_default_timeout(60_000)
    page.set_viewport_size(viewport)
    page.emulate_media(color_scheme=color_scheme, reduced_motion="reduce")
    listening = {
        "console": lambda message: wrong.append(where(message)) if bad(message, origin) else None,
        "pageerror": lambda error: None if is_gradios(error) else wrong.append(f"{error} {error.stack}"),
    }
    for event, listener in listening.items():
        page.on(event, listener)
    try:
        page.goto(url)
        page.wait_for_selector(".lz-head h1")
        page.wait_for_selector("#heard", state="attached")  # from here on it listens
        yield page
        assert not wrong, wrong
        page.goto(f"{origin}/robots.txt")  # a page of the same origin, without scripts
        page.evaluate("() => { localStorage.clear(); sessionStorage.clear() }")
        context.clear_cookies()
        for opened in context.pages:
            if opened != page:
                opened.close()
        for event, listener in listening.items():
            page.remove_listener(event, listener)
    except BaseException:
        context.close()
        raise
    if own:
        context.close()
    else:
        idle.append(page)


def wrong_in_both_schemes(page):
    """List what is wrong with a page in the light and in the dark."""
    found = []
    for scheme in SCHEMES:
        show_in(page, scheme)
        found += [(scheme, *each) for each in wrong(page, {} if scheme == SCHEMES[0] else COLOURS)]
    return found


def show_in(page, scheme):
    """Show an open page in the light or in the dark."""
    page.emulate_media(color_scheme=scheme)
    wait_until_true(page, "(dark) => document.body.classList.contains('dark') == dark", scheme == "dark")


def wrong(page, rules):
    """List what some rules of axe find against WCAG and good practice, apart from what is Gradio's own."""
    from axe_playwright_python.base import AXE_SCRIPT

    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    options = {"resultTypes": ["violations"], "preload": False, **rules}
    result = page.evaluate("async (options) => (await axe.run(options)).violations", options)
    return [
        (violation["id"], node["html"][:200])
        for violation in result
        if violation["id"] not in GRADIO
        for node in violation["nodes"]
    ]


def is_gradios(error):
    """Tell Gradio's own errors: a stream that ends, an open list that measures itself when its step is left, and one
    that draws suggestions while fewer of them arrive."""
    lists = "null (reading 'getBoundingClientRect')", "undefined (reading '0')"
    return error.name == "AbortError" or any(each in error.message for each in lists)


def bad(message, origin):
    """Tell errors from what Gradio says of a Space that the Hub does not have, of streams and of other scripts."""
    elsewhere = not message.location.get("url", origin).startswith((origin, "data:", "blob:"))
    expected = message.text == "Space not found" or "net::ERR_CONNECTION_RESET" in message.text  # a test's own
    return message.type == "error" and not expected and not elsewhere


def where(message):
    """Say what the browser said, and of which address."""
    return f"{message.text} {message.location.get('url', '')}"


def session_of(account, secret="client-secret"):
    """Forge the cookie that signing in leaves, as the Space that knows the secret would."""
    import itsdangerous

    info = {"preferred_username": account, "name": account, "sub": account, "profile": "", "picture": "", "website": ""}
    held = {
        "oauth_info": {
            "userinfo": info,
            "access_token": f"hf_fake_{account}",
            "scope": "openid",
            "expires_at": time.time() + 3600,
        }
    }
    key = hashlib.sha256(f"{secret}-v4".encode()).hexdigest()
    return itsdangerous.TimestampSigner(key).sign(base64.b64encode(json.dumps(held).encode())).decode()


def shown(page, selector, text, timeout=120_000):
    from playwright.sync_api import TimeoutError as PlaywrightTimeout

    script = "([where, what]) => document.querySelector(where)?.innerText.includes(what)"
    try:
        wait_until_true(page, script, [selector, text], timeout=timeout)
    except PlaywrightTimeout as error:
        said = page.evaluate("(where) => document.querySelector(where)?.innerText", selector)
        raise AssertionError(f"{selector} says {said!r} in place of {text!r}") from error


def wait_until_true(page, script, argument=None, timeout=120_000):
    """Wait for what a script says of a page; to ask at every frame would have the browser draw all the time."""
    return page.wait_for_function(script, arg=argument, polling=100, timeout=timeout)
