import time

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from linearizer.cli.text import describe_inspection
from linearizer.errors import UnsupportedModel
from linearizer.hub.models import Source
from linearizer.hub.weight_files import Weights
from linearizer.plan.head_bytes import Layer
from linearizer.teacher.inspect_model import inspect_model, verify_teacher
from linearizer.teacher.support import TESTED
from tests.support.cards import describe_teacher
from tests.support.families import ALTERED, FAMILIES, WINDOW, tiny_config
from tests.support.hybrids import HYBRIDS

MIXTURES = ("mixtral", "qwen3_moe")
LEARNED = ("gpt2", "gpt_bigcode", "opt")
PARTIAL = ("gpt_neox", "phi", "stablelm", "glm", "glm4", "glm4_moe")
ONE_TO_ONE = ("gpt2", "gpt_neox", "opt", "deepseek_v2", "deepseek_v3")
WINDOWS = dict.fromkeys(("cohere2", "exaone4", "olmo3"), [WINDOW, WINDOW, None]) | {"gemma3_text": [WINDOW, None, None]}
VALUES = {"deepseek_v2": 12, "deepseek_v3": 12}  # the size of a value, where it is not that of a key


def inspect(config):
    return inspect_model(
        Source("tiny", None, "org/tiny", "c0ffee", False, Weights((), 1234, 5678), {"license": "mit"}), config
    )


def kv_heads(family):
    return 4 if family in ONE_TO_ONE else 1 if family == "gpt_bigcode" else 2


def test_every_family_that_is_promised_is_tested():
    assert {*FAMILIES, *HYBRIDS, *ALTERED} == TESTED


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_supported_with_the_shapes_that_its_model_shows(family):
    config = tiny_config(family)
    inspection = inspect(config)
    assert inspection.supported and inspection.tested, inspection.reason
    sizes = kv_heads(family), 16, VALUES.get(family, 16)
    assert inspection.layers == tuple(Layer(4, *sizes, window) for window in WINDOWS.get(family, [None] * 3))
    scale = {"opt": 1.0, "granite": 0.1, "gemma3_text": 32**-0.5}.get(family, 16**-0.5)
    assert inspection.scalings == pytest.approx([scale] * 3)
    positions = "learned" if family in LEARNED else "partial rotary" if family in PARTIAL else "rotary"
    assert inspection.positions == ("rotary, but for some layers" if family == "smollm3" else positions)
    assert inspection.max_positions == 256
    assert inspection.vocabulary == config.get_text_config().vocab_size
    verify_teacher(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval(), inspection)


@pytest.mark.parametrize("family", MIXTURES)
def test_of_a_mixture_the_parameters_at_work_for_a_token_are_counted(family):
    inspection = inspect(tiny_config(family))
    inner = 32 if family == "qwen3_moe" else 96
    assert inspection.resting == 3 * (4 - 2) * 3 * 64 * inner  # layers, experts at rest, matrices of an expert
    assert inspection.active == inspection.parameters - inspection.resting
    assert f"{inspection.active:,} active per token" in describe_inspection(inspection)
    assert "parameters are active per token" in describe_teacher(inspection)
    whole = inspect(tiny_config("llama"))
    assert not whole.resting and "at work" not in describe_inspection(whole) and not describe_teacher(whole)


@pytest.mark.parametrize(
    "config",
    [
        dict(model_type="llama", num_hidden_layers=80, num_key_value_heads=8, intermediate_size=28672),
        dict(model_type="qwen3_moe", num_hidden_layers=94, num_key_value_heads=4, moe_intermediate_size=1536),
    ],
)
def test_very_large_model_is_inspected_in_seconds(config):
    config = AutoConfig.for_model(**config, hidden_size=8192, num_attention_heads=64, head_dim=128)
    start = time.process_time()
    inspection = inspect(config)
    assert inspection.supported and len(inspection.layers) == config.num_hidden_layers
    assert time.process_time() - start < 10


