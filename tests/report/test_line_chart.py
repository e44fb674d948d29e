"""Charts of lines stay within their frame, and no name of a line lies on another."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linearizer.report.line_chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTER,
    MAX_TICKS,
    SPACING,
    SUPERSCRIPTS,
    TOP,
    WIDTH,
    Axis,
    Line,
    draw_lines,
    place_names,
    spread,
)

HEIGHTS = st.lists(st.floats(TOP, HEIGHT - BOTTOM), min_size=1, max_size=8)
VALUES = st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=5)
NUMBER = r"-?[0-9.]+"
DIGIT, WIDTHS = 7.5, {"·": 4.0, ".": 4.0}  # the width of a digit, and of narrower signs
PLAIN = {high: chr(low) for low, high in SUPERSCRIPTS.items() if chr(low) != "."}


def number_of(name):
    """Read a number as an axis writes it: 0.5, 10⁻⁴, 2·10⁵."""
    digit, _, power = re.fullmatch(r"(?:([\d.]+)(?:·|$))?(10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", name).groups()
    return float(digit or 1) * 10.0 ** int((power or "⁰").translate(PLAIN))


def width_of(name):
    return sum(WIDTHS.get(letter, 5.0 if ord(letter) in PLAIN else DIGIT) for letter in name)


@given(HEIGHTS)
def test_names_are_moved_apart_in_their_order(heights):
    moved = spread(heights, TOP, HEIGHT - BOTTOM)
    in_order = [moved[place] for place in sorted(range(len(heights)), key=heights.__getitem__)]
    assert all(b - a > SPACING - 1e-6 for a, b in zip(in_order, in_order[1:], strict=False))
    assert TOP <= in_order[0] and in_order[-1] <= HEIGHT - BOTTOM
    assert len(heights) > 1 or moved == heights


@given(st.lists(st.tuples(st.floats(LEFT, WIDTH), st.floats(TOP, HEIGHT - BOTTOM)), min_size=1, max_size=8))
def test_names_beside_points_do_not_lie_on_each_other_and_stay_in_the_picture(ends):
    width, boxes = LETTER * len("student"), []
    for at, height, anchor in place_names(["student"] * len(ends), ends):
        left = at - width * bool(anchor)
        assert left >= 0 and left + width <= WIDTH
        assert not [1 for x, y in boxes if abs(x - left) < width - 1e-6 and abs(y - height) < SPACING - 1e-6]
        boxes.append((left, height))


@given(st.floats(1e-6, 1e9), st.floats(1, 1e9))
def test_an_axis_of_factors_holds_all_values_and_names_a_few_of_its_own(low, factor):
    axis = Axis.round([low, low * factor])
    assert all(number_of(name) == pytest.approx(tick) for tick, name in axis.ticks)
    assert all(width_of(name) <= LEFT - 6 for _, name in axis.ticks)  # else the frame would cut the name
    assert all(set(name) <= set("0123456789.") or "10" in name for _, name in axis.ticks)
    assert axis.low <= low and low * factor <= axis.high
    assert 1 < len(axis.ticks) <= MAX_TICKS and all(axis.low <= tick <= axis.high for tick, _ in axis.ticks)


@given(st.lists(VALUES, min_size=1, max_size=3))
def test_every_point_is_in_the_picture_and_words_are_escaped(values):
    lines = [Line("<b>&", list(enumerate(each, 1)), "lz-other") for each in values]
    fixed = Axis(1, 5, [(1, "1"), (5, "5")]), Axis(0.01, 100, [(1, "<i>")])
    around = (Axis.around([point[side] for line in lines for point in line.points]) for side in (0, 1))
    for axes in (fixed, around):
        drawn = draw_lines("a < b", *axes, lines)
        paths = re.findall(r'lz-other" d="([^"]*)"', drawn)
        assert "<b>" not in drawn and "<i>" not in drawn and len(paths) == len(lines)
        for numbers in ([float(number) for number in re.findall(NUMBER, path)] for path in paths):
            assert all(0 <= x <= WIDTH for x in numbers[::2]) and all(0 <= y <= HEIGHT for y in numbers[1::2])


def test_the_names_of_ticks_stay_in_the_picture():
    x, y = Axis(1, 100, ((1, "1 MB"), (100, "a hundred megabytes"))), Axis(0, 1, (), log=False)
    drawn = draw_lines("", x, y, [Line("", [(1, 0.5), (100, 0.5)], "")], at_ends=True)
    at = float(re.search(rf'x="({NUMBER})"[^>]*>a hundred megabytes<', drawn)[1])
    assert WIDTH - LETTER * len("a hundred megabytes") / 2 >= at > LEFT
