"""The text tower of a model that reads pictures loads alone, and gives text the whole model's logits."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from linearizer import pipeline
from linearizer.cli.text import describe_inspection
from linearizer.errors import UnsupportedModel
from linearizer.hub.models import find_model
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.disk import checkpoint_bytes
from linearizer.teacher import streaming
from linearizer.teacher.inspect_model import inspect_model, verify_teacher
from linearizer.teacher.load import load_config, load_teacher
from linearizer.teacher.streaming import measure_weights
from tests.support.cards import describe_teacher
from tests.support.families import GROUPED
from tests.support.hybrids import teacher_of
from tests.support.models import tokens
from tests.support.runs import weights_of
from tests.support.whole_models import WHOLE, whole_model

OLD = {"llava": ("model.language_model.", "language_model.model."), "qwen2_vl": ("model.language_model.", "model.")}


@pytest.mark.parametrize("family", WHOLE)
@torch.no_grad()
def test_a_tower_gives_text_the_logits_of_its_whole_model(family, tmp_path):
    whole = whole_model(family)
    whole.save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    config = load_config(source, text_only=True)
    inspection = inspect_model(source, config)
    assert inspection.supported, inspection.reason
    tower = load_teacher(source, text_only=True)
    assert torch.equal(tower(tokens(2, 20)).logits, whole(input_ids=tokens(2, 20)).logits)
    verify_teacher(tower, inspection)
    assert inspection.parameters == sum(x.numel() for x in tower.parameters()) < source.weights.parameters
    assert inspection.tower_of == type(whole).__name__ and inspection.architecture == type(tower).__name__
    description = f"the text tower of {type(whole).__name__}"
    assert description in describe_inspection(inspection) and description in describe_teacher(inspection)


@pytest.mark.parametrize("family", OLD)
@torch.no_grad()
def test_a_tower_is_found_by_the_names_of_older_files(family, tmp_path):
    whole = whole_model(family)
    whole.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    names = {name: name.replace(*OLD[family]) for name in load_file(path)}
    if family == "llava":
        names = {name: name.replace("lm_head", "language_model.lm_head") for name in names} | {
            name: new_name for name, new_name in names.items() if "lm_head" not in name
        }
    save_file({names[name]: x for name, x in load_file(path).items()}, path, {"format": "pt"})
    tower = load_teacher(find_model(str(tmp_path)), text_only=True)
    assert torch.equal(tower(tokens(1, 20)).logits, whole(input_ids=tokens(1, 20)).logits)


@torch.no_grad()
@pytest.mark.skipif(find_spec("timm") is not None, reason="its pictures are read, too")
def test_the_tower_of_gemma_3n_is_found_beside_parts_that_need_another_library(tmp_path):
    """Its tower for pictures is a model of timm; the files are written here under the names of the whole model."""
    text = teacher_of("gemma3n_text")
    config = AutoConfig.for_model("gemma3n", text_config=text.config.to_dict(), architectures=["Gemma3nForAll"])
    config.save_pretrained(tmp_path)
    named = {name.replace("model.", "model.language_model.", 1): x.clone() for name, x in text.state_dict().items()}
    named.pop("lm_head.weight")
    save_file({**named, "model.vision_tower.weight": torch.zeros(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    source = find_model(str(tmp_path))
    tower, inspection = load_teacher(source), inspect_model(source, load_config(source))
    assert torch.equal(tower(tokens(1, 20)).logits, text(tokens(1, 20)).logits)
    verify_teacher(tower, inspection)
    assert inspection.supported and inspection.tower_of == "Gemma3nForAll"
    assert inspection.reads.endswith("because its code needs timm, which is not installed")


def test_a_tower_whose_weights_are_not_there_is_refused(tmp_path):
    whole_model("llava").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if "norm" not in name}, path, {"format": "pt"})
    source = find_model(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="the weights of its text tower .* are not in its files by their names"):
        inspect_model(source, load_config(source)).require_support()


def whole_with_words(folder):
    """Save a model that reads pictures, with the demo model's words."""
    demo = find_model("demo")
    text = dict(GROUPED, model_type="llama", vocab_size=load_config(demo).vocab_size)
    model = whole_model("llava", text_config=text)
    model.save_pretrained(folder)
    for path in demo.folder.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return model


QUICK = dict(texts=2, length=32, sinks=2, steps=0, dtype="float32", strategy="window", budget=16)


@torch.no_grad()
def test_a_run_with_a_tower_ends_in_a_checkpoint_that_reads_text(tmp_path, monkeypatch):
    whole = whole_with_words(tmp_path / "whole")
    config = load_config(find_model(str(tmp_path / "whole")), text_only=True)
    needed = measure_weights(config, torch.float32).whole
    runs = []
    for name, free in (("run", needed), ("streamed", needed - 1)):
        monkeypatch.setattr(streaming, "free_bytes", lambda device, free=free: free / streaming.FILLED)
        runs.append(pipeline.begin(tmp_path / name, Plan(str(tmp_path / "whole"), text_only=True, **QUICK)))
        finish(pipeline.linearize(runs[-1]))
    run = runs[0]
    assert weights_of(run.checkpoint) == weights_of(runs[1].checkpoint)
    size = sum(path.stat().st_size for path in run.checkpoint.glob("*.safetensors"))
    assert 0.99 * size < checkpoint_bytes(run.plan, run.inspection) < 1.1 * size
    student = AutoModelForCausalLM.from_pretrained(run.checkpoint, dtype=torch.float32)
    ids = tokens(1, 8)  # no longer than its windows
    assert torch.allclose(student(ids).logits, whole(input_ids=ids).logits, atol=1e-4)
    assert json.loads((run.checkpoint / "config.json").read_text())["linearized"]["teacher_type"] == "llama"
