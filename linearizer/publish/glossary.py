"""The words that the page, the cards and the README use, with what they mean; the README holds the same table."""

from __future__ import annotations

from html import escape

GLOSSARY = {
    "teacher, student": "the model as it was; the same model once its heads hold a state of fixed size",
    "KV head": "one head of keys and values, with the group of query heads that read it; each "
    "holds what was bought for it",
    "cache": "the keys and values of every token, which a teacher keeps",
    "window, sinks": "the newest tokens and the first few, which a head keeps exactly",
    "far field": "what a head keeps of all tokens older than its window: slots, features, or a memory that a "
    "rule updates",
    "slot": "one key and value that stand for several older tokens, with their number",
    "feature": "one of the functions whose products stand for exp(q·k) in linear attention",
    "degrees of freedom": "how many features a head's attention needs for a given error; they decide those of "
    "`paper` and `features`",
    "kl": "nats by which the student's next-token distribution differs from its teacher's, at the model's output",
    "budget": "tokens of the teacher's cache whose bytes the student's state may take",
}


def glossary_html() -> str:
    """Lay out a "?" that opens the glossary; the browser itself opens and closes it, with the keyboard, too."""
    words = "".join(
        f"<dt>{escape(word)}</dt><dd>{escape(meaning).replace('`', '')}</dd>" for word, meaning in GLOSSARY.items()
    )
    return (
        '<button type="button" class="lz-ask" popovertarget="glossary" aria-label="Glossary">?</button>'
        '<div id="glossary" class="lz-glossary" popover role="dialog" aria-label="Glossary">'
        f"<h2>Glossary</h2><dl>{words}</dl></div>"
    )
