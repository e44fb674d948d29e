"""The step Result: the verdict, all measurements and further ones, the download, and publishing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gradio as gr

from linearizer.errors import LinearizerError, PublishError, RequestError
from linearizer.page import actions, cards, sending
from linearizer.page.calls import ONCE, QUICK, SLOW, Browser, handler
from linearizer.page.layout import ABOUT_NEEDS, chart, lead
from linearizer.page.run_steps import SOON_SECONDS
from linearizer.page.visitors import on_space
from linearizer.report import markup
from linearizer.report.markup import message_box
from linearizer.report.parts import PART_VIEWS

SPEED_SECONDS = 5.0  # that a measurement of speed may take: visitors wait for it


def place(ui: SimpleNamespace) -> None:
    gr.HTML('<h2 class="lz-lead">Result</h2>')
    with gr.Row(elem_id="next"):
        ui.to_chat = gr.Button("Chat with it", variant="primary", visible=False, elem_id="to-chat")
        ui.to_publish = gr.Button("Publish", visible=False, elem_id="to-publish")
    ui.awaited = gr.HTML(message_box("The student of this run is not judged yet."), elem_id="awaited")
    ui.verdict = gr.HTML(elem_id="verdict")
    ui.usage = gr.HTML(elem_id="use-card")
    ui.download = gr.Button("Download the student", visible=False, elem_id="download")
    ui.link = gr.Textbox(visible="hidden", label="where the student is fetched")
    ui.held = chart("What each head needs and holds", ABOUT_NEEDS, "held")
    place_publishing(ui)
    place_measurements(ui)


def place_measurements(ui: SimpleNamespace) -> None:
    """Place all measurements, which are drawn once they are opened, and the form of a further evaluation."""
    ui.evaluating = gr.HTML(elem_id="evaluating")
    with gr.Accordion("All measurements", open=False, elem_id="all") as ui.all:
        for part, view in PART_VIEWS.items():
            with gr.Column(visible=False, elem_id=f"part-{part}") as place:
                setattr(ui, f"{part}_chart", chart(view.title, view.about))
                setattr(ui, f"{part}_tables", gr.HTML())
            setattr(ui, f"{part}_place", place)
        place_evaluation(ui)


def place_evaluation(ui: SimpleNamespace) -> None:
    """Place the form of a further evaluation."""
    lead(
        "Measure more",
        "The evaluation goes on if you close the page. After a stop it resumes at the unfinished part.",
        "h3",
    )
    usual = [part for part in PART_VIEWS if part != "tasks"]
    names = [(view.title, part) for part, view in PART_VIEWS.items()]
    ui.parts = gr.CheckboxGroup(names, value=usual, label="What to measure", elem_id="parts")
    with gr.Row():
        ui.part_texts = gr.Slider(2, 32, 8, step=1, label="Texts", elem_id="part-texts", min_width=180)
        ui.part_tasks = gr.Textbox(label="Tasks", info="of lm_eval, such as piqa,arc_easy", max_lines=1, min_width=180)
        ui.part_limit = gr.Number(100, label="Samples of a task", precision=0, minimum=1, min_width=120)
    with gr.Row():
        ui.evaluate = gr.Button("Evaluate", variant="primary", elem_id="evaluate", interactive=False, scale=3)
        ui.stop_evaluating = gr.Button("Stop evaluating", elem_id="stop-evaluating", visible=False, scale=1)


def place_publishing(ui: SimpleNamespace) -> None:
    with gr.Accordion("Publish to the Hub", open=False, elem_id="publish-part") as ui.publish_part:
        with gr.Row():
            ui.owner = gr.Dropdown([], label="Owner", allow_custom_value=True, elem_id="owner")
            ui.repo = gr.Textbox(label="Name", max_lines=1, elem_id="repo")
            ui.private = gr.Checkbox(True, label="Private", elem_id="private")
        with gr.Row():
            ui.preview = gr.Button("Show what will be sent", elem_id="preview")
            ui.publish = gr.Button("Publish", variant="primary", interactive=False, elem_id="publish")
        ui.preview_note = gr.HTML(elem_id="preview-note")
        ui.files = gr.HTML(elem_id="files")
        with gr.Accordion("The card", open=False, visible=False) as ui.card_place:
            ui.card_text = gr.Markdown(elem_id="card-text", header_links=False)
        ui.sent = gr.HTML(elem_id="sent")
        ui.snippet = gr.Code("", language="python", label="Load it anywhere", visible=False, elem_id="snippet")


def wire(ui: SimpleNamespace) -> None:
    """Connect publishing, the download and evaluations."""
    choices = [ui.parts, ui.part_texts, ui.part_tasks, ui.part_limit]
    ui.evaluate.click(start_evaluation, [ui.memory, *choices], ui.timer, **ONCE)
    owned, noted = [ui.owner, ui.repo, ui.preview_note], {"show_progress_on": ui.preview_note}
    ui.publish_part.expand(list_owners, ui.memory, owned, **SLOW, **noted)
    target = [ui.memory, ui.owner, ui.repo, ui.private]
    outputs = [ui.preview_note, ui.files, ui.card_text, ui.card_place, ui.publish]
    fetched = ui.download.click(download_student, ui.memory, ui.link, **ONCE)
    fetched.success(None, ui.link, None, js="fetchFile", **QUICK)
    ui.preview.click(preview_publication, target, outputs, **{**ONCE, **noted})
    ui.publish.click(publish_run, target, ui.timer, **ONCE)


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
