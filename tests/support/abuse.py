"""Damaged files, hostile commands and requests, drawn by Hypothesis, and what must hold of all of them."""

import inspect
import io
import json
from contextlib import chdir, redirect_stderr, redirect_stdout

import gradio as gr
import torch
from hypothesis import strategies as st

from linearizer.cli.main import main, parser
from linearizer.errors import LinearizerError
from linearizer.hub.models import find_model
from linearizer.method.checkpoint import load_of_run
from linearizer.page import actions
from linearizer.page.calls import endpoint
from linearizer.run.folder import Run
from linearizer.serve.bodies import ChatBody, CompletionBody, Refusal, parse_body
from linearizer.teacher.load import load_tokenizer
from linearizer.workers import control

POSITIONS = 512
PRODUCTS = ("begun", "plan", "inspection", "profile", "prices", "allocation", "candidates", "results")
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


def read_tokenizer(folder):
    """Inspect a damaged teacher, and load its tokenizer: each is done, or refused in a sentence."""
    serve_words(["inspect", str(folder), "--json"])
    try:
        assert load_tokenizer(find_model(str(folder)))("The")["input_ids"] is not None
    except LinearizerError as error:
        check_sentence(error)


TEXT = torch.tensor([[3, 40, 5, 60, 7, 80, 9, 11]])


@torch.no_grad()
def answer(folder):
    """Load the student of a run and read a few tokens; None: it is refused in a sentence."""
    try:
        student, tokenizer = load_of_run(Run(folder))
    except LinearizerError as error:
        return check_sentence(error)
    return student(TEXT).logits, tokenizer("The quick brown fox")["input_ids"]


def same(answer, expected):
    return torch.equal(answer[0], expected[0]) and answer[1] == expected[1]


ODD = ["", " ", "/", "\n", "a\0b", "\udcff", "x" * 3000, "9" * 5000, "-1", "nan", "1e400", "null", "[]", "{}", "loop",
       "~nobody/x", "a/b@", "demo", "RUN", "16", "file:loop", "dataset:a:b:c:d:e", "x.gguf"]  # fmt: skip
WORDS = (
    st.sampled_from(ODD) | st.text(max_size=12).filter(lambda word: not word.startswith("-")) | st.integers().map(str)
)
UNLIMITED = {"app", "runs"}  # what listens until it is stopped, and what may go on with a run
ENDS = {"run": ["--text", "file:absent"], "push": ["--dry-run"]}
ENDLESS = ("-h", "--help", "--detach", "--job")  # flags that end, or leave for another process


def commands():
    """Draw a command with words for its operands and options; none of them begins work."""
    choices = next(action.choices for action in parser()._actions if action.choices)
    return st.sampled_from(sorted(choices.keys() - UNLIMITED)).flatmap(lambda name: words_of(name, choices[name]))


@st.composite
def words_of(draw, name, command):
    operands = [draw(WORDS) for action in command._actions if not action.option_strings]
    actions = [each for each in command._actions if each.option_strings and each.option_strings[-1] not in ENDLESS]
    words = [name, *operands]
    for action in draw(st.lists(st.sampled_from(actions), max_size=4, unique_by=id)):
        words += [action.option_strings[-1], *([] if action.nargs == 0 else [draw(WORDS)])]
    return words + ENDS.get(name, [])


def give_words(words, run, empty):
    """Serve a command in an empty folder, in which no run may have begun."""
    with chdir(empty):
        serve_words([str(run) if word == "RUN" else word for word in words])
        assert not [*empty.glob("runs/*")] and not [*empty.rglob("plan.json")]


def serve_words(words):
    """Serve a command: it is done, or refused in a sentence."""
    said, printed = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("backslashreplace", "strict"))
    with redirect_stderr(said), redirect_stdout(printed):
        code = main(words)
    said.seek(0)
    lines = [line for line in said.read().splitlines() if line.startswith("linearizer: ")]
    assert code in (0, 2), (code, words)
    assert code == 0 or len(lines) == 1, lines
    for line in lines:
        check_sentence(line)


BEGINNING = (actions.start_run, actions.start_job, actions.resume_run, actions.branch_run, actions.rename_run,
             actions.evaluate_run, actions.delete_run, actions.publish_run)  # fmt: skip
PLAUSIBLE = {"run": "run", "model": "demo", "budget": 64, "effort": "Quick", "tokens": 4, "prompt": "The", "query": "d"}


@st.composite
def page_calls(draw):
    """Draw a call of an action of the page; some values are as they should be, but where the action begins work."""
    action = draw(st.sampled_from([each for each in actions.ENDPOINTS if each is not actions.list_hardware]))
    names = [*inspect.signature(action).parameters][1:]
    known = {} if action in BEGINNING else PLAUSIBLE
    values = {name: draw(VALUES | st.just(known[name]) if name in known else VALUES) for name in names}
    return action, values


def call_page(call):
    """Call an endpoint of the page: it answers with what can be sent, or refuses in a sentence."""
    action, values = call
    try:
        json.dumps(endpoint(action, with_secret=False)(**values)).encode()
    except gr.Error as error:
        check_sentence(error.message)


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
