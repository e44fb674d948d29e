"""The part of the page that begins a run in a job of the Hub: hardware, what it costs at most, and a question."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gradio as gr

from linearizer.errors import RequestError
from linearizer.page import actions, plan_form
from linearizer.page.calls import Browser, handler
from linearizer.page.handlers import watch_run
from linearizer.page.plan_handlers import read_form
from linearizer.page.visitors import signs_in
from linearizer.report import markup

ABOUT = (
    "The same run on hardware that the Hub lends by the minute. Your account pays, and nobody else; the run is kept in "
    "a private bucket of yours, and this page follows it as any other."
)


def place_job(ui: SimpleNamespace) -> None:
    """Place the choices of a job; what is paid for is asked once more."""
    with gr.Accordion("Work in a job on your account instead", open=False, elem_id="job") as ui.job_part:
        gr.HTML(f'<p class="lz-faint">{ABOUT}{" Sign in first." if signs_in() else ""}</p>')
        with gr.Row(elem_classes="lz-options"):
            ui.flavor = gr.Dropdown(
                [], value=None, label="Hardware", info="what it costs now", allow_custom_value=True, elem_id="flavor"
            )
            ui.job_minutes = gr.Textbox(
                "", label="Minutes at most", placeholder="twice the forecast", max_lines=1, elem_id="job-minutes"
            )
            ui.job_push = gr.Textbox(
                "", label="Publish privately as", placeholder="OWNER/NAME, if at all", max_lines=1, elem_id="job-push"
            )
        ui.offer = gr.Button("What does it cost?", elem_id="job-offer")
        with gr.Column(visible=False, elem_id="job-sure") as ui.job_sure:
            ui.job_question, ui.cap = gr.HTML(elem_id="job-question"), gr.State(0.0)
            ui.start_job = gr.Button("Agree, and begin the job", variant="primary", elem_id="job-start")


@handler
def list_hardware(browser: Browser) -> Any:
    """Ask the Hub what jobs can run on."""
    return gr.Dropdown(choices=[(each.in_words, each.name) for each in actions.list_hardware(browser.visitor)])


@handler
def offer_job(browser: Browser, *choices: Any) -> tuple[Any, str, float]:
    """Say what a job costs at most."""
    flavor, minutes, push, chosen, *form = choices
    plan = read_form(chosen, *form)
    job = actions.offer_job(browser.visitor, plan, chosen.inspection, *read_job(flavor, minutes, push))
    sentence = job.in_words + (f"; it publishes {job.push}" if job.push else "")
    return gr.Column(visible=True), markup.message_box(sentence[0].upper() + sentence[1:] + "."), job.cap


@handler
def start_job(browser: Browser, *choices: Any) -> tuple[Any, ...]:
    """Begin a job whose cap was agreed to; from here on the page only watches."""
    cap, flavor, minutes, push, chosen, *form = choices
    plan, asked, job = read_form(chosen, *form), plan_form.read_written(form), read_job(flavor, minutes, push)
    return watch_run(browser, actions.start_job(browser.visitor, plan, asked, *job, cap))


def read_job(flavor: str | None, minutes: str | None, push: str | None) -> tuple[str, int | None, str | None]:
    """Read the choices of a job."""
    if not flavor:
        raise RequestError("no hardware was chosen: choose what the job runs on")
    text = (minutes or "").strip()
    if text and not text.isdecimal():
        raise RequestError(f"{text[:40]!r} is no number of minutes: give a whole number, or leave it empty")
    return str(flavor), int(text) if text else None, (push or "").strip() or None


def hide_question() -> tuple[Any, float]:
    """Take back the question where something else was chosen since."""
    return gr.Column(visible=False), 0.0
