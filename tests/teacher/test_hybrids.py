"""Softmax layers have a student; all other layers stay the teacher's, in one cache and in one state.

So do layers that read the keys and values of another layer: they attend with its student. Models that cap their scores
or have learned sinks are held to the same.
"""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload

from linearizer.hub.models import find_model
from linearizer.method.checkpoint import load
from linearizer.method.head_prices import estimate_prices
from linearizer.method.measure_run import measure_profile
from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.run.measured import ProfileSettings
from linearizer.serve.saved_state import begin_turn, read_state, take_back_turn, write_state
from linearizer.student.cache import CACHE, recurrent_tensors
from linearizer.teacher import streaming
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.load import load_config, load_teacher
from linearizer.teacher.logits import bytes_held
from linearizer.teacher.read_twice import read_twice
from tests.support import altered, hybrids
from tests.support.bare_environment import make_bare_environment, run_bare
from tests.support.families import ALTERED
from tests.support.hybrids import HYBRIDS, SOURCE, tiny_hybrid
from tests.support.models import MIXED, tokens
from tests.support.whole_models import PICTURED, inputs_of, pictured_student

LENGTH = 40
PARTS = (9, 1, 17, 13)
CLOSE, ROUNDED = 1e-4, 2e-3  # of the logits' spread: what is computed alike; recurrences in another order
WHOLE = [Head(window=LENGTH)]
FEW = [Head(window=4, slots=6), Head(window=3)]
WITHOUT_SOFTMAX = [head for head in MIXED if not head.softmax]
FAMILIES = [*HYBRIDS, *ALTERED]
BARE = ("qwen3_5_text", "nemotron_h", "falcon_h1", "lfm3", "gemma4_text", *ALTERED, "gemma4", "qwen2_vl")
every_family = pytest.mark.parametrize("family", FAMILIES)


def teacher_of(family):
    return (altered if family in ALTERED else hybrids).teacher_of(family)


def student_of(family, heads):
    """Give a student whose heads hold no features where these cannot follow the scores."""
    if family in ALTERED:
        return altered.student_of(family, [head for head in heads if not head.features])
    return hybrids.student_of(family, heads)


def distance(logits, expected):
    return float((logits - expected).abs().max() / expected.std())


def read(model, ids, cache, parts):
    return torch.cat([model(part, use_cache=True, **{CACHE: cache}).logits for part in ids.split(parts, 1)], 1)


@torch.no_grad()
@every_family
def test_a_budget_that_holds_the_text_gives_the_teachers_logits(family):
    teacher, student, ids = teacher_of(family), student_of(family, WHOLE), tokens(2, LENGTH)
    expected = teacher(ids).logits
    assert distance(student(ids).logits, expected) < CLOSE
    whole = student.generate(ids[:, :9], max_new_tokens=8, do_sample=False)
    assert torch.equal(whole, teacher.generate(ids[:, :9], max_new_tokens=8, do_sample=False))


@torch.no_grad()
@every_family
def test_a_text_read_at_once_in_parts_or_by_tokens_gives_the_same_logits(family):
    student, ids = student_of(family, MIXED), tokens(2, LENGTH)
    at_once = student(ids).logits
    step = 3e-2 if family == "nemotron_h" else ROUNDED  # its own code computes single tokens otherwise
    assert distance(read(student, ids, student.empty_cache(), 20), at_once) < ROUNDED
    assert distance(read(student, ids, student.empty_cache(), PARTS), at_once) < step
    assert distance(read(student, ids, student.empty_cache(), 1), at_once) < step


@torch.no_grad()
@every_family
def test_a_row_with_padding_at_the_left_is_the_row_alone(family):
    """Also where a text goes on after its padding, so that padding reaches no recurrent state."""
    student, ids, space = student_of(family, MIXED), tokens(2, LENGTH), 7
    alone = student(ids[:1, space:]).logits
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[0, :space] = 0
    padded = torch.where(real.bool(), ids, 0)
    assert distance(student(padded, attention_mask=real).logits[:1, space:], alone) < ROUNDED
    cache = student.empty_cache()
    first = student(padded[:, :20], attention_mask=real[:, :20], **{CACHE: cache}).logits
    second = student(padded[:, 20:], attention_mask=real, **{CACHE: cache}).logits
    assert distance(torch.cat([first, second], 1)[:1, space:], alone) < ROUNDED


@torch.inference_mode()
@every_family
def test_a_state_of_a_text_that_was_read_twice_is_read_on_from(family):
    """With room for all tokens as its teacher would; with less it has the bytes of any other state."""
    teacher, ids = teacher_of(family), tokens(1, LENGTH)
    for heads in ([Head(window=4, slots=LENGTH)], FEW):
        student = student_of(family, heads)
        cache, streamed = student.empty_cache(), student.empty_cache()
        assert [*read_twice(student, [1, 2], ids[:, :30], cache)][-1] == 60
        student(ids[:, :30], use_cache=True, **{CACHE: streamed})
        assert bytes_held(cache) == bytes_held(streamed)
        logits = student(ids[:, 30:], use_cache=True, **{CACHE: cache}).logits
        if heads is FEW:
            assert logits.isfinite().all()
        else:
            assert distance(logits, teacher(ids).logits[:, 30:]) < ROUNDED


