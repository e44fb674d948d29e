"""Models of real configs are made, and what their steps take stands beside the forecast."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from linearizer import pipeline
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.teacher.support import build_blueprint
from linearizer.workers.forecast import Speeds, forecast_run
from tests.benchmarks import sizes
from tests.support.families import GROUPED

PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
}
SPEEDS = Speeds(1e10, 1e10, 1e5, 1e9, 4e8)


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_parameters_of_the_real_models(name):
    assert sum(x.numel() for x in build_blueprint(sizes.SHAPES[name][0]).parameters()) == PARAMETERS[name]


def test_steps_are_measured_beside_the_forecast_and_layers_extrapolated_to_the_whole(tmp_path, monkeypatch):
    config = LlamaConfig(**{**GROUPED, "num_hidden_layers": 8, "vocab_size": sizes.FEW_WORDS})
    monkeypatch.setattr(sizes, "SHAPES", {"tiny": (config, False)})
    measured = []
    for layers in (1, 2):
        folder = tmp_path / f"tiny-{layers}"
        sizes.make_model(folder, sizes.config_of("tiny", num_hidden_layers=layers))
        run = ["--run", str(folder), str(tmp_path / f"run-{layers}")]
        result = sizes.run_here(sizes.parse(["--strategy=window", "--steps=0", "--length=32", *run]))
        measured.append({"made": 0.0, **result})
    names = list(measured[0]["steps"])
    assert names[0] == "profile" and names[-1] == "checkpoint" and "evaluate" in names
    assert measured[0]["memory"] > measured[0]["weights"] and measured[0]["disk"] > 0 and measured[0]["hashes"]
    text = sizes.table("tiny", config, [1, 2], measured)
    assert "tiny, 2 of 8 layers" in text and "all 8 layers (0.0 B parameters), extrapolated" in text


def test_the_disk_of_a_run_is_at_most_its_forecast_and_that_at_most_half_as_much_again(trained_run):
    run, used = Run.open(trained_run), sizes.bytes_of(trained_run)
    forecast = forecast_run(run.plan, run.inspection, SPEEDS, 0)
    assert used <= forecast.disk_bytes <= 1.5 * used, (used, forecast)


@pytest.mark.skipif(not Path("/proc").exists(), reason="the system does not tell what a process took")
def test_the_memory_of_a_run_is_at_most_its_forecast_and_that_at_most_half_as_much_again(tmp_path):
    config = LlamaConfig(**{**GROUPED, "num_hidden_layers": 2, "vocab_size": 32768})
    sizes.make_model(tmp_path / "model", config, torch.float32)
    work = f"from {__name__} import print_memory; print_memory({str(tmp_path)!r})"  # a process that has freed nothing
    output = subprocess.check_output([sys.executable, "-c", work], text=True)
    taken, forecast = map(float, output.split()[-2:])
    assert taken <= forecast <= 1.5 * taken, output


def print_memory(folder):
    """Run all steps on a folder's model; print what this process took and what was forecast."""
    options = dict(recipe="features", strategy="common-lambda", steps=2, texts=2, length=64, budget=32)
    run = pipeline.begin(Path(folder) / "run", Plan.of(model=f"{folder}/model", device="cpu", **options))
    finish(pipeline.linearize(run))
    forecast = forecast_run(run.plan, run.inspection, SPEEDS, 0).memory_bytes
    print(sizes.status_bytes(sizes.PEAK), forecast)
