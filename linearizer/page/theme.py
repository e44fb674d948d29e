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
