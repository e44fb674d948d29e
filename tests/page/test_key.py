"""Where other machines reach the page, nothing of it is served without its key."""

import http.cookies
import json
import re
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from tests.support.page_server import client_of, free_port, looking, server

CLOSED = ("", "runs", "config", "gradio_api/info", "gradio_api/queue/data?session_hash=a", "student/a.zip", "theme.css")
POSTED = ("gradio_api/run/list_runs", "gradio_api/call/list_runs", "gradio_api/queue/join", "gradio_api/upload")


@contextmanager
def open_to_others(folder, *options):
    """Serve the page to other machines, and give its address and what the server said."""
    port = free_port()
    command = [sys.executable, "-m", "linearizer", "app", "--host", "0.0.0.0", "--port", str(port), *options]
    with server(folder / "runs", command) as (_, log, process):
        end = time.monotonic() + 180
        while "Running on local URL" not in log.read_text() or not options and "key=" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/", log.read_text()


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Give the address of the page that other machines reach, and its key."""
    with open_to_others(tmp_path_factory.mktemp("open")) as (url, said):
        links = re.findall(r"http://0\.0\.0\.0:\d+/\?key=(\S+)", said)
        assert len(links) == 1 and said.count(links[0]) == 1
        yield url, links[0]


def status(url, content=None, **headers):
    """Ask without following a redirect."""
    sent = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, sent, {"Content-Type": "application/json", **headers})
    try:
        with opener().open(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def opener():
    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_):
            return None

    return urllib.request.build_opener(Stay)


def cookie_of(url, key, path="?"):
    """Open the link, and give the answer's headers and its cookie as a browser sends it."""
    with pytest.raises(urllib.error.HTTPError) as answer:
        opener().open(f"{url}{path}key={key}", timeout=60)
    answer.value.close()
    assert answer.value.code == 303
    ((name, morsel),) = http.cookies.SimpleCookie(answer.value.headers["Set-Cookie"]).items()
    return answer.value.headers, morsel, f"{name}={morsel.coded_value}"


def test_without_its_key_the_page_gives_and_does_nothing(others):
    url, key = others
    for headers in ({}, {"Cookie": "linearizer=x"}, {"Authorization": f"Bearer {key}x"}, {"Host": "localhost"}):
        for path in CLOSED:
            assert status(url + path, **headers) == 401, (path, headers)
        for path in POSTED:
            assert status(url + path, {"data": [""]}, **headers) == 401, (path, headers)
    assert status(f"{url}?key={key}x") == 401


def test_the_link_leaves_a_cookie_that_opens_the_page_and_no_key_in_the_address(others):
    url, key = others
    headers, morsel, cookie = cookie_of(url, key, "runs?run=a+b&")
    assert headers["Location"] == "./runs?run=a+b"
    assert morsel["httponly"] and morsel["samesite"] == "lax" and morsel["path"] == "/"
    for path in ("", "runs", "gradio_api/info"):
        assert status(url + path, Cookie=cookie) == 200, path
    assert status(f"{url}student/a.zip", Cookie=cookie) == 404


def test_a_program_sends_the_key_in_a_header(others):
    url, key = others
    client = client_of(url, headers={"Authorization": f"Bearer {key}"})
    assert isinstance(client.predict(api_name="/list_runs"), list)


def test_another_site_gets_nothing_with_the_cookie_of_a_visitor(others):
    url, key = others
    cookie = cookie_of(url, key)[2]
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://["):
        assert status(f"{url}gradio_api/run/list_runs", {"data": []}, Cookie=cookie, Origin=origin) == 403, origin
    assert status(url, Cookie=cookie, Origin=url.strip("/")) == 200


def test_a_given_key_opens_the_page_and_is_shown_nowhere(tmp_path):
    with open_to_others(tmp_path, "--api-key", "s3cret;\"'") as (url, said):
        assert "s3cret" not in said and status(url) == 401
        cookie = cookie_of(url, "s3cret%3B%22%27")[2]
        assert status(url, Cookie=cookie) == 200


def test_a_browser_opens_the_link_and_uses_the_page(others, browser):
    url, key = others
    with looking(browser, f"{url}?key={key}") as page:
        page.click("#demo")
        page.wait_for_selector("#model-card .lz-good")
        assert page.url.rstrip("?") == url and "key" not in page.evaluate("document.cookie")
