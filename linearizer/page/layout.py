"""The parts of the page and their places; site.py connects them with handlers."""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr

from linearizer.page import landing, plan_form
from linearizer.page.limits import LIMITS, budget_reach
from linearizer.page.plan_form import USUAL_PAPER, effort_choices, recipe_choices, way_choices
from linearizer.page.visitors import EXAMPLE_NAME, on_space, signs_in
from linearizer.plan.plan import DEFAULT_BUDGET
from linearizer.report.markup import glossary_html, message_box
from linearizer.report.parts import PART_VIEWS

UNCHOSEN = "Choose a model to continue"
SEARCH_ABOUT = "a name on the Hub, a folder, or a GGUF file"
MODELS = {  # suggestions, by the titles of their buttons
    "Take the demo (14 MB)": "demo",
    "SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen3-0.6B": "Qwen/Qwen3-0.6B",
}
ABOUT_BUDGET = (
    "The student’s memory (its state) may take as many bytes as the teacher’s KV cache takes after this many tokens."
)
LEADS = {  # of the second step: its title and text
    "causal": ("How much may it remember?", ABOUT_BUDGET),
    "encoder": (
        "How many tokens may each token see?",
        "A token of the student costs what a token of the teacher costs among this many tokens, however long the text.",
    ),
}
SLIDERS = {"causal": "Tokens of cache", "encoder": "Tokens that each token sees"}
ABOUT_JOBS = (
    "The same run on hardware that the Hub rents by the minute. Only your account pays. The run is kept in a private "
    "bucket of yours, and this page follows it as any other run."
)


ABOUT_EFFORT = (
    "The effort decides how much text is read, and how long training takes. “Try it” reads so little that its prices "
    "are rough: the demo’s student had KL 0.0099 at 96 tokens by “Try it”, and 0.0010 at 64 by “Quick”."
)
ABOUT_NEEDS = (
    "Colour: the degrees of freedom of each KV head, or its price, the KL at the model’s output if this head alone has "
    "only an equal share of the budget. Bar: the memory that the budget buys it; the full height holds a whole text."
)


def lead(title: str, text: str, level: str = "h2") -> gr.HTML:
    return gr.HTML(lead_html(title, text, level))


def lead_html(title: str, text: str, level: str = "h2") -> str:
    return f'<div class="lz-lead"><{level}>{title}</{level}><p>{text}</p></div>'


def chart(title: str, text: str, name: str | None = None, pending: str = "", switch: gr.Radio | None = None) -> gr.Plot:
    """Place a figure under its title, what it shows, and a switch; `pending` is shown until it is drawn."""
    with gr.Column(visible=True, elem_classes=["lz-chart", "lz-figure"]):
        awaited = f'<p class="lz-later">{pending}</p>' if pending else ""
        gr.HTML(f'<div class="lz-chart"><h3>{title}</h3><p>{text}</p>{awaited}</div>')
        if switch is not None:
            switch.render()
        return gr.Plot(show_label=False, label=title, container=False, elem_id=name)


def header(level: str = "h1") -> None:
    """Name the site on every page."""
    if signs_in():
        gr.LoginButton("Sign in with Hugging Face", size="sm", elem_id="sign-in")
    gr.HTML(
        f'<header class="lz-head"><{level} class="lz-name">Linearizer</{level}>{glossary_html()}'
        f"<p>Language models of the Hub, with a memory that does not grow.</p>{links_html()}</header>"
    )
    gr.HTML(f'<p class="lz-message">{LIMITS.in_words()}</p>' if on_space() else "", visible=on_space())


def links_html() -> str:
    """Link to the paper of the method, how to cite it, the licence, and on a Space the code."""
    card = (Path(__file__).parents[1] / "publish" / "causal_card.md").read_text(encoding="utf-8")
    cited = card.partition("```bibtex\n")[2].partition("\n\n")[0]
    space = (
        f'<a href="https://huggingface.co/spaces/{os.environ.get("SPACE_ID")}/tree/main">Code</a>' if on_space() else ""
    )
    return (
        f'<nav class="lz-about" aria-label="About">{space}<a href="https://arxiv.org/abs/2507.03340">Paper</a>'
        f'<button type="button" data-act="copy" value="{escape(cited, quote=True)}">BibTeX</button>'
        '<a href="https://www.apache.org/licenses/LICENSE-2.0">Apache 2.0</a></nav>'
    )


