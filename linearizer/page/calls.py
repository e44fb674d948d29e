"""What every call of the page and of its API needs: whose call it is, and a refusal that is shown as a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, wraps
from typing import Any, TypeAlias, get_type_hints

import gradio as gr

from linearizer.errors import LinearizerError
from linearizer.page import warmup
from linearizer.page.visitors import Visitor, find_visitor
from linearizer.report import markup
from linearizer.run.folder import Run

Profile: TypeAlias = gr.OAuthProfile | None
Token: TypeAlias = gr.OAuthToken | None
Memory = dict[str, Any]  # what a browser keeps: {"secret", "run"}


def identify_visitor(secret: str, profile: Profile, token: Token) -> Visitor:
    """Tell whose call this is. Every call asks this first, and may import anything after."""
    warmup.wait_for_import()
    return find_visitor(profile.username if profile else None, token.token if token else None, secret)


class Browser:
    """A browser that asks: what it keeps, which may be anything, and the account that its visitor signed in with."""

    def __init__(self, memory: object, profile: Profile = None, token: Token = None) -> None:
        self.memory: Memory = memory if isinstance(memory, dict) else {}
        self.profile, self.token = profile, token

    @cached_property
    def visitor(self) -> Visitor:
        return identify_visitor(self.memory.get("secret") or "", self.profile, self.token)

    @property
    def run_name(self) -> str:
        """The name of the run that this browser watches; empty where it watches none."""
        name = self.memory.get("run")
        return name if isinstance(name, str) else ""

    def find_run(self) -> Run:
        """Open the run that this browser watches."""
        return self.visitor.find_run(self.run_name)


def handler(function: Callable) -> Callable:
    """Let Gradio call a function of a browser and of what the page sends, and show its refusals as sentences.

    Gradio sends the browser's memory first; whose account it is, it tells by the types of parameters.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    types = {"memory": Memory, "profile": Profile, "token": Token} | get_type_hints(function)
    first = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("memory", "profile", "token")
    ]

    @wraps(function)
    def answer(memory: object, profile: Profile, token: Token, *sent: Any) -> Any:
        with refusals_on_page():
            return function(Browser(memory, profile, token), *sent)

    @wraps(function)
    def answers(memory: object, profile: Profile, token: Token, *sent: Any) -> Iterator[Any]:
        with refusals_on_page():
            yield from function(Browser(memory, profile, token), *sent)

    call: Any = answers if inspect.isgeneratorfunction(function) else answer
    call.__signature__ = inspect.Signature([*first, *own])
    call.__annotations__ = types
    return call


@contextmanager
def refusals_on_page() -> Iterator[None]:
    """Show a refusal as a sentence on the page, escaped, and never as a traceback."""
    try:
        yield
    except LinearizerError as error:
        sentence = markup.sentence_html(str(error))
        raise gr.Error(sentence, title="That cannot be done", duration=15, print_exception=False) from None


@contextmanager
def refusals_in_api() -> Iterator[None]:
    """Answer a refused call of the API with the sentence that says why."""
    try:
        yield
    except LinearizerError as error:
        raise gr.Error(markup.without_folders(str(error)), print_exception=False) from None
