"""Measurements of a running model, against the same computed plainly from its whole attention."""

import math

import pytest
import torch

from linearizer import pipeline
from linearizer.errors import FaultError, RequestError
from linearizer.method.degrees_of_freedom import degrees_of_freedom
from linearizer.method.measure_run import head_points, measure_freedoms, measure_profile
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.measured import Profile, ProfileSettings
from linearizer.teacher.observing import observing
from tests.support.models import layers_of, teacher_of

SMALL = ProfileSettings(samples=64, sinks=2)


def texts(count=4, tokens=40, seed=0):
    return torch.randint(3, 128, (count, tokens), generator=torch.Generator().manual_seed(seed))


def measured(model, windows, settings=SMALL, **options):
    return finish(measure_profile(model, [windows], layers_of(model), settings, **options))


def attended(model, **inputs):
    """Each layer's queries, keys (scaled) and values, from one pass over all texts."""
    vectors = {}

    def observe(module, query, key, value, scaling, kwargs):
        vectors[module.layer_idx] = (query * scaling**0.5, key * scaling**0.5, value)

    with torch.no_grad(), observing(model, observe):
        model(**inputs)
    return vectors


def close(result, expected, tolerance=1e-4):
    assert torch.as_tensor(result).double().tolist() == pytest.approx(
        torch.as_tensor(expected).double().tolist(), rel=tolerance, abs=1e-6
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "opt", "gemma3_text", "cohere2", "deepseek_v3"])
def test_every_family_is_measured_in_all_layers_that_it_does_not_bound(family):
    teacher = teacher_of(family)
    layers = layers_of(teacher)
    result = finish(measure_profile(teacher, [texts()], layers, SMALL))
    for layer, profile, samples in zip(layers, result.profile.layers, result.samples.layers, strict=True):
        bounded = layer.native_window is not None
        assert len(profile.heads) == (0 if bounded else layer.kv_heads)
        assert (samples is None) == bounded
        for head in profile.heads:
            assert 0 < head.freedoms[0] <= 1 and list(head.freedoms) == sorted(head.freedoms)
    assert Profile.from_json(result.profile.to_json()) == result.profile


def test_sample_that_holds_everything_is_everything():
    """All tokens of four texts, read one after the other, against all queries and keys at once."""
    teacher, windows = teacher_of("llama"), texts(4, 18)
    result = measured(teacher, windows, ProfileSettings(samples=128, sinks=2))
    for index, (query, key, _) in attended(teacher, input_ids=windows).items():
        samples, profile = result.samples.layers[index], result.profile.layers[index]
        for sample, vectors in ((samples.queries, query), (samples.keys, key)):
            torch.testing.assert_close(sample, vectors[:, :, 2:].transpose(0, 1).flatten(1, 2))
        points = head_points(samples.queries, samples.keys, 1, "centred")
        close(profile.heads[1].freedoms, degrees_of_freedom(points, result.profile.settings.ridges), 1e-5)


def test_samples_may_keep_the_whole_first_text_in_its_order():
    teacher, windows = teacher_of("llama"), texts(4, 18)
    settings = ProfileSettings(samples=32, sinks=2)
    plain, result = measured(teacher, windows, settings), measured(teacher, windows, settings, keep_text=True)
    for index, expected in attended(teacher, input_ids=windows).items():
        text = result.samples.layers[index].text
        assert plain.samples.layers[index].text is None
        for recorded, vectors in zip((text.queries, text.keys, text.values), expected, strict=True):
            torch.testing.assert_close(recorded, vectors[0])


def test_texts_of_two_lengths_are_one_sample():
    teacher, (long, short) = teacher_of("llama"), (texts(1, 34), texts(2, 18, seed=1))
    result = finish(measure_profile(teacher, [long, short], layers_of(teacher), ProfileSettings(samples=128, sinks=2)))
    vectors = [attended(teacher, input_ids=windows) for windows in (long, short)]
    assert result.profile.tokens == 34 + 2 * 18
    for index, samples in enumerate(result.samples.layers):
        for place, sample in enumerate((samples.queries, samples.keys, samples.values)):
            parts = [each[index][place][:, :, 2:].transpose(0, 1).flatten(1, 2) for each in vectors]
            torch.testing.assert_close(sample, torch.cat(parts, 1))


