"""A run whose card can be written, with names that try to become markup."""

from __future__ import annotations

import json
from dataclasses import asdict

from linearizer.run.allocation import Allocation
from linearizer.run.folder import Run
from linearizer.run.head_bytes import Head, Layer
from linearizer.run.plan import Plan

HOSTILE = "](http://evil)\n---\nlicense: mit\n# <script>alert(1)</script> `x` | **bold** ${os} ```"

LAYERS = (Layer(4, 2, 16, 16), Layer(4, 2, 16, 16, native_window=8), Layer(4, 2, 16, 16))
HEADS = ((Head(8, 32), Head(softmax=True)), (), (Head(8, slots=4), Head(features=64)))


def row(name, state, loss):
    language = {"loss": loss, "by_position": [loss + 1, loss - 1], "kl": 0.5, "agreement": 0.75, "tokens": 1234}
    return {
        "name": name, "state_bytes": state, "language": language, "recall": [{"gap": 16, "first": 4.0, "second": 2.0}]
    }  # fmt: skip


ROWS = [row("teacher", None, 3.0), row("student", 4096, 3.25), row("window", 4000, 3.5)]


def made(folder, rows=ROWS, plan=None, **inspection):
    """A run whose products are as given."""
    run = Run.begin(folder, plan or Plan("org/base@main", budget=64))
    facts = {"name": "org/base@main", "revision": "c0ffee" * 6, "gated": False, "terms": {"license": "mit"}}
    layers = [asdict(layer) for layer in LAYERS]
    run.write("inspection.json", json.dumps({**facts, "layers": layers, "max_positions": 1024, **inspection}))
    run.write("allocation.json", Allocation("gain", 4, HEADS).to_json())
    if rows:
        run.write("evaluation.json", json.dumps(rows))
    return run


def colours(image, box):
    return {colour for _, colour in image.crop(box).getcolors(maxcolors=10**6)}


def rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
