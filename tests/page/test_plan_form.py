"""The form of a plan: it has a field for every option, and writes a plan back as it was read."""

import json
from dataclasses import replace

import pytest

from linearizer import pipeline
from linearizer.errors import RequestError
from linearizer.page import actions, plan_form, plan_step, planning
from linearizer.page.plan_form import LISTED, WAYS, recipe_choices, recipe_of, way_of
from linearizer.page.plan_step import take_plan
from linearizer.page.visitors import find_visitor
from linearizer.plan.options import options_of
from linearizer.plan.plan import ADJUSTABLE, USUAL_TEXTS, Plan
from linearizer.plan.recipes import RECIPES, by_score, score_in_words
from linearizer.run.folder import parse_plan, read_plan


def plan_of(values):
    """Read the form as the page does when Start is pressed."""
    model, budget, effort, may_grow, way, listed, *fields = values
    budget = getattr(budget, "value", budget)  # of the slider
    listed = listed if isinstance(listed, str) else ""
    options = {
        "may_grow": may_grow,
        "recipe": recipe_of(way, listed),
        **plan_form.read_fields(fields[: len(plan_form.OPTIONS)]),
    }
    return planning.make_plan(model, budget, effort, options)


def test_every_option_of_a_plan_is_in_sight_or_has_a_field():
    assert {*plan_form.IN_SIGHT, *plan_form.OPTIONS} == set(options_of(Plan))
    assert set(plan_form.GROUPS) == {option.limits.group for option in plan_form.OPTIONS.values()}


def test_every_recipe_is_offered_with_its_reference():
    assert {*LISTED, *(way.recipe for way in WAYS.values() if way.recipe)} == set(RECIPES)
    labels = {name: label for label, name in recipe_choices()}
    assert all(RECIPES[name].reference.lower() in labels[name].lower() for name in LISTED)
    assert all(score_in_words(name) in labels[name] for name in LISTED)
    assert list(labels) == by_score(LISTED)
    assert not any("--" in label for label in labels.values())
    assert all(recipe_of(way_of(name), name) == name for name in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_that_is_taken_in_is_the_plan_that_starts(recipe):
    for effort in planning.EFFORTS:
        usual = planning.make_plan("demo", 128, effort, {"recipe": recipe})
        assert plan_of(plan_form.write_plan(usual)) == usual
    changed = replace(usual, texts=5, seed=3, dtype="float32", device="cpu", batch=1)
    assert plan_of(plan_form.write_plan(changed)) == changed
    in_features = Plan.of(model="demo", features=24)
    assert plan_of(plan_form.write_plan(in_features)) == in_features


def test_a_number_that_was_asked_for_is_written_also_where_the_effort_has_it(tmp_path, quick_run):
    def written(values):
        return dict(zip(plan_form.OPTIONS, values[6:], strict=False))

    plan = Plan("demo", budget=64, texts=USUAL_TEXTS)
    taken = written(take_plan(plan.to_json().encode()))
    assert taken["texts"] == str(USUAL_TEXTS) and taken["length"] == ""
    run = pipeline.begin(tmp_path / "run", plan)
    assert [run.requested[name] for name in ADJUSTABLE] == [USUAL_TEXTS, None]
    assert plan_of(plan_form.write_plan(run.plan, ["texts"])).sizes == run.plan.sizes


def test_the_page_refuses_numbers_that_were_asked_for_and_shrinks_those_of_an_effort(root, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("the state of the student takes as many bytes as its teacher's cache " * 60)
    for effort, (sizes, _) in planning.EFFORTS.items():
        asked = {"text": f"file:{text}", "texts": sizes.get("texts", USUAL_TEXTS), "length": 512}
        with pytest.raises(RequestError, match="name a longer text, or ask for fewer or shorter texts"):
            actions.start_run(find_visitor(), "demo", 64, effort, asked)
        plan = planning.make_plan("demo", 64, effort, {"text": f"file:{text}"})
        run = pipeline.begin(find_visitor().fresh_folder(plan), plan, adjustable=ADJUSTABLE)
        assert run.plan.texts == 2 and run.plan.length <= plan.resolved_length(None)
    assert len(list(root.iterdir())) == len(planning.EFFORTS)


def test_a_slider_that_moves_forecasts_nothing_and_then_each_plan_is_forecast_once(monkeypatch):
    forecast, asked = planning.Examined.forecast, []
    monkeypatch.setattr(planning.Examined, "forecast", lambda self, plan: asked.append(plan) or forecast(self, plan))
    chosen = planning.examine_model(find_visitor(), "demo")
    form = (64, "Quick", False, "features", "paper", *[""] * len(plan_form.OPTIONS))
    card = plan_step.show_budget(chosen, *form)
    assert "from 64 tokens on" in card and asked == []
    shown, takes, efforts, *_ = plan_step.show_plan(chosen, *form)
    assert shown == card and "it takes about" in takes and all("about" in label for label, _ in efforts.choices)
    assert len(asked) == len(set(asked)) == len(planning.EFFORTS) + len(WAYS) - 1


def test_the_page_refuses_while_it_is_chosen_what_the_door_refuses():
    options = {"steps": "4", "lora": "0"}
    chosen = planning.examine_model(find_visitor(), "demo")
    form = (64, "Quick", False, "measured", "paper", *(options.get(name, "") for name in plan_form.OPTIONS))
    assert "4 steps without adapters train nothing" in plan_step.show_budget(chosen, *form)


def test_a_plan_in_a_file_is_read_and_a_damaged_one_is_refused_in_a_sentence(tmp_path, quick_run):
    plan = read_plan(quick_run / "plan.json")
    assert plan_of(take_plan((quick_run / "plan.json").read_bytes())) == plan
    assert "null" not in plan.to_json() and parse_plan("it", plan.to_json().encode()) == plan
    unknown = json.dumps({**json.loads(plan.to_json()), "texts": "many"}).encode()
    for damaged in (b"", b"{", b"\xff\xfe", b"[1]", b"{" * 5000, unknown, b'{"model": "demo"}'):
        with pytest.raises(RequestError, match="'the file' cannot be read .*: name a plan.json"):
            parse_plan("the file", damaged)
