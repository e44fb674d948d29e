"""Layers that attend to the keys and values of another layer count where that layer is measured, priced and read."""

from dataclasses import replace

import pytest
import torch

from linearizer.checks import check_plan
from linearizer.errors import RequestError
from linearizer.method.blockwise_pass import chain_of
from linearizer.method.head_prices import estimate_prices
from linearizer.method.measure_run import measure_profile
from linearizer.method.recorder import Samples
from linearizer.method.substitute import attending_with, make_students
from linearizer.plan.head_bytes import Head, cache_operations
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.measured import ProfileSettings
from linearizer.teacher.inspect_model import inspect_model, verify_teacher
from linearizer.teacher.observing import observing
from tests.support.hybrids import SOURCE, student_of, teacher_of, tiny_hybrid
from tests.support.models import allocation_of, tokens

SOURCE_LAYER, READERS = 1, (3, 4)
every_family = pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])


def inspection_of(family):
    return inspect_model(SOURCE, tiny_hybrid(family))


@every_family
def test_inspection_finds_the_layer_that_others_read(family):
    inspection = inspection_of(family)
    assert [layer.reads for layer in inspection.layers] == [None, None, 0, SOURCE_LAYER, SOURCE_LAYER]
    (source,) = inspection.replaced_layers
    assert source.readers == len(READERS) and source.all_queries == 3 * source.query_heads
    assert cache_operations(inspection.layers, 10) == source.all_queries * 4 * source.key_dim * 10
    assert "3 attend to the keys and values of others" in dict(inspection.describe_shape())["layers"]
    verify_teacher(teacher_of(family), inspection)


@every_family
def test_the_queries_of_all_readers_are_in_the_sample_of_a_layer(family):
    teacher, texts, seen = teacher_of(family), tokens(2, 24), {}
    settings = ProfileSettings(samples=32, sinks=2)
    with observing(teacher, lambda module, query, *rest: seen.__setitem__(module.layer_idx, query)), torch.no_grad():
        teacher(texts)
    samples = finish(measure_profile(teacher, [texts], inspection_of(family).layers, settings)).samples
    assert [layer is not None for layer in samples.layers] == [False, True, False, False, False]
    groups = samples.layers[SOURCE_LAYER].queries.unflatten(0, (2, 3, 2))  # KV heads, layers, queries of a head
    for place, index in enumerate((SOURCE_LAYER, *READERS)):
        drawn, given = groups[0, place, 0, 0], seen[index][:, 0].flatten(0, 1)
        assert (drawn - given).abs().amax(-1).min() < 1e-5


@every_family
def test_a_price_counts_what_the_readers_of_a_head_lose(family):
    teacher, texts, layers = teacher_of(family), tokens(2, 24), inspection_of(family).layers
    unshared = [replace(layer, reads=None, readers=0) for layer in layers]
    options, samples = [Head(window=8), Head(window=16)], Samples((None,) * len(layers))
    both = (finish(estimate_prices(teacher, texts, each, options, 2, samples)).kl for each in (layers, unshared))
    shared, alone = (torch.tensor(kl[SOURCE_LAYER]) for kl in both)
    assert shared.shape == alone.shape == (2, 2) and (shared > 1.01 * alone).all()


@torch.no_grad()
@every_family
def test_the_readers_of_a_layer_attend_with_its_student(family):
    """Also in the teacher, when whole students are compared with it."""
    teacher, ids, layers = teacher_of(family), tokens(2, 24), inspection_of(family).layers
    allocation, samples = allocation_of(layers, [Head(window=8)], 2), Samples((None,) * len(layers))
    students = make_students(teacher, layers, allocation, samples)
    assert [*students] == [SOURCE_LAYER, *READERS]
    with attending_with(teacher, students):
        changed = teacher(ids).logits
    torch.testing.assert_close(changed, student_of(family, [Head(window=8)])(ids).logits)


@every_family
def test_blocks_that_share_keys_are_no_chain(family):
    assert chain_of(teacher_of(family), tokens(1, 20)) is None


def test_features_are_refused_where_layers_share_keys():
    with pytest.raises(RequestError, match="layers that attend to the keys of other layers, which features"):
        check_plan(Plan("tiny", budget=64, strategy="common-lambda"), inspection_of("gemma4_text"))


@torch.no_grad()
def test_a_student_keeps_no_copy_of_a_state_between_calls():
    student = student_of("gemma4_text", [Head(window=8)])
    cache = student.empty_cache()
    student(tokens(1, 12), cache=cache)
    assert not cache.layers[SOURCE_LAYER].kept