@torch.no_grad()
@every_family
def test_a_state_is_kept_forked_selected_and_reset_with_its_recurrent_part(family, tmp_path):
    student, ids = student_of(family, MIXED), tokens(2, LENGTH)
    cache = student.empty_cache()
    read(student, ids[:, :23], cache, 23)
    write_state(student, cache, tmp_path / "state")
    fork, kept, turned = cache.fork(), read_state(student, tmp_path / "state"), cache.fork()
    twice = cache.fork(2)
    twice.reorder_cache(torch.tensor([3, 0]))
    begin_turn(turned)
    read(student, ids[:, 23:30], turned, 7)
    take_back_turn(turned)
    expected = read(student, ids[:, 23:], cache, 5)
    assert kept.get_seq_length() == 23
    for state in (fork, kept, turned):
        assert torch.equal(read(student, ids[:, 23:], state, 5), expected)
    assert distance(read(student, ids[[1, 0], 23:], twice, 5), expected[[1, 0]]) < CLOSE
    fork.batch_select_indices(torch.tensor([1]))
    assert {len(states[key]) for layer in fork.layers for _, states, key in recurrent_tensors(layer)} <= {1}
    cache.reset()
    assert torch.equal(read(student, ids[:, :23], cache, 23), read(student, ids[:, :23], student.empty_cache(), 23))


@torch.no_grad()
@every_family
def test_the_bytes_of_softmax_layers_are_the_same_after_1_and_8_thousand_tokens(family):
    student = student_of(family, WITHOUT_SOFTMAX)
    cache, sizes = student.empty_cache(), []
    for part in tokens(1, 8192).split(1024, 1):
        student(part, logits_to_keep=1, **{CACHE: cache})
        sizes.append(bytes_held(cache))
    assert sizes[0] > 0 and len({*sizes}) == 1 and cache.get_seq_length() == 8192
    assert inspect_model(SOURCE, student.config).recurrent_bytes <= sizes[0]


@torch.no_grad()
def test_students_load_and_write_without_this_package(tmp_path):
    heads = {**dict.fromkeys(FAMILIES, FEW), "qwen3_5_text": MIXED}
    students = {family: (student_of(family, heads[family]), {"input_ids": tokens(1, 12)}) for family in FAMILIES}
    students |= {family: (pictured_student(family, FEW), inputs_of(family)) for family in PICTURED}
    expected, asked = {}, dict(max_new_tokens=2, do_sample=False, pad_token_id=0)
    for family, (student, inputs) in students.items():
        student.save_pretrained(tmp_path / family)
        torch.save(inputs, tmp_path / family / "inputs.pt")
        assert distance(load(tmp_path / family)(**inputs).logits, student(**inputs).logits) < CLOSE
        if family in BARE:
            expected[family] = student.generate(**inputs, **asked)[0, inputs["input_ids"].shape[1] :].tolist()
    program = """
        import json, sys, torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        torch.set_num_threads(1)
        written = {}
        for family in sys.argv[1:]:
            inputs = torch.load(f"{family}/inputs.pt")
            kind = AutoModelForImageTextToText if "pixel_values" in inputs else AutoModelForCausalLM
            student = kind.from_pretrained(family, trust_remote_code=True).eval()
            out = student.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)
            written[family] = out[0, inputs["input_ids"].shape[1]:].tolist()
        print(json.dumps(written))
    """
    (tmp_path / "packages").mkdir()
    environment = make_bare_environment(tmp_path / "packages")
    answer = run_bare(environment, program, *BARE, cwd=tmp_path)
    assert json.loads(answer.splitlines()[-1]) == expected


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "falcon_h1", "lfm3", "gemma4_text"])
def test_offloaded_to_memory_it_answers_the_same(family):
    student, ids = student_of(family, WITHOUT_SOFTMAX), tokens(1, 9)
    written = student.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    moved = copy.deepcopy(student)
    cpu_offload(moved, torch.device("cpu"))  # modules whose code takes weights of others hand the cache to hooks
    assert torch.equal(moved.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None), written)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_prices_of_streamed_weights_are_those_of_resident_weights(family, tmp_path, monkeypatch):
    teacher_of(family).save_pretrained(tmp_path / "model")
    source = find_model(str(tmp_path / "model"))
    resident = load_teacher(source, torch.float32)
    room = sum(x.nbytes for x in resident.parameters()) - 1
    monkeypatch.setattr(streaming, "free_bytes", lambda device: room / streaming.FILLED)
    places = streaming.place_weights(load_config(source), source, torch.float32, "cpu")
    streamed = load_teacher(source, torch.float32, places=places)
    assert streaming.is_streamed(streamed)
    layers, options = inspect_model(SOURCE, tiny_hybrid(family)).layers, [Head(4), Head(8, slots=8)]
    found = []
    for model in (resident, streamed):
        measured = finish(measure_profile(model, [tokens(3, 32)], layers, ProfileSettings(samples=32)))
        found.append(finish(estimate_prices(model, tokens(3, 32), layers, options, 2, measured.samples)).kl)
    expected, kl = (torch.tensor([row for heads in each for row in heads]) for each in found)
    torch.testing.assert_close(kl, expected, rtol=1e-3, atol=1e-9)
