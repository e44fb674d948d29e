"""What attention costs, counted by hand."""

import pytest

from linearizer.amounts import size
from linearizer.cli.text import describe_state
from linearizer.page.plan_cards import allocation_card
from linearizer.plan import head_bytes
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.student.attention_of_student import HeadKind
from tests.support.cards import describe_student

LAYER = Layer(query_heads=4, kv_heads=2, key_dim=8, value_dim=16)
BOUNDED = Layer(query_heads=4, kv_heads=2, key_dim=8, value_dim=16, native_window=32)
HEADS = ((Head(window=10, features=16), Head(softmax=True)), ())
LAYERS = (LAYER, BOUNDED)


def test_cache_counts_no_layer_that_the_teacher_bounds():
    assert head_bytes.cache_bytes(LAYERS, 100) == 100 * 2 * 2 * (8 + 16)


def test_state_is_exact_tokens_and_features_and_whole_caches():
    assert head_bytes.state_bytes(HEADS, LAYERS, 4, 100) == (4 + 10) * 2 * 24 + 16 * 4 * 17 + 100 * 2 * 24


@pytest.mark.parametrize(
    ("bits", "token"), [(16, 48), (8, 26), (6, 6 + 2 + 12 + 2), (5, 5 + 2 + 10 + 2), (4, 4 + 2 + 8 + 2)]
)
def test_fewer_bits_take_fewer_bytes_and_a_scale_for_every_vector(bits, token):
    assert head_bytes.token_bytes(LAYER, bits) == token
    assert head_bytes.slot_bytes(LAYER, bits) == token + (8 if bits >= 8 else 4)
    sinks = 0 if bits == 16 else 4 * head_bytes.token_bytes(LAYER)  # once more, exactly
    assert head_bytes.head_bytes(Head(softmax=True, bits=bits), LAYER, 4, 100) == 100 * token + sinks


def test_operations_of_a_head_are_those_of_its_group_and_of_its_update():
    exact, feature = 2 * (8 + 16), 2 * 8 + 2 * 17
    far = 2 * 14 * exact + (2 + 1) * 16 * feature  # two queries, one key
    assert head_bytes.state_operations(HEADS, LAYERS, 4, 100) == far + 2 * 100 * exact


@pytest.mark.parametrize(
    ("cross", "student", "teacher"),
    [
        (head_bytes.breakeven_tokens, head_bytes.state_bytes, head_bytes.cache_bytes),
        (head_bytes.breakeven_operations, head_bytes.state_operations, head_bytes.cache_operations),
    ],
)
def test_breakeven_is_the_first_length_at_which_the_teacher_is_no_cheaper(cross, student, teacher):
    length = cross(HEADS, LAYERS, 4)
    assert teacher(LAYERS, length) >= student(HEADS, LAYERS, 4, length)
    assert teacher(LAYERS, length - 1) < student(HEADS, LAYERS, 4, length - 1)


def test_all_softmax_is_even_from_the_start_and_a_bounded_teacher_is_never_passed():
    softmax = ((Head(softmax=True),) * 2, ())
    assert head_bytes.breakeven_tokens(softmax, LAYERS, 4) == 0
    assert head_bytes.find_breakeven(fixed=1, growth=0) is None


@pytest.mark.parametrize(
    ("heads", "state", "after", "long", "smaller"),
    [
        ([Head(softmax=True, bits=8)] * 2, "0 B + 52 B a token", 5200, 52 * 131072, "at any length"),
        ([Head(softmax=True)] * 2, "0 B + 96 B a token", 9600, 96 * 131072, "never"),
        ([Head(window=10), Head(softmax=True)], "480 B + 48 B a token", 5280, 480 + 48 * 131072, "from 10 tokens on"),
        ([Head(window=10)] * 2, "960 B, whatever the length", 960, 960, "from 10 tokens on"),
    ],
)
def test_the_terminal_the_page_and_the_card_say_alike_what_grows_and_from_where_on_it_is_smaller(
    heads, state, after, long, smaller
):
    allocation = Allocation("gain", 0, (tuple(heads), ()))
    result = allocation.summary(LAYERS, 100)
    assert (result["state_bytes"], result["state_tokens"]) == (after, 100)
    assert result["bytes_a_token"] == allocation.state_bytes(LAYERS, 8) - allocation.state_bytes(LAYERS, 7)
    on_card = describe_student(allocation, LAYERS)
    text, page = describe_state(allocation, LAYERS), allocation_card(allocation, LAYERS, 2**17)
    assert f"; state {state}" in text and state in page and f"The state takes {state}" in on_card
    assert f">{smaller}<" in page and f"<td>{size(long)}</td>" in page
    for said in (text, on_card):  # what grows is stated at three lengths
        assert (f"{size(long)} after 128k" in said) == (" after 4k, " in said) == (result["bytes_a_token"] > 0)
        assert ("never smaller than" if smaller == "never" else f"smaller than the teacher's cache {smaller}") in said


@pytest.mark.parametrize("slots", [4, 20, 400])
@pytest.mark.parametrize("window", [2, 7, 16, 40])
def test_half_of_a_window_stays_exact_beside_slots(window, slots):
    head = Head(window=window, slots=slots)
    exact = [place - merged for place in range(window, 200) for merged in [merged_before(place, head)]]
    assert min(exact) >= window // 2 and max(exact) < window


def merged_before(place, head):
    """Count the tokens that have left the window of a head when the token at a place attends."""
    return sum(
        head.block for before in range(place + 1) if HeadKind(head.window, head.slots, head.block).leaves(before)
    )
