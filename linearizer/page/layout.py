"""What is where on the page, and what its parts share; site.py connects it with handlers.

plan_layout.py has the first two steps, result_layout.py the last.
"""

from __future__ import annotations

from types import SimpleNamespace

import gradio as gr

from linearizer.page.limits import LIMITS
from linearizer.page.visitors import on_space, signs_in
from linearizer.plan.plan import DEFAULT_BUDGET
from linearizer.report.markup import glossary_html

SEARCH_ABOUT = "type to search; Enter takes what you typed, or what an arrow key chose"
MIN_BUDGET, MAX_BUDGET = 32, 4096  # tokens of cache that the slider reaches


def lead(title: str, text: str, level: str = "h2") -> None:
    gr.HTML(f'<div class="lz-lead"><{level}>{title}</{level}><p>{text}</p></div>')


def chart(title: str, text: str, name: str | None = None, later: str = "") -> gr.Plot:
    """Place a figure under its title and a sentence that says what it shows; `later` says when, until it is drawn."""
    with gr.Column(visible=True, elem_classes=["lz-chart", "lz-figure"]):
        awaited = f'<p class="lz-later">{later}</p>' if later else ""
        gr.HTML(f'<div class="lz-chart"><h3>{title}</h3><p>{text}</p>{awaited}</div>')
        return gr.Plot(show_label=False, label=title, container=False, elem_id=name)


def header(level: str = "h1") -> None:
    """Name the site on every page; `now` says what the run does where a screen has no room for the sidebar."""
    if signs_in():
        gr.LoginButton("Sign in with Hugging Face", size="sm", elem_id="sign-in")
    gr.HTML(
        f'<header class="lz-head"><{level} class="lz-name">Linearizer</{level}>{glossary_html()}'
        '<p>Any language model, with a memory that does not grow.</p></header><p id="now"></p>'
    )
    gr.HTML(f'<p class="lz-message">{LIMITS.in_words()}</p>' if on_space() else "", visible=on_space())


def actions_of_run(ui: SimpleNamespace) -> None:
    """Place what a run can be asked for above the steps, where every screen shows it."""
    with gr.Row(elem_id="acts"):
        ui.stop = gr.Button("Stop", visible=False, elem_id="stop", size="md")
        ui.use = gr.Button("End training now", visible=False, elem_id="use", size="md")
        ui.resume = gr.Button("Resume", variant="primary", visible=False, elem_id="resume", size="md")
        ui.pay = gr.Button("Agree, and begin another job", variant="primary", visible=False, elem_id="pay", size="md")


def profile_step(ui: SimpleNamespace) -> None:
    about = (
        "A head is a part of the model that looks back at earlier tokens. The teacher reads text, and each is measured."
    )
    lead("What does each head need?", about)
    ui.deciding = gr.HTML(elem_id="deciding")
    with gr.Row():
        with gr.Column(min_width=320) as ui.prices_place:
            ui.prices = chart(
                "Price of every head",
                "The kl at the model's output, in thousandths of a nat per token, if this head alone gets an equal "
                "share of the budget. Bytes are worth most where it is large.",
                later="It is drawn once all heads are priced.",
            )
        with gr.Column(min_width=320):
            ui.map = chart(
                "Degrees of freedom",
                "How many features a head's attention needs for a given error, filled as layers are measured.",
            )
    ui.other = gr.Slider(
        MIN_BUDGET, MAX_BUDGET, DEFAULT_BUDGET, step=8, label="Another budget, in tokens of cache", elem_id="other"
    )
    later = "It is drawn once all heads are measured."
    ui.bars = chart("What each KV head holds", "The dotted line is an equal share for every head.", "bars", later)
    ui.other_card = gr.HTML(elem_id="other-card")
    with gr.Row():
        ui.to_distil = gr.Button("Continue", variant="primary", elem_id="to-distil", interactive=False)
        ui.branch = gr.Button("Begin another run with this budget", elem_id="branch", interactive=False)
    gr.HTML(
        '<p class="lz-faint">The other run uses what was measured here, so it begins with training. This run goes '
        "on.</p>"
    )
    ui.curves = chart(
        "How many features it takes",
        "The features that each layer needs, by the error λ that is allowed: a smaller error, to the right, takes "
        "more. "
        "The map shows them at one λ.",
        later=later,
    )


def distil_step(ui: SimpleNamespace) -> None:
    lead(
        "Training the student",
        "Features learn from the teacher's queries, keys and values, one layer at a time. Without features, the "
        "student fits copies of some of its teacher's weights.",
    )
    ui.training = gr.HTML(elem_id="training")
    later = "It is drawn once training has begun."
    ui.losses = chart(
        "Loss of each layer", "Distance to the smallest possible loss; a line for each layer.", None, later
    )
    about = "The mean error of attention over the layers, or the KL at the model's output, in nats."
    ui.error = chart("Error", about, None, later)
    ui.to_compare = gr.Button("Continue", variant="primary", elem_id="to-compare", interactive=False)


def sidebar(ui: SimpleNamespace) -> None:
    with gr.Sidebar(label="This run", position="right", open=False, width=330, elem_id="sidebar") as ui.sidebar:
        gr.HTML('<h2 class="lz-side">This run</h2>')
        ui.run_card = gr.HTML(elem_id="run-card")
        ui.leave = gr.Button("New run", elem_id="leave")
        gr.HTML('<p class="lz-faint">You may close the page: the work goes on, and this address shows it again.</p>')
