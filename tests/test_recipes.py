"""Every recipe makes a student at the bytes that were asked for; controls and ablations are what they claim to be."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from linearizer import pipeline
from linearizer.cli.main import parser
from linearizer.cli.run_commands import begin_run
from linearizer.errors import RequestError, TextError
from linearizer.method.texts import TextsOfRun
from linearizer.plan.head_bytes import Head, cache_bytes
from linearizer.plan.plan import Plan
from linearizer.plan.recipes import RECIPES
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.teacher import load as teacher_module
from linearizer.train.settings import training_settings
from tests.benchmarks.ablation import without_far, without_window
from tests.support.models import student_of, tokens

pytestmark = pytest.mark.usefixtures("judged_briefly")
SMALL = dict(model="demo", budget=40, texts=2, length=64, target_length=64, dtype="float32")


@pytest.mark.parametrize("recipe", ["windows", "lolcats", "performer", "liger"])
def test_a_recipe_makes_a_student_within_the_budget(recipe, tmp_path):
    steps = {"steps": 2} if RECIPES[recipe].choices.get("steps") else {}
    run = pipeline.begin(tmp_path / "run", Plan.of(recipe, **SMALL, **steps))
    finish(pipeline.linearize(run))
    allocation = run.require_allocation()
    assert allocation.state_bytes(run.layers, 64) <= cache_bytes(run.layers, 40)
    assert math.isfinite(run.evaluation_parts["language"]["subjects"][1]["loss"]["mean"])
    phases = [event["phase"] for event in run.events() if event["event"] == "distilled"]
    assert phases == {"lolcats": [0, 1], "liger": [0, 1], "performer": [0]}.get(recipe, [])


def test_a_student_is_judged_by_text_that_its_teacher_was_not_measured_on(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a child who liked to read. " * 30)
    plan = Plan.of("windows", **{**SMALL, "texts": 5, "text": f"file:{text}"})
    run, teacher = Run.create(tmp_path / "run", plan), teacher_module.load_teacher_of(plan)
    judged, measured = TextsOfRun.of(run, teacher, None, 8).judged, teacher_module.texts_of(plan, teacher, 5, None)
    assert len(judged) and not (judged[:, None] == measured).all(-1).any()
    with pytest.raises(TextError, match="are needed"):
        longer = Run.create(tmp_path / "longer", replace(plan, texts=5 + len(judged)))
        TextsOfRun.of(longer, teacher)


@pytest.mark.parametrize("recipe", ["best", "windows"])
def test_a_run_that_measures_one_text_is_judged_by_none_that_it_was_priced_on(recipe, tmp_path):
    run = pipeline.begin(tmp_path / "run", Plan.of(recipe, **{**SMALL, "texts": 1}, may_grow=True))
    teacher = teacher_module.load_teacher_of(run.plan)
    texts = TextsOfRun.of(run, teacher, None, 8)
    read = teacher_module.texts_of(run.plan, teacher, len(texts.priced), None)
    assert len(read) == 1 and not (texts.judged[:, None] == read).all(-1).any()


def test_another_recipe_for_a_plan_brings_its_own_choices_and_leaves_all_else(tmp_path):
    written = Plan.of("lolcats", model="demo", budget=64, seed=3, length=64, steps=2, strategy="dof")
    (tmp_path / "plan.json").write_text(written.to_json())

    def planned(*options):
        asked = parser().parse_args(["run", "demo", "--plan", str(tmp_path / "plan.json"), *options])
        asked.out, asked.resume = tmp_path / "-".join(("run", *options)), False
        return replace(begin_run(asked).plan, dtype="auto", texts=None)  # which beginning decides

    kept = dict(model="demo", budget=64, seed=3, length=64)
    assert planned() == planned("--recipe", "lolcats") == written
    for recipe in sorted(set(RECIPES) - {"lolcats"}):
        assert planned("--recipe", recipe) == Plan.of(recipe, **kept)
    assert planned("--recipe", "paper", "--steps", "5", "--seed", "4") == Plan.of(
        "paper", **{**kept, "seed": 4}, steps=5
    )
    for change in (written.changed, partial(replace, written)):
        with pytest.raises(
            RequestError, match="recipe 'magic' is not allowed: it should be 'best', 'distilled', 'windows'"
        ):
            change(recipe="magic")


def test_a_state_has_8_bits_a_number_where_heads_are_priced_and_may_be_merged():
    kept = {name: Plan.of(name, model="demo", budget=64).resolved_bits for name in RECIPES}
    assert [name for name, bits in kept.items() if bits == 8] == ["best", "distilled", "windows"]
    usual, asked = (Plan.of(model="demo", budget=64, bits=bits) for bits in (None, 4))
    assert (usual.fewer_bits, asked.fewer_bits, asked.resolved_bits) == ((6, 5, 4), (), 4)
    for recipe, bits in (("paper", 8), ("best", 3), ("features", 4)):
        with pytest.raises(RequestError, match="bits"):
            Plan.of(recipe, model="demo", budget=64, bits=bits)


def test_the_control_without_slots_differs_from_the_default_in_nothing_else():
    default, control = (Plan.of(name, model="demo", budget=64) for name in ("best", "windows"))
    assert (control.resolved_bits, control.fewer_bits) == (default.resolved_bits, default.fewer_bits)
    spec = replace(control.strategy_spec, about=default.strategy_spec.about, far_field="slots")
    assert spec == default.strategy_spec


def test_training_without_features_trains_adapters(tmp_path):
    for recipe in ("best", "windows", "swa"):
        plan = Plan.of(recipe, model="demo", budget=64, steps=10)
        for options, rank in (({}, 8), ({"lora": 4}, 4)):
            (settings,) = training_settings(replace(plan, **options))
            assert (settings.loss, settings.lora, settings.window_dropout) == ("logits", rank, 0.0)
        assert plan.changes_weights and not replace(plan, steps=0).changes_weights
    (settings,) = training_settings(Plan.of("features", model="demo", budget=64))
    assert (settings.loss, settings.lora) == ("softmax", 0) and settings.window_dropout
    run = pipeline.begin(tmp_path / "run", Plan.of("swa", **SMALL, steps=2))
    finish(pipeline.linearize(run))
    assert [event["steps"] for event in run.events() if event["event"] == "distilled"] == [2]
    card = " ".join((run.checkpoint / "README.md").read_text().split())
    assert "adapters of rank 8 on q, k, v and o were trained" in card
    before = teacher_module.load_teacher_of(run.plan).model.state_dict()
    (file,) = run.checkpoint.glob("*.safetensors")
    changed = {name for name, x in load_file(file).items() if not torch.equal(x.float(), before[name].float())}
    layers = range(len(run.inspection.layers))
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert changed == {f"model.layers.{layer}.self_attn.{part}.weight" for layer in layers for part in parts}


def test_losses_share_all_steps():
    plan = Plan.of("hedgehog", model="demo", budget=64)
    assert [[settings.steps for settings in training_settings(replace(plan, steps=steps))] for steps in (0, 1, 7)] == [
        [0, 0],
        [1, 0],
        [4, 3],
    ]
    for loss in ("direct+logits", "softmax+logits"):
        with pytest.raises(
            RequestError, match=f"loss '{loss[:6]}.* is not allowed: it should be 'softmax', 'l2', 'output'"
        ):
            replace(plan, loss=loss)


def test_no_recipe_grows_unless_asked():
    assert not any(Plan.of(name, model="demo", budget=64).may_grow for name in RECIPES)


@torch.no_grad()
def test_a_branch_is_taken_away_and_comes_back():
    student, ids = student_of("llama", [Head(window=4, slots=6), Head(window=5, features=16)]), tokens(1, 40)
    before = student(ids).logits
    with without_far(student):
        plain = student_of("llama", [Head(window=4), Head(window=5)])
        torch.testing.assert_close(student(ids).logits, plain(ids).logits, atol=2e-4, rtol=0)
    with without_window(student):
        assert not torch.allclose(student(ids).logits, before, atol=1e-3)
    assert torch.equal(student(ids).logits, before)
