"""What the page does when a visitor uses a part of it: calls an action, and renders the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.components.plot import PlotData

from linearizer.errors import LinearizerError, NotAgreed, PublishError, RequestError
from linearizer.jobs import control
from linearizer.page import actions, cards, plan_cards, run_state, runs_cards, sending, students, warmup
from linearizer.page.calls import Profile, Token, identify_visitor, refusals_on_page
from linearizer.page.example import EXAMPLE_NAME, has_example
from linearizer.page.layout import SEARCH_ABOUT
from linearizer.page.visitors import MIN_SECRET_CHARACTERS, Visitor, new_secret, on_space
from linearizer.progress import Progress
from linearizer.publish import html
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.run.results import Comparison

SOON_SECONDS = 0.2  # until the page polls, once something was asked
IDLE_POLL_SECONDS = 5.0  # between two polls where nothing is at work
Memory = dict[str, Any]  # what a browser keeps: {"secret", "run"}


def read_visitor(memory: object, profile: Profile, token: Token) -> Visitor:
    """Identify the visitor. A browser's memory may hold anything."""
    kept = memory if isinstance(memory, dict) else {}
    return identify_visitor(kept.get("secret") or "", profile, token)


def run_name(memory: object) -> str | None:
    name = memory.get("run") if isinstance(memory, dict) else None
    return name if isinstance(name, str) and name else None


def watched_run(memory: Memory, profile: Profile, token: Token) -> tuple[Run, dict[str, run_state.Piece]] | None:
    """Give the run that a page watches, with its pieces; None without a run, or where it was deleted."""
    if (name := run_name(memory)) is None:
        return None
    try:
        run = read_visitor(memory, profile, token).find_run(name)
        return run, run_state.read_pieces(run, time.time())
    except LinearizerError:
        return None


def plot_json(figure: str | None) -> Any:
    """Send a figure that is JSON already."""
    return None if figure is None else PlotData(type="plotly", plot=figure)


def open_page(memory: Memory, address: str | None, profile: Profile, token: Token) -> tuple[Memory, Any, Any]:
    """Show the run that the address names, or that this browser watched last."""
    warmup.begin_import()
    kept = {"secret": "", "run": None} | (memory if isinstance(memory, dict) else {})
    if on_space() and len(str(kept["secret"])) < MIN_SECRET_CHARACTERS:
        kept["secret"] = new_secret()
    named = address or run_name(kept)
    note = ""
    kept["run"] = None
    if named:
        try:
            kept["run"] = read_visitor(kept, profile, token).find_run(named).folder.name
        except LinearizerError as error:
            note = html.message_box(str(error), "bad") if address else ""
    return (
        kept,
        gr.HTML(note, visible=True if note else "hidden"),
        gr.Timer(SOON_SECONDS if kept["run"] else IDLE_POLL_SECONDS, active=True),
    )


@refusals_on_page()
def search_models(memory: Memory, key: gr.KeyUpData, profile: Profile, token: Token) -> Any:
    """Search while the visitor types; without a network the field says so."""
    try:
        names, about = actions.search_models(read_visitor(memory, profile, token), key.input_value), SEARCH_ABOUT
    except RequestError as error:  # what was typed may be a folder, or in the cache
        names, about = [], html.without_folders(str(error))
    return gr.Dropdown(choices=names, info=about)


def watch_run(memory: Memory, name: str | None) -> tuple[Any, ...]:
    """Show a run from its profile step on; nothing of it was drawn yet."""
    step = 3 if name else 1
    return (
        {**memory, "run": name},
        {"shown": str(step)},
        gr.Tabs(selected=step),
        gr.Timer(SOON_SECONDS, active=True),
        False,
        gr.HTML("", visible="hidden"),  # what was said of another run
    )


@refusals_on_page()
def branch_run(memory: Memory, budget: float, profile: Profile, token: Token) -> tuple[Any, ...]:
    """Start a run with another budget from what this one has measured."""
    return watch_run(
        memory, actions.branch_run(read_visitor(memory, profile, token), run_name(memory) or "", int(budget))
    )


def leave_run(memory: Memory) -> tuple[Any, ...]:
    """Stop watching a run, which goes on."""
    return watch_run(memory, None)


