"""The finished example: today's code reads it, writes the same, and changes nothing in it."""

import json
import shutil
from dataclasses import replace

import pytest

from linearizer.errors import RequestError
from linearizer.page import actions, plan_cards, planning, run_state
from linearizer.page.chat import answers, chats
from linearizer.page.chat.chats import Message
from linearizer.page.visitors import EXAMPLE_NAME, example_folder, find_visitor
from linearizer.report.parts import PART_VIEWS
from linearizer.report.verdict import of_subject
from linearizer.run.files import unseal
from linearizer.run.folder import DECIDED, Run
from linearizer.teacher.logits import kl_of, logits_of
from linearizer.teacher.text import read_texts
from tests.benchmarks.example import PRODUCTS

REMAKE = "python -m tests.benchmarks.example"
MAX_BYTES = 200_000


@pytest.fixture
def visitor(root):
    return find_visitor()


def test_the_example_is_what_todays_code_writes(quick_run):
    example = Run(example_folder())
    assert sorted(path.name for path in example.folder.iterdir()) == sorted(PRODUCTS), REMAKE
    assert sum(path.stat().st_size for path in example.folder.iterdir()) < MAX_BYTES
    for name in ("plan", "inspection", "profile", "prices", "allocation"):
        stored = json.loads(unseal(example.read(f"{name}.json")))  # and its digest is right
        assert json.loads(getattr(example, name).to_json()) == stored, REMAKE
    parts = {name: part.to_plain() for name, part in example.results.items()}
    assert json.loads(json.dumps(parts)) == example.evaluation_parts, REMAKE
    assert example.evaluation_parts.keys() == PART_VIEWS.keys() - {"tasks"}
    fresh = Run(quick_run)
    for name in ("begun.json", "evaluation.json", "profile.json"):
        stored, written = (json.loads(unseal(run.read(name))).keys() for run in (example, fresh))
        assert stored == written, REMAKE
    assert {"id", "settled", *DECIDED} == json.loads(unseal(example.read("begun.json"))).keys(), REMAKE


def test_the_example_opens_in_every_step_and_nothing_changes_it(visitor):
    before = {path.name: path.read_bytes() for path in example_folder().iterdir()}
    pieces = run_state.read_pieces(visitor.find_run(EXAMPLE_NAME), 60.0)
    for piece in ("curves", "shares", "verdict"):
        assert pieces[piece].value, piece
    assert not pieces["trains"].value
    assert pieces["verdict"].value.count("<dt>") == 4
    assert pieces["verdict"].value.count("<svg") == 2
    for part in PART_VIEWS.keys() - {"tasks"}:
        tables, figure = pieces[run_state.PART_PREFIX + part].value()
        assert figure or '<details class="lz-fold" open>' in tables
    assert all("without weights" in pieces[piece].value for piece in ("usage", "evaluating card"))
    assert pieces["stage"].value == 5 and not any(pieces["can"].value[name] for name in ("stop", "resume", "student"))
    assert plan_cards.share_out(visitor.find_run(EXAMPLE_NAME), 128)[1].heads
    for change in (
        lambda: actions.delete_run(visitor, EXAMPLE_NAME),
        lambda: actions.resume_run(visitor, EXAMPLE_NAME),
        lambda: actions.evaluate_run(visitor, EXAMPLE_NAME),
    ):
        with pytest.raises(RequestError, match="the example that comes with Linearizer, and cannot be changed"):
            change()
    assert {path.name: path.read_bytes() for path in example_folder().iterdir()} == before


def test_the_examples_student_is_made_again_in_memory_and_compares_as_it_was_judged(visitor):
    before = {path.name: path.read_bytes() for path in example_folder().iterdir()}
    example = visitor.find_run(EXAMPLE_NAME)
    prompt, state = answers.make_memory_prompt(visitor, EXAMPLE_NAME, answers.PASSAGE, 16)
    assert state == example.plan.budget and prompt.distance > 5 * state
    *_, (_, last) = answers.compare_models(visitor, EXAMPLE_NAME, Message(prompt.text), 16, 0, False)
    assert last.teacher.text and last.student.text and last.window.text
    own, judged = chats.LOADED[0], example.results["language"]
    texts, logits = read_texts("builtin", own.tokenizer, 256, 4), {}
    for subject in own.subjects:
        with subject.prepared() as model:
            logits[subject.name] = logits_of(model, texts)
    for name in ("student", "window"):
        kl = kl_of(logits["teacher"], logits[name]).mean().item()
        assert 0 < kl < 3 * of_subject(judged.result, name).kl.mean, name
    with pytest.raises(
        RequestError, match="does not fit: there is room for 496, beside the 16 to write: give a shorter"
    ):
        next(answers.compare_models(visitor, EXAMPLE_NAME, Message("word " * 600), 16, 0, False))
    assert {path.name: path.read_bytes() for path in example_folder().iterdir()} == before


def test_the_examples_prices_tell_the_kl_of_a_budget_before_a_run_of_the_same_model(visitor):
    inspection = planning.examine_model(visitor, "demo").inspection
    run = planning.find_priced(visitor, inspection)
    assert run == visitor.find_run(EXAMPLE_NAME)
    told = [plan_cards.expected_kl(run, planning.make_plan("demo", budget, "Quick", {})) for budget in (64, 256)]
    small, large = (float(text.removeprefix("about ").partition(":")[0]) for text in told)
    assert small > large > 0 and all(text.endswith("512 tokens, by the prices of example-run") for text in told)
    for other in ({"recipe": "paper"}, {"strategy": "window"}, {"bits": 16}, {"sinks": 0}):
        assert plan_cards.expected_kl(run, planning.make_plan("demo", 64, "Quick", other)) == "", other
    assert plan_cards.expected_kl(run, planning.make_plan("demo", 1, "Quick", {})) == ""
    assert planning.find_priced(visitor, replace(inspection, name="other")) is None
    for name in ("candidates.json", "inspection.json"):  # of a damaged run, which hides no other
        (visitor.home / "damaged").mkdir(parents=True, exist_ok=True)
        (visitor.home / "damaged" / name).write_text("{")
    assert planning.find_priced(visitor, inspection) == run
    rough = Run(shutil.copytree(example_folder(), visitor.home / "rough"))
    plan = json.loads((rough.folder / "plan.json").read_text())
    (rough.folder / "plan.json").write_text(json.dumps({**plan, "texts": 2, "length": 256}))
    assert planning.find_priced(visitor, inspection) == run  # which has read more, though it is older


def test_a_visitors_own_run_of_that_name_comes_first(visitor):
    own = visitor.home / EXAMPLE_NAME
    own.mkdir(parents=True)
    (own / "plan.json").write_text("{}")
    assert visitor.find_run(EXAMPLE_NAME).folder == own
