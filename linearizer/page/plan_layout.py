"""The first two steps: which model, and how much it may remember; each also shows what a run has chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr

from linearizer.page import plan_form
from linearizer.page.layout import MAX_BUDGET, MIN_BUDGET, SEARCH_ABOUT, lead
from linearizer.page.planning import EFFORTS
from linearizer.page.presets import USUAL_PAPER, further_memories, recipe_choices, way_choices
from linearizer.page.visitors import EXAMPLE_NAME, has_example, signs_in
from linearizer.plan.plan import DEFAULT_BUDGET
from linearizer.report.markup import folded, message_box, table

SKETCH = Path(__file__).with_name("memory.svg")  # of what a teacher and its student keep while they read
ABOUT_JOBS = (
    "The same run on hardware that the Hub lends by the minute. Your account pays, and nobody else; the run is kept in "
    "a private bucket of yours, and this page follows it as any other."
)


def place_choice(ui: SimpleNamespace, name: str, text: str, place: Callable[[SimpleNamespace], None]) -> None:
    """Place what a visitor chooses, and beside it what a run has chosen, to read; one of both is shown."""
    with gr.Column(visible=False) as of_run:
        lead(f"The {name}", text)
        setattr(ui, f"run_{name}", gr.HTML(elem_id=f"run-{name}"))
        setattr(ui, f"change_{name}", gr.Button("Change and start again", elem_id=f"change-{name}"))
    with gr.Column() as choice:
        place(ui)
    setattr(ui, f"{name}_of_run", of_run)
    setattr(ui, f"{name}_choice", choice)


def model_step(ui: SimpleNamespace) -> None:
    place_choice(ui, "model", "This is the model of the run that you see.", choose_model)


def budget_step(ui: SimpleNamespace) -> None:
    text = "This is the plan of the run that you see. Another run can begin with its choices."
    place_choice(ui, "plan", text, choose_plan)


def choose_model(ui: SimpleNamespace) -> None:
    example = f'<p><a href="?run={EXAMPLE_NAME}" id="example">Look at a finished example</a></p>'
    sketch = SKETCH.read_text(encoding="utf-8")
    gr.HTML(
        '<div class="lz-hero"><div><p>A language model keeps every token that it has read, so its memory grows with '
        "the text. Linearizer turns a model of the Hub into a student whose memory stays the same, and measures what "
        f"that costs before anything is published.</p>{example if has_example() else ''}</div>{sketch}</div>",
        elem_id="hero",
    )
    lead("Which model?", "Search the Hub, name a local folder, or take the demo. Nothing is downloaded yet.")
    with gr.Row(equal_height=False, elem_classes="lz-pick"):
        typed: dict[str, Any] = {"allow_custom_value": True, "scale": 5, "min_width": 260}
        ui.model = gr.Dropdown([], value=None, label="Model", info=SEARCH_ABOUT, elem_id="model", **typed)
        ui.demo = gr.Button("Take the demo", scale=1, min_width=180, elem_id="demo")
    ui.model_card = gr.HTML(elem_id="model-card")
    ui.to_budget = gr.Button("Continue", variant="primary", interactive=False, elem_id="to-budget")


def choose_plan(ui: SimpleNamespace) -> None:
    place_budget(ui)
    place_ways(ui)
    with gr.Accordion("Advanced", open=False, elem_id="advanced"):
        gr.HTML('<p class="lz-faint">An empty field is decided by the way chosen above.</p>')
        ui.fields = plan_form.place_options()
        head, name = ("feature map", "what it is, and how it did"), "Memories beside those of the recipes"
        memories = table("", head, further_memories(), label=name, kind="lz-words lz-pair")
        gr.HTML(folded(f"{name}, for Feature map", memories), elem_id="further-memories")
    with gr.Accordion("Do this elsewhere, or load a plan", open=False, elem_id="elsewhere"):
        ui.command = gr.Code("", language="shell", label="The same, from a command line", lines=1, wrap_lines=True)
        ui.plan = gr.Code("", language="json", label="plan.json, for --plan", lines=3, wrap_lines=True)
        ui.taken = gr.UploadButton(
            "Load a plan.json", file_types=[".json"], type="binary", size="md", elem_id="take-plan"
        )
    place_job(ui)
    ui.start = gr.Button("Start", variant="primary", size="lg", elem_id="start")


def place_budget(ui: SimpleNamespace) -> None:
    """Place the slider, and what its budget means."""
    lead(
        "How much may it remember?",
        "One number: the student’s memory, its state, takes as many bytes as the teacher’s memory, its cache, after so "
        "many tokens. On longer texts the student’s memory is smaller.",
    )
    with gr.Row():
        with gr.Column(scale=3, min_width=300):
            ui.budget = gr.Slider(
                MIN_BUDGET, MAX_BUDGET, DEFAULT_BUDGET, step=8, label="Tokens of cache", elem_id="budget"
            )
            ui.may_grow = gr.Radio(
                [("Never grows", False), ("May grow", True)],
                value=False,
                label="State",
                info="May grow: heads that are worth it keep their whole cache, so long texts take more",
                elem_id="may-grow",
            )
        with gr.Column(scale=4, min_width=300):
            ui.budget_card = gr.HTML(message_box("Choose a model first."), elem_id="budget-card")


def place_ways(ui: SimpleNamespace) -> None:
    """Place the ways to a student and the efforts, and what each takes here."""
    compared = (
        "All three spend the same bytes, so their students can be compared by kl, the distance from the teacher: it is "
        "0 for a student that predicts as its teacher does."
    )
    lead("In which way?", compared, "h3")
    ui.way = gr.Radio(
        way_choices({}), value="measured", show_label=False, label="Way", elem_id="way", elem_classes="lz-tiles"
    )
    ui.listed = gr.Radio(
        recipe_choices(), value=USUAL_PAPER, label="Recipe", visible=False, elem_id="recipe", elem_classes="lz-tiles"
    )
    lead("How thorough?", "The effort decides how much text is read, and how long training takes.", "h3")
    ui.effort = gr.Radio(list(EFFORTS), value="Quick", show_label=False, label="How thorough", elem_id="effort")
    ui.efforts = gr.HTML(elem_id="efforts")
    ui.machine = gr.HTML(elem_id="machine")


def place_job(ui: SimpleNamespace) -> None:
    """Place the choices of a job; what is paid for is asked once more."""
    with gr.Accordion("Work in a job on your account instead", open=False, elem_id="job") as ui.job_part:
        gr.HTML(f'<p class="lz-faint">{ABOUT_JOBS}{" Sign in first." if signs_in() else ""}</p>')
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
