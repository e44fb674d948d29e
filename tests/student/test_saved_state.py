"""A state is a thing to keep: saved, loaded, copied, moved and taken back, it goes on as if nothing had been done."""

import copy
from itertools import cycle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from linearizer.method.checkpoint import load
from linearizer.plan.head_bytes import Head
from tests.support.models import MIXED, student_of, tokens

KINDS = {
    "16 bits": [*MIXED],
    "8 bits": [
        Head(window=5, bits=8),
        Head(window=4, slots=6, bits=8),
        Head(softmax=True, bits=8),
        Head(window=3, features=16, bits=8),
    ],
}
FAMILIES = ["llama", "gemma3_text", "gpt2"]  # grouped heads; layers with a window of their own; learned positions
READ, LENGTH = 23, 34


@pytest.fixture(scope="module", params=[*zip(FAMILIES, cycle(KINDS), strict=False), ("llama", "8 bits")], ids="-".join)
def student(request):
    family, kind = request.param
    return student_of(family, KINDS[kind])


def read(student, texts=1, count=READ):
    """Return a text and the cache that has read its first tokens, some of them one by one."""
    ids, cache = tokens(texts, LENGTH), student.empty_cache()
    for start, stop in ((0, count - 2), (count - 2, count - 1), (count - 1, count)):
        student(ids[:, start:stop], past_key_values=cache)
    return ids, cache


def go_on(student, ids, cache, start=READ):
    """Return the logits of the rest of a text: three tokens at once, the others one by one."""
    edges = [start, start + 3, *range(start + 4, ids.shape[1] + 1)]
    parts = [student(ids[:, a:b], past_key_values=cache).logits for a, b in zip(edges, edges[1:], strict=False)]
    return torch.cat(parts, 1)


@torch.no_grad()
def test_a_state_that_was_saved_goes_on_in_the_same_bits(student, tmp_path):
    ids, cache = read(student, texts=2)
    cache.save(tmp_path / "state")
    loaded = student.load_cache(tmp_path / "state")
    assert loaded.get_seq_length() == READ
    assert torch.equal(go_on(student, ids, loaded), go_on(student, ids, cache))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@torch.no_grad()
def test_a_copy_and_its_original_do_not_see_what_the_other_reads(student):
    ids, cache = read(student)
    other = torch.cat([ids[:, :READ], tokens(1, LENGTH - READ, seed=1)], 1)
    many = cache.fork(3)
    alone = [go_on(student, text, cache.fork()) for text in (ids, other)]
    together = go_on(student, torch.cat([ids, other, ids]), many)
    torch.testing.assert_close(together, torch.cat([*alone, alone[0]]), atol=2e-4, rtol=0)
    assert torch.equal(go_on(student, ids, copy.deepcopy(cache)), alone[0])
    assert torch.equal(go_on(student, ids, cache), alone[0])


@torch.no_grad()
def test_turns_are_taken_back_one_by_one(student):
    ids, cache = read(student)
    expected = go_on(student, ids, cache.fork())
    cache.begin_turn()
    student(tokens(1, 5, seed=2), past_key_values=cache)
    cache.begin_turn()
    student(tokens(1, 4, seed=3), past_key_values=cache)
    cache.take_back_turn()
    assert cache.to("cpu") is cache
    moved = cache.to(dtype=torch.float64).to(dtype=torch.float32)
    moved.take_back_turn()
    assert (cache.get_seq_length(), len(cache.turns)) == (READ + 5, 1)
    assert torch.equal(go_on(student, ids, moved), expected)
    cache.take_back_turn()
    assert cache.get_seq_length() == READ
    assert torch.equal(go_on(student, ids, cache), expected)
    with pytest.raises(ValueError, match="no turn to take back"):
        cache.take_back_turn()
    for _ in range(20):
        cache.begin_turn()
    assert len(cache.turns) == 8 and not cache.fork().turns
    cache.reset()
    assert (cache.get_seq_length(), cache.turns) == (0, [])


@torch.no_grad()
def test_a_state_moves_to_another_dtype(student):
    ids, cache = read(student)
    moved = cache.to("cpu", torch.float64)
    there, here = go_on(student, ids, moved.to(dtype=torch.float32)), go_on(student, ids, cache)
    assert torch.equal(there, here)
    wide = go_on(copy.deepcopy(student).to(torch.float64), ids, moved)
    assert wide.dtype == torch.float64
    rounded = any(group.bits == 8 for layer in student.students() for group in layer.groups)
    torch.testing.assert_close(wide, here.double(), atol=0.5 if rounded else 2e-4, rtol=0)  # of logits of about 10


