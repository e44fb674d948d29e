"""A config says how often code loops that reads it: one that says too much is refused before anything is built.

So is one that contradicts itself.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from linearizer import pipeline
from linearizer.errors import UnsupportedModel
from linearizer.teacher.config_bounds import MAX_BYTES, check_counts
from tests.support.families import tiny_config
from tests.support.hybrids import HYBRIDS, tiny_hybrid
from tests.support.whole_models import whole_config

REFUSED = {
    "layers": (dict(num_hidden_layers=10**7), "10,000,000 layers"),
    "a layer too many": (dict(num_hidden_layers=4), "4 layers, and its files hold 3 tensors"),
    "layers of a section": (dict(vision_config=dict(depth=10**9)), "1,000,000,000 layers"),
    "layers in a list": (dict(parts=[dict(n_layer=10**7)]), "10,000,000 layers"),
    "layers by their kinds": (dict(layers_block_type=["mlp"] * 10**5), "100,000 layers"),
    "layers by letters": (dict(text_config=dict(hybrid_override_pattern="M" * 10**5)), "100,000 layers"),
    "layers by groups": (dict(attention_types=[[["global"], 10**9]]), "1,000,000,000 layers"),
    "layers of stages": (dict(vision_config=dict(depths=[500] * 400)), "200,000 layers"),
    "a long list": (dict(vision_config=dict(deepstack_visual_indexes=[0] * 10**5)), "100,000 entries in a list"),
    "experts": (dict(num_local_experts=10**8), "100,000,000 experts"),
    "labels": (dict(num_labels=10**9), "1,000,000,000 labels"),
    "pixels": (dict(vision_config=dict(image_size=[224, 10**6])), "1,000,000 pixels a side"),
    "endless layers": (dict(num_hidden_layers=float("inf")), "layers"),
}


SEEING = whole_config("llava").to_dict()
CONTRADICTORY = {
    "kinds for fewer layers": (tiny_hybrid("qwen3_5_text").to_dict(), dict(layer_types=["full_attention"])),
    "a kind that nobody knows": (tiny_hybrid("nemotron_h").to_dict(), dict(layers_block_type=["other"] * 4)),
    "kinds of a model without kinds": (tiny_hybrid("falcon_h1").to_dict(), dict(layer_types=["full_attention"] * 4)),
    "more shared layers than layers": (tiny_hybrid("gemma4_text").to_dict(), dict(num_kv_shared_layers=50)),
    "attention beyond the layers": (tiny_hybrid("bamba").to_dict(), dict(attn_layer_indices=[99])),
    "no text": (SEEING, dict(text_config={"model_type": "clip_vision_model"})),
    "text of an unknown kind": (SEEING, dict(text_config={"model_type": "nothing"})),
    "a tower that is a list": (SEEING, dict(vision_config=[1])),
}


def write_model(folder, **config):
    content = {**tiny_config("llama").to_dict(), **config}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    save_file({f"model.{name}": torch.zeros(2) for name in "abc"}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_with_more_parts_than_its_files_is_refused_in_one_sentence(case, tmp_path):
    config, reason = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        pipeline.inspect(write_model(tmp_path, **config))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize("case", CONTRADICTORY)
def test_a_config_that_contradicts_itself_is_refused_in_one_sentence(case, tmp_path):
    content, changed = CONTRADICTORY[case]
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**content, **changed}), encoding="utf-8")
    with pytest.raises(UnsupportedModel) as refusal:
        pipeline.inspect(str(tmp_path)).require_support()
    assert "\n" not in str(refusal.value) and ": " in str(refusal.value)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_config_of_many_megabytes_is_refused_unread(tmp_path):
    with pytest.raises(UnsupportedModel, match="config.json of more than"):
        pipeline.inspect(write_model(tmp_path, note="x" * MAX_BYTES))


def test_many_layers_of_many_experts_are_refused_together():
    with pytest.raises(UnsupportedModel, match="layers times experts"):
        check_counts("a", {"num_hidden_layers": 500, "num_experts": 4000}, 0)


def test_a_mixture_without_experts_is_described_in_a_sentence(tmp_path):
    write_model(tmp_path)
    content = {**tiny_config("deepseek_v3").to_dict(), "n_routed_experts": 0}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    described = pipeline.inspect(str(tmp_path))
    assert described.resting == 0


def test_published_shapes_are_within_the_bounds():
    for family in HYBRIDS:
        check_counts(family, tiny_hybrid(family).to_dict(), 10)
    check_counts("kimi", {"text_config": {"num_hidden_layers": 61, "n_routed_experts": 384}}, 90_000)
    check_counts("gemma", {"num_hidden_layers": 35, "vocab_size_per_layer_input": 262_144}, 700)
