"""The kernel in C that reads on a CPU: PyTorch's results, whatever heads hold, however texts are cut."""

import copy
import os
import pickle
from contextlib import nullcontext
from multiprocessing import get_context

import pytest
import torch

from linearizer.kernels import door, trial
from linearizer.kernels.c import compiler
from linearizer.kernels.c import layer as layer_in_c
from linearizer.kernels.c.compiler import compiled, load_kernel
from linearizer.student.attention_of_student import tensors
from tests.support.kernels import needs_compiler
from tests.support.layers import SCALE, assert_same_states, layer, move_keys, read, scores, text

HELD = [[8, 0, 6, 4], [9, 0], [12, 0, 10, 4], [5, 0, 7, 4, 8], [9, 0, 0, 0, 8], [6, 0, 3, 2, 6], [40, 0, 9, 16, 5],
        [9, 0, 0, 0, 4], [0, 0, 0, 0, 16]]  # fmt: skip
EXACT = [kind for kind in HELD if len(kind) < 5 or kind[4] >= 8]  # whose sizes may be any
LENGTH, LONG = 60, 600  # of one part, and of several


def in_c(memory):
    """Whether the kernel read."""
    return any(getattr(state, "layer_in_c", None) is not None for state in memory)


@needs_compiler
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("edges", [(LENGTH,), (1, 10, *range(11, 30), LENGTH), (3, 4, 40, 41, LENGTH)], ids=str)
@pytest.mark.parametrize("held, dim, value_dim", [(HELD, 8, 8), (HELD, 16, 32), (HELD, 24, 8), (EXACT, 5, 3)])
def test_it_reads_as_pytorch_does(held, dim, value_dim, edges, padded, monkeypatch):
    student, given = layer(held, dim, value_dim), text(len(held), LENGTH, dim, value_dim)
    real = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7 if padded else None
    found, memory = read(student, given, edges, real)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected, other = read(student, given, edges, real)
    assert in_c(memory) and not in_c(other)
    seen = 1 if real is None else real[:, None, :, None]
    torch.testing.assert_close(found * seen, expected * seen)
    assert_same_states(memory, other)


