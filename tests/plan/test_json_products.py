"""Products come back from their JSON as they were; damage is named by its field."""

from dataclasses import dataclass

import pytest

from linearizer.errors import RequestError
from linearizer.plan.json_products import JsonProduct


@dataclass(frozen=True)
class Part:
    size: int
    share: float = 0.5
    name: str | None = None


@dataclass(frozen=True)
class Whole(JsonProduct):
    parts: tuple[tuple[Part, ...], ...]
    terms: dict[str, int]
    done: bool = False


WHOLE = Whole(((Part(1), Part(2, 1, "b")), ()), {"a": 1}, True)


def test_a_product_of_all_kinds_comes_back_from_its_json():
    assert Whole.from_json(WHOLE.to_json()) == WHOLE


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('"size": 2', '"size": "2"', r"parts\[0\]\[1\].size '2' is not allowed: it should be a valid integer"),
        ('"size": 2', '"size": true', r"parts\[0\]\[1\].size True is not allowed: it should be a valid integer"),
        ('"size": 2, ', "", r"parts\[0\]\[1\].size is missing"),
        ('"share": 0.5', '"shore": 0.5', r"parts\[0\]\[0\].shore is unknown: leave it out"),
        ('"share": 0.5', r'"a\nb": 0.5', r"parts\[0\]\[0\]\['a\\nb'\] is unknown: leave it out"),
        ('"b"', "[]", r"parts\[0\]\[1\].name \[\] is not allowed: it should be a valid string"),
        ('"done": true', '"done": null', "done None is not allowed: it should be a valid boolean"),
        ('{"a": 1}', "3", "terms 3 is not allowed: it should be an object"),
        ('{"parts"', "{", "it is not JSON: key must be a string at line 1 column 2"),
        (WHOLE.to_json(), "[]", r"it \[\] is not allowed: it should be an object"),
    ],
)
def test_damage_is_named_by_its_field(before, after, sentence):
    text = WHOLE.to_json()
    assert before in text
    with pytest.raises(RequestError, match=sentence):
        Whole.from_json(text.replace(before, after))
