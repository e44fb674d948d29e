"""What every call of the page and of its API needs: its visitor, and refusals that are shown as sentences.

The large libraries are imported once the page is open, so that neither the page nor the first inspection waits.
While transformers is imported it replaces its own module, and another thread might see the first, nearly empty one. So
one thread imports it, and all others wait for that thread. So does the end of the process, because libraries abort if
the process ends while they are being loaded.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import cache, cached_property, wraps
from importlib import import_module
from typing import Any, TypeAlias, get_type_hints

import gradio as gr
from pydantic import validate_call

from linearizer.errors import LinearizerError
from linearizer.page.chat.cards import MAX_PICTURES
from linearizer.page.limits import MAX_COMPARED_TOKENS
from linearizer.page.planning import EFFORTS
from linearizer.page.visitors import Visitor, find_visitor
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.json_products import explained_faults
from linearizer.plan.options import Option, options_of
from linearizer.plan.plan import Plan
from linearizer.report import markup
from linearizer.run.folder import Run
from linearizer.run.results import PARTS, Request

Profile: TypeAlias = gr.OAuthProfile | None
Token: TypeAlias = gr.OAuthToken | None
Memory = dict[str, Any]  # that a browser stores: {"secret", "run"}
USUAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
SECRET = inspect.Parameter("secret", USUAL, default="", annotation=str)
ACCOUNT = (
    SECRET.replace(name="profile", default=None, annotation=Profile),
    SECRET.replace(name="token", default=None, annotation=Token),
)  # Gradio passes both if the visitor has signed in
# Gradio sends the progress of every event to every part that ever showed progress, and copies its figures each time.
# So an event without progress names no part for it, and an event with progress names one.
HIDDEN: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}
QUICK: dict[str, Any] = {**HIDDEN, "queue": False}  # Gradio shows no errors of these events: they return sentences
SLOW: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private", "concurrency_limit": 4}
ONCE: dict[str, Any] = {**SLOW, "show_progress_on": [], "trigger_mode": "once"}
FIRST_IMPORT, IMPORTED = threading.Lock(), threading.Event()


def begin_import() -> None:
    """Start the import of the large libraries, once."""
    if FIRST_IMPORT.acquire(blocking=False):
        threading.Thread(target=import_libraries).start()


def import_libraries() -> None:
    try:
        import_module("transformers")
    finally:
        IMPORTED.set()  # an error is raised again by the next import
    import_module("linearizer.pipeline")
    gc.freeze()  # later garbage collections would visit all modules, and stop every thread for more than a second


def identify_visitor(secret: str, profile: Profile, token: Token) -> Visitor:
    """Return the visitor of a call. Every call begins with this, and may import anything afterwards."""
    begin_import()
    IMPORTED.wait()
    return find_visitor(profile.username if profile else None, token.token if token else None, secret)


class Browser:
    """The browser of a call: the memory that it stores, which may be anything, and the account of its visitor."""

    def __init__(self, memory: object, profile: Profile = None, token: Token = None) -> None:
        self.memory: Memory = memory if isinstance(memory, dict) else {}
        self.profile, self.token = profile, token

    @cached_property
    def visitor(self) -> Visitor:
        return identify_visitor(self.memory.get("secret") or "", self.profile, self.token)

    @property
    def run_name(self) -> str:
        """The name of the run that this browser watches; empty if none."""
        name = self.memory.get("run")
        return name if isinstance(name, str) else ""

    def find_run(self) -> Run:
        """Open the run that this browser watches."""
        return self.visitor.find_run(self.run_name)


def handler(function: Callable) -> Callable:
    """Let Gradio call a function with a browser and the values that the page sends; show refusals as sentences.

    Gradio sends the browser's memory first, and fills in the account by the types of parameters.
    """
    sent_parameters = list(inspect.signature(function).parameters.values())[1:]
    types = {"memory": Memory, "profile": Profile, "token": Token} | get_type_hints(function)
    browser_parameters = [inspect.Parameter(name, USUAL) for name in ("memory", "profile", "token")]

    @wraps(function)
    def answer(memory: object, profile: Profile, token: Token, *sent: Any) -> Any:
        with refusals():
            return function(Browser(memory, profile, token), *sent)

    @wraps(function)
    def answers(memory: object, profile: Profile, token: Token, *sent: Any) -> Iterator[Any]:
        with refusals():
            yield from function(Browser(memory, profile, token), *sent)

    call: Any = answers if inspect.isgeneratorfunction(function) else answer
    call.__signature__ = inspect.Signature([*browser_parameters, *sent_parameters])
    call.__annotations__ = types
    return call


def endpoint(action: Callable[..., Any], with_secret: bool) -> Callable[..., Any]:
    """Let a client call an action: check its arguments, and send dataclasses as dictionaries.

    In place of the visitor the client sends a secret, before the keyword-only arguments, or has signed in.
    """
    types = get_type_hints(action)
    declared = list(inspect.signature(action).parameters.values())[1:]
    annotated = [entry.replace(annotation=types[entry.name]) for entry in declared]
    positional = [entry for entry in annotated if entry.kind is USUAL]
    keyword_only = [entry.replace(kind=USUAL) for entry in annotated if entry.kind is not USUAL]
    parameters = [*positional, *[SECRET] * with_secret, *keyword_only, *ACCOUNT]
    signature = inspect.Signature(parameters, return_annotation=types["return"])
    checked_action = validate_call(config={"allow_inf_nan": False})(action)

    @wraps(action)
    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        visitor = identify_visitor(*(bound.arguments.pop(entry.name, entry.default) for entry in (SECRET, *ACCOUNT)))
        with refusals(on_page=False), explained_faults():
            result = checked_action(visitor, **bound.arguments)
        return [to_plain(item) for item in result] if isinstance(result, list) else to_plain(result)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {entry.name: entry.annotation for entry in parameters} | {"return": types["return"]}
    return call


def add_endpoint(action: Callable[..., Any], with_secret: bool, at_a_time: int) -> None:
    """Make an action an endpoint under its own name; it answers so many calls at a time."""
    gr.api(
        endpoint(action, with_secret),
        api_name=action.__name__,
        api_description=(inspect.getdoc(action) or "").format_map(described_options()),
        concurrency_limit=at_a_time,
    )


@cache
def described_options() -> dict[str, str]:
    """Return the texts that replace the braces in descriptions: the values that options may have."""
    plan, encoder, request = (options_of(kind) for kind in (Plan, EncoderPlan, Request))
    return {
        "budget": plan["budget"].limits.about,
        "seed": plan["seed"].limits.about,
        "efforts": ", ".join(EFFORTS),
        "parts": ", ".join(PARTS),
        "prompt": "at most as many tokens as the model reads, minus those it writes",
        "pictures": f"at most {MAX_PICTURES} in a chat, as URLs with data (data:image/png;base64,…)",
        "tokens": f"1 to {MAX_COMPARED_TOKENS}",
        "plan": list_options(plan, "model", "budget"),
        "encoder": list_options(encoder, "model", "budget"),
        "request": list_options(request, "parts"),
    }


def list_options(options: Mapping[str, Option], *others: str) -> str:
    """List options, except some, each with the values that it may have."""
    listed = (f"{name}: {option.help}" for name, option in options.items() if name not in others)
    return f"a dictionary of {'; '.join(listed)}"


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
