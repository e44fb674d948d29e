"""What every call of the page and of its API needs: whose call it is, and a refusal that is shown as a sentence.

The large libraries are imported once the page is open, so that neither the page nor the first inspection waits.
transformers replaces its own module while it is imported, so another thread may see the first module, which lacks
nearly everything. So one thread imports it, and all others wait for that thread. The end of the process waits, too,
because libraries abort if the process ends while they are being loaded.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import cached_property, wraps
from importlib import import_module
from typing import Any, TypeAlias, get_type_hints

import gradio as gr
from pydantic import validate_call

from linearizer.errors import LinearizerError
from linearizer.page.visitors import Visitor, find_visitor
from linearizer.plan.json_products import explained_faults
from linearizer.report import markup
from linearizer.run.folder import Run

Profile: TypeAlias = gr.OAuthProfile | None
Token: TypeAlias = gr.OAuthToken | None
Memory = dict[str, Any]  # what a browser keeps: {"secret", "run"}
USUAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
SECRET = inspect.Parameter("secret", USUAL, default="", annotation=str)
ACCOUNT = (
    SECRET.replace(name="profile", default=None, annotation=Profile),
    SECRET.replace(name="token", default=None, annotation=Token),
)  # Gradio gives both where a visitor signed in
FIRST_IMPORT, IMPORTED = threading.Lock(), threading.Event()


def begin_import() -> None:
    """Start the import of the large libraries, once."""
    if FIRST_IMPORT.acquire(blocking=False):
        threading.Thread(target=import_libraries).start()


def import_libraries() -> None:
    try:
        import_module("transformers")
    finally:
        IMPORTED.set()  # an error shows where the library is imported again
    import_module("linearizer.pipeline")
    gc.freeze()  # later collections of garbage would visit all modules, and stop every thread for more than a second


def identify_visitor(secret: str, profile: Profile, token: Token) -> Visitor:
    """Return the visitor of a call. Every call asks this first, and may import anything after."""
    begin_import()
    IMPORTED.wait()
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
    first = [inspect.Parameter(name, USUAL) for name in ("memory", "profile", "token")]

    @wraps(function)
    def answer(memory: object, profile: Profile, token: Token, *sent: Any) -> Any:
        with refusals():
            return function(Browser(memory, profile, token), *sent)

    @wraps(function)
    def answers(memory: object, profile: Profile, token: Token, *sent: Any) -> Iterator[Any]:
        with refusals():
            yield from function(Browser(memory, profile, token), *sent)

    call: Any = answers if inspect.isgeneratorfunction(function) else answer
    call.__signature__ = inspect.Signature([*first, *own])
    call.__annotations__ = types
    return call


def endpoint(action: Callable[..., Any], with_secret: bool) -> Callable[..., Any]:
    """Let a client call an action of a visitor: check what it sends, and send dataclasses as dictionaries.

    In place of the visitor it sends a secret, before what is passed by keyword only, or has signed in.
    """
    types = get_type_hints(action)
    own = [each.replace(annotation=types[each.name]) for each in inspect.signature(action).parameters.values()][1:]
    usual = [each for each in own if each.kind is USUAL]
    by_name = [each.replace(kind=USUAL) for each in own if each.kind is not USUAL]
    parameters = [*usual, *[SECRET] * with_secret, *by_name, *ACCOUNT]
    signature = inspect.Signature(parameters, return_annotation=types["return"])
    checked = validate_call(config={"allow_inf_nan": False})(action)

    @wraps(action)
    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        visitor = identify_visitor(*(bound.arguments.pop(each.name, each.default) for each in (SECRET, *ACCOUNT)))
        with refusals(on_page=False), explained_faults():
            result = checked(visitor, **bound.arguments)
        return [to_plain(each) for each in result] if isinstance(result, list) else to_plain(result)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": types["return"]}
    return call


def to_plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@contextmanager
def refusals(on_page: bool = True) -> Iterator[None]:
    """Show a refusal as a sentence, on the page as HTML, and never as a traceback."""
    try:
        yield
    except LinearizerError as error:
        if not on_page:
            raise gr.Error(markup.without_folders(str(error)), print_exception=False) from None
        sentence = markup.sentence_html(str(error))
        raise gr.Error(sentence, title="That cannot be done", duration=15, print_exception=False) from None
