"""What transformers tests of each of its models holds for students of encoders."""

import copy
from functools import partial

import pytest
import torch
from transformers import AutoConfig
from transformers.testing_utils import torch_device

from linearizer.encoders.modeling_encoder import LinearizedEncoder, LinearizedEncoderConfig
from tests.support.transformers_suite import EXCLUDED, check_suite, import_mixins, suite_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of tests that are not ours

TOKENS = 50  # of a picture: 49 patches, and a token before them
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)
BASES = {  # the teacher's config, and the student's
    "bert": (
        dict(SIZES, vocab_size=99, max_position_embeddings=64),
        dict(auto_class="AutoModelForMaskedLM", ways=[[[1], 8]], first=1, last=1),
    ),
    "vit": (
        dict(SIZES, image_size=28, patch_size=4),
        dict(auto_class="AutoModelForImageClassification", ways=[[[1, 1], 8]], first=1),
    ),
}
OF_TEXTS = "a model of pictures has no tokens, and its teacher passes tests of its own instead"
EXCLUDED_OF = {
    "bert": EXCLUDED,
    "vit": {
        **EXCLUDED,
        "test_inputs_embeds": OF_TEXTS,
        "test_model_get_set_embeddings": OF_TEXTS,
        "test_resize_tokens_embeddings": OF_TEXTS,
    },
}


def make(kind):
    """Make a student's config and inputs."""
    sizes, how = BASES[kind]
    config = LinearizedEncoderConfig(AutoConfig.for_model(kind, **copy.deepcopy(sizes)), **how)
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        return config, {"pixel_values": torch.randn(3, 3, 28, 28, generator=generator).to(torch_device)}
    ids = torch.randint(3, 99, (3, TOKENS), generator=generator).to(torch_device)
    return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("kind, least", [("bert", 60), ("vit", 55)])
def test_a_student_passes_what_every_model_of_transformers_passes(kind, least, tmp_path_factory, pytestconfig):
    mixin, _ = import_mixins(tmp_path_factory.getbasetemp().parent, pytestconfig)
    sizes = dict(batch_size=3, seq_length=TOKENS, num_hidden_layers=2, num_attention_heads=4, hidden_size=32)
    suite = suite_of([mixin], LinearizedEncoder, partial(make, kind), **sizes)
    check_suite(suite, mixin, EXCLUDED_OF[kind], least)
