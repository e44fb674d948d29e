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

from linearizer.errors import LinearizerError
from linearizer.page import (
    actions,
    landing,
    layout,
    limits,
    link_preview,
    plan_step,
    result_step,
    run_steps,
    sending,
)
from linearizer.page.calls import QUICK, Browser, Memory, add_endpoint, begin_import, handler
from linearizer.page.chat import chats, compare
from linearizer.page.layout import browser_memory, show_note
from linearizer.page.run_list import runs_page
from linearizer.page.run_steps import IDLE_POLL_SECONDS, SOON_SECONDS
from linearizer.page.visitors import MIN_SECRET_CHARACTERS, on_space
from linearizer.report import markup
from linearizer.serve import guards
from linearizer.serve.server import HOST, LOCAL_HOSTS, address, check_key

STEPS: dict[str, Callable[[SimpleNamespace], None]] = {
    "Model": partial(layout.place_choice, "model", landing.place),
    "Budget": partial(layout.place_choice, "plan", plan_step.place),
    "Measure": run_steps.place_measuring,
    "Train": run_steps.place_training,
    "Result": result_step.place,
    "Compare": compare.place,
}
HERE = Path(__file__).parent
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
        run_steps.place_run(ui)
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
        for action in actions.ENDPOINTS:  # before handlers with the same names, or Gradio would number the endpoints
            once = action in actions.ONE_AT_A_TIME
            add_endpoint(action, action not in actions.WITHOUT_SECRET, 1 if once else 4)
        wire(site, ui)
    with site.route("Runs", "/runs") as runs:
        runs_page(runs)
    return site


def wire(site: gr.Blocks, ui: SimpleNamespace) -> None:
    """Connect the parts of the page with their handlers."""
    outputs = [ui.memory, ui.note, ui.timer]
    opened = site.load(open_page, [ui.memory, ui.address], outputs, js="readAddress", **QUICK)
    opened.then(None, ui.memory, None, js="memory => { window.opened = true; keepInAddress(memory) }", **QUICK)
    site.load(landing.list_last_runs, ui.memory, ui.last_runs, **QUICK)
    opened.success(landing.forecast_models, ui.memory, ui.takes, **{**QUICK, "queue": True})
    ui.memory.change(None, ui.memory, None, js="keepInAddress", **QUICK)
    for number, page in enumerate(ui.pages, 1):
        page.select(None, None, ui.at, js=f"() => focusStep({number})", **QUICK)
    run_steps.wire(ui, opened)
    for step in (landing, plan_step, result_step, compare):
        step.wire(ui)


@handler
def open_page(browser: Browser, address: str | None) -> tuple[Memory, Any, Any]:
    """Show the run that the address names, or the first page."""
    begin_import()
    secret, note = str(browser.memory.get("secret") or ""), ""
    if on_space() and len(secret) < MIN_SECRET_CHARACTERS:
        secret = secrets.token_urlsafe(24)  # by which the browser is recognised
    memory: Memory = {"secret": secret, "run": address or None}
    if memory["run"]:
        try:
            memory["run"] = Browser(memory, browser.profile, browser.token).find_run().folder.name
        except LinearizerError as error:
            memory["run"] = None
            note = markup.message_box(str(error), "bad")
    poll_seconds = SOON_SECONDS if memory["run"] else IDLE_POLL_SECONDS
    return memory, show_note(note), gr.Timer(poll_seconds, active=True)


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
        threading.Thread(target=limits.guard_runs, args=[chats.end_old_chats], daemon=True).start()
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
