"""Of all kinds of models that transformers has: what inspection takes is served rightly, though no list names it."""

from contextlib import suppress
from itertools import product

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from linearizer.hub.models import Source
from linearizer.hub.weight_files import Weights
from linearizer.method.untrained import make_student
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.observing import implementation_of_teacher
from tests.support.families import EXPERTS, FAMILIES, GPT, GROUPED, LATENT, ROUTED, WINDOW
from tests.support.hybrids import HYBRIDS
from tests.support.models import tokens

LENGTH = 40
LEAST = 25  # kinds that have to be compared, also with the oldest transformers
KINDS = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*FAMILIES, *HYBRIDS})
SMALL = {
    **{**GPT, **GROUPED, **EXPERTS, **ROUTED, **LATENT, "num_experts": 4, "moe_num_experts": 4},
    **{"d_model": 64, "n_layers": 3, "num_layers": 3, "n_heads": 4, "num_heads": 4, "ffn_hidden_size": 96, "moe_k": 2},
    **{"first_k_dense_replace": 1, "moe_topk": 2, "original_max_position_embeddings": 256, "sliding_window": WINDOW},
    **{"global_head_dim": 16, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 128},
    **{"cls_token_id": 1, "sep_token_id": 2, "n_shared_experts": 1},
}
WITHOUT = ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads"), ("layer_types",))


def small_configs(kind):
    """Build configs of a kind of which nothing is known, with the usual sizes as far as it has them."""
    try:
        usual = CONFIG_MAPPING[kind]().to_dict()
    except Exception:
        return
    special_sizes = {"num_key_value_heads": 4} if "kv_lora_rank" in usual else {}
    if kinds := usual.get("layer_types"):
        special_sizes["layer_types"] = [kinds[0], kinds[-1], kinds[-1]]
    sizes = {name: size for name, size in (SMALL | special_sizes).items() if name in usual}
    unset = [name for name in sizes if usual[name] is None]
    for names in ([*unset, *removed] for unset, removed in product((unset, ()), WITHOUT)):
        with suppress(Exception):
            yield AutoConfig.for_model(kind, **{name: x for name, x in sizes.items() if name not in names})


def inspected(kind):
    """Give a small config that transformers can build, and what inspection says of it; None where it can build none."""
    source = Source("tiny", None, "org/tiny", "c0ffee", False, Weights((), 1234, 5678), {"license": "mit"})
    for config in small_configs(kind):
        if config.get_text_config(decoder=True) is not config:
            return None  # test_whole_models.py has those that read pictures
        inspection = inspect_model(source, config)
        if not (inspection.reason or "").startswith("transformers cannot build"):
            return config, inspection
    return None


@torch.no_grad()
def differences(config, inspection):
    """Compare logits of a model with those of a student whose windows cover the text, read at once and in pieces."""
    torch.manual_seed(0)
    attention = implementation_of_teacher(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    teacher = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    ids = tokens(2, LENGTH)
    expected = teacher(ids).logits
    layers = [
        None
        if layer.native_window is not None
        else dict(heads=[[LENGTH, 0]] * layer.kv_heads, key_dim=layer.key_dim, value_dim=layer.value_dim)
        for layer in inspection.layers
    ]
    student = make_student(teacher, {"layers": layers}, 0)
    cache = student.empty_cache()
    pieces = [student(chunk, past_key_values=cache).logits for chunk in ids.split((9, 1, LENGTH - 10), 1)]
    scale = expected.std()
    return [float((logits - expected).abs().max() / scale) for logits in (student(ids).logits, torch.cat(pieces, 1))]


@pytest.mark.filterwarnings("ignore")
def test_a_kind_that_inspection_takes_has_a_student_that_is_its_teacher():
    equal, different = [], {}
    for kind in KINDS:
        if (built := inspected(kind)) and built[1].supported:
            distances = differences(*built)
            if max(distances) < 1e-3:
                equal.append(kind)
            else:
                different[kind] = distances
    assert not different and len(equal) >= LEAST, (equal, different)