def run_above_steps(ui: SimpleNamespace) -> None:
    """Place the state of a run and the actions on it above the steps, where every screen shows them."""
    ui.run_card = gr.HTML(elem_id="run-card")
    names = {"stop": "Stop", "use": "End training now", "resume": "Resume", "pay": "Agree, and begin another job"}
    with gr.Row(elem_id="acts"):
        for name, title in names.items():
            look: dict[str, Any] = {"variant": "primary" if name in ("resume", "pay") else "secondary", "size": "md"}
            setattr(ui, name, gr.Button(title, visible=False, elem_id=name, **look))


def place_choice(name: str, place: Callable[[SimpleNamespace], None], ui: SimpleNamespace) -> None:
    """Place the form of a choice, and the card of what a run has chosen; one of the two is shown."""
    with gr.Column(visible=False) as of_run:
        lead(f"The {name}", f"This is the {name} of this run. Another run can start with the same choices.")
        setattr(ui, f"run_{name}", gr.HTML(elem_id=f"run-{name}"))
        setattr(ui, f"change_{name}", gr.Button("Change and start again", elem_id=f"change-{name}"))
    with gr.Column() as choice:
        place(ui)
    setattr(ui, f"{name}_of_run", of_run)
    setattr(ui, f"{name}_choice", choice)


def choose_model(ui: SimpleNamespace) -> None:
    gr.HTML(landing.hero_html(), elem_id="hero")
    with gr.Row(elem_classes="lz-pick"):
        look: dict[str, Any] = {"allow_custom_value": True, "elem_id": "model", "scale": 3, "min_width": 300}
        ui.model = gr.Dropdown([], value=None, label="Model", info=SEARCH_ABOUT, **look)
        ui.to_budget = gr.Button(
            UNCHOSEN, variant="primary", interactive=False, elem_id="to-budget", scale=1, min_width=200
        )
    with gr.Row(elem_classes="lz-chips"):
        ui.models = {
            model: gr.Button(title, size="sm", min_width=90, elem_id=model.rpartition("/")[2])
            for title, model in MODELS.items()
        }
    ui.model_card = gr.HTML(elem_id="model-card")
    link = f'<a href="?run={EXAMPLE_NAME}" id="example">Look at a finished example, and chat with its student</a>'
    ui.last_runs = gr.HTML(elem_id="last-runs")
    gr.HTML(f'<p class="lz-links">{link}</p>{landing.real_model_html()}', elem_id="gain")


def choose_plan(ui: SimpleNamespace) -> None:
    """Place the budget, its forecast, and Start; all other choices are folded."""
    ui.plan_lead = lead(*LEADS["causal"])
    with gr.Row():
        with gr.Column(scale=3, min_width=300):
            ui.budget = gr.Slider(label=SLIDERS["causal"], step=8, elem_id="budget", **reach_of(value=DEFAULT_BUDGET))
            ui.forecast = gr.HTML(elem_id="forecast")
            ui.start = gr.Button("Start", variant="primary", size="lg", elem_id="start")
            ui.start_note = gr.HTML(elem_id="start-note")
        with gr.Column(scale=4, min_width=300):
            ui.budget_card = gr.HTML(message_box("Choose a model first."), elem_id="budget-card")
    with gr.Column(visible=False) as ui.encoder_sight:
        fields = plan_form.place_encoder_options(in_sight=True)
    with gr.Accordion("Change how", open=False, elem_id="how"):
        with gr.Column() as ui.causal_form:
            place_ways(ui)
            with gr.Accordion("Advanced", open=False, elem_id="advanced"):
                gr.HTML('<p class="lz-faint">The way chosen above decides the fields that are empty.</p>')
                ui.fields = plan_form.place_options()
        with gr.Column(visible=False) as ui.encoder_form:
            fields |= plan_form.place_encoder_options(in_sight=False)
        ui.encoder_fields = {name: fields[name] for name in plan_form.ENCODER_OPTIONS}
        with gr.Accordion("Do this elsewhere, or load a plan", open=False, elem_id="elsewhere"):
            ui.command = gr.Code("", language="shell", label="The same, from a command line", lines=1, wrap_lines=True)
            ui.plan = gr.Code("", language="json", label="plan.json, for --plan", lines=3, wrap_lines=True)
            load: dict[str, Any] = {"file_types": [".json"], "type": "binary", "size": "md", "elem_id": "take-plan"}
            ui.taken = gr.UploadButton("Load a plan.json", **load)
        place_job(ui)


