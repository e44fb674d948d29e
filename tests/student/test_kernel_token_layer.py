"""One token of a layer whose heads hold all kinds of things is one launch for each kind, and what PyTorch says."""

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from linearizer.student import kernel_common, kernel_dispatch, kernel_text_slots, kernel_token_slots, kernel_trial
from linearizer.student.kernel_token_table import TokenGroup, get_table
from linearizer.student.layer_student import LayerStudent
from linearizer.student.rounding import pack_vectors
from linearizer.student.state import change_tensors, tensors
from tests.support.kernels import CLOSE, DEVICE, EXACT, mutate, relative, vary

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
DIM, VALUE_DIM, GROUP, SINKS, SCALE = 6, 5, 2, 2, 0.3
WINDOWS = [[5, 0], [3, 0], "softmax", [4, 0], [5, 0]]
SLOTS = [[5, 0, 4, 3], [7, 0, 3, 4], [5, 0, 4, 3]]
SMALL_SLOTS = [[*held, 8] for held in SLOTS[:2]]
SMALL = [[4, 0, 0, 0, 8], [0, 0, 0, 0, 8], [3, 0, 0, 0, 8]]


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    """Kernels for tokens count as right here, and in fp64, which the interpreter knows; the others as wrong."""
    families = {"attention": False, "slots": False, "single tokens": True, "single tokens and slots": True}
    device = torch.empty(0, device=DEVICE).device
    monkeypatch.setattr(kernel_trial, "DEVICES", {DEVICE})
    monkeypatch.setattr(kernel_trial, "DTYPES", (torch.float32, torch.float64))
    monkeypatch.setattr(kernel_trial, "_verdicts", {(family, device): right for family, right in families.items()})


@pytest.fixture
def launches(monkeypatch):
    """Count them."""
    counted = Counter()
    for name in ("run_token_windows", "run_token_slots"):
        run = getattr(kernel_dispatch, name)
        monkeypatch.setattr(
            kernel_dispatch, name, lambda *args, run=run, name=name: (counted.update([name]), run(*args))[1]
        )
    return counted


def layer(held, kind="prf"):
    student = LayerStudent(held, SINKS, DIM, kind).to(DEVICE, EXACT).eval()
    student.reset(torch.Generator().manual_seed(0))
    vary(student)
    return student


def drawn(heads, tokens, batch=2):
    """Some texts, as projections give them: all heads of a token side by side."""
    generator = torch.Generator().manual_seed(0)
    shape = heads * (GROUP * DIM + DIM + VALUE_DIM)
    side_by_side = torch.randn(batch, tokens, shape, generator=generator, dtype=torch.float64).to(DEVICE, EXACT)
    widths = heads * GROUP * DIM, heads * DIM, heads * VALUE_DIM
    parts = zip(side_by_side.split(widths, -1), (DIM, DIM, VALUE_DIM), strict=True)
    return [x.unflatten(-1, (-1, dim)).transpose(1, 2) for x, dim in parts]


@torch.no_grad()
def read(student, text, edges, change=None):
    """Read a text in calls that end at these edges; the state is changed before the last call."""
    memory, out, stop = [], [], 0
    for index, end in enumerate(edges):
        if change and index == len(edges) - 1:
            for state in memory:
                change_tensors(state, change)
        out.append(student(*(x[:, :, stop:end] for x in text), SCALE, None, memory))
        stop = end
    return torch.cat(out, -2), memory


def assert_alike(student, edges, monkeypatch, change=None, batch=2):
    text = drawn(student.kv_heads, edges[-1], batch)
    result, own = read(student, text, edges, change)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected, plain = read(student, text, edges, change)
    monkeypatch.delenv("LINEARIZER_KERNELS")
    assert relative(result, expected) < CLOSE
    for mine, theirs in zip(own, plain, strict=True):
        for name, x in tensors(theirs).items():
            assert relative(tensors(mine)[name].double(), x.double()) < CLOSE, name


def token_by_token(start, stop):
    return [start, *range(start + 1, stop + 1)]


