"""Small models that cap their scores or have learned sinks: a layer with a sliding window, and one without."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from linearizer.hub.models import Source
from linearizer.hub.weight_files import Weights
from linearizer.method.checkpoint import put_student_into
from linearizer.teacher.inspect_model import inspect_model
from tests.support.families import ALTERED, GROUPED, WINDOW
from tests.support.models import allocation_of

SIZES = {**GROUPED, "num_hidden_layers": 2, "max_position_embeddings": 512, "sliding_window": WINDOW}
SOURCE = Source("tiny", None, "org/tiny", "c0ffee", False, Weights((), 1234, 5678), {"license": "mit"})


def config_of(family):
    return AutoConfig.for_model(family, **{**SIZES, **ALTERED[family]})


def teacher_of(family):
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped experts know no float64
    teacher = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32, **eager)
    for name, weight in teacher.named_parameters():
        weight.data = torch.randn_like(weight) if name.endswith("sinks") else 3 * weight.data  # scores are large
    return teacher.eval().requires_grad_(False)


def student_of(family, heads):
    inspection = inspect_model(SOURCE, config_of(family))
    layers = inspection.layers
    assert inspection.supported and inspection.alters_scores
    assert [layer.native_window is None for layer in layers] == [False, True]
    return put_student_into(teacher_of(family), layers, allocation_of(layers, heads, 2))
