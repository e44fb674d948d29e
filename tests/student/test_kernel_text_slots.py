"""The kernels of slots decide as PyTorch does, ties included: in Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from linearizer.student import kernel_common, kernel_text_slots
from linearizer.student.kernel_dispatch import attend_periods_by_kernel
from linearizer.student.rounding import round_vectors
from linearizer.student.slots_merging import Merging
from linearizer.student.slots_torch import attend_periods, attend_text_with_slots
from linearizer.student.state import SlotState, tensors
from tests.support.kernels import DEVICE, mutate

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
WINDOW, SINKS, DIM, VALUE_DIM = 8, 2, 6, 5


def text(length, group=2, dtype=torch.float64, heads=2, batch=2, whole=False):
    """Random queries, keys and values; whole numbers make exact distances, many of them alike."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape):
        numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (numbers.round().clamp(-1, 1) if whole else numbers).to(DEVICE, dtype)

    q, k = draw(batch, heads, group, length, DIM), draw(batch, heads, length, DIM)
    metric = torch.eye(DIM).expand(heads, -1, -1).to(k) if whole else draw(heads, DIM, DIM)
    query = torch.zeros(heads, DIM + 1).to(k) if whole else draw(heads, DIM + 1) / 4
    return q, k, draw(batch, heads, length, VALUE_DIM), metric, 0.25 + draw(heads).abs(), query


@torch.no_grad()
def both(q, k, v, metric, gain, mean_query, count, block, real=None, edges=(), bits=16):
    """The whole text by PyTorch and by kernels, in calls that end at these edges: outputs and states."""
    ends = [*edges, q.shape[-2]]
    if bits == 8:
        k, v = round_vectors(k), round_vectors(v)  # as a layer gives them
    for attend in (attend_periods, attend_periods_by_kernel):
        state, out = SlotState.empty(k, v, WINDOW, SINKS, count), []
        for a, b in zip([0, *ends], ends, strict=False):
            part = q[..., a:b, :], k[:, :, a:b], v[:, :, a:b]
            piece = None if real is None else real[:, a:b]
            out.append(
                attend_text_with_slots(
                    *part, Merging(metric, gain, mean_query, WINDOW, block, bits=bits), piece, state, attend
                )
            )
        yield torch.cat(out, -2), state


def assert_alike(result, tolerance, real=None):
    (plain, state), (fused, own) = result
    for x in tensors(own).values():
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size(), "only the last period is remembered"
    if real is not None:
        plain, fused = (x * real[:, None, None, :, None] for x in (plain, fused))
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)
    assert torch.equal(own.weight, state.weight), "slots hold as many tokens each"
    full = state.weight > 0
    for name in ("slot_k", "slot_v", "spread"):
        mine, theirs = (getattr(holder, name)[full] for holder in (own, state))
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


CASES = {
    "more slots than fit into one tile": (54, 36, 4, dict(heads=1, batch=1), {}),
    "fewer slots than a block": (34, 3, 8, dict(group=1, heads=1), {}),
    "in pieces": (33, 6, 4, dict(batch=1), dict(edges=(1, 17, 18))),
    "in 8 bits": (33, 6, 4, dict(heads=1, batch=1), dict(edges=(20,), bits=8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_slots_are_those_of_pytorch(name, dtype):
    length, count, block, sizes, how = CASES[name]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    assert_alike(both(*text(length, dtype=dtype, **sizes), count, block, **how), tolerance)


def test_padding_is_never_merged():
    real = (torch.rand(2, 32, generator=torch.Generator().manual_seed(0)) < 0.7).to(DEVICE)
    assert_alike(both(*text(32, heads=1), 5, 4, real=real), 1e-9, real)


def test_of_pairs_that_cost_the_same_the_same_ones_are_merged():
    assert_alike(both(*text(36, heads=1, batch=1, whole=True), 6, 8), 1e-9)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter shows it as well")
@pytest.mark.parametrize(
    "module, line, mutation",
    [
        (kernel_text_slots, "j[None, :] < i[:, None]", "j[None, :] > i[:, None]"),  # ties
        (kernel_text_slots, "tl.where(i[:, None] > j[None, :]", "tl.where(i[:, None] < j[None, :]"),
        (kernel_text_slots, "apart * apart * (apart * apart)", "apart * apart"),
        (kernel_text_slots, "tl.where(stays[None, :]", "tl.where((stays | True)[None, :]"),
        (kernel_common, "- 133", "- 132"),
        (kernel_common, "0x7E0000, 1, 0", "0x7E0000, 0, 0"),
        (kernel_text_slots, "gain * load_rows", "0 * load_rows"),
        (kernel_text_slots, "near[None, :] <= place", "near[None, :] < place"),
    ],
)
def test_a_mutated_kernel_fails(module, line, mutation, tmp_path, monkeypatch):
    mutate(module, line, mutation, tmp_path, monkeypatch)
    q, k, v, *merging = text(36, heads=1, batch=1, whole=True)
    with pytest.raises(AssertionError):
        assert_alike(both(q, k, v, *merging, 6, 8), 1e-9)
        share = torch.where(torch.arange(36) % 2 == 0, 1.0, 127 / 128).to(k)[:, None]
        # 8 bits hold both, and not what lies between: the mean of two such is above 127/128 of a power of two
        assert_alike(both(q, share * k, share * v, *merging, 6, 8, bits=8), 1e-9)