def reach_of(positions: int | None = None, planned: int | None = None, **how: Any) -> dict[str, Any]:
    """Describe the reach of the budget's slider, as arguments of a slider; `how` are others."""
    least, most = budget_reach(positions, planned)
    about = f"a whole number from {least} to {most:,}; beyond it, the nearest is taken"
    return {"minimum": least, "maximum": most, "info": about, **how}


def place_ways(ui: SimpleNamespace) -> None:
    """Place the ways to a student and the efforts, with the time that each takes here."""
    lead("Which way?", "All use the same bytes.", "h3")
    tiles: dict[str, Any] = {"elem_classes": "lz-tiles"}
    ui.way = gr.Radio(way_choices({}), value="measured", show_label=False, label="Way", elem_id="way", **tiles)
    listed: dict[str, Any] = {"value": USUAL_PAPER, "label": "Recipe", "visible": False, "elem_id": "recipe", **tiles}
    ui.listed = gr.Radio(recipe_choices(), **listed)
    ui.may_grow = gr.Radio(
        [("Never grows", False), ("May grow", True)],
        value=False,
        label="State",
        info="May grow: heads that are worth it keep their whole cache, so long texts take more",
        elem_id="may-grow",
    )
    lead("How thorough?", ABOUT_EFFORT, "h3")
    efforts: dict[str, Any] = {"value": "Quick", "show_label": False, "label": "How thorough", "elem_id": "effort"}
    ui.effort = gr.Radio(effort_choices({}), **efforts)


def place_job(ui: SimpleNamespace) -> None:
    """Place the choices of a job, whose cost must be agreed to."""
    with gr.Accordion("Run it in a job on your account instead", open=False, elem_id="job") as ui.job_part:
        gr.HTML(f'<p class="lz-faint">{ABOUT_JOBS}{" Sign in first." if signs_in() else ""}</p>')
        with gr.Row(elem_classes="lz-options"):
            ui.flavor = gr.Dropdown(
                [], value=None, label="Hardware", info="what it costs now", allow_custom_value=True, elem_id="flavor"
            )
            ui.job_minutes = gr.Number(
                0, label="Minutes at most", info="0: twice the forecast", precision=0, elem_id="job-minutes"
            )
            ui.job_push = gr.Textbox(
                "", label="Publish privately as", placeholder="OWNER/NAME, if at all", max_lines=1, elem_id="job-push"
            )
        ui.offer = gr.Button("What does it cost?", elem_id="job-offer")
        with gr.Column(visible=False, elem_id="job-sure") as ui.job_sure:
            ui.job_question, ui.cap = gr.HTML(elem_id="job-question"), gr.State(0.0)
            ui.start_job = gr.Button("Agree, and begin the job", variant="primary", elem_id="job-start")


def profile_step(ui: SimpleNamespace) -> None:
    about = (
        "A head is a part of the model that looks back at earlier tokens. The original model, the teacher, reads text, "
        "and each head is measured."
    )
    lead("What does each head need?", about)
    pending = "It fills while the heads are measured."
    colours = {"Degrees of freedom": 0, "Price": 1}  # the traces of the picture
    look: dict[str, Any] = {"label": "Colour", "show_label": False, "elem_id": "colour", "render": False}
    ui.colour = gr.Radio([*colours.items()], value=0, **look)
    ui.needs = chart("Need, price, purchase", ABOUT_NEEDS, "needs", pending, ui.colour)
    other = "Another budget, in tokens of cache"
    ui.other = gr.Slider(label=other, step=8, elem_id="other", **reach_of(value=DEFAULT_BUDGET))
    ui.other_card = gr.HTML(elem_id="other-card")
    about = "The mean of the heads of each layer, and of all. The dotted line is the λ of the picture above."
    ui.curves = chart("Degrees of freedom by λ", about, pending="It is drawn once all heads are measured.")
    ui.branch = gr.Button("Start a run with this budget, without measuring again", elem_id="branch", interactive=False)


def distil_step(ui: SimpleNamespace) -> None:
    lead(
        "Training the student",
        "Features learn from the teacher's queries, keys and values, one layer at a time. Without features, the "
        "student fits copies of some of its teacher's weights.",
    )
    ui.training = gr.HTML(elem_id="training")
    about, pending = "Distance to the smallest possible loss.", "It is drawn once training has begun."
    ui.losses = chart("Loss of each layer", about, pending=pending)


def result_step(ui: SimpleNamespace) -> None:
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
