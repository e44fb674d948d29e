"""The handlers of the page's parts: each calls an action and renders the result."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from html import escape
from typing import Any

import gradio as gr

from linearizer.errors import LinearizerError, NotAgreed, PublishError, RequestError
from linearizer.page import actions, cards, plan_cards, run_list, sending
from linearizer.page.calls import Browser, Memory, begin_import, handler
from linearizer.page.layout import SEARCH_ABOUT
from linearizer.page.visitors import EXAMPLE_NAME, MIN_SECRET_CHARACTERS, Visitor, on_space
from linearizer.plan.plan import Plan
from linearizer.report import markup
from linearizer.workers import control

SOON_SECONDS = 0.2  # until the page polls after an action
IDLE_POLL_SECONDS = 5.0  # between two polls while nothing is running
MAX_LINKED_RUNS = 4  # of a visitor, on the first page
SPEED_SECONDS = 5.0  # that a measurement of speed may take: visitors wait for it
WATCHED_PARTS = ("memory", "seen", "walk", "timer", "touched", "note")
RUN_ACTIONS: dict[str, Callable[[Visitor, str], str]] = {  # by the buttons above the steps
    "stop": actions.stop_run,
    "resume": actions.resume_run,
    "use": actions.use_run,
    "pay": partial(actions.resume_run, pay=True),
}

CARD_ACTIONS = {"stop": actions.stop_run, "resume": actions.resume_run, "delete": actions.delete_run}


def show_note(box: str) -> gr.HTML:
    """Show a message above the steps, or none."""
    return gr.HTML(box, visible=True if box else "hidden")


@handler
def open_page(browser: Browser, address: str | None) -> tuple[Memory, Any, Any]:
    """Show the run that the address names, or the first page."""
    begin_import()
    secret, note = str(browser.memory.get("secret") or ""), ""
    if on_space() and len(secret) < MIN_SECRET_CHARACTERS:
        secret = secrets.token_urlsafe(24)  # by which the browser is recognised
    memory: Memory = {"secret": secret, "run": address or None}
    if memory["run"]:
        try:
            memory["run"] = Browser(memory, browser.profile, browser.token).find_run().folder.name
        except LinearizerError as error:
            memory["run"] = None
            note = markup.message_box(str(error), "bad")
    poll_seconds = SOON_SECONDS if memory["run"] else IDLE_POLL_SECONDS
    return memory, show_note(note), gr.Timer(poll_seconds, active=True)


@handler
def list_last_runs(browser: Browser) -> str:
    """Link to the runs that the visitor began last; an unknown visitor has none."""
    with suppress(LinearizerError):
        return run_list.last_runs(control.runs_in(browser.visitor.home, MAX_LINKED_RUNS))
    return ""


@handler
def search_models(browser: Browser, key: gr.KeyUpData) -> Any:
    """Search while the visitor types; without a network, the field tells."""
    try:
        names, about = actions.search_models(browser.visitor, key.input_value), SEARCH_ABOUT
    except RequestError as error:  # the text may still be a folder, or a model in the cache
        names, about = [], markup.without_folders(str(error))
    return gr.Dropdown(choices=names, info=about)


def watch_run(browser: Browser, name: str | None) -> tuple[Any, ...]:
    """Show a run, of which nothing was drawn yet, from its profile step on; return WATCHED_PARTS in their order."""
    step = 1 if not name else 5 if browser.visitor.find_run(name).is_encoder_run else 3
    return (
        {**browser.memory, "run": name},
        {"shown": str(step)},
        gr.Tabs(selected=step),
        gr.Timer(SOON_SECONDS, active=True),
        False,
        show_note(""),  # the old note was about another run
    )


@handler
def branch_run(browser: Browser, budget: float) -> tuple[Any, ...]:
    """Start a run with another budget from what this one has measured."""
    return watch_run(browser, actions.branch_run(browser.visitor, browser.run_name, int(budget)))


@handler
def leave_run(browser: Browser) -> tuple[Any, ...]:
    """Stop watching a run, which goes on."""
    return watch_run(browser, None)


def ask_run(action: Callable[[Visitor, str], str]) -> Callable:
    """Return the handler of a button that acts on the run; what costs money must be confirmed first."""

    @handler
    def ask(browser: Browser) -> tuple[Any, Any, Any]:
        try:
            action(browser.visitor, browser.run_name)
        except NotAgreed as question:
            return gr.skip(), show_note(markup.message_box(str(question))), gr.Button(visible=True)
        return gr.Timer(SOON_SECONDS), show_note(""), gr.Button(visible=False)

    return ask


@handler
def share_budget(browser: Browser, budget: float) -> tuple[str, bool]:
    """Share out another budget without the model. The card carries the figure of the bars, which the browser draws."""
    try:
        if not browser.run_name or not browser.find_run().has_file("profile.json"):
            return "", False
        figure, card = plan_cards.draw_shares(browser.find_run(), int(budget))
    except LinearizerError as error:
        return markup.message_box(str(error), "bad"), True
    return card + f'<i hidden data-figure="{escape(figure)}"></i>', True


@handler
def start_evaluation(browser: Browser, parts: list[str], texts: float, tasks: str, limit: float | None) -> Any:
    """Start an evaluation, which goes on without the page."""
    if not parts:
        raise RequestError("no part was chosen: choose what to measure")
    named = [name for name in (tasks or "").replace(",", " ").split() if name] if "tasks" in parts else []
    if "tasks" in parts and not named:
        raise RequestError("no task was named: name tasks of lm_eval, such as piqa,arc_easy")
    options: dict[str, Any] = {"parts": list(parts), "texts": int(texts), "seconds": SPEED_SECONDS}
    options |= {"tasks": named, "limit": int(limit) if limit else None} if named else {}
    actions.evaluate_run(browser.visitor, browser.run_name, options=options)
    return gr.Timer(SOON_SECONDS)


@handler
def list_owners(browser: Browser) -> tuple[Any, str, str]:
    """List the accounts under which the visitor may publish, and suggest a name."""
    from linearizer.hub import repository

    suggested, token = sending.student_name(browser.find_run()), browser.visitor.token
    owners, note = list[str](), ""
    if on_space() and token is None:
        note = "To publish, sign in at the top right. You can see what would be sent without signing in."
    else:
        try:
            owners = list(repository.list_owners(token))
        except PublishError as error:
            note = str(error)
    listed = gr.Dropdown(choices=owners, value=owners[0]) if owners else gr.Dropdown(choices=[])
    return listed, suggested, markup.message_box(note) if note else ""


@handler
def preview_publication(browser: Browser, owner: str, repo: str, private: bool) -> tuple[str, str, str, Any, Any]:
    """Show what publishing would send, its card as the Hub shows it."""
    from linearizer.publish import push

    try:
        preview = actions.preview_publication(browser.visitor, browser.run_name, repo_id_of(owner, repo), private)
    except LinearizerError as error:
        return markup.message_box(str(error), "bad"), "", "", gr.Accordion(visible=False), gr.Button(interactive=False)
    warnings = push.list_warnings(browser.find_run())
    notes = "".join(markup.message_box(note, "bad" if note in warnings else "note") for note in preview.notes)
    _, facts, card = preview.card.split("---\n", 2)
    files, place = cards.files_table(preview.files, preview.bytes), gr.Accordion(visible=True)
    return notes, files, f"```yaml\n{facts}```\n{card}", place, gr.Button(interactive=preview.checked)


def repo_id_of(owner: str | None, repo: str | None) -> str:
    """Name a repository by its owner and its name, or by its name alone."""
    return "/".join(part for part in ((owner or "").strip(), (repo or "").strip()) if part)


@handler
def download_student(browser: Browser) -> str:
    """Return the address that the browser then fetches."""
    return actions.download_student(browser.visitor, browser.run_name)


@handler
def publish_run(browser: Browser, owner: str, repo: str, private: bool) -> Any:
    """Begin to publish, which goes on without the page."""
    run = browser.visitor.find_own_run(browser.run_name)
    sending.begin_publication(run, repo_id_of(owner, repo), private, browser.visitor.token)
    return gr.Timer(SOON_SECONDS)


@handler
def list_runs(browser: Browser, busy: bool) -> list[Any]:
    """List the visitor's runs, unless they are `busy` with a card; offer the undamaged ones for a comparison."""
    if busy:
        return [gr.skip()] * 4
    try:
        statuses = control.runs_in(browser.visitor.home)
    except LinearizerError as error:
        return [markup.message_box(str(error), "bad"), gr.Column(visible=False), *[gr.skip()] * 2]
    names = [*(status.run.folder.name for status in statuses if isinstance(status.plan, Plan)), EXAMPLE_NAME]
    return [run_list.run_cards(statuses), gr.Column(visible=len(names) > 1), *[gr.Dropdown(choices=names)] * 2]


@handler
def compare_runs(browser: Browser, first_name: str | None, second_name: str | None) -> str:
    """Set two runs side by side."""
    if not first_name or not second_name:
        return ""
    try:
        return run_list.comparison_card(browser.visitor.find_run(first_name), browser.visitor.find_run(second_name))
    except LinearizerError as error:
        return markup.message_box(str(error), "bad")


@handler
def act_on_run(browser: Browser, event: gr.EventData) -> None:
    """Do what a button on a run's card asks for; a browser may send anything."""
    sent = event._data if isinstance(event._data, dict) else {}
    act, run, value = (str(sent.get(name, "")) for name in ("act", "run", "value"))
    if act == "rename":
        actions.rename_run(browser.visitor, run, value)
    elif act in CARD_ACTIONS:
        CARD_ACTIONS[act](browser.visitor, run)
