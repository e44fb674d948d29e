"""What transformers tests of each of its models holds for students of encoders."""

import copy
import unittest

import pytest
import torch
from transformers import AutoConfig
from transformers.testing_utils import torch_device

from linearizer.encoders.modeling_encoder import LinearizedEncoder, LinearizedEncoderConfig
from tests.support.transformers_suite import failures_of, fetch_tests, import_mixins

pytestmark = pytest.mark.filterwarnings("ignore")  # of tests that are not ours

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
OWN_ATTENTION = "the attention of a student is its own and cannot be exchanged"
EXCLUDED = {  # why each test cannot hold for a student
    "test_can_set_attention_dynamically": OWN_ATTENTION,
    "test_config_attn_implementation_setter": OWN_ATTENTION,
    "test_correct_missing_keys": "loads a student from a teacher, whose config does not say how heads attend",
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


@pytest.fixture(scope="session")
def mixins(tmp_path_factory, pytestconfig):
    return import_mixins(fetch_tests(tmp_path_factory.getbasetemp().parent), pytestconfig)


class Inputs:
    """What transformers' tests ask for a config and inputs."""

    batch_size, num_hidden_layers, num_attention_heads, hidden_size = 3, 2, 4, 32
    is_training = True

    def __init__(self, kind):
        self.kind, self.seq_length = kind, 50  # of a picture: 49 patches, and a token before them

    def get_config(self):
        sizes, how = BASES[self.kind]
        return LinearizedEncoderConfig(AutoConfig.for_model(self.kind, **copy.deepcopy(sizes)), **how)

    def prepare_config_and_inputs_for_common(self):
        generator = torch.Generator().manual_seed(0)
        if self.kind == "vit":
            pixels = torch.randn(self.batch_size, 3, 28, 28, generator=generator).to(torch_device)
            return self.get_config(), {"pixel_values": pixels}
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length), generator=generator).to(torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("kind, least", [("bert", 60), ("vit", 55)])
def test_a_student_passes_what_every_model_of_transformers_passes(kind, least, mixins):
    class Suite(mixins[0], unittest.TestCase):
        all_model_classes = (LinearizedEncoder,)
        has_attentions = False  # weights between tokens

        def setUp(self):
            self.model_tester = Inputs(kind)

        def _prepare_for_class(self, inputs, model_class, return_labels=False):
            inputs = super()._prepare_for_class(inputs, model_class, return_labels=return_labels)
            labels = inputs.get("input_ids", torch.zeros(3, dtype=torch.long, device=torch_device))
            return {**inputs, "labels": labels} if return_labels else inputs

    failed, passed = failures_of(Suite, mixins[0], EXCLUDED_OF[kind])
    assert not failed, "\n".join(failed)
    assert passed >= least
