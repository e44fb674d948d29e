"""Checkpoints of GPTQ and AWQ, packed here bit by bit, load as the weights that they stand for."""

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import AutoModelForCausalLM

from linearizer import pipeline
from linearizer.errors import ModelNotAvailable, UnsupportedModel
from linearizer.hub.models import find_model
from linearizer.teacher.load import load_teacher
from tests.support.damage import change_json
from tests.support.models import teacher_of, tokens
from tests.support.quantised import AWQ, GPTQ, save_quantised

LAYOUTS = {  # name -> what the config says
    "gptq": GPTQ,
    "gptq-v2": dict(GPTQ, checkpoint_format="gptq_v2"),
    "gptq-in-order-of-activations": dict(GPTQ, desc_act=True),
    "gptq-one-group": dict(GPTQ, group_size=-1),
    "gptq-2": dict(GPTQ, bits=2),
    "gptq-3": dict(GPTQ, bits=3),
    "gptq-8": dict(GPTQ, bits=8),
    "awq": AWQ,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_few_bits_are_expanded_to_what_they_stand_for(layout, tmp_path):
    expected = save_quantised(teacher_of("llama"), tmp_path, LAYOUTS[layout])
    inspection = pipeline.inspect(str(tmp_path))
    method, bits = LAYOUTS[layout]["quant_method"], LAYOUTS[layout]["bits"]
    assert inspection.supported and inspection.quantised == f"{method}, {bits} bits", inspection.reason
    assert not inspection.packed and not inspection.links
    assert inspection.parameters == sum(x.numel() for x in expected.parameters())
    teacher = load_teacher(find_model(str(tmp_path)), torch.float32)
    parameters = dict(teacher.named_parameters())
    assert all(torch.equal(x, parameters[name]) for name, x in expected.named_parameters())
    assert torch.equal(teacher(tokens(1, 20)).logits, expected(tokens(1, 20)).logits)
    if layout == "awq":
        teacher.save_pretrained(tmp_path / "again")
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(reloaded(tokens(1, 20)).logits, teacher(tokens(1, 20)).logits)


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
@torch.no_grad()
def test_matrices_that_lie_or_are_stored_otherwise_are_found(family, tmp_path):
    expected = save_quantised(teacher_of(family), tmp_path, LAYOUTS["gptq"])
    teacher = load_teacher(find_model(str(tmp_path)), torch.float32)
    assert torch.equal(teacher(tokens(1, 20)).logits, expected(tokens(1, 20)).logits)


def test_a_bias_of_zeros_is_dropped_and_another_is_refused(tmp_path):
    name, stated = "model.layers.0.self_attn.q_proj.bias", LAYOUTS["gptq"]
    for place, value in (("none", 0.0), ("some", 1.0)):
        save_quantised(teacher_of("llama"), tmp_path / place, stated, {name: torch.full((64,), value)})
    assert load_teacher(find_model(str(tmp_path / "none"))).config.model_type == "llama"
    with pytest.raises(ModelNotAvailable, match=r"self_attn\.q_proj has a bias that the model has no place for"):
        load_teacher(find_model(str(tmp_path / "some")))


def test_activations_that_are_scaled_are_refused(tmp_path):
    name = "model.layers.0.mlp.act_fn.scales"
    save_quantised(teacher_of("llama"), tmp_path, LAYOUTS["awq"], {name: torch.ones(128)})
    with pytest.raises(UnsupportedModel, match=rf"its quantisation scales activations \({name}\)"):
        load_teacher(find_model(str(tmp_path)))


DAMAGED_PARTS = [
    ("scales", None),
    ("scales", torch.zeros(0, 0)),
    ("scales", torch.ones(())),
    ("qzeros", None),
    ("qweight", torch.zeros(3, 64, dtype=torch.int32)),
    ("qweight", torch.zeros((), dtype=torch.int32)),
]


def test_parts_that_are_missing_or_do_not_fit_are_damage(tmp_path):
    save_quantised(teacher_of("llama"), tmp_path, LAYOUTS["gptq"])
    intact = load((tmp_path / "model.safetensors").read_bytes())
    name = "model.layers.1.mlp.down_proj"
    for part, damaged in DAMAGED_PARTS:
        tensors = {key: x for key, x in intact.items() if key != f"{name}.{part}"}
        save_file(tensors | ({} if damaged is None else {f"{name}.{part}": damaged}), tmp_path / "model.safetensors")
        with pytest.raises(ModelNotAvailable, match=rf"damaged weights \({name} cannot be unpacked"):
            load_teacher(find_model(str(tmp_path)))


@pytest.mark.parametrize(
    "stated, reason",
    [
        (dict(quant_method="gptq", bits=5), "by gptq to 5 bits"),
        (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), "by gptq in the layout marlin"),
        (dict(quant_method="awq", bits=4, version="gemv"), "by awq in the layout gemv"),
        (dict(quant_method="awq", bits=3), "by awq to 3 bits"),
    ],
)
def test_other_layouts_are_refused_by_name(stated, reason, tmp_path):
    teacher_of("llama").save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", quantization_config=stated)
    refused = pipeline.inspect(str(tmp_path))
    assert not refused.supported and refused.reason == f"its weights are quantised {reason}, which is not served"
    assert refused.remedy == "name the model that it was quantised from"