def ask_run(wish: str) -> Callable:
    """Make the handler of a button that stops a run, resumes it, or ends its training."""

    def handler(memory: Memory, profile: Profile, token: Token) -> tuple[Any, Any, Any]:
        try:
            actions.ask_run(read_visitor(memory, profile, token), run_name(memory) or "", wish)
        except NotAgreed as question:
            return gr.skip(), gr.HTML(html.message_box(str(question)), visible=True), gr.Button(visible=True)
        return gr.Timer(SOON_SECONDS), gr.HTML("", visible="hidden"), gr.Button(visible=False)

    return refusals_on_page()(handler)


@refusals_on_page()
def share_budget(memory: Memory, budget: float, profile: Profile, token: Token) -> tuple[str, bool]:
    """Share out another budget without the model. The bars travel with the card, and the browser draws them."""
    name = run_name(memory)
    run = read_visitor(memory, profile, token).find_run(name) if name else None
    if run is None or not run.has_file("profile.json"):
        return "", False
    try:
        figure, card = draw_shares(run, int(budget))
    except LinearizerError as error:
        return html.message_box(str(error), "bad"), True
    return card + html.hidden_data("figure", figure), True


def draw_shares(run: Any, budget: int | None = None) -> tuple[str, str]:
    """Draw how a budget, or that of the run, is shared out, and say which bytes it takes."""
    from linearizer.publish import allocation_charts

    shares = actions.share_budget(run, budget)
    figure = allocation_charts.draw_allocation(shares.allocation, shares.layers, shares.fix, shares.prices)
    return figure.to_json(), cards.shares_note(shares.decided) + plan_cards.allocation_card(
        shares.allocation, shares.layers
    )


def compare_models(
    memory: Memory, prompt: str, tokens: float, seed: float, sample: bool, profile: Profile, token: Token
) -> Iterator[tuple[str, str, str, str, str]]:
    """Let teacher and student write."""
    empty, both = cards.side_card(None), None
    yield "", empty, "", empty, ""
    with refusals_on_page():
        visitor, name = read_visitor(memory, profile, token), run_name(memory) or ""
        choices = prompt or "", int(tokens or 0), int(seed or 0), bool(sample)
        for both in students.compare_models(visitor, name, *choices):
            yield *show_sides(both), ""
        if both is not None:
            why = students.explain_speed(visitor.find_run(name), both.teacher, both.student)
            yield *show_sides(both), cards.comparison_note(both, why)


def show_sides(both: Comparison) -> tuple[str, str, str, str]:
    """Show what both have written so far, and how fast."""
    first = both.difference
    teacher = cards.writing_card(both.teacher, first, first.teacher if first else "")
    student = cards.writing_card(both.student, first, first.student if first else "")
    return teacher, cards.side_card(both.teacher), student, cards.side_card(both.student)


def read_document(memory: Memory, text: str, profile: Profile, token: Token) -> Iterator[tuple[str, Any, Any]]:
    """Let the student read a document; its state is kept with the run."""
    with refusals_on_page():
        visitor, name = read_visitor(memory, profile, token), run_name(memory) or ""
        for step in students.read_document(visitor, name, text or ""):
            if isinstance(step, Progress):
                yield cards.document_bar(step), gr.skip(), gr.skip()
        asks = gr.Button(interactive=True)
        yield cards.reading_card(visitor.find_run(name)), asks, asks


@refusals_on_page()
def take_document(content: bytes | None) -> str:
    """Take the text of a file."""
    from linearizer.model.text import decode_text

    return decode_text("the file", content if isinstance(content, bytes) else b"")


def ask_document(
    memory: Memory, prompt: str, tokens: float, seed: float, sample: bool, keep: bool, profile: Profile, token: Token
) -> Iterator[tuple[str, Any]]:
    """Let the student continue a prompt after the document that it read."""
    with refusals_on_page():
        visitor, name = read_visitor(memory, profile, token), run_name(memory) or ""
        choices, answer = (prompt or "", int(tokens or 0), int(seed or 0), bool(sample), bool(keep)), ""
        for text in students.ask_document(visitor, name, *choices):
            answer = f"<p>{escape(text)}</p>"
            yield answer, gr.skip()
        if keep:
            yield answer, cards.reading_card(visitor.find_run(name))


@refusals_on_page()
def take_back_answer(memory: Memory, profile: Profile, token: Token) -> tuple[str, str]:
    """Let the state forget the question and the answer that it kept last."""
    visitor, name = read_visitor(memory, profile, token), run_name(memory) or ""
    students.take_back_answer(visitor, name)
    return "", cards.reading_card(visitor.find_run(name))


