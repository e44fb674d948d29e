import os
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from linearizer.errors import ModelNotAvailable, UnsupportedModel
from linearizer.hub.models import find_model
from linearizer.teacher.load import load_config, load_teacher, load_tokenizer
from tests.support.damage import change_json

TEXT = torch.arange(3, 40)[None]
GRADIENTS = """
import torch
from linearizer.hub.models import find_model
from linearizer.teacher.load import load_teacher

def gradient():
    embedded = teacher.get_input_embeddings()(torch.arange(3, 515)[None]).detach().requires_grad_()
    teacher(inputs_embeds=embedded).logits.square().sum().backward()
    return embedded.grad

teacher = load_teacher(find_model("demo"), torch.float32)
first = gradient()
torch.set_num_threads(torch.get_num_threads())
assert torch.equal(first, gradient())
"""


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """Copy the tiny model into one file that a test may damage."""
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_weights(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_process_that_measured_nothing_computes_the_same_bits_as_one_that_did():
    variables = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", GRADIENTS], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_teacher_is_frozen_and_equals_what_was_saved(folder):
    teacher = load_teacher(find_model(str(folder)))
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())
    assert torch.equal(teacher(TEXT).logits, saved(TEXT).logits)


def test_teacher_comes_from_the_hub_at_its_pinned_revision(hub, folder):
    hub.add("org/tiny", folder)
    source = find_model("org/tiny")
    change_weights(folder, lambda weights: {key: weight + 1 for key, weight in weights.items()})
    hub.add("org/tiny", folder)
    moved = load_teacher(find_model("org/tiny"))
    teacher = load_teacher(source)
    assert not torch.equal(teacher(TEXT).logits, moved(TEXT).logits)


def test_network_lost_before_the_weights_came_is_no_damage(hub, folder, monkeypatch):
    hub.add("org/lost", folder)
    source = find_model("org/lost")
    load_config(source)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotAvailable, match="no network"):
        load_teacher(source)


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda x: x.index_fill(1, torch.tensor(5), torch.inf),
            r"layers\.2\.mlp\.up_proj\.weight holds NaN or infinity",
        ),
        (lambda x: None, r"1 of its parameters are missing, such as model\.layers\.2\.mlp\.up_proj"),
    ],
    ids=["infinity", "missing"],
)
def test_weights_that_cannot_be_used_are_named_and_never_made_up(change, said, folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    changed = change(weights.pop(name := "model.layers.2.mlp.up_proj.weight"))
    save_file(weights if changed is None else {**weights, name: changed}, path, {"format": "pt"})
    with pytest.raises(ModelNotAvailable, match=said):
        load_teacher(find_model(str(folder)))


def test_code_beside_a_known_kind_is_ignored(folder):
    change_json(folder / "config.json", **EVIL)
    (folder / "evil.py").write_text("raise SystemExit('this code was run')")
    assert type(load_teacher(find_model(str(folder)))).__module__ == "transformers.models.llama.modeling_llama"


EVIL = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
REFUSED = "has a config\\.json that transformers refuses"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model_type": "homemade", **EVIL}, "needs code from its repository, which is never run here"),
        ({"model_type": "homemade"}, "the kind 'homemade', which transformers .* does not know"),
        ({"hidden_size": "many"}, rf"{REFUSED} \(.*(hidden|int)"),
        ({"num_attention_heads": 7}, rf"{REFUSED} \(.*heads"),
        ({"intermediate_size": 80}, r"mlp.* is stored as \(.*96.*\) and should be \(.*80.*\)"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_sentence(changes, said, folder):
    change_json(folder / "config.json", **changes)
    (folder / "evil.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises((UnsupportedModel, ModelNotAvailable), match=said):
        load_teacher(find_model(str(folder)))


def test_model_without_tokenizer_says_so(folder):
    with pytest.raises(ModelNotAvailable, match="has no tokenizer that can be loaded"):
        load_tokenizer(find_model(str(folder)))
