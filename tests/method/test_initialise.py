from dataclasses import replace

import pytest
import torch

from linearizer.method.initialise import cluster, initialise, initialise_layer
from linearizer.method.measure_run import measure_profile
from linearizer.method.untrained import draw_layer
from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.run.measured import ProfileSettings
from linearizer.student.feature_maps import FEATURE_MAPS
from linearizer.teacher.layers import featured
from linearizer.teacher.observing import observing
from linearizer.train.losses import AttentionInputs, layer_loss
from tests.support.models import MIXED, layers_of, student_of, teacher_of, tokens

HELD = [Head(window=4, features=16), Head(features=16)]


def samples_of(family="llama"):
    teacher = teacher_of(family)
    options = ProfileSettings(samples=256, sinks=2)
    return finish(measure_profile(teacher, [tokens(8, 64)], layers_of(teacher), options)).samples


@torch.no_grad()
def kl_of_rows(student):
    """KL of the student's attention rows, a mean over its layers."""
    result = []

    def observe(module, query, key, value, scale, _):
        inputs = AttentionInputs(query, key, value, scale)
        result.append(layer_loss("softmax", module.student, inputs, None).excess)

    with observing(student, observe):
        student.base_model(tokens(4, 64, seed=1), use_cache=False)
    return torch.stack(result).mean()


def test_clusters_begun_from_samples_are_nearer_to_their_teacher():
    samples, before, after = samples_of(), [], []
    for seed in range(3):
        student = student_of("llama", HELD, feature_map="clusters")
        for layer in student.students():
            draw_layer(layer, torch.Generator().manual_seed(seed))
        before.append(kl_of_rows(student))
        initialise(student, replace(samples, seed=seed))
        after.append(kl_of_rows(student))
    assert sum(after) < 0.95 * sum(before)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_the_same_seed_initialises_the_same_and_only_clusters_change(feature_map):
    heads = [head for head in MIXED if not head.slots]
    samples, students = samples_of(), [student_of("llama", heads, feature_map=feature_map) for _ in range(3)]
    for student, seed in zip(students, (0, 0, 1), strict=True):
        initialise(student, replace(samples, seed=seed))
    states = [list(student.state_dict().values()) for student in students]
    untouched = list(student_of("llama", heads, feature_map=feature_map).state_dict().values())

    def equal(a, b):
        return all(map(torch.equal, a, b))

    initialised = feature_map == "clusters"
    assert equal(states[0], states[1])
    assert equal(states[0], untouched) == equal(states[0], states[2]) == (not initialised)


def test_what_a_head_begins_with_depends_on_no_other_head_and_on_no_order():
    samples = samples_of()
    mixed = student_of("llama", [Head(window=4, features=16), Head(window=3)], feature_map="clusters")
    alike = student_of("llama", [Head(window=4, features=16)], feature_map="clusters")
    initialise(mixed, samples)
    for index, layer in reversed(list(enumerate(alike.students()))):
        initialise_layer(layer, samples, index)
    for mixed_layer, layer in zip(mixed.students(), alike.students(), strict=True):
        (group,), (all_heads,) = featured(mixed_layer), featured(layer)
        assert torch.equal(group.feature_map.centres[0], all_heads.feature_map.centres[group.heads[0]])


def test_slots_begin_with_the_metric_of_the_queries():
    student, samples = student_of("llama", [Head(window=4, slots=5)]), samples_of()
    initialise(student, samples)
    for layer, result in zip(student.students(), samples.layers, strict=True):
        (group,) = layer.groups
        queries = result.queries.unflatten(0, (2, -1)).flatten(1, 2)
        differences = torch.randn(2, 7, queries.shape[-1], generator=torch.Generator().manual_seed(0))
        distances = (differences @ group.merger.metric.mT).square().sum(-1)
        torch.testing.assert_close(distances, (queries @ differences.mT).square().mean(1), rtol=1e-2, atol=1e-3)


def test_centres_find_the_clusters_that_are_there():
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(8, 4, generator=generator) * 10
    points = truth.repeat(20, 1) + torch.randn(160, 4, generator=generator) * 0.01
    result = cluster(points, 8, generator)
    assert torch.cdist(truth, result).amin(-1).max() < 0.1
