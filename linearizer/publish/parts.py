"""What the parts of an evaluation ask, and what their charts are called and show."""

from __future__ import annotations

TITLES = {  # part -> its name, and what it asks
    "language": ("Language", "How well is the next token predicted?"),
    "recall": ("Recall", "How far back is a passage remembered?"),
    "needle": ("Hidden pairs", "Is a key's value found again, wherever it stood?"),
    "generation": ("Writing", "Does it write as its teacher does?"),
    "approximation": ("Approximation", "How far is every head from its teacher's?"),
    "speed": ("Speed and memory", "What does it take on this machine?"),
    "tasks": ("Tasks", "What does it score where others were scored?"),
}
OPEN = "Open markers are drawn out from shorter texts."
WROTE = "Repeated runs of four tokens; different tokens, and pairs of them; those that the teacher would choose."
CAPTIONS = {  # part -> its charts in their order: name, and what is seen
    "language": (
        ("Loss", "Next-token loss, lower is better; the bars hold 95 % of what other texts would give."),
        ("Loss by position", "A student that forgets is worse the later a token stands; the bars hold 95 %."),
        ("Calibration", "How often the likeliest token came, by its probability; on the dotted line both agree."),
    ),
    "recall": (
        ("Recall", "Loss on a passage that comes again, so many tokens later. Lower: it remembers."),
        ("Longer texts", "Loss beyond the training's length; open markers lie beyond the teacher's positions."),
    ),
    "needle": (
        (
            "Pairs hidden in text",
            "Share of a hidden value that is found when its key is asked for, by depth and length of the text; * marks "
            "lengths beyond the teacher's positions.",
        ),
    ),
    "generation": (
        ("Where they leave the teacher", "Tokens before the first that is not the teacher's; a mark for each text."),
        ("What they write: the likeliest tokens", WROTE),
        ("What they write: drawn tokens", WROTE),
    ),
    "approximation": (
        ("Error of every head", "Share of attention that is misplaced, layer by KV head; the number is in the cell."),
        (
            "Error by features",
            "If every KV head had nothing but so many features; the dotted line is what the profile promises.",
        ),
    ),
    "speed": (
        ("Writing", f"Tokens a second, one text at a time, by its length. {OPEN}"),
        ("Reading", f"Tokens a second of a prompt, by its length. {OPEN}"),
        ("Memory", "Bytes of what is remembered at a length. Open markers are told by the shape."),
    ),
    "tasks": (("Scores", "Of every task, with standard errors."),),
}
