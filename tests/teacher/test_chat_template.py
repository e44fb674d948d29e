"""A chat template of others writes the turns of a chat, or is refused in a sentence."""

import pytest
from transformers import AutoTokenizer

from linearizer.errors import RequestError
from linearizer.hub.models import find_model
from linearizer.teacher.chat_template import next_turn_tokens, turn_texts, turn_tokens, write_chat

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "with a system message": "{% if messages[0].role != 'system' %}[be kind]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content | trim }}</u>{% else %}{{ m.content }}<e>"
    "{% endif %}{% endfor %}",
}
HARMFUL = {
    "that looks for Python": "{{ messages.__class__.__mro__[-1].__subclasses__() }}",
    "that changes what it is given": "{% set _ = messages.append(messages[0]) %}",
    "that counts for ever": "{% for a in range(10**9) %}{% endfor %}",
    "that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "that is broken": "{% for",
    "that refuses": "{{ raise_exception('no\ntwo lines') }}",
    "that repeats": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "that ignores": "hello",
    "that shouts": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(find_model("demo").folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_add_up_to_what_the_template_writes(tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name])
    said = [("user", "Where is it?"), ("assistant", "Here."), ("user", "Since when?")]
    written = write_chat(tokenizer, [{"role": role, "content": text} for role, text in said])
    opening, separator, closing = turn_texts(tokenizer)
    assert written == f"{opening}Where is it?{closing}Here.{separator}Since when?{closing}"
    tokens = turn_tokens(tokenizer, "Where is it?")
    assert tokenizer.decode(tokens) == f"{opening}Where is it?{closing}"
    tokens = next_turn_tokens(tokenizer) + turn_tokens(tokenizer, "Since when?", begins=False)
    assert tokenizer.decode(tokens) == f"{separator}Since when?{closing}"
    tokens = turn_tokens(tokenizer, "A text.", asks=False) + turn_tokens(tokenizer, "Where is it?", begins=False)
    assert tokenizer.decode(tokens) == f"{opening}A text.\n\nWhere is it?{closing}"


def test_without_a_template_a_text_goes_on_as_it_is(tokenizer, monkeypatch):
    expected = tokenizer("Where is it?")["input_ids"]
    assert turn_tokens(tokenizer, "Where is it?") == expected
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["plain"])
    assert turn_tokens(tokenizer, "Where is it?", raw=True) == expected and not next_turn_tokens(tokenizer, raw=True)
    assert turn_tokens(tokenizer, "Where is it?") != expected


@pytest.mark.parametrize("name", HARMFUL)
def test_a_template_that_does_not_write_turns_is_refused_in_a_sentence(tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", HARMFUL[name])
    with pytest.raises(RequestError) as refused:
        turn_tokens(tokenizer, "Where is it?")
    assert "chat template" in str(refused.value) and "--raw" in str(refused.value) and "\n" not in str(refused.value)


def test_a_template_cannot_be_replaced_by_its_variables(tokenizer):
    for name in ("chat_template", "tokenize", "tools"):
        with pytest.raises(RequestError, match=f"may not set {name}"):
            write_chat(tokenizer, [{"role": "user", "content": "a"}], {name: "x"})