@refusals_on_page()
def list_owners(memory: Memory, profile: Profile, token: Token) -> tuple[Any, Any, str]:
    """List the accounts under which the visitor may publish."""
    from linearizer.publish import repository

    visitor = read_visitor(memory, profile, token)
    name = run_name(memory)
    run = visitor.find_run(name or "")
    suggested = f"{run.plan.model.partition('@')[0].rstrip('/').split('/')[-1]}-linearized"
    if on_space() and visitor.token is None:
        note = "To publish, sign in at the top right. What would be sent can be shown without."
        return gr.Dropdown(choices=[]), suggested, html.message_box(note)
    try:
        owners = list(repository.list_owners(visitor.token))
    except PublishError as error:
        return gr.Dropdown(choices=[]), suggested, html.message_box(str(error))
    return gr.Dropdown(choices=owners, value=owners[0] if owners else None), suggested, ""


@refusals_on_page()
def preview_publication(
    memory: Memory, owner: str, repo: str, private: bool, profile: Profile, token: Token
) -> tuple[str, str, str, Any]:
    """Show what publishing would send."""
    from linearizer.publish import push

    visitor = read_visitor(memory, profile, token)
    run = visitor.find_run(run_name(memory) or "")
    preview = push.preview(run, repo_id_of(owner, repo), private, visitor.token)
    warnings = push.list_warnings(run)
    notes = "".join(html.message_box(note, "bad" if note in warnings else "note") for note in preview.notes)
    return notes, cards.files_table(preview.files, preview.bytes), preview.card, gr.Button(interactive=preview.checked)


def repo_id_of(owner: str | None, repo: str | None) -> str:
    """Name a repository by its owner and its name, or by its name alone."""
    return "/".join(part for part in ((owner or "").strip(), (repo or "").strip()) if part)


@refusals_on_page()
def publish_run(memory: Memory, owner: str, repo: str, private: bool, profile: Profile, token: Token) -> Any:
    """Publish; the page may be closed meanwhile."""
    visitor = read_visitor(memory, profile, token)
    run = visitor.find_own_run(run_name(memory) or "")
    sending.begin_publication(run, repo_id_of(owner, repo), private, visitor.token)
    return gr.Timer(SOON_SECONDS)


@refusals_on_page()
def list_runs(memory: Memory, profile: Profile, token: Token) -> tuple[str, Any, Any, Any]:
    """List the visitor's runs; what was chosen to be compared or deleted stays."""
    table, names, idle = describe_runs(read_visitor(memory, profile, token))
    return table, gr.Dropdown(choices=idle), gr.Dropdown(choices=names), gr.Dropdown(choices=names)


def describe_runs(visitor: Visitor) -> tuple[str, list[str], list[str]]:
    """Lay out a visitor's runs, and name all that can be compared, and those that nothing works on."""
    statuses = control.runs_in(visitor.home)
    names = [status.run.folder.name for status in statuses if status.plan is not None]
    idle = [status.run.folder.name for status in statuses if not status.live]
    return runs_cards.runs_table(statuses), [*names, *([EXAMPLE_NAME] if has_example() else [])], idle


@refusals_on_page()
def compare_runs(memory: Memory, first: str | None, second: str | None, profile: Profile, token: Token) -> str:
    """Set two runs side by side."""
    if not first or not second:
        return ""
    visitor = read_visitor(memory, profile, token)
    return runs_cards.comparison_card(visitor.find_run(str(first)), visitor.find_run(str(second)))


@refusals_on_page()
def resume_run(memory: Memory, name: str | None, profile: Profile, token: Token) -> str:
    """Go on with a run of the list."""
    if not name:
        raise RequestError("no run was chosen: choose the run to resume")
    visitor = read_visitor(memory, profile, token)
    actions.ask_run(visitor, name, "resume")
    return describe_runs(visitor)[0]


@refusals_on_page()
def ask_to_delete(memory: Memory, name: str | None, profile: Profile, token: Token) -> tuple[Any, str]:
    """Ask once more before a run is deleted."""
    if not name:
        raise RequestError("no run was chosen: choose the run to delete")
    run = read_visitor(memory, profile, token).find_run(name)
    return gr.Column(visible=True), runs_cards.deleting_card(control.status(run))


@refusals_on_page()
def delete_run(memory: Memory, name: str | None, profile: Profile, token: Token) -> tuple[str, Any, Any]:
    """Delete a run for good."""
    visitor = read_visitor(memory, profile, token)
    actions.delete_run(visitor, name or "")
    table, _, idle = describe_runs(visitor)
    return table, gr.Dropdown(choices=idle, value=None), gr.Column(visible=False)
