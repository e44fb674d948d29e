"""The whole page: its layout, the events that connect it with handlers, and the server that shows it."""

from __future__ import annotations

import inspect
import os
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio.themes import Color
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from linearizer.page import actions, compare, handlers, layout, limits, link_preview, plan_handlers, polling, sending
from linearizer.page.calls import ONCE, QUICK, SLOW
from linearizer.page.visitors import on_space
from linearizer.serve import guards
from linearizer.serve.server import HOST, LOCAL_HOSTS, address, check_key

STEPS: dict[str, Callable[[SimpleNamespace], None]] = {
    "Model": partial(layout.place_choice, "model", layout.choose_model),
    "Budget": partial(layout.place_choice, "plan", layout.choose_plan),
    "Measure": layout.profile_step,
    "Train": layout.distil_step,
    "Result": layout.result_step,
    "Compare": compare.place,
}
HERE = Path(__file__).parent
PAIR = (("One run", "first"), ("Another run", "second"))
QUEUE_SECONDS = 0.02  # between two looks of an idle server at its queue; Gradio looks a thousand times a second
COMPRESSED_BYTES = 10_000  # larger answers are sent compressed; Gradio itself compresses only files
STARTED = "/gradio_api/startup-events"  # which Gradio asks for when it starts, without a key; it tells nothing
MAX_SESSIONS = 200  # whose state is kept, about 0.4 MB each; an open page polls, and so stays among them
ACCENT = Color(
    "#eef6fb", "#d9eaf6", "#b5d6ec", "#84bbdf", "#4f9bcd", "#2a7fb8", "#1f6699", "#1b527b", "#194461", "#163650",
    "#0f2538", name="accent",
)  # fmt: skip
NEUTRAL = Color(
    "#fafaf8", "#f3f3f0", "#e6e6e1", "#d3d3cc", "#a3a49d", "#74766f", "#565853", "#434541", "#272926", "#1a1c1b",
    "#121413", name="neutral",
)  # fmt: skip


def browser_memory() -> gr.BrowserState:
    """Store in the browser the run that it watches, and the secret that identifies it; never a token.

    Gradio encrypts the storage with a key, and by default draws another at each start, which would lose every browser.
    This fixed key protects nothing: whoever can read a browser's storage can read what is in it.
    """
    return gr.BrowserState({"secret": "", "run": None}, storage_key="linearizer", secret="linearizer")


def build() -> gr.Blocks:
    """Put the page together."""
    ui = SimpleNamespace()
    with gr.Blocks(title="Linearizer", analytics_enabled=False, delete_cache=(3600, 86400)) as site:
        ui.memory, ui.seen, ui.inspection, ui.touched = browser_memory(), gr.State({}), gr.State(None), gr.State(False)
        ui.at = gr.Number(1, visible="hidden", label="step", precision=0)
        ui.mark = gr.Textbox(visible="hidden", label="what the page shows")
        ui.opened = gr.Checkbox(False, visible="hidden", label="all measurements are shown")
        ui.address = gr.Textbox(visible="hidden", label="run in the address")
        ui.timer = gr.Timer(1.0, active=False)
        layout.header()
        layout.run_above_steps(ui)
        ui.note = gr.HTML(visible="hidden", elem_id="note")
        parameters = inspect.signature(gr.Tabs).parameters  # without wrapping, a menu hides the steps that do not fit
        wrap: dict[str, Any] = {"overflow_behavior": "wrap"} if "overflow_behavior" in parameters else {}
        with gr.Tabs(selected=1, elem_id="steps", **wrap) as ui.walk:
            ui.pages = []
            for number, (name, place) in enumerate(STEPS.items(), 1):
                reached: dict[str, Any] = {"interactive": number == 1, "visible": name != "Train"}  # until it trains
                with gr.Tab(name, id=number, elem_id=f"step-{number}", **reached) as page:
                    place(ui)
                ui.pages.append(page)
                setattr(ui, f"step_{number}", page)
        actions.add_endpoints()  # before handlers with the same names, or Gradio would number the endpoints
        wire(site, ui)
    with site.route("Runs", "/runs") as runs:
        runs_page(runs)
    return site