@needs_compiler
@pytest.mark.parametrize("cap", [None, 3.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_caps_scores_and_has_learned_sinks_as_pytorch_does(cap, dtype, monkeypatch):
    student, given = layer(HELD, dtype=dtype), text(9, LENGTH, dtype=dtype)
    move_keys(student)
    edges, altered = (1, 10, *range(11, 30), LENGTH), [scores(9, cap), (cap, None), ()]
    found, memories = zip(*(read(student, given, edges, altered=each) for each in altered), strict=True)
    assert all(map(in_c, memories))
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    for out, each in zip(found, altered, strict=True):
        torch.testing.assert_close(out, read(student, given, edges, altered=each)[0])
    assert (found[0] - found[2]).abs().max() > 0.1


@needs_compiler
@pytest.mark.parametrize("padded", [False, True])
def test_it_reads_the_parts_of_a_long_text_as_pytorch_does(padded, monkeypatch):
    student, given = layer(HELD), text(9, LONG)
    real = torch.rand(2, LONG, generator=torch.Generator().manual_seed(0)) < 0.7 if padded else None
    found, memory = read(student, given, (LONG,), real)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected, other = read(student, given, (LONG,), real)
    seen = 1 if real is None else real[:, None, :, None]
    torch.testing.assert_close(found * seen, expected * seen)
    assert_same_states(memory, other)


@needs_compiler
def test_it_goes_on_where_pytorch_ended_and_the_other_way_round(monkeypatch):
    student, given = layer(HELD), text(9, LENGTH)
    expected, _ = read(student, given, (LENGTH,))
    for first, then in (("0", "1"), ("1", "0")):
        monkeypatch.setenv("LINEARIZER_KERNELS", first)
        begun, memory = read(student, given, (20, 21, 22))
        monkeypatch.setenv("LINEARIZER_KERNELS", then)
        rest = [x[:, :, 22:] for x in given]
        more, _ = read(student, rest, (1, 2, LENGTH - 22), memory=memory)
        torch.testing.assert_close(torch.cat([begun, more], -2), expected)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_neither_the_cut_of_a_text_nor_other_texts_change_a_bit(dtype):
    student, given = layer(HELD, dtype=dtype), text(9, LONG, dtype=dtype)
    whole, memory = read(student, given, (LONG,))
    for edges in ((7, 20, 300, LONG), (*range(1, LENGTH + 1), 400, LONG)):
        cut, other = read(student, given, edges)
        assert torch.equal(cut, whole)
        assert_same_states(other, memory, rtol=0, atol=0)
    alone, _ = read(student, [x[1:] for x in given], (LONG,))
    assert torch.equal(alone, whole[1:])


@needs_compiler
@pytest.mark.parametrize("openmp", [True, False])
def test_the_number_of_threads_changes_no_bit(openmp, monkeypatch):
    if not openmp:
        monkeypatch.setattr(layer_in_c, "begin_in_openmp", lambda: 0)
    student, given = layer(HELD, dtype=torch.float32), text(9, LONG, dtype=torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(read(student, given, (20, 400, 401, LONG)))
    finally:
        torch.set_num_threads(threads)
    for out, memory in found[1:]:
        assert torch.equal(out, found[0][0])
        assert_same_states(memory, found[0][1], rtol=0, atol=0)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_forked_reads_with_threads_of_its_own():
    student, given = layer(HELD, dtype=torch.float32), text(9, LENGTH, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected, _ = read(student, given, (LENGTH,))
        child = get_context("fork").Process(
            target=lambda: os._exit(0 if torch.equal(read(student, given, (LENGTH,))[0], expected) else 1)
        )
        child.start()
        child.join(60)
        child.kill()
    finally:
        torch.set_num_threads(threads)
    assert child.exitcode == 0


@needs_compiler
@pytest.mark.parametrize("edges", [(20, 21, LENGTH), (1, 2, LENGTH)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_reads_in_two_bytes_nearly_as_pytorch_does(dtype, edges, monkeypatch):
    student, given = layer(HELD, dtype=dtype), text(9, LENGTH, dtype=dtype)
    found, memory = read(student, given, edges)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected, other = read(student, given, edges)
    assert found.dtype == expected.dtype and in_c(memory)
    assert (found - expected).float().norm() < 2.5 * torch.finfo(dtype).eps * expected.float().norm()
    for mine, theirs in zip(memory, other, strict=True):
        assert {name: x.dtype for name, x in tensors(mine).items()} == {
            name: x.dtype for name, x in tensors(theirs).items()
        }


@needs_compiler
def test_a_copied_state_leaves_the_first_alone():
    student, given = layer(HELD), text(9, LENGTH)
    _, memory = read(student, given, (20,))
    copied, rest = copy.deepcopy(memory), [x[:, :, 20:] for x in given]
    edges = (1, 2, LENGTH - 20)
    found, expected = (read(student, rest, edges, memory=states)[0] for states in (copied, memory))
    assert torch.equal(found, expected)


@needs_compiler
def test_what_the_heads_learn_later_counts_in_the_next_text(monkeypatch):
    student, given = layer(HELD), text(9, LENGTH)
    first, _ = read(student, given, (LENGTH,))
    with torch.no_grad():
        student.turns.key_middle.data += 0.5
        for group in student.groups:
            if group.merger is not None:
                group.merger.gain.data *= 2
    found, memory = read(student, given, (LENGTH,))
    again, _ = read(pickle.loads(pickle.dumps(student)), given, (LENGTH,))
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected, _ = read(student, given, (LENGTH,))
    torch.testing.assert_close(found, expected)
    assert in_c(memory) and torch.equal(again, found) and not torch.equal(found, first)


@needs_compiler
def test_it_gives_no_gradients_and_may_be_kept_off(monkeypatch):
    student, given = layer(HELD), text(9, LENGTH)
    assert in_c(read(student, given, (LENGTH,))[1])
    q, k, v = given
    memory = []
    student(q, k.clone().requires_grad_(), v, SCALE, None, memory)
    assert not in_c(memory)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    assert not in_c(read(student, given, (LENGTH,))[1])


@needs_compiler
def test_the_device_that_tensors_have_by_default_does_not_change_the_trial(monkeypatch):
    monkeypatch.setattr(trial, "_verdicts", {})
    student, given = layer(HELD), text(9, LENGTH)
    with torch.device("meta"):  # as a GPU where vLLM makes a model
        assert door.reads_in_c(student, given[0][:, :, None], *given[1:], False)


@needs_compiler
def test_pytorch_reads_where_the_kernel_errs(monkeypatch):
    monkeypatch.setattr(door, "passes_trial", lambda family, x, sizes, compute: wrong(compute))
    student, given = layer(HELD), text(9, LENGTH)
    assert not in_c(read(student, given, (LENGTH,))[1])


def wrong(compute):
    """Compare what a trial computes by the kernel with what PyTorch does, and call it wrong."""
    for mine, other in zip(compute(True, torch.float64), compute(False, torch.float64), strict=True):
        torch.testing.assert_close(mine, other)
    return False


@pytest.fixture
def uncompiled():
    """Forget which kernels there are, before and after."""
    load_kernel.cache_clear()
    yield
    load_kernel.cache_clear()


@needs_compiler
def test_a_kernel_is_compiled_once(uncompiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernel("read_heads", torch.float32) is not None
    load_kernel.cache_clear()
    monkeypatch.setattr(compiler, "COMPILERS", ())
    assert load_kernel("read_heads", torch.float32) is not None


@needs_compiler
def test_another_version_of_the_compiler_compiles_anew(monkeypatch, tmp_path):
    given = tmp_path / "linearizer", "key", "int x;", ["-shared"]
    first = compiled(*given)
    monkeypatch.setattr(compiler, "output_of", lambda *_: "another version")
    assert compiled(*given) != first and first.exists()


@pytest.mark.parametrize("program", ["no-such-compiler", "false"])
def test_without_a_compiler_that_works_pytorch_does_the_work(program, uncompiled, monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "COMPILERS", (program,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.warns(RuntimeWarning, match="built none") if program == "false" else nullcontext():
        assert load_kernel("read_heads", torch.float32) is None
        assert not in_c(read(layer(HELD), text(9, LENGTH), (10, 11, 12))[1])


@needs_compiler
@torch.no_grad()
def test_a_state_of_other_texts_is_refused():
    student, given = layer(HELD), text(9, LENGTH)
    _, memory = read(student, given, (20,))
    with pytest.raises(RuntimeError):
        student(*(x[:1, :, 20:22] for x in given), SCALE, None, memory)


@needs_compiler
@pytest.mark.parametrize("writable", ["folder", "library"])
def test_a_kernel_that_others_may_have_written_is_not_loaded(tmp_path, writable):
    folder = tmp_path / "linearizer"
    library = compiled(folder, "key", "int x;", ["-shared"])
    (folder if writable == "folder" else library).chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        compiled(folder, "key", "int x;", [])