INTERFACE = "does not hand its attention to transformers' attention interface"
ALIBI = "its positions are ALiBi, which its code adds to the scores outside transformers' attention interface"
ENCODES = "it is an encoder, which reads in both directions"
RECURRENT = "all of its layers are recurrent, with a state of fixed size"
REFUSED = {
    "falcon": (dict(model_type="falcon", new_decoder_architecture=True, num_hidden_layers=2), INTERFACE),
    "falcon with ALiBi": (dict(model_type="falcon", alibi=True), ALIBI),
    "mpt": (dict(model_type="mpt"), ALIBI),
    "mpt without ALiBi": (dict(model_type="mpt", attn_config=dict(alibi=False)), INTERFACE),
    "doge": (dict(model_type="doge", num_hidden_layers=2), f"({INTERFACE}|its layers mask tokens)"),
    "t5": (dict(model_type="t5"), "it is an encoder–decoder"),
    "bart": (dict(model_type="bart"), "it is an encoder–decoder"),
    "gpt2 that reads another text": (dict(model_type="gpt2", add_cross_attention=True), "it is an encoder–decoder"),
    "bert": (dict(model_type="bert"), ENCODES),
    "roberta": (dict(model_type="roberta"), ENCODES),
    "gemma in both directions": (dict(model_type="gemma", use_bidirectional_attention=True), ENCODES),
    "mamba": (dict(model_type="mamba", num_hidden_layers=2), RECURRENT),
    "mamba2": (dict(model_type="mamba2", num_hidden_layers=2), RECURRENT),
    "rwkv": (dict(model_type="rwkv", num_hidden_layers=2), RECURRENT),
    "bamba without attention": (dict(model_type="bamba", num_hidden_layers=2), RECURRENT),
    "lfm2 without attention": (
        dict(model_type="lfm2", num_hidden_layers=2, layer_types=["conv"] * 2),
        "none of its layers attends",
    ),
    "zamba": (dict(model_type="zamba", num_hidden_layers=6), "share one attention module"),
    "inkling": (dict(model_type="inkling_text"), "a learned bias for distances"),
    "quantised": (dict(model_type="llama", quantization_config={"quant_method": "hqq"}), "its weights are quantised"),
    "windows everywhere": (
        dict(model_type="mistral", sliding_window=64, num_hidden_layers=2),
        "every layer already attends to a window",
    ),
    "a tower without a class": (dict(model_type="mllama"), "its text tower \\(mllama_text_model\\) is of a kind"),
    "no tower": (dict(model_type="chameleon"), "has no text tower of its own"),
    "two attentions in each layer": (
        dict(model_type="diffllama", num_hidden_layers=2),
        f"({INTERFACE}|4 times in all)",
    ),
    "vit": (dict(model_type="vit"), "vit models do not continue text"),
    "no layers": (dict(model_type="llama", num_hidden_layers=0), "its config says that it has 0 layers"),
    "uneven heads": (dict(model_type="gemma", num_attention_heads=7, num_key_value_heads=4, head_dim=8), "evenly"),
    "no fit": (dict(model_type="llama", hidden_act="nonsense"), "cannot build it from its config"),
}


@pytest.mark.parametrize(
    "case", [case for case, (config, _) in REFUSED.items() if config["model_type"] in CONFIG_MAPPING]
)
def test_what_cannot_be_linearized_is_refused_with_its_true_reason(case):
    config, reason = REFUSED[case]
    inspection = inspect(AutoConfig.for_model(**config))
    assert not inspection.supported and inspection.remedy
    with pytest.raises(UnsupportedModel, match=f"'tiny' cannot be linearized, because .*{reason}.*: "):
        inspection.require_support()


def test_chunked_layers_are_native_windows():
    config = AutoConfig.for_model(
        "llama4_text",
        num_hidden_layers=4,
        attention_chunk_size=32,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
    )
    assert [layer.native_window for layer in inspect(config).layers] == [32, 32, 32, None]


def test_inspection_changes_neither_config_nor_random_numbers():
    config = tiny_config("mixtral")
    before, state = config.to_dict(), torch.get_rng_state()
    inspect(config)
    assert config.to_dict() == before and torch.equal(torch.get_rng_state(), state)
    assert config._attn_implementation is None


def test_teacher_with_other_shapes_than_its_config_is_an_error():
    inspection = inspect(tiny_config("llama"))
    other = AutoModelForCausalLM.from_config(tiny_config("llama", num_key_value_heads=4))
    with pytest.raises(UnsupportedModel, match="attends differently from what its config says .*kv_heads=4"):
        verify_teacher(other, inspection)


def test_an_inspection_leaves_the_type_of_new_tensors_to_other_threads(monkeypatch):
    """transformers sets it for the whole process while it makes a model of another type."""
    used, change = [], torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: (used.append(dtype), change(dtype)))
    assert inspect(tiny_config("llama", dtype="bfloat16")).supported
    assert {*used} <= {torch.float32}