def runs_page(page: gr.Blocks) -> None:
    """Build the page that lists all runs."""
    memory = browser_memory()
    layout.header("p")
    layout.lead("Runs", "Runs go on by themselves; open one to watch it.", "h1")
    listed, busy = gr.HTML(elem_id="runs", js_on_load="actOnRuns(element, trigger)"), gr.Checkbox(visible="hidden")
    with gr.Column(visible=False) as two:
        layout.lead("Two runs side by side", "Plans, heads, quality and bytes.", "h2")
        with gr.Row(elem_classes="lz-pick"):
            pair = [gr.Dropdown([], label=label, allow_custom_value=True, elem_id=name) for label, name in PAIR]
        compared = gr.HTML(elem_id="compared")
    gr.on([part.change for part in pair], handlers.compare_runs, [memory, *pair], compared, **QUICK)
    acted = listed.click(handlers.act_on_run, memory, None, **ONCE)
    refresh: dict[str, Any] = {"inputs": [memory, busy], "outputs": [listed, two, *pair], **QUICK}
    acted.success(handlers.list_runs, **refresh)
    gr.on([page.load, gr.Timer(5).tick], handlers.list_runs, js="askWhetherBusy", **refresh)


def wire(site: gr.Blocks, ui: SimpleNamespace) -> None:
    """Connect the parts of the page with their handlers."""
    outputs = [ui.memory, ui.note, ui.timer]
    opened = site.load(handlers.open_page, [ui.memory, ui.address], outputs, js="readAddress", **QUICK)
    opened.then(None, None, None, js="() => { window.opened = true }", **QUICK)
    site.load(handlers.list_last_runs, ui.memory, ui.last_runs, **QUICK)
    ui.memory.change(None, ui.memory, None, js="keepInAddress", **QUICK)
    for number, page in enumerate(ui.pages, 1):
        page.select(None, None, ui.at, js=f"() => focusStep({number})", **QUICK)
    wire_model(ui)
    wire_plan(ui)
    wire_run(ui, opened)
    compare.wire(ui)
    wire_publish(ui)
    wire_evaluate(ui)


def wire_model(ui: SimpleNamespace) -> None:
    parts = {**vars(ui), **ui.encoder_fields, "text_only": ui.fields["text_only"]}
    outputs = [ui.model_card, ui.inspection, ui.to_budget, ui.step_2, *(parts[name] for name in plan_handlers.FORM)]
    ui.model.key_up(handlers.search_models, ui.memory, ui.model, **{**QUICK, "trigger_mode": "always_last"})
    # queued, because otherwise Gradio would not report the change of the inspection's State to the page
    ui.model.change(
        plan_handlers.show_model, [ui.memory, ui.model, ui.budget], outputs, show_progress_on=ui.model_card, **SLOW
    )
    for model, button in ui.models.items():
        button.click(lambda model=model: model, None, ui.model, **QUICK)
    # leaving a run may have closed the second step
    ui.to_budget.click(lambda: (gr.Tabs(selected=2), gr.Tab(interactive=True)), None, [ui.walk, ui.step_2], **QUICK)


def wire_plan(ui: SimpleNamespace) -> None:
    form = [ui.budget, ui.effort, ui.may_grow, ui.way, ui.listed, *ui.fields.values(), *ui.encoder_fields.values()]
    choices, changed = [ui.inspection, *form], [ui.inspection, *form[1:]]
    outputs = [ui.budget_card, ui.forecast, ui.effort, ui.way, ui.listed, ui.command, ui.plan]
    newest_only = {**QUICK, "trigger_mode": "always_last", "js": "(...sent) => clampSlider('budget', 1, sent)"}
    changes = [part.change for part in changed]
    ui.budget.input(plan_handlers.show_budget, choices, ui.budget_card, **newest_only)
    gr.on([*changes, ui.budget.release], plan_handlers.show_plan, choices, outputs, **newest_only)
    ui.start.click(plan_handlers.start_run, [ui.memory, *choices], [*watch_outputs(ui), ui.start_note], **ONCE)
    wire_job(ui, choices)
    written = [ui.model, *form]
    uploaded = ui.taken.upload(plan_handlers.take_plan, ui.taken, written, **ONCE)
    reused = gr.on([ui.change_model.click, ui.change_plan.click], plan_handlers.change_run, ui.memory, written, **ONCE)
    for filled in (uploaded, reused):  # a slider that a handler sets sends no event
        filled.success(plan_handlers.show_plan, choices, outputs, **newest_only)
    reused.success(handlers.leave_run, ui.memory, watch_outputs(ui), **QUICK)


