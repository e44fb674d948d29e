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

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, from the lowest bits of a word on
LAYOUTS = {  # name -> what the config says
    "gptq": dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=False),
    "gptq-v2": dict(quant_method="gptq", bits=4, group_size=32, checkpoint_format="gptq_v2"),
    "gptq-in-order-of-activations": dict(quant_method="gptq", bits=4, group_size=32, desc_act=True),
    "gptq-one-group": dict(quant_method="gptq", bits=4, group_size=-1),
    "gptq-2": dict(quant_method="gptq", bits=2, group_size=32),
    "gptq-3": dict(quant_method="gptq", bits=3, group_size=32),
    "gptq-8": dict(quant_method="gptq", bits=8, group_size=32),
    "awq": dict(quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True),
}


def words_of(numbers, bits):
    """Write whole numbers one after the other, the lowest bits first, and cut that into words of 32 bits."""
    text = "".join(format(number, f"0{bits}b")[::-1] for number in numbers)
    words = [int(text[place : place + 32][::-1], 2) for place in range(0, len(text), 32)]
    return [word - 2**32 * (word >= 2**31) for word in words]


def pack_rows(numbers, bits, columns=None):
    """Pack every row of a matrix."""
    if columns is not None:
        numbers = numbers.unflatten(1, (-1, 8))[:, :, list(columns)].flatten(1)
    return torch.tensor([words_of(row, bits) for row in numbers.tolist()], dtype=torch.int32)


def packed(weight, stated, generator):
    """Round a matrix (outputs, inputs) to few bits; give what a file holds of it, and what that stands for."""
    inputs, bits = weight.shape[1], stated["bits"]
    size = stated["group_size"] if stated["group_size"] > 0 else inputs
    groups = torch.arange(inputs) // size
    if stated.get("desc_act"):
        groups = groups[torch.randperm(inputs, generator=generator)]
    count = inputs // size
    scales = (weight.abs().max() / 2 ** (bits - 1) * (0.5 + torch.rand(count, len(weight), generator=generator))).half()
    zeros = torch.randint(1, 2**bits, (count, len(weight)), generator=generator)
    spread = scales.float()[groups], zeros[groups]
    numbers = (weight.T / spread[0] + spread[1]).round().clamp(0, 2**bits - 1).long()  # (inputs, outputs)
    meant = ((numbers - spread[1]) * spread[0]).T.contiguous()
    if stated["quant_method"] == "awq":
        words = {"qweight": pack_rows(numbers, 4, AWQ_COLUMNS), "qzeros": pack_rows(zeros, 4, AWQ_COLUMNS)}
        return {**words, "scales": scales}, meant
    stored = zeros if stated.get("checkpoint_format") else zeros - 1
    words = {"qweight": pack_rows(numbers.T, bits).T.contiguous(), "qzeros": pack_rows(stored, bits)}
    return {**words, "scales": scales, "g_idx": groups.int()}, meant


def save_packed(model, folder, stated, extra=None):
    """Save a model with its matrices packed; give the model that they stand for."""
    for place in (folder, folder / "plain"):
        model.save_pretrained(place)
    path, tensors, generator = folder / "model.safetensors", {}, torch.Generator().manual_seed(0)
    state = load(path.read_bytes())
    for name, x in state.items():
        if "_proj.weight" in name or ".c_" in name and name.endswith("weight"):
            turned = ".c_" in name  # of GPT-2: (inputs, outputs)
            parts, meant = packed(x.T if turned else x, stated, generator)
            state[name] = meant.T.contiguous() if turned else meant
            tensors |= {name.replace("weight", part): value for part, value in parts.items()}
        else:
            tensors[name] = x
    save_file({**tensors, **(extra or {})}, path, {"format": "pt"})
    change_json(folder / "config.json", quantization_config=stated)
    save_file(state, folder / "plain" / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder / "plain")


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_few_bits_are_expanded_to_what_they_stand_for(layout, tmp_path):
    expected = save_packed(teacher_of("llama"), tmp_path, LAYOUTS[layout])
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
    expected = save_packed(teacher_of(family), tmp_path, LAYOUTS["gptq"])
    teacher = load_teacher(find_model(str(tmp_path)), torch.float32)
    assert torch.equal(teacher(tokens(1, 20)).logits, expected(tokens(1, 20)).logits)


def test_a_bias_of_zeros_is_dropped_and_another_is_refused(tmp_path):
    name, stated = "model.layers.0.self_attn.q_proj.bias", LAYOUTS["gptq"]
    for place, value in (("none", 0.0), ("some", 1.0)):
        save_packed(teacher_of("llama"), tmp_path / place, stated, {name: torch.full((64,), value)})
    assert load_teacher(find_model(str(tmp_path / "none"))).config.model_type == "llama"
    with pytest.raises(ModelNotAvailable, match=r"self_attn\.q_proj has a bias that the model has no place for"):
        load_teacher(find_model(str(tmp_path / "some")))


def test_activations_that_are_scaled_are_refused(tmp_path):
    name = "model.layers.0.mlp.act_fn.scales"
    save_packed(teacher_of("llama"), tmp_path, LAYOUTS["awq"], {name: torch.ones(128)})
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
    save_packed(teacher_of("llama"), tmp_path, LAYOUTS["gptq"])
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
