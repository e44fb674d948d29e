"""What is where on the page; site.py connects it with handlers."""

from __future__ import annotations

from types import SimpleNamespace

import gradio as gr

from linearizer.page.actions import EFFORTS
from linearizer.page.limits import LIMITS
from linearizer.page.visitors import on_space, signs_in
from linearizer.publish.glossary import glossary_html
from linearizer.publish.html import message_box, part_lead
from linearizer.publish.parts import PART_VIEWS
from linearizer.run.plan import DEFAULT_BUDGET
from linearizer.run.recipes import RECIPES

MIN_BUDGET, MAX_BUDGET = 32, 4096  # tokens of cache that the slider reaches
EFFORT_INFO = "how much text is read, and how long training takes"


def lead(title: str, text: str, level: str = "h2") -> None:
    gr.HTML(f'<div class="lz-lead"><{level}>{title}</{level}><p>{text}</p></div>')


def chart(title: str, text: str, name: str | None = None) -> gr.Plot:
    """Place a figure under its title and a sentence that says what it shows."""
    with gr.Column(visible=True, elem_classes="lz-chart"):
        gr.HTML(f'<div class="lz-chart"><h3>{title}</h3><p>{text}</p></div>')
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


def model_step(ui: SimpleNamespace) -> None:
    with gr.Column(visible=False) as ui.model_of_run:
        lead("The model", "This is the model of the run that you see.")
        ui.run_model = gr.HTML(elem_id="run-model")
        ui.change_model = gr.Button("Change and start again", elem_id="change-model")
    with gr.Column() as ui.model_choice:
        choose_model(ui)


def choose_model(ui: SimpleNamespace) -> None:
    lead("Which model?", "Search the Hub, name a local folder, or take the demo. Nothing is downloaded yet.")
    with gr.Row(equal_height=False, elem_classes="lz-pick"):
        ui.model = gr.Dropdown(
            choices=[],
            value=None,
            allow_custom_value=True,
            label="Model",
            info="type to search; Enter takes what you typed",
            scale=5,
            min_width=260,
            elem_id="model",
        )
        ui.demo = gr.Button("Take the demo", scale=1, min_width=180, elem_id="demo")
    ui.model_card = gr.HTML(elem_id="model-card")
    ui.to_budget = gr.Button("Continue", variant="primary", interactive=False, elem_id="to-budget")


def budget_step(ui: SimpleNamespace) -> None:
    with gr.Column(visible=False) as ui.plan_of_run:
        lead("The plan", "This is the plan of the run that you see. Another run can begin with its choices.")
        ui.run_plan = gr.HTML(elem_id="run-plan")
        ui.change_plan = gr.Button("Change and start again", elem_id="change-plan")
    with gr.Column() as ui.plan_choice:
        choose_budget(ui)


