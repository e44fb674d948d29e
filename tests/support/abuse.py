"""Damaged files and hostile bodies of requests, drawn by Hypothesis, and what must hold of all of them."""

import json

from hypothesis import strategies as st

from linearizer.errors import LinearizerError
from linearizer.serve.bodies import ChatBody, CompletionBody, Refusal, parse_body
from linearizer.workers import control

POSITIONS = 512
PRODUCTS = ("begun", "plan", "inspection", "profile", "prices", "gates", "allocation", "candidates", "results")
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "n", "logprobs", "user", "x"})
HUGE = [2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -1e308, float("inf"), float("nan")]
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([*HUGE, "\ud800"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | VALUES, "content": st.text() | VALUES}
    )
)


@st.composite
def damaged(draw, content):
    """A file whose bits are flipped, that is cut off, or in which values are others."""
    how = draw(st.sampled_from(["flip", "cut", "whole", "value"]))
    if how == "flip":
        place, bit = draw(st.integers(0, len(content) - 1)), draw(st.integers(0, 7))
        return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
    if how == "cut":
        return content[: draw(st.integers(0, len(content)))]
    if how == "value":
        try:
            values = json.loads(content)
            return json.dumps(change(draw, values)).encode()
        except ValueError:  # a log is several objects
            pass
    return draw(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))


def change(draw, values):
    """Put another value somewhere into a JSON object."""
    if isinstance(values, dict) and values and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(values)))
        return {**values, name: change(draw, values[name])}
    if isinstance(values, list) and values and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(values) - 1))
        return [*values[:place], change(draw, values[place]), *values[place + 1 :]]
    return draw(VALUES)


def look_at(run):
    """Read all that is known of a run: each is read, or refused in a sentence."""
    found = {}
    for name in PRODUCTS:
        try:
            found[name] = getattr(run, name)
        except LinearizerError as error:
            check_sentence(error)
    try:
        control.state_of(run)
        assert run.events() is not None and run.done in (True, False)
    except LinearizerError as error:
        check_sentence(error)
    return found


def check_sentence(error):
    said = str(error)
    assert said and "\n" not in said and "Traceback" not in said and len(said) < 2000, said


BODIES = st.one_of(
    st.binary(max_size=60),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"model": st.just("tiny")},
        optional={"prompt": st.text(max_size=20) | st.lists(st.integers(-3, 200)) | VALUES, "messages": MESSAGES}
        | {name: VALUES for name in FIELDS if name not in ("model", "prompt", "messages")},
    ).map(lambda body: json.dumps(body).encode()),
)


def read_hostile_body(content):
    """Read a body as both kinds of request: it is one, or refused in the shape of OpenAI's API."""
    for kind in (CompletionBody, ChatBody):
        try:
            body = parse_body(content, kind, POSITIONS)
            assert body.new_tokens is None or body.new_tokens >= 1
        except Refusal as refusal:
            assert 400 <= refusal.status < 500
            check_sentence(refusal)
            json.dumps(refusal.content, allow_nan=False).encode()
