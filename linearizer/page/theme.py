"""How the page looks: one accent, one neutral, much room; light and dark."""

from __future__ import annotations

import gradio as gr
from gradio.themes import Color

ACCENT = Color(
    "#eef6fb", "#d9eaf6", "#b5d6ec", "#84bbdf", "#4f9bcd", "#2a7fb8", "#1f6699", "#1b527b", "#194461", "#163650",
    "#0f2538", name="accent",
)  # fmt: skip
NEUTRAL = Color(
    "#fafaf8", "#f3f3f0", "#e6e6e1", "#d3d3cc", "#a3a49d", "#74766f", "#565853", "#434541", "#272926", "#1a1c1b",
    "#121413", name="neutral",
)  # fmt: skip


def theme() -> gr.themes.Base:
    """Make our theme; its fonts are the system's, so nothing is fetched."""
    return gr.themes.Base(
        primary_hue=ACCENT,
        secondary_hue=ACCENT,
        neutral_hue=NEUTRAL,
        text_size=gr.themes.sizes.text_md,
        spacing_size=gr.themes.sizes.spacing_lg,
        radius_size=gr.themes.sizes.radius_lg,
        font=["Inter", "system-ui", "-apple-system", "Segoe UI", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_900",
        body_text_color_dark="*neutral_100",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        background_fill_primary="white",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary="*neutral_50",
        background_fill_secondary_dark="*neutral_950",
        border_color_primary="*neutral_200",
        border_color_primary_dark="*neutral_800",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_shadow="none",
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
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_700",
        button_primary_text_color="white",
        button_primary_text_color_dark="white",
        button_secondary_background_fill="*neutral_100",
        button_secondary_background_fill_hover="*neutral_200",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_background_fill_hover_dark="*neutral_700",
        button_cancel_text_color="#a3281f",
        button_cancel_text_color_dark="#f0a69f",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
        link_text_color="*primary_600",
        link_text_color_dark="*primary_300",
    )


OUTSIDE = """<style>
.lz-heard { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media (max-width: 640px) { footer .divider { display: none !important; } }
</style>"""  # what CSS cannot say: Gradio keeps that to its main part

CSS = """
.gradio-container { max-width: 1180px !important; margin-inline: auto !important; width: 100%; }
.nav-holder nav { justify-content: flex-start !important; }
.form { background: transparent !important; border: 0 !important; box-shadow: none !important;
  gap: 1.25rem !important; }
.lz-head { display: flex; align-items: baseline; gap: 1rem; flex-wrap: wrap; padding: .5rem 0 .25rem; }
.lz-head .lz-name { font-size: 1.5rem; color: var(--body-text-color);
  font-weight: 650; letter-spacing: -.02em; margin: 0; }
.lz-head p { color: var(--body-text-color-subdued); margin: 0; }
#sign-in { position: absolute; right: 3rem; top: .75rem; width: auto; }
#now { display: none; margin: .5rem 0 0; font-size: .95rem; font-weight: 500; font-variant-numeric: tabular-nums; }
@media (max-width: 1100px) { #now:not(:empty) { display: block; } }
#sidebar:not(.open) .sidebar-content { visibility: hidden; }
#model:not([data-chosen]) li.active:not(:hover) { background: none; }
.lz-pick { align-items: flex-end !important; }
#to-budget, #start, #to-distil, #to-compare, #change-model, #change-plan, #take-plan, #job-offer, #job-start {
  max-width: 22rem; }
#steps > .tab-wrapper { margin-bottom: .75rem; }
#steps > .tab-wrapper button[role=tab] { font-size: 1rem; padding: .6rem 1rem; color: var(--body-text-color-subdued); }
#steps > .tab-wrapper button.selected { color: var(--body-text-color) !important; font-weight: 600; }
#steps { gap: 1rem; }
.cm-line, .cm-line span { color: var(--body-text-color) !important; }
.lz-lead h1, .lz-lead h2 { font-size: 1.75rem; font-weight: 600; letter-spacing: -.02em; margin: .75rem 0 .25rem; }
.lz-lead p { color: var(--body-text-color-subdued); max-width: 44rem; margin: 0 0 .5rem; font-size: 1rem; }
.lz-facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1rem 1.5rem;
  margin: .75rem 0; }
.lz-facts.lz-wide { grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); }
.lz-facts.lz-thirds { grid-template-columns: repeat(3, 1fr); gap: .75rem; }
.lz-facts.lz-list { grid-template-columns: 1fr; gap: .45rem; }
.lz-facts.lz-list > div { display: flex; justify-content: space-between; gap: 1rem; }
.lz-facts.lz-list dd { text-align: right; overflow-wrap: anywhere; font-size: .9rem; font-weight: 500; }
.lz-facts dt { color: var(--body-text-color-subdued); font-size: .82rem; }
.lz-facts dd { margin: 0; font-weight: 600; font-size: 1.02rem; font-variant-numeric: tabular-nums; }
.lz-card { background: var(--background-fill-primary); border: 1px solid var(--border-color-primary);
  border-radius: 14px; padding: 1.25rem 1.5rem; }
.lz-card header { display: flex; align-items: baseline; gap: .75rem; flex-wrap: wrap; }
.lz-card h3 { margin: 0; font-size: 1.2rem; font-weight: 600; overflow-wrap: anywhere; }
.lz-card small, .lz-faint, .lz-empty { color: var(--body-text-color-subdued); }
.lz-message { border-left: 3px solid var(--border-color-primary); padding: .5rem .9rem; margin: .6rem 0;
  border-radius: 4px;
  background: var(--background-fill-primary); overflow-wrap: anywhere; }
.lz-good { border-color: #12906f; } .lz-bad { border-color: #c2571a; }
.lz-message code { font-family: var(--font-mono); font-size: .9em; }
.lz-ask { width: 1.75rem; height: 1.75rem; min-width: 1.75rem; padding: 0 !important; display: inline-flex;
  align-items: center; justify-content: center; align-self: center; line-height: 1; border-radius: 50%;
  border: 1px solid var(--border-color-primary);
  background: var(--background-fill-primary); color: var(--body-text-color); font-weight: 600; cursor: pointer; }
.lz-glossary { max-width: 40rem; width: calc(100vw - 2rem); max-height: 80vh; overflow-y: auto; margin: auto;
  border: 1px solid var(--border-color-primary); border-radius: 14px; padding: 1rem 1.5rem 1.5rem;
  background: var(--background-fill-primary); color: var(--body-text-color); }
.lz-glossary h2 { font-size: 1.2rem; font-weight: 600; margin: .25rem 0 .75rem; }
.lz-glossary dt { font-weight: 600; margin-top: .6rem; } .lz-glossary dd { margin: 0; }
.lz-card pre { overflow-x: auto; font-size: .85rem; } .lz-card code { overflow-wrap: anywhere; }
.lz-verdict .lz-message { font-size: 1.15rem; font-weight: 600; padding: .9rem 1.1rem; border-left-width: 5px;
  border-radius: 10px; }
.lz-verdict .lz-note-below { color: var(--body-text-color-subdued); font-size: .95rem; margin: .5rem 0 0;
  max-width: 44rem; }
.lz-verdict .lz-note { border-color: #b8860b; }
.lz-fold { margin: .75rem 0; } .lz-fold > summary { cursor: pointer; color: var(--body-text-color-subdued);
  font-size: .95rem; font-weight: 500; padding: .25rem 0; }
.lz-lead h3 { font-size: 1.2rem; font-weight: 600; margin: 1rem 0 .25rem; }
.lz-state { font-size: 1.05rem; font-weight: 600; margin: .25rem 0 .5rem; }
.lz-running, .lz-done { color: var(--link-text-color); }
.lz-step { margin: .5rem 0 .25rem; font-weight: 500; } .lz-faint { font-size: .85rem; margin: .25rem 0; }
progress { width: 100%; height: 6px; appearance: none; border: 0; border-radius: 3px; overflow: hidden;
  background: var(--border-color-primary); }
progress::-webkit-progress-bar { background: var(--border-color-primary); }
progress::-webkit-progress-value { background: var(--slider-color); transition: width .4s; }
progress::-moz-progress-bar { background: var(--slider-color); }
.lz-scroll { overflow-x: auto; } .lz-scroll ~ .lz-scroll { margin-top: .9rem; }
.lz-chart h3.lz-part { font-size: 1.3rem; border-top: 1px solid var(--border-color-primary); padding-top: 1.25rem;
  margin-top: 1.5rem; }
.lz-table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem; }
.lz-table caption { text-align: left; color: var(--body-text-color-subdued); font-size: .82rem; padding: .4rem 0;
  white-space: normal; max-width: calc(100vw - 4.5rem); }
.slider_input_container { padding-block: 4px; }
.lz-table, .lz-table tr, .lz-table thead, .lz-table tbody { border: 0 !important; background: none !important; }
.lz-table th, .lz-table td { padding: .5rem .75rem .5rem 0 !important; text-align: right; font-weight: 400;
  white-space: nowrap; border: 0 !important; border-bottom: 1px solid var(--border-color-primary) !important; }
.lz-table thead th { color: var(--body-text-color-subdued); font-size: .82rem; }
.lz-table th:first-child { text-align: left !important; padding-left: 0 !important; }
.lz-table th:first-child a { padding-left: 0 !important; }
.lz-table.lz-words th, .lz-table.lz-words td { text-align: left; } .lz-table tbody th { font-weight: 600; }
.lz-table.lz-pair { table-layout: fixed; } .lz-table.lz-pair th, .lz-table.lz-pair td { white-space: normal;
  vertical-align: top; overflow-wrap: anywhere; }
.lz-chart h3 { font-size: 1rem; font-weight: 600; margin: 1rem 0 0; }
.lz-chart p { color: var(--body-text-color-subdued); font-size: .9rem; margin: 0; max-width: 44rem; }
.js-plotly-plot g:not(.heatmap-label):not(.hovertext) > text {
  fill: var(--body-text-color-subdued) !important; }
.js-plotly-plot .hovertext > text.name { fill: var(--body-text-color) !important; }
.js-plotly-plot .annotation-text, .js-plotly-plot .legendtext { fill: var(--body-text-color) !important; }
.js-plotly-plot .modebar-container { display: none; }
.lz-chart .lz-later { font-weight: 500; margin-top: .25rem; }
.lz-figure:not(:has(.empty)) .lz-later, #step-5:not(:has(#compare:disabled)) #awaited,
#note:has(.lz-message) ~ #steps #awaited, #step-5:has(#compare:disabled) #stop-writing { display: none; }
#step-4:has(.lz-untrained) .lz-chart { display: none; }
#teacher, #student, #answer { font-family: var(--font-mono); font-size: .9rem; line-height: 1.5; height: 15rem;
  overflow-y: auto !important;
  background: var(--background-fill-primary); border: 1px solid var(--border-color-primary); border-radius: 10px;
  padding: .75rem 1rem !important; }
#teacher p, #student p, #answer p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
#teacher mark, #student mark { background: #f6d58a; color: #1a1c1b; border-radius: 3px; padding: 0 1px; }
#answer { height: auto; min-height: 4rem; }
#teacher:not(:has(p))::before, #student:not(:has(p))::before, #answer:not(:has(p))::before {
  color: var(--body-text-color-subdued); font-family: var(--font); }
#teacher:not(:has(p))::before { content: "What the teacher writes appears here."; }
#student:not(:has(p))::before { content: "What the student writes appears here."; }
#answer:not(:has(p))::before { content: "What the student answers appears here."; }
.lz-side-name h3 { font-size: 1rem; font-weight: 600; margin: .5rem 0 .25rem; }
.lz-chips { gap: .5rem !important; flex-wrap: wrap; } .lz-chips button { flex: 0 1 auto; }
#acts:not(:has(button)) { display: none; }
#acts { margin: .25rem 0; } #acts button { flex: 0 1 auto; min-width: 7rem; }
.lz-hero { display: grid; grid-template-columns: 1fr minmax(0, 26rem); gap: 2rem; align-items: center;
  margin: .5rem 0 1rem; }
.lz-hero p { font-size: 1.15rem; line-height: 1.6; max-width: 34rem; margin: 0 0 1rem; }
.lz-hero a { font-size: 1rem; font-weight: 600; padding: 0 !important; }
.lz-picture { width: 100%; max-width: 26rem; height: auto; font-size: 13px; }
.lz-picture text { fill: var(--body-text-color-subdued); }
.lz-picture line { stroke: var(--border-color-primary); stroke-width: 2; }
.lz-teacher-bar { fill: #7c8796; } .lz-student-bar { fill: #2a83c4; }
.lz-tiles .wrap { display: grid !important; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1rem !important; }
.lz-tiles .wrap label { align-items: flex-start !important; gap: .6rem; padding: 1rem 1.1rem !important; height: 100%;
  border: 1px solid var(--border-color-primary) !important; border-radius: 14px !important; white-space: normal;
  background: var(--background-fill-primary) !important; box-shadow: none !important; }
.lz-tiles .wrap label.selected { border-color: var(--slider-color) !important;
  outline: 1px solid var(--slider-color); background: var(--background-fill-primary) !important; }
.lz-tiles .wrap label span { display: block; white-space: pre-line; font-size: .92rem; line-height: 1.5;
  font-weight: 400; margin: 0 !important; color: var(--body-text-color-subdued) !important; }
.lz-tiles .wrap label span::first-line { font-weight: 600; font-size: 1.02rem; color: var(--body-text-color); }
.lz-tiles .wrap input { margin-top: .25rem; flex: none; }
#recipe .wrap { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .75rem !important; }
#recipe .wrap label { padding: .75rem .9rem !important; }
.lz-group { font-size: 1rem; font-weight: 600; margin: .75rem 0 0; }
.lz-options > .form, .lz-options:not(:has(> .form)) { display: grid !important; gap: 1rem 1.25rem;
  grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr));
  align-items: end; }
@media (min-width: 800px) { #flavor { grid-column: span 2; } }
input:checked:hover { background-color: var(--checkbox-background-color-selected) !important;
  border-color: var(--checkbox-border-color-selected) !important; }
input[type=range]::-webkit-slider-thumb { background: var(--slider-color) !important; }
input[type=range]::-moz-range-thumb { background: var(--slider-color) !important; }
.dark input[type=range] { --neutral-200: var(--border-color-primary); }
h2:focus { outline: none; }
button:focus-visible, input:not([role=listbox], [role=combobox]):focus-visible, textarea:focus-visible,
a:focus-visible, .lz-scroll:focus-visible, [role=tab]:focus-visible, .wrap:has(> .wrap-inner):focus-within {
  outline: 2px solid var(--link-text-color) !important; outline-offset: 2px; }
@media (max-width: 800px) {
  .lz-hero { grid-template-columns: 1fr; gap: 1rem; } .lz-tiles .wrap, #recipe .wrap { grid-template-columns: 1fr; }
}
@media (max-width: 640px) {
  #to-budget, #start, #to-distil, #to-compare, #change-model, #change-plan, #take-plan, #job-offer, #job-start {
    max-width: none; }
  #steps > .tab-wrapper button { font-size: .8rem !important; padding: .5rem .25rem !important; font-weight: 500; }
  .lz-tiles .wrap label { padding: .9rem .75rem !important; gap: .5rem; }
  .lz-tiles .wrap label span::first-line { font-size: .95rem; }
  .lz-table th, .lz-table td { padding-right: .4rem !important; font-size: .86rem; }
  .lz-card { padding: 1rem; }
  .lz-lead h1, .lz-lead h2 { font-size: 1.4rem; }
  .lz-facts, .lz-facts.lz-wide { grid-template-columns: 1fr 1fr; gap: .75rem 1rem; }
}
@media (prefers-reduced-motion: reduce) { * { transition: none !important; animation: none !important; } }
"""
