"""The first two steps: which model, and how much it may remember; each also shows what a run has chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import gradio as gr

from linearizer.page import hub_jobs, plan_form
from linearizer.page.actions import EFFORTS
from linearizer.page.example import EXAMPLE_NAME, has_example
from linearizer.page.layout import MAX_BUDGET, MIN_BUDGET, SEARCH_ABOUT, lead
from linearizer.page.picture import PICTURE
from linearizer.page.ways import USUAL_PAPER, further_memories, recipe_choices, way_choices
from linearizer.publish.html import folded, message_box, table
from linearizer.run.plan import DEFAULT_BUDGET

EFFORT_INFO = "how much text is read, and how long training takes"


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
    gr.HTML(
        '<div class="lz-hero"><div><p>A language model keeps every token that it has read, so its memory grows with '
        "the text. Linearizer turns a model of the Hub into a student whose memory stays the same, and measures what "
        f"that costs before anything is published.</p>{example if has_example() else ''}</div>{PICTURE}</div>",
        elem_id="hero",
    )
    lead("Which model?", "Search the Hub, name a local folder, or take the demo. Nothing is downloaded yet.")
    with gr.Row(equal_height=False, elem_classes="lz-pick"):
        ui.model = gr.Dropdown(
            choices=[],
            value=None,
            allow_custom_value=True,
            label="Model",
            info=SEARCH_ABOUT,
            scale=5,
            min_width=260,
            elem_id="model",
        )
        ui.demo = gr.Button("Take the demo", scale=1, min_width=180, elem_id="demo")
    ui.model_card = gr.HTML(elem_id="model-card")
    ui.to_budget = gr.Button("Continue", variant="primary", interactive=False, elem_id="to-budget")


def choose_plan(ui: SimpleNamespace) -> None:
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
    compared = (
        "All three spend the same bytes, so their students can be compared by kl, the distance from the teacher: it is "
        "0 for a student that predicts as its teacher does."
    )
    lead("In which way?", compared, "h3")
    ui.way = gr.Radio(
        way_choices({}), value="measured", show_label=False, label="Way", elem_id="way", elem_classes="lz-tiles"
    )
    ui.listed = gr.Radio(
        recipe_choices(),
        value=USUAL_PAPER,
        label="Recipe",
        visible=False,
        elem_id="recipe",
        elem_classes="lz-tiles",
    )
    lead("How thorough?", f"The effort decides {EFFORT_INFO}.", "h3")
    ui.effort = gr.Radio(list(EFFORTS), value="Quick", show_label=False, label="How thorough", elem_id="effort")
    ui.efforts = gr.HTML(elem_id="efforts")
    ui.machine = gr.HTML(elem_id="machine")
    with gr.Accordion("Advanced", open=False, elem_id="advanced"):
        gr.HTML('<p class="lz-faint">An empty field is decided by the way chosen above.</p>')
        ui.fields = plan_form.place_options()
        head, name = ("feature map", "what it is, and how it did"), "Memories beside those of the recipes"
        memories = table("", head, further_memories(), label=name, kind="lz-words lz-pair")
        gr.HTML(folded(f"{name}, for Feature map", memories), elem_id="further-memories")
    with gr.Accordion("Do this elsewhere, or load a plan", open=False, elem_id="elsewhere"):
        ui.command = gr.Code("", language="shell", label="The same, from a command line", lines=1, wrap_lines=True)
        ui.plan = gr.Code(
            "",
            language="json",
            label="plan.json, for --plan",
            lines=3,
            wrap_lines=True,
        )
        ui.taken = gr.UploadButton(
            "Load a plan.json", file_types=[".json"], type="binary", size="md", elem_id="take-plan"
        )
    hub_jobs.place_job(ui)
    ui.start = gr.Button("Start", variant="primary", size="lg", elem_id="start")
