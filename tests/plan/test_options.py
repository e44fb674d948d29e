"""Options say what they may be once: checks, help, commands and text derive from the fields of the plan."""

import json
import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from linearizer.cli.main import parser
from linearizer.cli.options import plan_changes
from linearizer.errors import BudgetError, RequestError
from linearizer.plan.options import check_options, option, options_of
from linearizer.plan.plan import ALLOCATION, BY_RECIPE, MAX_SAMPLES, Plan
from linearizer.plan.recipes import RECIPES, USUAL_CHOICES, by_score, measured_quality, score_in_words
from linearizer.plan.rule_papers import RULE_PAPERS
from linearizer.run.results import Request
from linearizer.student.update_rules import UPDATE_RULES


@dataclass(frozen=True)
class Oven:
    heat: int | None = option(None, "degrees", least=0, most=300, default_text="off", error=BudgetError)
    share: float = option(0.5, above=0)
    mode: str = option("fan", "how", choices=("fan", "grill"))
    trays: tuple[int, ...] = option((), least=1)
    light: bool = False

    def __post_init__(self):
        check_options(self)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"heat": -1}, "heat -1 is not allowed: it should be greater than or equal to 0"),
        ({"heat": True}, "heat True is not allowed: it should be a valid integer"),
        ({"share": 0}, "share 0 is not allowed: it should be greater than 0"),
        ({"share": float("nan")}, "share nan is not allowed"),
        ({"mode": "gril"}, "mode 'gril' is not allowed: it should be 'fan' or 'grill'"),
        ({"trays": (1, 0)}, r"trays\[1\] 0 is not allowed: it should be greater than or equal to 1"),
        ({"light": "yes"}, "light 'yes' is not allowed: it should be a valid boolean"),
        ({"mode": "x" * 90}, "mode 'x{39}… is not allowed: it should be"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_the_values_that_can(values, sentence):
    with pytest.raises(RequestError, match=sentence) as refused:
        Oven(**values)
    assert isinstance(refused.value, BudgetError) == ("heat" in values)


def test_values_are_read_from_text():
    options = options_of(Oven)
    assert [options[name].parse(text) for name, text in (("heat", "20"), ("share", "1"), ("mode", "grill"))] == [
        20, 1.0, "grill"
    ]  # fmt: skip
    assert options["trays"].parse("1, 3,") == (1, 3) and options["trays"].parse("") == ()
    with pytest.raises(RequestError, match=r"trays\[1\] 'few' is not allowed"):
        options["trays"].parse("1,few")


def test_help_says_what_an_option_means_and_its_default():
    options = options_of(Oven)
    assert options["heat"].help == "degrees (default: off)" and options["mode"].help == "how: fan, grill (default: fan)"
    for described in (*options_of(Plan).values(), *options_of(Request).values()):
        assert described.limits.about or described.name == "model"


def test_every_option_of_a_plan_is_an_option_of_the_command_line():
    for described in options_of(Plan).values():
        if described.name != "model":
            assert described.limits.group, described.name
    text = next(action for action in parser()._actions if action.choices).choices["run"].format_help()
    for name in (*RECIPES, ALLOCATION):
        assert name in text
    hidden = [each.flag for each in options_of(Plan).values() if each.limits.hidden]
    assert hidden == ["--strategy", "--feature-map", "--loss"] and not any(f"{flag} " in text for flag in hidden)
    assert all(recipe.origin in text for recipe in RECIPES.values())


def test_the_command_of_a_plan_makes_the_plan():
    for plan in (
        Plan.of("lolcats", model="demo", budget=64, steps=7, may_grow=False),
        Plan.of(model="a/b", budget=64, may_grow=True, window=8, device="cuda:1"),
        Plan.of(model="a b", features=32, may_grow=True),
    ):
        options = parser().parse_args(shlex.split(plan.command())[1:])
        assert Plan.of(**{"model": options.model, **plan_changes(options)}) == plan


def test_samples_are_as_many_as_the_texts_hold_up_to_a_number():
    usual, few = Plan.of(model="demo", budget=64), Plan.of(model="demo", budget=64, texts=2, length=256)
    assert usual.samples == MAX_SAMPLES == 1024
    assert few.samples == 2 * 2 * (256 - few.resolved_sinks) // 8 * 8 < 1024


def test_a_window_beyond_the_budget_is_refused():
    with pytest.raises(BudgetError, match="too small for a window of 999999 and 4 sinks: .* at most 60"):
        Plan.of("features", model="demo", budget=64, window=999999)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0},
        {"budget": math.nan},
        {"budget": 64.5},
        {"budget": 10**30},
        {"features": 15},
        {"budget": 64, "features": 64},
        {},
        {"budget": 64, "strategy": "best"},
        {"budget": 64, "window": 61},
    ],
)
def test_what_buys_nothing_is_refused(options):
    with pytest.raises(BudgetError):
        Plan.of("features", model="demo", **options)


