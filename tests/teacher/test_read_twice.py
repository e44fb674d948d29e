"""What a text that is read twice leaves: the tokens that are needed to repeat it stay apart, in a state of any size."""

from collections import deque

import torch

from linearizer.plan.head_bytes import Head
from linearizer.student.attention_of_student import HeadKind, Merging, open_state
from linearizer.teacher.observing import attending_as_teacher
from linearizer.teacher.read_twice import choose_slots, may_read_twice, read_twice
from linearizer.teacher.token_loop import placed
from tests.support.models import student_of, tokens
from tests.support.whole_models import pictured_student

DIM, TOKENS, SINKS = 8, 90, 2
NEEDED = [11, 37, 58]


def test_tokens_that_are_needed_stay_alone_in_their_slots():
    kind = HeadKind(window=16, slots=10, block=4)
    merging = Merging(torch.eye(DIM)[None], torch.zeros(1), torch.zeros(1, DIM + 1))
    k, v = torch.randn(2, 1, 1, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    needs = torch.full((1, TOKENS), 1e-3)
    needs[:, NEEDED] = 1.0
    state = choose_slots(kind, merging, SINKS, k, v, needs)
    slots = open_state(kind, state, TOKENS, SINKS, torch.float32).slots
    apart = torch.cdist(v[0, 0, NEEDED], slots.v[0])
    assert apart.amin(1).max() == 0 and (slots.weight[0, apart.argmin(1)] == 1).all()
    assert slots.weight.sum() == kind.merged(TOKENS) - SINKS


def test_a_text_is_read_twice_if_it_is_merged_and_has_positions_for_its_repetition():
    student = student_of("llama", [Head(window=4, slots=6)], max_position_embeddings=512)
    positions = student.config.max_position_embeddings
    assert may_read_twice(student, positions // 2) and not may_read_twice(student, positions - 8)
    for layer in student.students():
        layer.exact_tokens = positions // 2
    assert not may_read_twice(student, positions // 2)


def test_a_model_that_reads_pictures_reads_a_text_twice():
    student, ids = pictured_student("qwen2_5_vl", [Head(window=4, slots=40)]), tokens(1, 40)
    with torch.inference_mode():
        cache = student.empty_cache()
        deque(read_twice(student, [1, 2], ids[:, :30], cache), 0)
        logits = student(use_cache=True, **placed(student, ids[:, 30:], cache)).logits
        with attending_as_teacher(student):
            expected = student(ids).logits[:, 30:]
    assert (logits - expected).abs().max() < 1e-4 * expected.std()