@torch.no_grad()
def test_turns_that_were_saved_are_taken_back_in_the_same_bits(student, tmp_path):
    cache = student.empty_cache()
    cache.begin_turn()  # before anything was read
    ids = tokens(1, LENGTH)
    student(ids[:, :READ], past_key_values=cache)
    expected = go_on(student, ids, cache.fork())
    cache.begin_turn()
    student(tokens(1, 5, seed=2), past_key_values=cache)
    cache.save(tmp_path / "state")
    loaded = student.load_cache(tmp_path / "state")
    assert loaded.get_seq_length() == READ + 5 and len(loaded.turns) == 2
    loaded.take_back_turn()
    assert loaded.get_seq_length() == READ
    assert torch.equal(go_on(student, ids, loaded.fork()), expected)
    loaded.save(tmp_path / "state")
    loaded = student.load_cache(tmp_path / "state")
    loaded.take_back_turn()
    assert loaded.get_seq_length() == 0 and not loaded.turns
    assert torch.equal(go_on(student, ids, loaded, 0), go_on(student, ids, student.empty_cache(), 0))


@torch.no_grad()
def test_a_state_fits_the_checkpoint_of_its_model_in_every_dtype(tmp_path):
    student = student_of("llama")
    ids, cache = read(student)
    cache.save(tmp_path / "state")
    student.save_pretrained(tmp_path / "checkpoint")
    loaded = load(tmp_path / "checkpoint", dtype=torch.float32)
    both = (go_on(model, ids, model.load_cache(tmp_path / "state")) for model in (loaded, student))
    torch.testing.assert_close(*both, atol=2e-4, rtol=0)
    for dtype in (torch.bfloat16, torch.float16):
        short = load(tmp_path / "checkpoint", dtype=dtype)
        assert short.load_cache(tmp_path / "state").get_seq_length() == READ
        half = go_on(short, ids, short.load_cache(tmp_path / "state"))
        assert half.isfinite().all()
    with safe_open(tmp_path / "state", "pt") as file:
        facts = file.metadata()
    assert facts["tokens"] == str(READ) and facts["dtype"] == "float32" and str(tmp_path) not in str(facts)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_in_another_copy_of_its_checkpoints_code(kind, tmp_path):
    student = student_of("llama", KINDS[kind])
    student.save_pretrained(tmp_path / "checkpoint")
    entry = student.config.auto_map["AutoModelForCausalLM"]
    copied = get_class_from_dynamic_module(entry, str(tmp_path / "checkpoint"))
    other = copied.from_pretrained(tmp_path / "checkpoint")
    assert not isinstance(other, type(student))
    ids, cache = read(student)
    expected, close = go_on(student, ids, cache.fork()), dict(atol=2e-4 if kind == "16 bits" else 0.5, rtol=0)
    torch.testing.assert_close(go_on(other, ids, cache.fork()), expected, **close)
    torch.testing.assert_close(go_on(student, ids, read(other)[1]), expected, **close)


@torch.no_grad()
def test_a_state_of_another_model_is_refused(tmp_path):
    student = student_of("llama")
    read(student)[1].save(tmp_path / "state")
    others = [student_of("llama", sinks=3), copy.deepcopy(student), copy.deepcopy(student)]
    next(others[1].students()[0].parameters()).data += 0.5
    others[2].get_input_embeddings().weight.data *= 1.1
    for other in others:
        with pytest.raises(ValueError, match="the state of another model"):
            other.load_cache(tmp_path / "state")


@torch.no_grad()
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path):
    student = student_of("llama")
    read(student)[1].save(tmp_path / "state")
    whole = (tmp_path / "state").read_bytes()
    with safe_open(tmp_path / "state", "pt") as file:
        facts = file.metadata()
    held = load_file(tmp_path / "state")
    bad = tmp_path / "bad"

    def refused(match):
        with pytest.raises(ValueError, match=match):
            student.load_cache(bad)

    for content in (
        whole[:-9],
        whole[:40],
        b"",
        b"no state",
        whole[: len(whole) // 2] + b"abc" + whole[len(whole) // 2 + 3 :],
    ):
        bad.write_bytes(content)
        refused("is damaged")
    save_file(held, bad, {**facts, "tokens": "999"})
    refused("is damaged")
    save_file(held, bad)
    refused("no state of a linearized model")
    save_file(held, bad, {**facts, "format": "linearized state 99"})
    refused("linearized state 99")
    with pytest.raises(FileNotFoundError):
        student.load_cache(tmp_path / "missing")
    with pytest.raises(ValueError, match="read nothing"):
        student.empty_cache().save(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
