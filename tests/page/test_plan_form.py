"""The form of a plan: it has a field for every option, and writes a plan back as it was read."""

import json
from dataclasses import replace

import pytest

from linearizer.errors import RequestError
from linearizer.page import actions, plan_form
from linearizer.page.plan_handlers import take_plan
from linearizer.page.ways import LISTED, WAYS, recipe_choices, recipe_of, way_of
from linearizer.run.options import options_of
from linearizer.run.plan import Plan, parse_plan, read_plan
from linearizer.run.recipes import RECIPES


def plan_of(values):
    """Read the form as the page does when Start is pressed."""
    model, budget, effort, may_grow, way, listed, *fields = values
    listed = listed if isinstance(listed, str) else ""
    options = {"may_grow": may_grow, "recipe": recipe_of(way, listed), **plan_form.read_options(tuple(fields))}
    return actions.make_plan(model, budget, effort, options)


def test_every_option_of_a_plan_is_in_sight_or_has_a_field():
    assert {*plan_form.IN_SIGHT, *plan_form.OPTIONS} == set(options_of(Plan))
    assert set(plan_form.GROUPS) == {option.limits.group for option in plan_form.OPTIONS.values()}


def test_every_recipe_is_offered_with_its_reference():
    assert {*LISTED, *(way.recipe for way in WAYS.values() if way.recipe)} == set(RECIPES)
    labels = {name: label for label, name in recipe_choices()}
    assert all(RECIPES[name].reference in labels[name] for name in LISTED)
    assert all(recipe_of(way_of(name), name) == name for name in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_that_is_taken_in_is_the_plan_that_starts(recipe):
    for effort in actions.EFFORTS:
        usual = actions.make_plan("demo", 128, effort, {"recipe": recipe, "may_grow": recipe == "duo"})
        assert plan_of(plan_form.write_plan(usual)) == usual
    changed = replace(usual, texts=5, seed=3, dtype="float32", device="cpu", exchanges=0, prices="measured", batch=1)
    assert plan_of(plan_form.write_plan(changed)) == changed


def test_a_plan_in_features_is_taken_in():
    plan = Plan.of(model="demo", features=24)
    assert plan_of(plan_form.write_plan(plan)) == plan


def test_a_plan_in_a_file_is_read_and_a_damaged_one_is_refused_in_a_sentence(tmp_path, quick_run):
    plan = read_plan(quick_run / "plan.json")
    assert plan_of(take_plan((quick_run / "plan.json").read_bytes())) == plan
    assert parse_plan("it", plan.to_json().encode()) == plan
    unknown = json.dumps({**json.loads(plan.to_json()), "texts": "many"}).encode()
    for damaged in (b"", b"{", b"\xff\xfe", b"[1]", b"{" * 5000, unknown, b'{"model": "demo"}'):
        with pytest.raises(RequestError, match="'the file' cannot be read .*: name a plan.json"):
            parse_plan("the file", damaged)