@pytest.mark.parametrize("held", [WINDOWS, SMALL], ids=["16 bits", "8 bits"])
def test_a_token_of_all_heads_is_one_launch(held, launches, monkeypatch):
    assert_alike(layer(held), token_by_token(6, 10), monkeypatch)
    assert launches == {"run_token_windows": 4}


def test_a_token_of_heads_with_features_is_of_pytorch(launches, monkeypatch):
    assert_alike(layer([[3, 8], [2, 0], [0, 8]]), token_by_token(2, 4), monkeypatch, batch=1)
    assert launches == {"run_token_windows": 2}


@pytest.mark.parametrize("held", [SLOTS, SMALL_SLOTS], ids=["16 bits", "8 bits"])
def test_a_token_of_all_heads_with_slots_is_one_launch(held, launches, monkeypatch):
    assert_alike(layer(held), token_by_token(7, 12), monkeypatch)
    assert launches == {"run_token_slots": 5}


def test_heads_of_several_numbers_of_bits_share_a_layer(launches, monkeypatch):
    assert_alike(layer([[3, 0], [3, 0, 0, 0, 8], [4, 0]]), token_by_token(2, 6), monkeypatch, batch=1)
    assert launches == {"run_token_windows": 8}


@pytest.mark.parametrize("change", ["reordered", "moved", "laid otherwise"])
def test_states_that_were_exchanged_are_found_again(change, launches, monkeypatch):
    changes = {
        "reordered": lambda x: x.index_select(0, torch.tensor([1, 1], device=x.device)),
        "moved": lambda x: x.clone(),
        "laid otherwise": lambda x: x[..., None].repeat_interleave(3, -1)[..., 1],
    }
    assert_alike(layer([[3, 0], [2, 0, 0, 0, 8]]), [*token_by_token(2, 4), 7, 8, 9], monkeypatch, changes[change])
    assert launches == {"run_token_windows": 8}


def test_a_state_on_another_device_is_no_address(launches):
    student, text = layer([[3, 0], [2, 0, 3, 2]]), drawn(2, 5)
    _, memory = read(student, [x[:, :, :4] for x in text], [4])
    for state in memory:
        change_tensors(state, lambda x: x.to("meta"))
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        student(*(x[:, :, 4:] for x in text), SCALE, None, memory)
    assert not launches


def test_a_batch_that_grew_where_it_lies_has_tickets_for_all():
    student, text = layer([[3, 0]]), drawn(1, 5)
    _, (state,) = read(student, [torch.cat([x, x])[:, :, :4] for x in text], [4])
    whole = dict(tensors(state))
    change_tensors(state, lambda x: x[:1])
    groups = [TokenGroup([0], state, 3)]
    assert get_table(groups).tickets.shape == (1, 1)
    for name, x in whole.items():
        setattr(state, name, x)
    assert get_table(groups).tickets.shape == (1, 4)


def test_a_token_leaves_alone_what_gradients_need(launches):
    kernel_trial._verdicts["attention and its gradients", torch.empty(0, device=DEVICE).device] = True
    student, text = layer([[3, 0]]), drawn(1, 13, batch=1)
    result = []
    for goes_on in (False, True):
        memory: list = []
        k = text[1].clone().requires_grad_()
        out = student(*(x[:, :, :12] for x in (text[0], k, text[2])), SCALE, None, memory)
        total = out.sum() + memory[0].window_k.square().sum()
        if goes_on:
            with torch.no_grad():
                student(*(x[:, :, 12:] for x in text), SCALE, None, memory)
        result += torch.autograd.grad(total, k)
    assert launches and torch.equal(*result)


def test_a_state_stays_where_it_is_and_so_does_its_table():
    student, text = layer(WINDOWS), drawn(5, 6)
    _, memory = read(student, [x[:, :, :4] for x in text], [3, 4])
    held, table = [tensors(state) for state in memory], memory[0].token_table
    with torch.no_grad():
        student(*(x[:, :, 4:5] for x in text), SCALE, None, memory)
    assert memory[0].token_table is table
    for state, before in zip(memory, held, strict=True):
        if hasattr(state, "count"):
            assert all(x is before[name] for name, x in tensors(state).items())
            assert state.count.tolist() == [5, 5]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("held", [WINDOWS, SMALL, SLOTS, SMALL_SLOTS])