def choose_budget(ui: SimpleNamespace) -> None:
    lead(
        "How much may it remember?",
        "One number: the student's whole state takes the bytes of the teacher's cache at so many tokens. On longer "
        "text the student is the smaller one.",
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
            ui.effort = gr.Radio(list(EFFORTS), value="Quick", label="How thorough", info=EFFORT_INFO, elem_id="effort")
            ui.efforts = gr.HTML(elem_id="efforts")
        with gr.Column(scale=4, min_width=300):
            ui.budget_card = gr.HTML(message_box("Choose a model first."), elem_id="budget-card")
    with gr.Accordion("Advanced", open=False):
        with gr.Row():
            ui.recipe = gr.Dropdown(
                [(recipe.label, name) for name, recipe in RECIPES.items()],
                value="best",
                label="Recipe",
                allow_custom_value=True,
            )
            ui.text = gr.Textbox("builtin", label="Text", info="builtin, self, dataset:ID or file:PATH", max_lines=1)
        with gr.Row():
            # a field for numbers would turn from empty to 0 when it is unfolded
            ui.steps = gr.Textbox("", label="Steps", info="of training; empty: the usual", max_lines=1)
            ui.window = gr.Textbox("", label="Window", info="empty: half of the budget", max_lines=1)
            ui.seed = gr.Number(0, label="Seed", precision=0, minimum=0)
    with gr.Accordion("Do this elsewhere", open=False):
        ui.command = gr.Code("", language="shell", label="The same, from a command line", lines=1, wrap_lines=True)
        ui.plan = gr.Code(
            "",
            language="json",
            label="plan.json, for: linearizer run MODEL --plan plan.json",
            lines=3,
            wrap_lines=True,
        )
    ui.start = gr.Button("Start", variant="primary", size="lg", elem_id="start")


def profile_step(ui: SimpleNamespace) -> None:
    lead("What does each head need?", "The teacher reads text, and every head is measured by itself.")
    ui.deciding = gr.HTML(elem_id="deciding")
    with gr.Row():
        with gr.Column(min_width=320) as ui.prices_place:
            ui.prices = chart(
                "Kl of every head",
                "Thousandths of a nat per token that the model's output loses if this head alone holds an equal "
                "share of the budget: the more, the more bytes are worth here. Drawn once all heads are priced.",
            )
        with gr.Column(min_width=320):
            ui.map = chart(
                "Degrees of freedom",
                "How many features a head's attention needs for a given error, filled as layers are measured.",
            )
    ui.other = gr.Slider(
        MIN_BUDGET, MAX_BUDGET, DEFAULT_BUDGET, step=8, label="Another budget, in tokens of cache", elem_id="other"
    )
    ui.other_card = gr.HTML(elem_id="other-card")
    ui.bars = chart("What each KV head holds", "The dotted line is an equal share for every head.", "bars")
    with gr.Row(elem_classes="lz-acts"):
        ui.to_distil = gr.Button("Continue", variant="primary", elem_id="to-distil")
        ui.branch = gr.Button("Begin another run with this budget", elem_id="branch", interactive=False)
    gr.HTML(
        '<p class="lz-faint">The other run uses what was measured here, so it begins with training. This run goes '
        "on.</p>"
    )
    ui.curves = chart(
        "How many features it takes",
        "N(λ): a finer λ, to the right, takes more features in each layer. The map has one λ.",
    )


def distil_step(ui: SimpleNamespace) -> None:
    lead(
        "Training the features",
        "One layer at a time, on the teacher's queries, keys and values. The teacher's weights stay as they are.",
    )
    ui.training = gr.HTML(elem_id="training")
    ui.losses = chart("Loss of each layer", "Distance to the smallest possible loss; a line for each layer.")
    ui.error = chart("Error", "Of attention, in the mean over layers, or KL at the model's output, in nats.")
    ui.to_compare = gr.Button("Continue", variant="primary", elem_id="to-compare")


def compare_step(ui: SimpleNamespace) -> None:
    ui.verdict = gr.HTML(elem_id="verdict")
    lead("Compare", "The same prompt, both models. They write one token each in turn, so neither slows the other down.")
    ui.prompt = gr.Textbox("Once upon a time", label="Prompt", lines=2, elem_id="prompt")
    with gr.Row():
        ui.tokens = gr.Slider(8, 256, 64, step=8, label="Tokens", scale=3, min_width=220)
        ui.prompt_seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**31, min_width=100)
        ui.sample = gr.Checkbox(
            False, label="Draw tokens", info="instead of the likeliest token", scale=2, min_width=180
        )
    with gr.Row(elem_classes="lz-acts"):
        ui.compare = gr.Button("Write", variant="primary", elem_id="compare", interactive=False)
        ui.stop_writing = gr.Button("Stop writing", elem_id="stop-writing")
    with gr.Row():
        for side in ("teacher", "student"):
            with gr.Column(min_width=300):
                words = gr.Textbox(
                    label=side.capitalize(),
                    lines=9,
                    max_lines=9,
                    interactive=False,
                    elem_classes="lz-writes",
                    elem_id=side,
                )
                setattr(ui, side, words)
                setattr(ui, f"{side}_card", gr.HTML(elem_id=f"{side}-card"))
    evaluate_part(ui)
    publish_part(ui)


