"""What several steps and pages place: titles, figures, the header, and what a browser stores."""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from pathlib import Path
from types import SimpleNamespace

import gradio as gr

from linearizer.page.limits import LIMITS
from linearizer.page.visitors import on_space, signs_in
from linearizer.report.markup import glossary_html

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


def show_note(box: str) -> gr.HTML:
    """Show a message above the steps, or none."""
    return gr.HTML(box, visible=True if box else "hidden")


def browser_memory() -> gr.BrowserState:
    """Store in the browser the run that it watches, and the secret that identifies it; never a token.

    Gradio encrypts the storage with a key, and by default draws another at each start, which would lose every browser.
    This fixed key protects nothing: whoever can read a browser's storage can read what is in it.
    """
    return gr.BrowserState({"secret": "", "run": None}, storage_key="linearizer", secret="linearizer")