def test_what_recipes_decide_is_said_to_be_theirs():
    said = {each.name for each in options_of(Plan).values() if each.usual.startswith(BY_RECIPE)}
    assert said == USUAL_CHOICES.keys() - {"window", "sinks"}
    assert all(recipe.choices.keys() <= USUAL_CHOICES.keys() for recipe in RECIPES.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_has_its_recipes_choices_except_where_it_chooses_otherwise(recipe):
    plan, fewest = (
        Plan("demo", budget=64, recipe=recipe),
        Plan.from_json(f'{{"model": "demo", "budget": 64, "recipe": "{recipe}"}}'),
    )
    assert plan == fewest == Plan.of(recipe, model="demo", budget=64)
    assert {name: getattr(plan, name) for name in RECIPES[recipe].choices} == RECIPES[recipe].choices
    other = replace(plan, window=None, sinks=None, lora=None, steps=0)
    assert (other.window, other.sinks, other.lora, other.steps) == (None, None, None, 0)
    assert Plan.from_json(other.to_json()) == replace(other) == other


def test_the_list_says_of_every_recipe_what_it_is_from_whom_and_how_it_did_in_the_table(capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["run", "--recipe", "list"])
    text, measured = capsys.readouterr().out, measured_quality()
    assert ended.value.code == 0 and all(recipe.origin in text for recipe in RECIPES.values())
    alike = [paper.begins_like for paper in RULE_PAPERS.values() if paper.begins_like]
    assert all(text.count(f"the same as {name}\n") == alike.count(name) > 0 for name in set(alike))
    records = json.loads(Path("tests/benchmarks/results/quality-demo.json").read_text())
    for name, row in [(each, row) for each in ("best", *UPDATE_RULES) for row in measured.get(each, ())]:
        kind = f"{name}, {'untrained' if row.untrained else '300 steps'}" if name in UPDATE_RULES else name
        result = [r["kl"] for r in records if (r["row"], r["budget"]) == (kind, row.budget) and "kl" in r]
        assert row.kl == round(sum(result) / len(result), 5) and row.seeds == len(result)
        assert f"{row.budget} tokens {row.kl:.3g}" in text
    assert measured.keys() <= RECIPES.keys()
    listed = [line.split()[0] for line in text.splitlines() if re.match(r"  \S", line)]
    assert (
        listed == by_score(RECIPES)
        and listed[:2] == ["distilled", "best"]
        and listed.index("swa") < listed.index("paper")
    )


def test_a_recipe_that_loses_to_a_plain_window_says_so_where_it_is_chosen():
    window = next(row.kl for row in measured_quality()["swa"] if row.budget == 64)
    for name, rows in measured_quality().items():
        kl = next(row.kl for row in rows if row.budget == 64)
        assert ("worse than a plain window" in score_in_words(name)) == (kl > window), name
    assert "KL 2.5 " in score_in_words("paper") and score_in_words("unknown") == ""
