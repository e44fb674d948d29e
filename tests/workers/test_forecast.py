"""What work will take is forecast from the sizes of the work and the speed of the device that is meant."""

from dataclasses import replace

import pytest

from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.run.disk import map_bytes, rows_of
from linearizer.student.feature_maps import FEATURE_MAPS
from linearizer.workers.forecast import Speeds, forecast_run, run_memory
from tests.support.runs import inspection_of


def test_a_forecast_counts_the_type_that_is_computed_in():
    result = inspection_of([Layer(32, 8, 64, 64)] * 16, parameters=10**9, weight_bytes=2 * 10**9)
    plan = Plan("demo", budget=64, device="cpu")
    slow_in_halves, fast_in_halves = Speeds(1e11, 2e10, 1e5, 1e10, 1e9), Speeds(1e11, 2e11, 1e5, 1e10, 1e9)
    seconds = forecast_run(plan, result, slow_in_halves, 0).seconds
    assert forecast_run(replace(plan, dtype="float32"), result, slow_in_halves, 0).seconds == seconds
    assert forecast_run(plan, result, fast_in_halves, 0).seconds < seconds
    assert forecast_run(replace(plan, dtype="bfloat16"), result, slow_in_halves, 0).seconds > seconds
    large = replace(result, weight_bytes=4 * 10**9)
    assert forecast_run(plan, large, fast_in_halves, 0).seconds > forecast_run(plan, result, fast_in_halves, 0).seconds


def test_a_forecast_counts_the_training_of_adapters_and_what_resuming_it_needs():
    result = inspection_of([Layer(32, 8, 64, 64)] * 16, parameters=10**9, weight_bytes=2 * 10**9)
    speeds, plan = Speeds(1e11, 2e11, 1e5, 1e10, 1e9), Plan.of(model="demo", budget=64, device="cpu", loss="logits")
    plain, healed, longer = (forecast_run(replace(plan, steps=steps), result, speeds, 0) for steps in (0, 50, 100))
    assert longer.seconds - healed.seconds > 0.9 * (healed.seconds - plain.seconds) > 100
    texts = 50 * 2 * result.max_positions * 4  # bytes of the tokens of 50 steps
    assert longer.disk_bytes == healed.disk_bytes + texts > plain.disk_bytes + 10 * 8 * 16 * 4 * 2048


def test_where_a_loss_runs_through_the_whole_model_texts_are_short_and_the_graph_is_counted():
    result = inspection_of(
        [Layer(9, 3, 64, 64)] * 30, parameters=135 * 10**6, weight_bytes=27 * 10**7, max_positions=8192
    )
    adapters, features = (Plan.of(name, model="demo", budget=256) for name in ("lolcats", "features"))
    assert [plan.usual_length for plan in (adapters, features)] == [1024, 4096]
    assert run_memory(replace(adapters, length=4096), result) - run_memory(adapters, result) > 2**30


def test_a_large_vocabulary_takes_little_memory_while_heads_are_priced():
    plan = Plan("demo", budget=256)
    few, many = (
        run_memory(plan, inspection_of([Layer(4, 1, 256, 256)] * 18, vocabulary=words)) for words in (32_000, 262_144)
    )
    assert many - few < 2**30  # all logits of a text of 4,096 tokens take four


@pytest.mark.parametrize("name", ["clusters", "mlp"])
def test_the_disk_that_feature_maps_take_is_about_that_of_their_numbers(name):
    plan = Plan.of("features", model="demo", budget=256, feature_map=name)
    layer = Layer(4, 2, 64, 64)
    feature_map = FEATURE_MAPS[name](2, 64, rows_of(plan, layer))
    numbers = sum(x.numel() for x in feature_map.parameters())
    assert 0.67 < map_bytes(plan, inspection_of([layer])) / (4 * numbers) < 1.5
