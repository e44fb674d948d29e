"""The first page: a text that three models read, replayed from a recording, measurements of a real model, and the
choice of a model.

The recording and the measurements are in real_model.json, which `python -m tests.benchmarks.landing` writes from the
results of the benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.amounts import size
from linearizer.errors import LinearizerError, RequestError
from linearizer.page import actions, plan_cards, plan_form, planning, run_list
from linearizer.page.calls import QUICK, SLOW, Browser, handler
from linearizer.page.plan_form import FORM, show_form
from linearizer.page.planning import Examined, ExaminedEncoder, Known, make_plan
from linearizer.page.visitors import EXAMPLE_NAME
from linearizer.plan.json_products import JsonProduct
from linearizer.plan.plan import DEFAULT_BUDGET
from linearizer.report import markup
from linearizer.report.line_chart import Axis, Line, draw_lines
from linearizer.report.markup import folded, table, values_list

if TYPE_CHECKING:
    from linearizer.workers.forecast import RunForecast

FILE = Path(__file__).with_name("real_model.json")
KL = Axis(0.0003, 0.4, ((0.001, "0.001"), (0.01, "0.01"), (0.1, "0.1")))
AGREEMENT = Axis(0.8, 1.0, tuple((share / 100, f"{share}%") for share in range(80, 101, 5)), log=False)
MEGABYTES = Axis(2, 250, ((3, "3"), (10, "10"), (30, "30"), (100, "100")))
STUDENT, WINDOW = "student", "window"
SIDES = (("teacher", "The model"), (STUDENT, "Its student"), (WINDOW, "A plain window"))
SHOWN = 260  # characters of the text that are shown while it is read
UNCHOSEN = "Choose a model to continue"
SEARCH_ABOUT = "a name on the Hub, a folder, or a GGUF file"
MODELS = {  # suggestions, by the titles of their buttons
    "Take the demo (14 MB)": "demo",
    "SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen3-0.6B": "Qwen/Qwen3-0.6B",
}
BUDGETS = {"demo": 64}  # which its short texts exceed, so that a run shows what a student forgets
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOL |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
KNOWN = {  # of the suggested models of the Hub
    "HuggingFaceTB/SmolLM2-135M-Instruct": Known("llama", 134_515_008, 269_060_552, SMOL),
    "Qwen/Qwen3-0.6B": Known("qwen3", 751_632_384, 1_503_300_328, QWEN),
}
MAX_LINKED_RUNS = 4  # of a visitor, on the first page


@dataclass(frozen=True)
class Row:
    """The measurements of a student, or of what could replace it, at every length."""

    name: str
    kl: tuple[tuple[float, float, float], ...]  # mean, and its interval
    agreement: tuple[float, ...]


@dataclass(frozen=True)
class Budget:
    """The rows of a budget, the student's first and the window's second."""

    tokens: int
    state_bytes: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Asked:
    """How many questions each side answered right, that need the memory of a text."""

    text: str
    budget: int  # of the student, in tokens
    count: int
    right: dict[str, int]  # by the names of SIDES


@dataclass(frozen=True)
class Recording:
    """A text that was read, and one of the questions about it."""

    asked: Asked
    about: str  # what was read
    fact: str
    question: str
    distance: int  # tokens from the fact to the question
    answers: dict[str, str]  # by the names of SIDES
    text: str  # what was read, up to the question
    readings: tuple[tuple[int, ...], ...]  # tokens that were read by then, and the bytes of each side


@dataclass(frozen=True)
class RealModel(JsonProduct):
    """The measurements of a real model."""

    model: str
    documents: int
    lengths: tuple[int, ...]
    cache_bytes: tuple[int, ...]  # of the teacher, at every length
    budgets: tuple[Budget, ...]
    recordings: tuple[Recording, ...]
    asked: tuple[Asked, ...]  # of all texts at all budgets

    @property
    def first(self) -> int:
        """The place of the budget that is shown first: the budget of the first recording."""
        return [budget.tokens for budget in self.budgets].index(self.recordings[0].asked.budget)


@cache
def read_model() -> RealModel:
    return RealModel.from_json(FILE.read_text(encoding="utf-8"))


def place(ui: SimpleNamespace) -> None:
    gr.HTML(hero_html(), elem_id="hero")
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
    ui.takes = gr.HTML(takes_html(dict.fromkeys(MODELS.values(), "…")), elem_id="takes")
    ui.model_card = gr.HTML(elem_id="model-card")
    title = "Look at a finished run of SmolLM2-135M-Instruct, and chat with its student"
    link = f'<a href="?run={EXAMPLE_NAME}" id="example">{title}</a>'
    ui.last_runs = gr.HTML(elem_id="last-runs")
    gr.HTML(f'<p class="lz-links">{link}</p>{real_model_html()}', elem_id="gain")


def wire(ui: SimpleNamespace) -> None:
    parts = {**vars(ui), **ui.encoder_fields, "text_only": ui.fields["text_only"]}
    outputs = [ui.model_card, ui.inspection, ui.to_budget, ui.step_2, *(parts[name] for name in plan_form.FORM)]
    ui.model.key_up(search_models, ui.memory, ui.model, **{**QUICK, "trigger_mode": "always_last"})
    # queued, because otherwise Gradio would not report the change of the inspection's State to the page
    ui.model.change(show_model, [ui.memory, ui.model, ui.budget], outputs, show_progress_on=ui.model_card, **SLOW)
    for model, button in ui.models.items():
        budget = BUDGETS.get(model, DEFAULT_BUDGET)
        button.click(lambda model=model, budget=budget: (model, budget), None, [ui.model, ui.budget], **QUICK)
    # leaving a run may have closed the second step
    ui.to_budget.click(lambda: (gr.Tabs(selected=2), gr.Tab(interactive=True)), None, [ui.walk, ui.step_2], **QUICK)


def takes_html(facts: Mapping[str, str], device: str = "this machine") -> str:
    """List what a run of each suggested model takes."""
    listed = "".join(
        f"<li><b>{escape(name.rpartition('/')[2])}</b> {escape(text)}</li>" for name, text in facts.items()
    )
    return f'<p class="lz-faint">A usual run on {escape(device)} takes:</p><ul class="lz-takes lz-faint">{listed}</ul>'


@handler
def forecast_models(browser: Browser) -> str:
    """Forecast a run of each suggested model on this machine."""
    facts, device = dict[str, str](), "a CPU"
    for name in MODELS.values():
        known, plan = KNOWN.get(name), make_plan(name, DEFAULT_BUDGET, "Quick", {})
        examined = known.examine(name) if known else planning.examine_model(browser.visitor, name)
        if isinstance(examined, Examined):
            forecast, machine = examined.with_runs(browser.visitor).forecast(plan), planning.machine_of(plan)
            facts[name] = takes(forecast)
            if machine is not None:
                device = machine.device
                facts[name] += "" if machine.fits(forecast) else "; that does not fit here now"
    return takes_html(facts, device)


def takes(forecast: RunForecast) -> str:
    """Say in a line what a run takes."""
    load = f", {size(forecast.download_bytes)} to download" if forecast.download_bytes else ""
    return f"{plan_cards.time_range(forecast)}, {size(forecast.memory_bytes)} of memory{load}"


@handler
def list_last_runs(browser: Browser) -> str:
    """Link to the runs that the visitor began last; an unknown visitor has none."""
    with suppress(LinearizerError):
        return run_list.last_runs(browser.visitor.runs(MAX_LINKED_RUNS))
    return ""


@handler
def search_models(browser: Browser, key: gr.KeyUpData) -> Any:
    """Search while the visitor types; without a network, the field tells."""
    try:
        names, about = actions.search_models(browser.visitor, key.input_value), SEARCH_ABOUT
    except RequestError as error:  # the text may still be a folder, or a model in the cache
        names, about = [], markup.without_folders(str(error))
    return gr.Dropdown(choices=names, info=about)


@handler
def show_model(browser: Browser, model: str | None, budget: float | None) -> tuple[Any, ...]:
    """Describe a model, and open the next step if it is supported."""

    def show(card: str, chosen: Examined | ExaminedEncoder | None = None, form: Sequence[Any] = ()) -> tuple[Any, ...]:
        title = "Continue" if chosen else "Choose another model" if model else UNCHOSEN
        opened = gr.Button(title, interactive=chosen is not None), gr.Tab(interactive=chosen is not None)
        return card, chosen, *opened, *(form or [gr.skip()] * len(FORM))

    if not model:
        return show(markup.message_box("No model is named: type one, or take the demo."))
    try:
        examined = planning.examine_model(browser.visitor, model)
    except LinearizerError as error:
        return show(markup.message_box(str(error), "bad"))
    if isinstance(examined, ExaminedEncoder):
        from linearizer.page.encoder_cards import model_card

        encoder = examined.inspection
        return show(model_card(encoder), examined, show_form(encoder.tokens, budget, encoder))
    card, inspection = plan_cards.model_card(examined.inspection), examined.inspection
    if not inspection.supported:
        return show(card)
    form = show_form(inspection.max_positions, budget, pictures=inspection.reads_pictures)
    return show(card, examined.with_runs(browser.visitor), form)


def hero_html() -> str:
    """Open with what a student is and what it keeps, and with the recording that shows it."""
    model = read_model()
    budget = model.budgets[model.first]
    return (
        '<div class="lz-hero"><h2>A memory that does not grow</h2><p>Linearizer turns a language model into a student '
        "whose memory has a fixed size, and measures what that costs: "
        f"at {model.lengths[-1]:,} tokens the student of {escape(model.model)} <b>chooses the same next token "
        f"{budget.rows[0].agreement[-1]:.0%} of the time, in {size(budget.state_bytes)} instead of "
        f"{size(model.cache_bytes[-1])}</b>.</p></div>{replays_html(model.recordings)}"
    )


def replays_html(recordings: Sequence[Recording]) -> str:
    """Write all recordings, each behind a tab: head.html shows one at a time."""
    tabs = "".join(
        f'<button type="button" role="tab" id="recording-{place}" aria-controls="replay-{place}" '
        f'aria-selected="{str(not place).lower()}" tabindex="{-1 if place else 0}">{recording.asked.text}, '
        f"{size(recording.readings[-1][2])}</button>"
        for place, recording in enumerate(recordings)
    )
    replays = "".join(replay_html(place, recording) for place, recording in enumerate(recordings))
    return f'<div class="lz-replays"><div role="tablist" aria-label="A recording">{tabs}</div>{replays}</div>'


def replay_html(place: int, recording: Recording) -> str:
    """Write the end of a recording, which head.html replays from its begin where motion is welcome."""
    tokens, *held = recording.readings[-1]
    sides = "".join(
        side_html(recording, side, title, count, max(held)) for (side, title), count in zip(SIDES, held, strict=True)
    )
    text = " ".join(recording.text.split())
    return (
        f'<section class="lz-replay" role="tabpanel" id="replay-{place}" aria-labelledby="recording-{place}" '
        f'data-text="{escape(text, quote=True)}" data-readings="{[*map(list, recording.readings)]}"'
        f"{' hidden' * bool(place)}><p>All read {escape(recording.about)}; early on stands "
        f"<q>{escape(recording.fact)}</q></p>"
        f'<p class="lz-read"><span>… <span data-shown>{escape(text[-SHOWN:])}</span> '
        f'<b class="lz-later">{escape(recording.question)}</b></span></p><div class="lz-sides">{sides}</div>'
        '<p class="lz-faint"><button type="button" data-act="replay">Play</button> '
        f'<span data-read>{tokens:,}</span> tokens read <span class="lz-wide">at a budget of {recording.asked.budget} '
        f"tokens; {recording.asked.count} such questions were asked</span></p></section>"
    )


def side_html(recording: Recording, side: str, title: str, held: int, most: int) -> str:
    """Show what one side remembers at the end, and its answer."""
    answer, right, asked = recording.answers[side], recording.answers[side] == recording.fact, recording.asked
    sign = '<span role="img" aria-label="right">✓</span>' if right else '<span role="img" aria-label="wrong">✗</span>'
    return (
        f'<div class="lz-side"><h3>{title}</h3>'
        f'<small class="lz-later">{asked.right[side]} of {asked.count} right</small><b data-held>{size(held)}</b>'
        f'<div class="lz-held lz-{side}"><i style="width:{held / most:.1%}"></i></div>'
        f'<p class="lz-later">{sign} {escape(answer)}</p></div>'
    )


def real_model_html() -> str:
    """Show the measurements of the budget that a slider chooses."""
    model = read_model()
    dial = (
        ""
        if len(model.budgets) == 1
        else (
            '<label class="lz-dial">Budget, in tokens of the cache'
            f'<input type="range" id="real-budget" min="0" max="{len(model.budgets) - 1}" value="{model.first}" '
            f'aria-valuetext="{model.budgets[model.first].tokens} tokens"></label>'
        )
    )
    budgets = "".join(
        f'<div data-budget="{place}" data-tokens="{budget.tokens} tokens"{"" if place == model.first else " hidden"}>'
        f"{budget_html(model, budget)}</div>"
        for place, budget in enumerate(model.budgets)
    )
    about = (
        f"{escape(model.model)}, without training, judged on {model.documents} documents of others (novels, "
        "speeches, news, specifications, code, documentation), none of which its heads were priced on. KL is in nats "
        "per token, lower is better."
    )
    far = min(recording.distance for recording in model.recordings)
    about_recordings = (
        f"In the recordings above, sides end a sentence whose beginning is given, some {far:,} tokens after they read "
        "it. The contract and the log are ours, and so are the sentences in the novel and in nine other texts."
    )
    lead = f'<div class="lz-lead"><h2 id="gained">What you gain</h2><p>{about}</p><p>{about_recordings}</p></div>'
    return f'<section class="lz-real" aria-labelledby="gained">{lead}{dial}{budgets}{numbers_html(model)}</section>'


def budget_html(model: RealModel, budget: Budget) -> str:
    """Show five numbers and three charts of a budget."""
    student, window, longest = *budget.rows[:2], model.lengths[-1]
    pairs = [
        ("budget", f"{budget.tokens} tokens"),
        ("state, whatever the length", size(budget.state_bytes)),
        (f"the model’s cache at {longest:,} tokens", size(model.cache_bytes[-1])),
        ("agrees with the model", f"{student.agreement[-1]:.1%}"),
        ("a plain window of the same bytes does", f"{window.agreement[-1]:.1%}"),
    ]
    ticks = [(length, f"{length // 1024}k") for length in model.lengths]
    lengths = Axis(model.lengths[0], longest, ticks, title="length of the text, tokens")

    def line(name: str, values: Iterable[float], intervals: Sequence[tuple[float, float]] = ()) -> Line:
        kind = {STUDENT: "lz-student", "state": "lz-student", WINDOW: "lz-window"}.get(name, "lz-other")
        return Line(name, list(zip(model.lengths, values, strict=True)), kind, intervals)

    cache, state = (
        [count / 1e6 for count in counts] for counts in (model.cache_bytes, [budget.state_bytes] * len(model.lengths))
    )
    charts = (
        (
            "KL to the model",
            KL,
            [
                line(row.name, [mean for mean, *_ in row.kl], [(low, high) for _, low, high in row.kl])
                for row in budget.rows
            ],
        ),
        ("Agreement with the model", AGREEMENT, [line(row.name, row.agreement) for row in budget.rows]),
        ("Memory, MB", MEGABYTES, [line("cache", cache), line("state", state)]),
    )
    drawn = ""
    for title, axis, lines in charts:
        ends = ", ".join(f"{curve.name} {curve.points[0][1]:.4g} to {curve.points[-1][1]:.4g}" for curve in lines)
        about = f"{title}, over texts of {model.lengths[0]:,} to {longest:,} tokens: {ends}"
        drawn += f"<figure><figcaption>{title}</figcaption>{draw_lines(about, lengths, axis, lines)}</figure>"
    return f'{values_list(pairs, "lz-wide")}<div class="lz-charts">{drawn}</div>'


def numbers_html(model: RealModel) -> str:
    """Write the KL of all rows as a folded table."""
    head = ("", "budget", *(f"{length:,} tokens" for length in model.lengths))
    rows = [
        [row.name, str(budget.tokens), *(f"{mean:.4f} [{low:.4f}, {high:.4f}]" for mean, low, high in row.kl)]
        for budget in model.budgets
        for row in budget.rows
    ]
    note = '<p class="lz-faint">Brackets hold 95% intervals by Student’s t over the documents.</p>'
    asked_head = ("", "budget", "questions", *(title for _, title in SIDES))
    asked_rows = [
        [asked.text, str(asked.budget), str(asked.count), *(str(asked.right[side]) for side, _ in SIDES)]
        for asked in model.asked
    ]
    about = "Right answers about what stands far back; “Novel”: one question about each of ten texts"
    answers = table(about, asked_head, asked_rows)
    return folded("In numbers", table("", head, rows, label="KL of a real model") + note + answers)
