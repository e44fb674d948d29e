"""Quantised teachers: packed weights stay as they are, others are expanded while they load."""

import importlib.util
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from tests.support.cards import describe_teacher
from tests.support.damage import change_json
from tests.support.models import MIXED, allocation_of, layers_of, teacher_of, tokens

INT8 = dict(num_bits=8, type="int", strategy="channel", symmetric=True)
GROUPS = {"group_0": {"targets": ["Linear"], "weights": INT8}}
STATED = {
    "fp8": dict(quant_method="fp8", weight_block_size=[32, 32], activation_scheme="dynamic"),
    "compressed-tensors": dict(
        quant_method="compressed-tensors",
        format="int-quantized",
        quantization_status="compressed",
        config_groups=GROUPS,
        ignore=["lm_head"],
    ),
}


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


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


def fp8(weight):
    """Give a weight in blocks of 32 x 32 float8 numbers, with their scales, and what they stand for."""
    blocks = weight.unfold(0, 32, 32).unfold(1, 32, 32)
    scales = blocks.abs().amax((-1, -2)) / 448
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    small = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": scales}, small.float() * spread


def int8(weight):
    """Give a weight as 8-bit integers with a scale for every row, and what they stand for."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    small = (weight / scales).round().to(torch.int8)
    return {"weight": small, "weight_scale": scales}, small * scales


def quantised(method, folder):
    """Save a teacher whose matrices are quantised by hand; give the model that they stand for."""
    model = teacher_of("llama")
    model.save_pretrained(folder)
    path, tensors = folder / "model.safetensors", {}
    state = load_file(path)
    for name, x in state.items():
        if "_proj" in name:
            parts, state[name] = (fp8 if method == "fp8" else int8)(x)
            tensors |= {name.replace("weight", part): value for part, value in parts.items()}
        else:
            tensors[name] = x
    save_file(tensors, path, {"format": "pt"})
    change_json(folder / "config.json", quantization_config=STATED[method])
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("method", ["fp8", pytest.param("compressed-tensors", marks=needs("compressed_tensors"))])
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


QUICK = dict(texts=2, length=32, sinks=2, dtype="float32", budget=16)


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


@pytest.mark.parametrize("size", [[0, 0], [128], [128, -1], [1.5, 2], "128", 128])
def test_blocks_that_hold_no_weights_are_refused_before_they_are_read(size, tmp_path):
    quantised("fp8", tmp_path)
    change_json(tmp_path / "config.json", quantization_config={**STATED["fp8"], "weight_block_size": size})
    refused = pipeline.inspect(str(tmp_path))
    assert not refused.supported and refused.reason.startswith("its config gives its fp8 weights blocks of")
