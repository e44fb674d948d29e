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
from linearizer.method import allocate_run
from linearizer.method.allocate_run import learn_gates
from linearizer.method.decide import allocate_by_gates
from linearizer.method.measure_run import measure_teacher
from linearizer.plan.head_bytes import Head, Layer, cache_bytes
from linearizer.plan.plan import Plan
from linearizer.plan.recipes import RECIPES
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.run.measured import Prices
from linearizer.teacher import load as teacher_module
from linearizer.train.settings import training_settings
from tests.benchmarks.ablation import without_far, without_window
from tests.support.models import layers_of, student_of, teacher_of, tokens

pytestmark = pytest.mark.usefixtures("judged_briefly")
SMALL = dict(model="demo", budget=40, texts=2, length=64, target_length=64, dtype="float32")


@pytest.mark.parametrize("recipe", ["windows", "duo", "lolcats", "performer", "liger"])
def test_a_recipe_makes_a_student_within_the_budget(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(allocate_run, "GATE_STEPS", 4)
    steps = {"steps": 2} if RECIPES[recipe].choices.get("steps") else {}
    run = pipeline.begin(tmp_path / "run", Plan.of(recipe, **SMALL, **steps, may_grow=recipe == "duo"))
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
    judged, measured = (
        pipeline.training_and_judging_texts(run, teacher, None)[1],
        teacher_module.texts_of(plan, teacher, 5, None),
    )
    assert len(judged) and not (judged[:, None] == measured).all(-1).any()
    with pytest.raises(TextError, match="are needed"):
        longer = Run.create(tmp_path / "longer", replace(plan, texts=5 + len(judged)))
        pipeline.training_and_judging_texts(longer, teacher, None)


@pytest.mark.parametrize("recipe", ["best", "duo"])
def test_a_run_that_measures_one_text_is_judged_by_none_that_it_was_priced_on(recipe, tmp_path):
    run = pipeline.begin(tmp_path / "run", Plan.of(recipe, **{**SMALL, "texts": 1}, may_grow=True))
    teacher = teacher_module.load_teacher_of(run.plan)
    judged = pipeline.training_and_judging_texts(run, teacher, None)[1]
    texts = teacher_module.texts_of(run.plan, teacher, len(allocate_run.texts_to_price_on(run, teacher, None)), None)
    assert len(texts) == 1 and not (judged[:, None] == texts).all(-1).any()


def test_features_are_bought_where_they_are_the_better_price(tmp_path):
    run = pipeline.begin(tmp_path / "run", Plan.of("best", **SMALL, strategy="gain-features", steps=2))
    teacher = teacher_module.load_teacher_of(run.plan)
    finish(measure_teacher(run, teacher))
    finish(allocate_run.price_heads(run, teacher, allocate_run.texts_to_price_on(run, teacher, None)))
    result = run.prices
    assert {bool(option.slots) for option in result.options} == {False}
    half = [0.5 if option.features else 1.0 for option in result.options]  # what features are not by nature, here
    cheaper = tuple(
        tuple(tuple(price * factor for price, factor in zip(row, half, strict=True)) for row in layer)
        for layer in result.kl
    )
    run.write("prices.json", Prices(result.sinks, result.options, cheaper).to_json())
    finish(pipeline.linearize(run))
    allocation = run.require_allocation()
    assert any(head.features for row in allocation.heads for head in row)
    assert allocation.state_bytes(run.layers, 64) <= cache_bytes(run.layers, 40)
    assert [event["steps"] for event in run.events() if event["event"] == "distilled"] == [2]


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
        growing = {"may_grow": True} if recipe == "duo" else {}
        asked = planned("--recipe", recipe, *["--may-grow"] * len(growing))
        assert asked == Plan.of(recipe, **kept, **growing)
    assert planned("--recipe", "paper", "--steps", "5", "--seed", "4") == Plan.of(
        "paper", **{**kept, "seed": 4}, steps=5
    )
    for change in (written.changed, partial(replace, written)):
        with pytest.raises(RequestError, match="recipe 'magic' is not allowed: it should be 'best', 'windows'"):
            change(recipe="magic")


def test_a_state_has_8_bits_a_number_where_heads_are_priced_and_may_be_merged():
    kept = {name: Plan.of(name, model="demo", budget=64, may_grow=name == "duo").resolved_bits for name in RECIPES}
    assert [name for name, bits in kept.items() if bits == 8] == ["best", "windows"]
    usual, asked = (Plan.of(model="demo", budget=64, bits=bits) for bits in (None, 4))
    assert (usual.fewer_bits, asked.fewer_bits, asked.resolved_bits) == ((6, 5, 4), (), 4)
    for recipe, bits in (("paper", 8), ("duo", 8), ("best", 3), ("features", 4)):
        with pytest.raises(RequestError, match="bits"):
            Plan.of(recipe, model="demo", budget=64, bits=bits)


def test_the_control_without_slots_differs_from_the_default_in_nothing_else():
    default, control = (Plan.of(name, model="demo", budget=64) for name in ("best", "windows"))
    assert (control.resolved_bits, control.fewer_bits) == (default.resolved_bits, default.fewer_bits)
    spec = replace(control.strategy_spec, about=default.strategy_spec.about, far_field="slots")
    assert spec == default.strategy_spec


def test_training_without_features_fits_what_layers_write_or_adapters(tmp_path):
    for recipe in ("best", "windows", "swa"):
        plan = Plan.of(recipe, model="demo", budget=64, steps=10)
        for options, loss, rank in (({}, "squares", 0), ({"loss": "logits"}, "logits", 8), ({"lora": 4}, "logits", 4)):
            (settings,) = training_settings(replace(plan, **options))
            assert (settings.loss, settings.lora, settings.window_dropout) == (loss, rank, 0.0)
        assert plan.changes_weights and not replace(plan, steps=0).changes_weights
    (settings,) = training_settings(Plan.of("features", model="demo", budget=64))
    assert (settings.loss, settings.lora) == ("softmax", 0) and settings.window_dropout
    run = pipeline.begin(tmp_path / "run", Plan.of("swa", **SMALL, steps=2))
    finish(pipeline.linearize(run))
    assert [event["steps"] for event in run.events() if event["event"] == "distilled"] == [2]
    card = " ".join((run.checkpoint / "README.md").read_text().split())
    assert "weights are unchanged, but for the two matrices of each layer that were fitted" in card
    before = teacher_module.load_teacher_of(run.plan).model.state_dict()
    (file,) = run.checkpoint.glob("*.safetensors")
    changed = {name for name, x in load_file(file).items() if not torch.equal(x.float(), before[name].float())}
    layers = range(len(run.inspection.layers))
    ends = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    assert changed == {f"model.layers.{layer}.{end}" for layer in layers for end in ends}


def test_losses_share_all_steps():
    plan = Plan.of("hedgehog", model="demo", budget=64)
    assert [[settings.steps for settings in training_settings(replace(plan, steps=steps))] for steps in (0, 1, 7)] == [
        [0, 0],
        [1, 0],
        [4, 3],
    ]
    for loss in ("direct+logits", "softmax+squares"):
        with pytest.raises(RequestError, match=f"loss '{loss[:6]}.* is not allowed: it should be 'softmax', 'output'"):
            replace(plan, loss=loss)


def test_no_recipe_grows_unless_asked_and_duo_says_that_it_must():
    for name in RECIPES.keys() - {"duo"}:
        assert not Plan.of(name, model="demo", budget=64).may_grow
    with pytest.raises(RequestError, match="duo lets heads keep their whole cache .*: add --may-grow, or ask for"):
        Plan.of("duo", model="demo", budget=64)
    assert Plan.of("duo", model="demo", budget=64, may_grow=True).may_grow


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


def test_the_head_that_needs_its_cache_keeps_its_gate():
    """Values of one head only are read: the gates of all others may close."""
    teacher = teacher_of("llama").requires_grad_(False)
    attention = teacher.model.layers[1].self_attn
    for layer in teacher.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    attention.o_proj.weight[:, :32] = 3 * torch.eye(64)[:, :32]  # the queries of KV head 0
    gates = finish(learn_gates(teacher, tokens(4, 40), layers_of(teacher), window=2, sinks=0, steps=60))
    flat = {(index, head): gate for index, row in enumerate(gates) for head, gate in enumerate(row)}
    assert max(flat, key=flat.get) == (1, 0)
    assert max(gate for place, gate in flat.items() if place != (1, 0)) < 0.2


def test_open_gates_are_served_first_and_the_rest_shares_what_is_left():
    layers, gates = (Layer(4, 2, 16, 16),) * 2, [[0.1, 0.9], [0.2, 0.3]]
    allocation = allocate_by_gates(gates, layers, budget=64, sinks=4, length=128)
    assert allocation.heads[0][1].softmax and sum(head.softmax for row in allocation.heads for head in row) == 1
    assert allocation.state_bytes(layers, 128) <= cache_bytes(layers, 64)
    assert allocation.heads[0][0].window == (4 * 64 - 128) // 3 - 4
    assert not any(head.softmax for row in allocate_by_gates(gates, layers, 64, 4, 10_000).heads for head in row)
