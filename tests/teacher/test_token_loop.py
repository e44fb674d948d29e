"""Text that comes token by token is the text of all tokens."""

import pytest
from transformers import AutoTokenizer

from linearizer.hub.models import find_model
from linearizer.teacher.token_loop import HALF_LETTER, TextStream


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(find_model("demo").folder)


@pytest.mark.parametrize("text", ["The quick  brown fox.\n\nx = 1", "naïve café — 東京 👩‍🚀!", " a"])
def test_pieces_add_up_to_the_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, tokenizer("Once")["input_ids"])
    pieces = [stream.add(token) for token in ids]
    assert "".join([*pieces, stream.rest()]) == text
    assert not any(HALF_LETTER in piece for piece in pieces)
