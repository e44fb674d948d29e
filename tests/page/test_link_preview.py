"""What a link to the page shows where it is sent: the run that it names, and nothing of Gradio."""

import io
import re
from pathlib import Path

import gradio
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from linearizer.page import link_preview
from linearizer.page.visitors import EXAMPLE_NAME

HTML = (Path(gradio.__file__).parent / "templates" / "frontend" / "index.html").read_text(encoding="utf-8")


@pytest.fixture
def client(root):
    """A client of a server that sends Gradio's own page."""
    routes = [Route("/", lambda request: HTMLResponse(HTML)), link_preview.ROUTE]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(link_preview.LinkPreview)]))


def test_a_link_to_a_run_shows_its_model_its_agreement_and_its_bytes(client):
    page = client.get(f"/?run={EXAMPLE_NAME}").text
    (title,) = [line.partition('"')[0] for line in page.split('"og:title" content="')[1:]]
    assert re.match(r"SmolLM2-135M-Instruct: 9\d\.\d% alike in 5\.\d MB, 1/\d+ of its cache at \d,\d+ tokens", title)
    assert page.count('"og:image"') == page.count('"twitter:card"') == 1 and "Click to try out" not in page
    assert f'content="http://testserver/preview.png?run={EXAMPLE_NAME}"' in page


def test_other_links_show_the_recording_also_one_whose_run_is_gone(client, on_space):
    pages = {name: client.get("/", params={"run": name} if name else {}).text for name in ("", "gone", '"><b>')}
    for name, page in pages.items():
        assert link_preview.SITE in page and "<b>" not in page, name


def test_the_picture_has_the_size_that_previews_have_and_is_small(client):
    for address in ("/preview.png", f"/preview.png?run={EXAMPLE_NAME}"):
        sent = client.get(address)
        assert sent.headers["content-type"] == "image/png" and len(sent.content) < 60_000
        assert Image.open(io.BytesIO(sent.content)).size == (1200, 630)