def wire_job(ui: SimpleNamespace, choices: list[Any]) -> None:
    job = [ui.flavor, ui.job_minutes, ui.job_push]
    ui.job_part.expand(plan_handlers.list_hardware, ui.memory, ui.flavor, **SLOW, show_progress_on=ui.flavor)
    outputs = [ui.job_sure, ui.job_question, ui.cap]
    ui.offer.click(
        plan_handlers.offer_job, [ui.memory, *job, *choices], outputs, **{**ONCE, "show_progress_on": ui.offer}
    )
    ui.start_job.click(plan_handlers.start_job, [ui.memory, ui.cap, *job, *choices], watch_outputs(ui), **ONCE)
    changes = [part.change for part in (*job, *choices)]
    gr.on(changes, plan_handlers.forget_offer, None, [ui.job_sure, ui.cap], **{**QUICK, "trigger_mode": "always_last"})
    # in the browser: an answer of the server might arrive late, and erase the refusal of a newer start
    gr.on(changes, None, None, ui.start_note, js="() => ''", **QUICK)


def watch_outputs(ui: SimpleNamespace) -> list[Any]:
    return [getattr(ui, name) for name in handlers.WATCHED_PARTS]


def wire_run(ui: SimpleNamespace, opened: Any) -> None:
    """Connect the parts that show a run: the page polls when it is opened, and then at every tick."""
    outputs = [getattr(ui, name) for name in polling.OUTPUTS]
    card_outputs = [ui.run_card, ui.training, ui.evaluating, ui.mark]
    for event in (opened.success, ui.timer.tick):
        event(polling.poll_run, ui.memory, card_outputs, **{**QUICK, "trigger_mode": "once"})
    ui.all.expand(None, None, ui.opened, js="() => true", **QUICK)
    changes = [ui.mark.change, ui.opened.change]
    gr.on(changes, polling.draw_changes, [ui.memory, ui.seen, ui.at, ui.touched, ui.opened], outputs, **QUICK)
    newest_only = {**QUICK, "trigger_mode": "always_last", "js": "(...sent) => clampSlider('other', 1, sent)"}
    ui.other.input(handlers.share_budget, [ui.memory, ui.other], [ui.other_card, ui.touched], **newest_only)
    ui.colour.change(None, ui.colour, None, js="colourHeads", **QUICK)
    ui.branch.click(handlers.branch_run, [ui.memory, ui.other], watch_outputs(ui), **ONCE)
    ui.to_chat.click(lambda: gr.Tabs(selected=6), None, ui.walk, **QUICK)
    ui.to_publish.click(None, None, None, js="openPublishing", **QUICK)
    for name, action in {**handlers.RUN_ACTIONS, "stop_evaluating": actions.stop_evaluation}.items():
        getattr(ui, name).click(handlers.ask_run(action), ui.memory, [ui.timer, ui.note, ui.pay], **ONCE)


def wire_evaluate(ui: SimpleNamespace) -> None:
    choices = [ui.parts, ui.part_texts, ui.part_tasks, ui.part_limit]
    ui.evaluate.click(handlers.start_evaluation, [ui.memory, *choices], ui.timer, **ONCE)


