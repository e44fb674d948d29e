"""Parts of a long text on streams give what they give one after the other, and a layer reads no part too early.

Without a GPU, stand-ins for streams record which work is ordered after which; the work itself is done at once.
"""

from types import SimpleNamespace

import pytest
import torch

from linearizer.kernels import door
from linearizer.kernels.graphs import text_parts
from linearizer.kernels.graphs.call_reader import reader_of
from linearizer.plan.head_bytes import Head
from linearizer.student.cache import CACHE
from tests.support.kernels import CLOSE, DEVICE, EXACT, ON_GPU
from tests.support.models import student_of, tokens
from tests.support.streams import RecordedStreams, assert_same_states, opened, record_launches, use_streams

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of an interpreter, in empty rows
HEADS = [Head(window=5, bits=8), Head(window=4, slots=6, bits=8)]
PART, PARTS, LAYERS = 8, 3, 2


@pytest.fixture
def student(monkeypatch):
    """A student that says what its layers launch, in PyTorch."""
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: True)
    student = student_of("llama", HEADS, num_hidden_layers=LAYERS, num_key_value_heads=1).to(DEVICE, EXACT)
    record_launches(student, "pytorch", monkeypatch)
    return student


@pytest.fixture
def in_triton(student):
    """The same student, whose layers are read by Triton's kernels."""
    for layer in student.students():
        layer.reader = "triton"
    return student


@pytest.fixture
def on_streams(monkeypatch):
    """Let texts be read on streams, as on a GPU."""
    monkeypatch.setattr(text_parts, "FEWEST", 2 * PART)
    monkeypatch.setattr(text_parts, "SCALE", PART / PARTS)
    monkeypatch.setattr(text_parts, "STEP", PART)
    monkeypatch.setattr(text_parts, "TRIAL_PARTS", PARTS)
    use_streams(monkeypatch)


@torch.inference_mode()
def read_in_turn(student, ids, mask=None):
    """Read parts one after the other, each by a call of the model; return the logits and the cache."""
    cache, logits = student.empty_cache(), []
    for begin in range(0, ids.shape[1], PART):
        seen = None if mask is None else mask[:, : begin + PART]
        logits.append(student(ids[:, begin : begin + PART], attention_mask=seen, **{CACHE: cache}).logits)
    return torch.cat(logits, 1), cache


@torch.inference_mode()
def test_a_long_text_is_read_in_parts_as_one_after_the_other(in_triton, on_streams):
    ids = tokens(2, PARTS * PART).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, : PART + 3] = 0  # more than a part
    out = in_triton(ids, attention_mask=mask, **{CACHE: (cache := in_triton.empty_cache())})
    last = in_triton(ids, attention_mask=mask, logits_to_keep=1).logits
    logits, expected = read_in_turn(in_triton, ids, mask)
    assert reader_of(in_triton).reads_parts and torch.equal(out.logits, logits)
    assert (last - logits[:, -1:]).abs().max() < CLOSE
    assert_same_states(cache, expected)
    for layer in in_triton.students():
        layer.reader = "pytorch"
    reader_of(in_triton).reads_parts = False
    whole = in_triton(ids, attention_mask=mask).logits  # at once, by PyTorch
    assert ((out.logits - whole) * mask[..., None]).abs().max() < CLOSE * whole.abs().max()


@pytest.mark.skipif(ON_GPU, reason="streams of a device record nothing")
@torch.inference_mode()
def test_a_layer_reads_a_part_after_the_part_before_and_beside_later_layers(in_triton, on_streams):
    in_triton(tokens(1, PARTS * PART), logits_to_keep=1)
    before, text = opened[-1].before, len(opened)
    assert len(before) == LAYERS * PARTS
    for _, layer, part in before:
        assert part == 0 or (text, layer, part - 1) in before[text, layer, part]
        assert layer == 0 or (text, layer - 1, part) in before[text, layer, part]
        assert (text, LAYERS - 1, part - 1) not in before[text, 0, part]


@pytest.mark.skipif(ON_GPU, reason="streams of a device record nothing")
@torch.inference_mode()
def test_states_that_are_replaced_are_read_on_one_stream_or_at_once(student, on_streams):
    ids = tokens(1, PARTS * PART)
    student(ids, logits_to_keep=1)
    assert reader_of(student).reads_parts is False and len(opened) == 1  # on which the trial was
    reader_of(student).reads_parts = True
    student(ids, logits_to_keep=1)
    assert all((2, LAYERS - 1, part - 1) in opened[-1].before[2, 0, part] for part in range(1, PARTS))


@pytest.mark.skipif(ON_GPU, reason="streams of a device do not fail")
@pytest.mark.parametrize("fault", ["no streams here", "it gives other logits"])
@torch.inference_mode()
def test_streams_that_fail_or_change_results_are_not_used(in_triton, on_streams, monkeypatch, fault):
    class Failing(RecordedStreams):
        def hand_over(self, x):
            if self.count > 1 and fault == "no streams here":
                raise RuntimeError(fault)
            x *= self.count

    said = []
    monkeypatch.setattr(text_parts, "Streams", Failing)
    monkeypatch.setattr(text_parts.logger, "warning", said.append)
    ids = tokens(1, PARTS * PART)
    for _ in range(2):
        assert in_triton(ids, logits_to_keep=1).logits.isfinite().all()
    assert (
        [fault in words for words in said] == [True] and reader_of(in_triton).reads_parts is False and len(opened) == 2
    )


@pytest.mark.parametrize(
    "given",
    [
        {"logits_to_keep": 2},
        {"logits_to_keep": torch.tensor([0])},
        {"labels": torch.zeros(1, 64, dtype=torch.long)},
        {"output_hidden_states": True},
        {"output_router_logits": True},
        {"return_dict": False},
        {"attention_mask": torch.ones(1, 1, 64, 64)},
        {"position_ids": torch.zeros(3, 1, 64)},
        {"other": torch.zeros(1, 64)},
    ],
    ids=lambda given: f"{[*given][0]}",
)
def test_a_text_whose_results_need_all_of_it_is_read_at_once(given):
    config = SimpleNamespace(output_hidden_states=False, return_dict=True)
    usual = {"input_ids": torch.zeros(1, 64), "labels": None, "logits_to_keep": 1, "output_hidden_states": None}
    assert text_parts.can_cut(config, usual) and not text_parts.can_cut(config, {**usual, **given})


@torch.inference_mode()
def test_positions_that_depend_on_the_length_of_a_text_let_it_be_read_at_once(student, on_streams):
    student.model.rotary_emb.rope_type = "dynamic"
    student(tokens(1, PARTS * PART).to(DEVICE), logits_to_keep=1)
    assert not opened and reader_of(student).reads_parts is None


@pytest.mark.parametrize("count", [4096, 5000, 16384, 131072])
def test_parts_grow_more_slowly_than_texts(count):
    size = text_parts.choose_size(count)
    assert size % text_parts.STEP == 0 and size < count
    assert 0.5 < size / (count * text_parts.SCALE) ** 0.5 < 2
