"""The finished example: today's code reads it, writes the same, and changes nothing in it."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from linearizer.errors import RequestError
from linearizer.evaluate.evaluate_run import JUDGING
from linearizer.evaluate.subjects import assembled, make_again
from linearizer.page import actions, landing, plan_cards, planning, run_state
from linearizer.page.calls import Browser
from linearizer.page.chat import chats, compare, recorded
from linearizer.page.chat.cards import COLUMNS, answer_in
from linearizer.page.visitors import EXAMPLE_NAME, example_folder, find_visitor
from linearizer.run.files import unseal
from linearizer.run.folder import DECIDED, Run
from tests.benchmarks import example as example_maker

REMAKE = "python -m tests.benchmarks.example"
MAX_BYTES = 250_000
MEMORY = {"run": EXAMPLE_NAME}  # of a browser


@pytest.fixture
def visitor(root):
    yield find_visitor()
    chats.CHATS.clear()


def test_the_example_is_what_todays_code_writes(quick_run):
    example = Run(example_folder())
    assert sorted(path.name for path in example.folder.iterdir()) == sorted(example_maker.PRODUCTS), REMAKE
    assert sum(path.stat().st_size for path in example.folder.iterdir()) < MAX_BYTES
    for name in ("plan", "inspection", "profile", "prices", "allocation"):
        stored = json.loads(unseal(example.read(f"{name}.json")))  # and its digest is right
        assert json.loads(getattr(example, name).to_json()) == stored, REMAKE
    parts = {name: part.to_plain() for name, part in example.results.items()}
    assert json.loads(json.dumps(parts)) == example.evaluation_parts, REMAKE
    assert example.evaluation_parts.keys() == {*JUDGING.parts}, "those of every run"
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
    assert not pieces["trains"].value and pieces["can"].value["recorded"] and not pieces["can"].value["prompts"]
    assert pieces["verdict"].value.count("<dt>") == 4
    assert pieces["verdict"].value.count("<svg") == 2
    for part in JUDGING.parts:
        tables, figure = pieces[run_state.PART_PREFIX + part].value()
        assert figure or '<details class="lz-fold" open>' in tables
    assert "without weights" in pieces["usage"].value and pieces["evaluating card"].value == ""
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


def test_the_example_names_the_model_of_the_hub_and_nothing_of_the_machine_that_made_it():
    example = Run(example_folder())
    assert example.plan.model == example.inspection.name == example_maker.MODEL and not example.inspection.revision
    assert landing.KNOWN[example_maker.MODEL].parameters == example.inspection.parameters
    for path in example.folder.iterdir():
        assert not re.search(r'"(?:/|[A-Z]:)|127\.0\.0\.1|@[0-9a-f]{40}', path.read_text(encoding="utf-8")), path.name


def test_recorded_chats_are_about_the_texts_they_show_and_the_teacher_is_right_in_each():
    chats_recorded, shown = recorded.read_recorded(), 0
    written = {title: (text, facts) for title, text, facts in example_maker.texts_with_facts()}
    assert [reading.title for reading in chats_recorded.readings] == [*written]
    assert chats_recorded.asked == sum(len(facts) for _, facts in written.values())
    for reading in chats_recorded.readings:
        text, facts = written[reading.title]
        assert reading.text == text and len(reading.tokens) > 5 * Run(example_folder()).plan.budget
        for question in reading.questions:
            (fact,) = (fact for fact in facts if fact[2] == question.text)
            assert question.fact == f"{fact[0]} {fact[1]}." in text and question.answer == fact[1]
            assert answer_in(question.answers.teacher, question.answer)
            shown += 1
    assert 0 < shown <= chats_recorded.right["teacher"] <= chats_recorded.asked
    assert chats_recorded.right["window"] < chats_recorded.right["student"] <= chats_recorded.right["teacher"]


def test_the_example_shows_a_recorded_chat_until_another_begins(visitor):
    reading, first, second = (each := recorded.read_recorded().readings[0]), *each.questions[:2]
    shown = compare.show_kept(Browser(MEMORY))
    assert "<b>recorded</b>" in shown["about_recorded"] and "269 MB are downloaded" in shown["about_recorded"]
    assert f"<mark>{first.fact}</mark>" in shown["recorded_text"] and first.answer in shown["chat_note"]
    for name, title in COLUMNS.items():
        side = getattr(first.answers, name)
        said = [message["content"] for message in shown[name]["value"]]
        assert said == [f"A document, {len(reading.tokens):,} tokens", first.text, side.text]
        mark = "✓</span> right" if answer_in(side, first.answer) else "✗</span> wrong"
        assert f"<h3>{title}" in shown[f"{name}_head"] and mark in shown[f"{name}_head"]
    key = compare.key_of(Browser(MEMORY))
    assert chats.look_up(key) is None, "a visitor who only looks takes no room"
    take = compare.take_recorded(recorded.chat_about(reading, second))
    chosen = dict(zip(compare.OUTPUTS, take(MEMORY, None, None), strict=True))
    assert f"<mark>{second.fact}</mark>" in chosen["recorded_text"]
    assert compare.show_kept(Browser(MEMORY))["student"] == chosen["student"]
    compare.end(MEMORY, None, None)
    emptied = compare.show_kept(Browser(MEMORY))
    assert emptied["student"]["value"] == [] and emptied["recorded_text"] == emptied["chat_note"] == ""


def test_who_asks_the_example_without_a_network_is_told_so_and_loses_nothing(visitor, hub):
    shown = compare.show_kept(Browser(MEMORY))
    compare.send(MEMORY, None, None, "Who wrote this?", "", (), 8, 0, False)
    *_, end = compare.answer(MEMORY, None, None, 8, 0, False, True, "", True)
    told = dict(zip(compare.OUTPUTS, end, strict=True))
    assert "SmolLM2-135M-Instruct" in told["chat_note"] and told["prompt"] == "Who wrote this?"
    assert told["student"] == shown["student"]


def test_a_run_without_weights_has_its_student_made_again_bit_for_bit(quick_run, tmp_path):
    for path in quick_run.glob("*.json"):
        shutil.copy(path, tmp_path)
    ids, again = torch.arange(5, 205)[None], make_again(Run(tmp_path)).student
    with assembled(Run(quick_run)) as stored, torch.inference_mode():
        assert torch.equal(stored.student(ids).logits, again(ids).logits)


def test_the_examples_prices_tell_the_kl_of_a_budget_before_a_run_of_the_same_model(visitor):
    model = example_maker.MODEL
    inspection = landing.KNOWN[model].examine(model).inspection
    run = planning.find_priced(visitor, inspection)
    assert run == planning.find_priced(visitor, replace(inspection, revision="a" * 40)) == Run(example_folder())
    told = [plan_cards.expected_kl(run, planning.make_plan(model, budget, "Quick", {})) for budget in (64, 256)]
    small, large = (float(text.removeprefix("about ").partition(":")[0]) for text in told)
    assert small > large > 0 and all(text.endswith("tokens, by the prices of example-run") for text in told)
    assert "knee" in plan_cards.budget_strip(run, planning.make_plan(model, 64, "Quick", {}))
    for other in ({"recipe": "paper"}, {"strategy": "window"}, {"bits": 16}, {"sinks": 0}):
        assert plan_cards.expected_kl(run, planning.make_plan(model, 64, "Quick", other)) == "", other
    assert plan_cards.expected_kl(run, planning.make_plan(model, 1, "Quick", {})) == ""
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
