"""What transformers tests of each of its models holds for students."""

import copy
import functools
import unittest

import pytest
import torch
from transformers.testing_utils import torch_device

from linearizer.plan.head_bytes import Head
from tests.support.models import MIXED, student_of, tokens
from tests.support.transformers_suite import CHECKOUT, EXCLUDED, check_suite, import_mixins, suite_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of tests that are not ours

TWO_LAYERS = {"gpt2": dict(n_layer=2), "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"])}
HELD = {"mixed": MIXED, "memories": [Head(4, 6, memory="gdn"), Head(4, slots=6, bits=4), Head(5, 8, memory="kda")]}
NO_WEIGHTS = "a student computes no weights between tokens, so its attentions are None"
NO_KEYS = "looks for the keys of all tokens in the cache, and a student keeps a state"
NO_ROLLBACK = "a student cannot forget tokens, so assisted decoding and prompt lookup are refused"
NO_STATIC_CACHE = "a student has a cache of its own, and refuses static and quantised ones"
OTHER_SLOTS = "what rounds otherwise in 16 bits may merge other slots; it holds in 32 bits"
NO_PACKING = "packed rows and custom masks are refused"
EXCLUDED_OF_DECODERS = {  # why each test cannot hold for a student
    **EXCLUDED,
    "test_capture_outputs_decorator": NO_WEIGHTS,
    "test_generation_tester_mixin_inheritance": "GenerationTesterMixin is in no source distribution",
    "test_beam_search_generate_dict_outputs_use_cache": NO_KEYS,
    "test_greedy_generate_dict_outputs_use_cache": NO_KEYS,
    "test_past_key_values_format": NO_KEYS,
    "test_generate_with_static_cache": NO_STATIC_CACHE,
    "test_generate_with_quant_cache": NO_STATIC_CACHE,
    "test_generate_from_inputs_embeds_with_static_cache": NO_STATIC_CACHE,
    "test_generate_compile_model_forward_fullgraph": NO_STATIC_CACHE,
    "test_generate_compilation_all_outputs": NO_STATIC_CACHE,
    "test_assisted_decoding_matches_greedy_search_0_random": NO_ROLLBACK,
    "test_assisted_decoding_matches_greedy_search_1_same": NO_ROLLBACK,
    "test_assisted_decoding_sample": NO_ROLLBACK,
    "test_prompt_lookup_decoding_matches_greedy_search": NO_ROLLBACK,
    "test_prompt_lookup_decoding_stops_at_eos": NO_ROLLBACK,
    "test_eager_padding_matches_padding_free_with_position_ids": NO_PACKING,
    "test_sdpa_padding_matches_padding_free_with_position_ids": NO_PACKING,
    "test_custom_4d_attention_mask": NO_PACKING,
    "test_eager_matches_batched_and_grouped_inference_0_fp16": OTHER_SLOTS,
    "test_eager_matches_batched_and_grouped_inference_2_bf16": OTHER_SLOTS,
    "test_tied_weights_are_sharded_together": "a student is on one device, and its layers on several, but no tensor is",
}


@functools.cache
def model_of(family, held):
    """Make a family's student."""
    return student_of(family, HELD[held], num_hidden_layers=2, **TWO_LAYERS.get(family, {}))


def make(family, held):
    """Make a student's config and inputs."""
    ids = tokens(3, 12).to(torch_device)
    return copy.deepcopy(model_of(family, held).config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("mixin, least", [("ModelTesterMixin", 60), ("GenerationTesterMixin", 20)])
@pytest.mark.parametrize(
    "family, held",
    [*((name, "mixed") for name in ["llama", "gpt2", "gemma3_text", "mixtral"]), ("llama", "memories")],
)
def test_a_student_passes_what_every_model_of_transformers_passes(
    family, held, mixin, least, tmp_path_factory, pytestconfig
):
    mixins = import_mixins(tmp_path_factory.getbasetemp().parent, pytestconfig)
    (tests,) = (each for each in mixins if each.__name__ == mixin)
    if not unittest.TestLoader().getTestCaseNames(tests):
        pytest.skip(
            f"{mixin} is in no source distribution: test_generation.py holds its properties; for its own tests name "
            f"those of a checkout by {CHECKOUT}"
        )
    sizes = dict(batch_size=3, seq_length=12, num_hidden_layers=2, num_attention_heads=4, hidden_size=64)
    suite = suite_of(mixins, type(model_of(family, held)), functools.partial(make, family, held), **sizes)
    suite.test_all_params_have_gradient = False  # experts that no token chose, and how slots merge
    check_suite(suite, tests, EXCLUDED_OF_DECODERS, least)
