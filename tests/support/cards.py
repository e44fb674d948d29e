"""A run whose card can be written, with names that try to become markup."""

from __future__ import annotations

from linearizer.plan.allocation import Allocation, StateSize
from linearizer.plan.head_bytes import Head, Layer
from linearizer.plan.plan import Plan
from linearizer.publish.card import ENVIRONMENT
from linearizer.report.tables import describe_heads
from linearizer.run.folder import Run
from tests.support.evaluation_results import LANGUAGE, RECALL, at_length, estimate, predictions
from tests.support.runs import inspection_of

HOSTILE = "](http://evil)\n---\nlicense: mit\n# <script>alert(1)</script> `x` | **bold** ${os} ```"

LAYERS = (Layer(4, 2, 16, 16), Layer(4, 2, 16, 16, native_window=8), Layer(4, 2, 16, 16))
HEADS = ((Head(8, 32), Head(softmax=True)), (), (Head(8, slots=4), Head(features=64)))


LOSSES = {"teacher": 3.0, "student": 3.25, "window": 3.5}


def judged(text="builtin", **losses):
    """What is measured when a student is made: the losses of its subjects on a text."""
    losses = LOSSES | losses
    states = {"teacher": 65536, "student": 4096, "window": 4000}
    predicted = [{**predictions(name, loss), "state_bytes": states[name]} for name, loss in losses.items()]
    passages = [{"name": name, "first": [4.0], "second": [2.0]} for name in losses]
    recall = {**RECALL, "text": text, "gaps": [16], "subjects": passages}
    lengths = [at_length(length, names=list(losses)) for length in (32, 128)]
    for row in (row for result in lengths for row in result["subjects"]):
        row["loss"] = estimate(losses[row["name"]])
    return {"language": {**LANGUAGE, "text": text, "subjects": predicted, "lengths": lengths}, "recall": recall}


def made(folder, plan=None, losses=LOSSES, **inspection):
    """A run whose products are as given; no losses: its student was not measured."""
    run = Run.create(folder, plan or Plan("org/base@main", budget=64))
    facts = {"name": "org/base@main", "revision": "c0ffee" * 6, "terms": {"license": "mit"}}
    run.write("inspection.json", inspection_of(LAYERS, **{**facts, **inspection}).to_json())
    run.write("allocation.json", Allocation("gain", 4, HEADS).to_json())
    if losses:
        run.write_evaluation(parts=judged(run.plan.text, **losses))
    return run


def described(name, **facts):
    """Render a part of the card alone, on one line, without the signs that escape others."""
    return " ".join(ENVIRONMENT.get_template(name).render(facts).replace("\\", "").split())


def describe_teacher(inspection):
    """What the card says of a teacher that is a mixture, a text tower or quantised; "" of any other."""
    return described("teacher.md", inspection=inspection)


def describe_student(allocation, layers):
    """What the card says of a student."""
    state = StateSize.of(allocation, layers)
    return described("student.md", allocation=allocation, held=describe_heads(allocation), state=state, exact=0)