def evaluate_part(ui: SimpleNamespace) -> None:
    """Place what judging measured, the choices of an evaluation, and its parts, each hidden until it is finished."""
    lead(
        "Evaluate",
        "What the student kept. The same code measures teacher, student, a plain window of equal bytes and the "
        "untrained student, on text that was kept from training.",
    )
    with gr.Row():
        with gr.Column(min_width=320):
            ui.positions = chart("Loss by position", "Next-token loss; the control is a window of the student's bytes.")
        with gr.Column(min_width=320):
            ui.recall = chart("Recall", "Loss on a passage that occurs a second time. Lower is better.")
    with gr.Row():
        with gr.Column(min_width=320, visible=False) as ui.frontier_place:
            ui.frontier = chart(
                "What a budget buys",
                "The kl that the prices predict for every budget; the markers were measured, at this run's bytes.",
            )
        with gr.Column(min_width=320):
            ui.memory_plot = chart("Memory", "Bytes of the teacher's cache and the student's state, by length of text.")
    ui.evaluation = gr.HTML(elem_id="evaluation")
    lead(
        "Measure more",
        "The evaluation goes on when you close the page. After a stop it resumes at the part that was not finished.",
        "h3",
    )
    usual = [part for part in PART_VIEWS if part != "tasks"]
    names = [(view.title, part) for part, view in PART_VIEWS.items()]
    ui.parts = gr.CheckboxGroup(names, value=usual, label="What to measure", elem_id="parts")
    with gr.Row():
        ui.part_texts = gr.Slider(2, 32, 8, step=1, label="Texts", elem_id="part-texts", min_width=180)
        ui.part_tasks = gr.Textbox(label="Tasks", info="of lm_eval, such as piqa,arc_easy", max_lines=1, min_width=180)
        ui.part_limit = gr.Number(100, label="Samples of a task", precision=0, minimum=1, min_width=120)
    ui.part_times = gr.HTML(elem_id="part-times")
    with gr.Row():
        ui.evaluate = gr.Button("Evaluate", variant="primary", elem_id="evaluate", interactive=False, scale=3)
        ui.stop_evaluating = gr.Button("Stop evaluating", elem_id="stop-evaluating", visible=False, scale=1)
    ui.evaluating = gr.HTML(elem_id="evaluating")
    ui.part_places, ui.part_tables, ui.part_charts = {}, {}, {}
    for part, view in PART_VIEWS.items():
        with gr.Column(visible=False, elem_id=f"part-{part}") as ui.part_places[part]:
            gr.HTML(part_lead(part))
            ui.part_charts[part] = []
            for figure in view.charts:
                with gr.Column() as place:
                    ui.part_charts[part] += [place, chart(figure.title, figure.text)]
            ui.part_tables[part] = gr.HTML()


def publish_part(ui: SimpleNamespace) -> None:
    lead("Publish", "The student, as a model of the Hub, with a card that says all of this.")
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
        with gr.Accordion("The card", open=False):
            ui.card_text = gr.Code("", language="markdown", label="README.md", lines=3, wrap_lines=True)
        ui.sent = gr.HTML(elem_id="sent")
        ui.snippet = gr.Code("", language="python", label="Load it anywhere", visible=False, elem_id="snippet")


def sidebar(ui: SimpleNamespace) -> None:
    with gr.Sidebar(label="This run", position="right", open=False, width=330, elem_id="sidebar") as ui.sidebar:
        gr.HTML('<h2 class="lz-side">This run</h2>')
        ui.run_card = gr.HTML(elem_id="run-card")
        ui.stop = gr.Button("Stop", visible=False, elem_id="stop")
        ui.resume = gr.Button("Resume", variant="primary", visible=False, elem_id="resume")
        ui.use = gr.Button("Use what we have", visible=False, elem_id="use")
        ui.leave = gr.Button("New run", elem_id="leave")
        gr.HTML('<p class="lz-faint">You may close the page: the work goes on, and this address shows it again.</p>')
