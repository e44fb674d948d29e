"""Amounts are written for people, with three digits and never with an exponent."""

from linearizer.amounts import count_in_words, size


def test_an_amount_that_is_rounded_up_to_the_next_unit_is_written_in_it():
    assert [size(count) for count in (999.4, 999.7, 999_400, 999_960)] == ["999 B", "1 kB", "999 kB", "1 MB"]
    assert [count_in_words(count) for count in (999, 999_700, 999_960_000)] == ["999", "1 million", "1 billion"]
