"""Models that cap their scores, or have learned sinks, have students that do the same.

What holds for all families is tested with hybrids.
"""

import pytest
import torch

from linearizer.plan.head_bytes import Head
from linearizer.student.cache import CACHE
from linearizer.teacher.observing import attending_as_teacher
from tests.support.altered import student_of, teacher_of
from tests.support.families import ALTERED
from tests.support.layers import move_keys
from tests.support.models import tokens

LENGTH = 40
WHOLE = [Head(window=LENGTH)]
FEW_BITS = [Head(window=8, slots=10, bits=6), Head(window=12, bits=8)]
CLOSE = dict(atol=2e-3, rtol=2e-3)  # gpt_oss norms in float32, whose last digits may round a key of few bits otherwise
every_family = pytest.mark.parametrize("family", ALTERED)


@torch.no_grad()
@every_family
def test_a_budget_that_holds_the_text_gives_the_teachers_logits(family):
    student, ids = student_of(family, WHOLE), tokens(2, LENGTH)
    expected = teacher_of(family)(ids).logits
    torch.testing.assert_close(student(ids).logits, expected, atol=2e-4, rtol=1e-3)
    with attending_as_teacher(student):
        torch.testing.assert_close(student(ids).logits, expected, atol=2e-4, rtol=1e-3)
    kept = student_of(family, [Head(softmax=True)])(ids).logits
    torch.testing.assert_close(kept, expected, atol=2e-4, rtol=1e-3)


@torch.no_grad()
@every_family
def test_caps_and_sinks_count_in_few_bits_in_pieces_and_beside_padding(family):
    student, ids = student_of(family, FEW_BITS).double(), tokens(2, LENGTH)
    for layer in student.students():  # a shift of all keys changes capped scores, and the share of a sink
        move_keys(layer)
    whole, cache = student(ids).logits, student.empty_cache()
    pieces = [student(part, **{CACHE: cache}).logits for part in ids.split((9, 1, 17, 13), 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    padded, alone = student(ids, attention_mask=mask).logits[0, 7:], student(ids[:1, 7:]).logits[0]
    torch.testing.assert_close(padded, alone, **CLOSE)
    off = (student_of(family, WHOLE).double()(ids).logits - whole).abs().mean()
    assert 1e-4 < off < 0.5 * whole.abs().mean()  # near the model that keeps all


@torch.no_grad()
def test_features_refuse_capped_scores():
    with pytest.raises(ValueError, match="neither capped scores nor learned sinks"):
        student_of("gemma2", [Head(window=4, features=8)])(tokens(1, 20))