def test_centred_gauge_is_blind_to_a_shift_of_the_keys_as_softmax_is():
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 32, 8).double(), torch.randn(1, 32, 8).double()
    curves = [
        degrees_of_freedom(head_points(queries, keys + shift, 0, "centred"), (0.1, 0.01))
        for shift in (0.0, 5 * torch.randn(8))
    ]
    torch.testing.assert_close(*curves)


def test_a_second_run_changes_nothing():
    teacher, windows = teacher_of("qwen3"), texts(6)
    settings = ProfileSettings(samples=64, seed=3)
    measurement, again = measured(teacher, windows, settings), measured(teacher, windows, settings)
    assert again.profile == measurement.profile
    assert all(torch.equal(again.samples.tensors()[name], x) for name, x in measurement.samples.tensors().items())


def test_paper_mode_has_a_curve_for_every_query_head():
    settings = ProfileSettings(samples=64, sinks=0, gauge="raw", per="query")
    shared, multi_head = (measured(teacher_of(family), texts(), settings) for family in ("llama", "gpt2"))
    samples, profile = shared.samples.layers[0], shared.profile.layers[0]
    assert len(profile.query_freedoms) == 4 and Profile.from_json(shared.profile.to_json()) == shared.profile
    points = torch.cat([samples.queries[3], samples.keys[1]])
    close(profile.query_freedoms[3], degrees_of_freedom(points, settings.ridges), 1e-5)
    for layer in multi_head.profile.layers:
        assert layer.query_freedoms == tuple(head.freedoms for head in layer.heads)


def test_model_is_left_as_it_was():
    teacher = teacher_of("llama")
    before = teacher.config._attn_implementation
    next(measure_profile(teacher, [texts()], layers_of(teacher), SMALL))
    assert teacher.config._attn_implementation == before and torch.is_grad_enabled()
    assert not any(module._forward_pre_hooks for module in teacher.modules())


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_damaged_weights_name_the_layer(part):
    teacher = teacher_of("llama")
    getattr(teacher.model.layers[1].self_attn, part).weight[:8] = torch.nan
    with pytest.raises(RequestError, match="layer 1: the (queries|keys|values) are not finite"):
        measured(teacher, texts())


@pytest.mark.parametrize("texts, tokens, drawn", [(200, 2, 0), (200, 4, 0), (2, 11, 14)])
def test_texts_that_leave_too_little_besides_their_sinks_are_refused(texts, tokens, drawn, tmp_path):
    with pytest.raises(RequestError, match=f"texts of {tokens} tokens leave {drawn} tokens to draw from, and .* on 16"):
        pipeline.begin(tmp_path / "run", Plan("demo", budget=64, texts=texts, length=tokens, sinks=4))


def test_layers_that_were_not_seen_are_an_error():
    teacher = teacher_of("llama")
    layers = layers_of(teacher)
    with pytest.raises(FaultError, match=r"the attention of layers \[3\] was not seen"):
        finish(measure_profile(teacher, [texts()], (*layers, layers[0]), SMALL))


def test_the_interval_of_freedoms_holds_those_of_other_samples_of_the_same_texts():
    settings, inside = ProfileSettings(), []
    at = settings.ridges.index(settings.reference)
    truth = sum(measured_of(seed).freedoms[at] for seed in range(20, 40)) / 20
    for seed in range(20):
        head = measured_of(seed)
        inside.append(abs(math.log(head.freedoms[at] / truth)) < head.errors[at] < 1)
    assert len(head.errors) == len(settings.ridges) and sum(inside) >= 16


def measured_of(seed):
    points = torch.randn(512, 8, generator=torch.Generator().manual_seed(seed)) / 6
    return measure_freedoms(points, ProfileSettings(), torch.device("cpu"))
