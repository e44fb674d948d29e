"""Quantised teachers: packed weights stay as they are, others are expanded while they load."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from linearizer import pipeline
from linearizer.cli.text import describe_inspection
from linearizer.errors import RequestError, UnsupportedModel
from linearizer.hub.models import find_model
from linearizer.method.checkpoint import save
from linearizer.method.head_prices import estimate_prices
from linearizer.method.recorder import Samples
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.disk import checkpoint_bytes
from linearizer.run.folder import Run
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.layers import matrix
from linearizer.teacher.load import load_config, load_teacher
from linearizer.teacher.quantised import keep_as_stored
from tests.support.altered import teacher_of as altered_teacher_of
from tests.support.cards import describe_teacher
from tests.support.damage import change_json
from tests.support.models import MIXED, allocation_of, layers_of, teacher_of, tokens
from tests.support.quantised import AWQ, FP8, GPTQ, INT8, MXFP4, needs, save_quantised
from tests.support.whole_models import inputs_of, pictured_model

STATED = {each["quant_method"]: each for each in (FP8, MXFP4, INT8, GPTQ, AWQ)}
BITS = [pytest.param(bits, marks=needs("bitsandbytes")) for bits in (4, 8)]


@pytest.mark.parametrize("stated", ["awq", ["gptq"], 4])
def test_a_quantisation_that_is_no_object_is_refused_in_a_sentence(stated, tmp_path):
    source = find_model("demo")
    content = json.loads((source.folder / "config.json").read_text())
    for fields in ({"quantization_config": stated}, {"text_config": {"quantization_config": stated}}):
        (tmp_path / "config.json").write_text(json.dumps({**content, **fields}))
        with pytest.raises(UnsupportedModel, match="`quantization_config` that is not an object: repair that file"):
            load_config(replace(source, folder=tmp_path))


def packed(bits, folder, **sizes):
    """Save a teacher quantised by bitsandbytes; give it as transformers loads it."""
    teacher_of("llama", intermediate_size=128, **sizes).save_pretrained(folder / "full")
    quantisation = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / "full", quantization_config=quantisation, dtype=torch.float32)
    model.save_pretrained(folder / "teacher")
    keep_as_stored(model)
    return model.eval()


def quantised(method, folder):
    """Save a teacher whose matrices are quantised by hand; give the model that they stand for."""
    return save_quantised(
        altered_teacher_of("gpt_oss") if method == "mxfp4" else teacher_of("llama"), folder, STATED[method]
    )


@pytest.mark.parametrize(
    "method", ["fp8", "mxfp4", pytest.param("compressed-tensors", marks=needs("compressed_tensors"))]
)
@torch.no_grad()
def test_weights_are_expanded_to_what_they_stand_for(method, tmp_path):
    expected = quantised(method, tmp_path)
    source = find_model(str(tmp_path))
    inspection = inspect_model(source, load_config(source))
    assert inspection.supported and not inspection.packed and not inspection.links, inspection.reason
    assert inspection.parameters == sum(x.numel() for x in expected.parameters())
    teacher = load_teacher(source, torch.float32)
    assert torch.allclose(teacher(tokens(1, 20)).logits, expected(tokens(1, 20)).logits, atol=1e-5)
    assert not hasattr(teacher.config, "quantization_config") and {x.dtype for x in teacher.parameters()} == {
        torch.float32
    }
    teacher.save_pretrained(tmp_path / "again")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(reloaded(tokens(1, 20)).logits, teacher(tokens(1, 20)).logits)
    assert f"{method}; its weights are held expanded while they load" in describe_inspection(inspection)
    assert f"({method}) and were expanded: everything here about the teacher" in describe_teacher(inspection)


@pytest.mark.parametrize("family, method", [("llava", "fp8"), ("qwen3_5", "gptq")])
@torch.no_grad()
def test_quantised_models_that_read_pictures_are_served_whole_and_by_their_towers(family, method, tmp_path):
    """Also where only the config of the tower states it."""
    expected, inputs = save_quantised(pictured_model(family), tmp_path, STATED[method]), inputs_of(family)
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["text_config"]["quantization_config"] = stated.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(stated))
    source = find_model(str(tmp_path))
    for text_only in (False, True):
        inspection = inspect_model(source, load_config(source, text_only=text_only))
        assert inspection.supported and inspection.quantised and inspection.reads_pictures != text_only
        teacher = load_teacher(source, torch.float32, text_only=text_only)
        given = {"input_ids": tokens(1, 20)} if text_only else inputs
        assert torch.equal(teacher(**given).logits, expected(**given).logits)
        assert inspection.parameters == sum(x.numel() for x in teacher.parameters())
        assert "quantization_config" not in teacher.config.to_json_string()


@needs("bitsandbytes")
def test_the_tower_of_packed_weights_packs_no_others(tmp_path):
    whole = pictured_model("llava")
    whole.save_pretrained(tmp_path / "full")
    kept = ["vision_tower", "multi_modal_projector", "lm_head", "model.language_model.layers.1.self_attn"]
    stated = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=kept)
    packed_whole = type(whole).from_pretrained(tmp_path / "full", quantization_config=stated, dtype=torch.float32)
    packed_whole.save_pretrained(tmp_path / "teacher")
    keep_as_stored(packed_whole)
    source, given = find_model(str(tmp_path / "teacher")), {"input_ids": tokens(1, 20)}
    assert inspect_model(source, load_config(source)).reads_pictures
    with torch.no_grad():
        tower = load_teacher(source, torch.float32, text_only=True)
        assert torch.equal(tower(**given).logits, packed_whole(**given).logits)


@pytest.mark.parametrize("bits", BITS)
def test_packed_weights_stay_as_they_are_and_have_gradients(bits, tmp_path):
    expected = packed(bits, tmp_path)
    source = find_model(str(tmp_path / "teacher"))
    inspection = inspect_model(source, load_config(source))
    assert inspection.supported and inspection.packed and inspection.links, inspection.reason
    assert inspection.quantised == f"bitsandbytes, {bits} bits"
    assert inspection.parameters == sum(x.numel() for x in teacher_of("llama", intermediate_size=128).parameters())
    teacher = load_teacher(source, torch.float32)
    with torch.no_grad():
        assert torch.equal(teacher(tokens(1, 20)).logits, expected(tokens(1, 20)).logits)
    layers = layers_of(teacher)
    prices = finish(estimate_prices(teacher, tokens(2, 24), layers, (Head(window=4),), 2, Samples((None,) * 16)))
    assert all(kl > 0 for layer in prices.kl for head in layer for kl in head)
    projection = teacher.model.layers[0].self_attn.o_proj
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.allclose(
            x @ matrix(projection, 64, torch.device("cpu")), projection(x), atol=0.1 if bits == 8 else 1e-4
        )


@pytest.mark.parametrize("bits", BITS)
@torch.no_grad()
def test_a_student_of_packed_weights_loads_from_its_teachers_files(bits, tmp_path):
    from linearizer.method.checkpoint import put_student_into

    packed(bits, tmp_path)
    source = find_model(str(tmp_path / "teacher"))
    teacher = load_teacher(source, torch.float32)
    layers = layers_of(teacher)
    student = put_student_into(teacher, layers, allocation_of(layers, MIXED, 2))
    files = sorted((tmp_path / "teacher").glob("*.safetensors"))
    save(student, None, tmp_path / "checkpoint", files)
    shutil.rmtree(tmp_path / "teacher")
    stated = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert stated["quantization_config"][f"load_in_{bits}bit"]
    assert (tmp_path / "checkpoint" / "teacher-00001-of-00001.safetensors").stat().st_nlink == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    keep_as_stored(loaded)
    assert torch.equal(loaded(tokens(1, 20)).logits, student(tokens(1, 20)).logits)


QUICK = dict(texts=2, length=32, sinks=2, dtype="float32", budget=20)


@needs("bitsandbytes")
def test_a_run_with_a_packed_teacher_ends_in_a_student_that_is_evaluated(tmp_path, said):
    words = load_config(find_model("demo")).vocab_size
    packed(4, tmp_path, vocab_size=words)
    for path in find_model("demo").folder.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "teacher")
    plan = Plan(str(tmp_path / "teacher"), **QUICK, strategy="common-lambda", steps=1)
    run = pipeline.begin(tmp_path / "run", plan)
    finish(pipeline.linearize(run))
    assert checkpoint_bytes(plan, run.inspection) < run.inspection.weight_bytes
    assert "bitsandbytes, 4 bits" in (run.checkpoint / "README.md").read_text()
    code, _, err = said("compare", run.folder, "--prompt", "Once", "--tokens", 4)
    assert code == 0, err
    code, _, err = said("evaluate", run.folder, "--parts", "language", "--texts", 1)
    assert code == 0, err
    assert Run.open(run.folder).results["language"].result.subjects[0].loss.mean > 0
    with pytest.raises(RequestError, match="adapters cannot be merged into such weights"):
        pipeline.begin(tmp_path / "other", Plan.of(recipe="lolcats", model=str(tmp_path / "teacher"), budget=64))
    with pytest.raises(RequestError, match="adapters cannot be merged into such weights: ask for --lora 0"):
        pipeline.begin(tmp_path / "other", Plan.of(model=str(tmp_path / "teacher"), budget=64, steps=2))


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    from linearizer.teacher import quantised as module

    quantised("fp8", tmp_path)
    monkeypatch.setitem(module.PACKAGES, "fp8", "no_such_package")
    refused = pipeline.inspect(str(tmp_path))
    assert "no_such_package is not installed" in refused.reason and "pip install no-such-package" in refused.remedy


def test_mxfp4_is_refused_where_transformers_does_not_expand_it(tmp_path):
    teacher_of("mixtral").save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", quantization_config=MXFP4)
    refused = pipeline.inspect(str(tmp_path))
    assert refused.reason == "its weights are quantised by mxfp4, which transformers expands for gpt_oss alone"


@pytest.mark.parametrize("size", [[0, 0], [128], [128, -1], [1.5, 2], "128", 128])
def test_blocks_that_hold_no_weights_are_refused_before_they_are_read(size, tmp_path):
    quantised("fp8", tmp_path)
    change_json(tmp_path / "config.json", quantization_config={**FP8, "weight_block_size": size})
    refused = pipeline.inspect(str(tmp_path))
    assert not refused.supported and refused.reason.startswith("its config gives its fp8 weights blocks of")