def wire_publish(ui: SimpleNamespace) -> None:
    owned, noted = [ui.owner, ui.repo, ui.preview_note], {"show_progress_on": ui.preview_note}
    ui.publish_part.expand(handlers.list_owners, ui.memory, owned, **SLOW, **noted)
    target = [ui.memory, ui.owner, ui.repo, ui.private]
    outputs = [ui.preview_note, ui.files, ui.card_text, ui.card_place, ui.publish]
    fetched = ui.download.click(handlers.download_student, ui.memory, ui.link, **ONCE)
    fetched.success(None, ui.link, None, js="fetchFile", **QUICK)
    ui.preview.click(handlers.preview_publication, target, outputs, **{**ONCE, **noted})
    ui.publish.click(handlers.publish_run, target, ui.timer, **ONCE)


def theme() -> gr.themes.Base:
    """Build the theme, with fonts of the system, so nothing is downloaded."""
    return gr.themes.Base(
        primary_hue=ACCENT,
        secondary_hue=ACCENT,
        neutral_hue=NEUTRAL,
        spacing_size=gr.themes.sizes.spacing_lg,
        radius_size=gr.themes.sizes.radius_lg,
        font=["Inter", "system-ui", "-apple-system", "Segoe UI", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_900",
        body_text_color_subdued="*neutral_600",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary_dark="*neutral_950",
        border_color_primary_dark="*neutral_800",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_text_color="*body_text_color_subdued",
        block_title_text_color="*body_text_color",
        block_title_text_weight="600",
        block_padding="0px",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_secondary_background_fill="*neutral_100",
        button_secondary_background_fill_hover="*neutral_200",
        button_secondary_background_fill_dark="*neutral_800",
        button_cancel_text_color="#a3281f",
        button_cancel_text_color_dark="#f0a69f",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
        link_text_color="*primary_600",
        link_text_color_dark="*primary_300",
    )


def keep_out(key: str | None) -> list[Middleware]:
    """Ask every request for the key if there is one; else serve this machine alone. A Space serves everybody."""
    if on_space():
        return []
    if key is None:
        return [Middleware(guards.Guard, allows=guards.is_local, refuse=guards.REFUSED)]
    allows = guards.has_key_or_cookie(key, STARTED)
    return [
        Middleware(guards.Guard, allows=guards.is_same_site, refuse=guards.CROSS_SITE),
        Middleware(guards.KeyLink, key=key),
        Middleware(guards.Guard, allows=allows, refuse=guards.KEYLESS),
    ]


def serve_page(
    port: int | None = None,
    host: str | None = None,
    key: str | None = None,
    ready: Callable[[str], None] = lambda link: None,
) -> None:
    """Serve the page; on a Space, enforce limits, and use no token but the visitor's own.

    Elsewhere whoever reaches the page may do all that its owner may. So requests must carry the `key`. Where other
    machines reach the page and no key is given, one is made, and `ready` is called with a link that contains it.
    """
    check_key(key)
    host = host or ("0.0.0.0" if on_space() else HOST)
    made_key = secrets.token_urlsafe(24) if key is None and host not in LOCAL_HOSTS and not on_space() else None
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(10**9)  # else every event computes statistics of all events
    os.environ["GRADIO_RUN_HISTORY"] = "False"  # else browsers keep the inputs of events
    if on_space():
        os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
        threading.Thread(target=limits.guard_runs, daemon=True).start()
    site = build().queue(max_size=64, api_open=True)
    site._queue.sleep_when_free = QUEUE_SECONDS
    compressing = Middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES, compresslevel=5)
    site.launch(
        server_name=f"[{host}]" if ":" in host else host,
        server_port=port,
        share=False,  # whatever GRADIO_SHARE says
        theme=theme(),
        css_paths=HERE / "page.css",
        head_paths=HERE / "head.html",
        footer_links=["api", "settings"],
        show_error=False,
        allowed_paths=[],
        enable_monitoring=False,
        max_file_size=limits.MAX_FILE,
        state_session_capacity=MAX_SESSIONS,
        app_kwargs={
            "routes": [*sending.ROUTES, link_preview.ROUTE],
            "middleware": [compressing, *keep_out(key or made_key), Middleware(link_preview.LinkPreview)],
        },
        ssr_mode=False,
        prevent_thread_lock=True,
    )
    if made_key is not None:
        ready(f"{address(host, site.server_port)}/?key={made_key}")
    site.block_thread()
