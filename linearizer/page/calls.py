"""What every call of the page and of its API needs: whose call it is, and a refusal that is shown as a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import gradio as gr

from linearizer.errors import LinearizerError
from linearizer.page import warmup
from linearizer.page.visitors import Visitor, find_visitor
from linearizer.publish import html

Profile: TypeAlias = gr.OAuthProfile | None
Token: TypeAlias = gr.OAuthToken | None


def identify_visitor(secret: str, profile: Profile, token: Token) -> Visitor:
    """Tell whose call this is. Every call asks this first, and may import anything after."""
    warmup.wait_for_import()
    return find_visitor(profile.username if profile else None, token.token if token else None, secret)


@contextmanager
def refusals_on_page() -> Iterator[None]:
    """Show a refusal as a sentence on the page, escaped, and never as a traceback."""
    try:
        yield
    except LinearizerError as error:
        sentence = html.sentence_html(str(error))
        raise gr.Error(sentence, title="That cannot be done", duration=15, print_exception=False) from None


@contextmanager
def refusals_in_api() -> Iterator[None]:
    """Answer a refused call of the API with the sentence that says why."""
    try:
        yield
    except LinearizerError as error:
        raise gr.Error(html.without_folders(str(error)), print_exception=False) from None
