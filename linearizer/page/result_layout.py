"""The last step: compare, read and ask, evaluate, publish."""

from __future__ import annotations

from types import SimpleNamespace

import gradio as gr

from linearizer.page.chat import sample_prompts
from linearizer.page.layout import chart, lead
from linearizer.report.markup import message_box, part_lead
from linearizer.report.parts import PART_VIEWS


def compare_step(ui: SimpleNamespace) -> None:
    ui.verdict = gr.HTML(elem_id="verdict")
    gr.HTML(message_box("Writing, evaluating and publishing wait for the student of this run."), elem_id="awaited")
    lead("Compare", "The same prompt, both models. They write one token each in turn, so neither slows the other down.")
    ui.prompt = gr.Textbox("Once upon a time", label="Prompt", lines=2, max_lines=6, elem_id="prompt")
    with gr.Row(elem_id="prompts", elem_classes="lz-chips"):
        ui.prompts = {title: gr.Button(title, size="sm", min_width=90) for title in sample_prompts()}
    with gr.Row():
        ui.tokens = gr.Slider(8, 256, 64, step=8, label="Tokens", scale=3, min_width=220)
        ui.prompt_seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**31, min_width=100)
        ui.sample = gr.Checkbox(
            False, label="Draw tokens", info="instead of the likeliest token", scale=2, min_width=180
        )
    with gr.Row():
        ui.compare = gr.Button("Write", variant="primary", elem_id="compare", interactive=False)
        ui.stop_writing = gr.Button("Stop writing", elem_id="stop-writing")
    with gr.Row():
        for side in ("teacher", "student"):
            with gr.Column(min_width=300):
                gr.HTML(f"<h3>{side.capitalize()}</h3>", elem_classes="lz-side-name")
                setattr(ui, side, gr.HTML(elem_id=side))
                setattr(ui, f"{side}_card", gr.HTML(elem_id=f"{side}-card"))
    ui.compare_note = gr.HTML(elem_id="compare-note")
    place_reading(ui)
    place_results(ui)
    place_evaluation(ui)
    place_publishing(ui)


def place_reading(ui: SimpleNamespace) -> None:
    """Place what a student reads once, and the questions that it then answers from its state."""
    with gr.Accordion("Read a document once, ask often", open=False, elem_id="read-part"):
        gr.HTML(
            '<p class="lz-faint">The student reads the document, and only its state is kept. Every question goes on '
            "from that state, so nothing is read again.</p>"
        )
        ui.document = gr.Textbox("", label="Document", lines=4, max_lines=8, elem_id="document")
        with gr.Row():
            ui.read = gr.Button("Read", variant="primary", elem_id="read", interactive=False)
            ui.file = gr.UploadButton(
                "Load a text file", file_types=["text"], type="binary", size="lg", elem_id="take-document"
            )
        ui.reading = gr.HTML(elem_id="reading")
        ui.question = gr.Textbox("", label="Continue after the document", lines=2, elem_id="question")
        ui.keep = gr.Checkbox(False, label="The state remembers question and answer", elem_id="keep")
        with gr.Row():
            ui.ask = gr.Button("Ask", variant="primary", elem_id="ask", interactive=False)
            ui.take_back = gr.Button("Take the last answer back", elem_id="take-back", interactive=False)
        ui.answer = gr.HTML(elem_id="answer")


def place_results(ui: SimpleNamespace) -> None:
    """Place what a student costs, and the parts that were measured."""
    lead(
        "Evaluate",
        "How much of its teacher the student kept. The same code measures both, and what could stand in the student’s "
        "place: a plain window of equal bytes, the student before its training, and the teacher’s cache in 2, 3 and 4 "
        "bits, which still grows. The texts were kept from training.",
    )
    later = "It is drawn once the student is judged."
    with gr.Row():
        with gr.Column(min_width=320, visible=False) as ui.frontier_place:
            ui.frontier = chart(
                "What a budget buys",
                "The kl that the prices predict for every budget, times what whole students were measured to differ "
                "by; the markers were measured, at this run's bytes and on texts of its length.",
                later=later,
            )
        with gr.Column(min_width=320):
            about = "Bytes of the teacher's cache and the student's state, by length of text."
            ui.memory_plot = chart("Memory", about, later=later)
    ui.evaluation = gr.HTML(elem_id="evaluation")
    ui.part_places, ui.part_tables, ui.part_charts = {}, {}, {}
    for part, view in PART_VIEWS.items():
        with gr.Column(visible=False, elem_id=f"part-{part}") as ui.part_places[part]:
            gr.HTML(part_lead(part))
            ui.part_charts[part] = []
            with gr.Row():
                for figure in view.charts:
                    with gr.Column(min_width=440) as place:
                        ui.part_charts[part] += [place, chart(figure.title, figure.text)]
            ui.part_tables[part] = gr.HTML()


def place_evaluation(ui: SimpleNamespace) -> None:
    """Place the choices of a further evaluation."""
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


def place_publishing(ui: SimpleNamespace) -> None:
    lead("Publish", "The student becomes a model of the Hub, with a card that shows these results.")
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