@torch.no_grad()
def test_on_a_gpu_a_captured_layer_goes_on_with_the_state(held, monkeypatch):
    student = layer([kind for kind in held if kind != "softmax"])
    text = drawn(student.kv_heads, 30)
    _, memory = read(student, [x[:, :, :4] for x in text], [4])
    token, out = [x[:, :, 4:5].clone() for x in text], []
    student(*token, SCALE, None, memory)  # strides decide which kernel is compiled, and none can be loaded in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = student(*token, SCALE, None, memory)
    for t in range(5, 30):
        for mine, new in zip(token, text, strict=True):
            mine.copy_(new[:, :, t : t + 1])
        graph.replay()
        out.append(result.clone())
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected, _ = read(student, text, [4, *range(5, 31)])
    assert relative(torch.cat(out, -2), expected[:, :, 5:]) < CLOSE


def test_numbers_are_kept_as_pytorch_keeps_them():
    student = layer([[4, 0, 0, 0, 8]])
    q, k, v = drawn(1, 6)
    k[:, :, 4] = 0.995 * k[:, :, 4].sign()  # above 127/128 of a power of two
    _, (state,) = read(student, (q, k, v), token_by_token(2, 6))
    assert torch.equal(state.window_k, pack_vectors(k)[:, :, [4, 5, 2, 3]])
    assert torch.equal(state.window_v, pack_vectors(v)[:, :, [4, 5, 2, 3]])


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter shows it as well")
@pytest.mark.parametrize(
    "module, line, mutation",
    [
        (kernel_common, "- 133", "- 132"),
        (kernel_common, "0x7E0000, 1, 0", "0x7E0000, 0, 0"),
        (kernel_common, "<= place - tl.maximum(merged, C.S)", "< place - tl.maximum(merged, C.S)"),
        (kernel_common, "tl.maximum(merged, C.S)", "merged"),
        (kernel_common, "tl.where(place < C.S, C.DV, 0)", "0"),
        (kernel_common, "place + 1, mask=before == last", "place + 1, mask=before >= 0"),
        (kernel_common, "0, mask=before == last", "0, mask=before < 0"),
        (kernel_common, "return out * C.SCALE", "return out"),
        (kernel_common, "codes(x, power(-exponent)) * power(exponent)", "x"),
    ],
)
def test_a_mutated_token_fails(module, line, mutation, tmp_path, monkeypatch):
    mutate(module, line, mutation, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        test_numbers_are_kept_as_pytorch_keeps_them()
        assert_alike(layer([[2, 0, 0, 0, 8], [3, 0, 0, 0, 8]]), token_by_token(1, 5), monkeypatch, batch=1)
        assert_alike(layer([[2, 0], [2, 0], [3, 0]]), token_by_token(1, 5), monkeypatch, batch=1)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter shows it as well")
@pytest.mark.parametrize(
    "module, line, mutation",
    [
        (kernel_token_slots, "gain * load_rows", "0 * load_rows"),
        (kernel_token_slots, "merged - block == place - WIDTH", "merged == place - WIDTH"),
        (kernel_token_slots, "(merged - block + i) % WIDTH", "i % WIDTH"),
        (kernel_token_slots, "merged - block + i >= C.S", "merged - block + i >= 0"),
        (kernel_text_slots, " * ROOT", ""),
        (
            kernel_common,
            "x = codes(x, power(-exponent)[:, None])",
            "x = codes(0.99 * x, power(-exponent)[:, None])",
        ),
    ],
)
def test_a_mutated_token_with_slots_fails(module, line, mutation, tmp_path, monkeypatch):
    mutate(module, line, mutation, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        assert_alike(layer([[4, 0, 3, 3, 8]]), token_by_token(4, 11), monkeypatch, batch=1)
        assert_alike(layer([[4, 0, 2, 4]]), token_by_token(4, 10), monkeypatch, batch=1)
