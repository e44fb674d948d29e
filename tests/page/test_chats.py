"""What is said in a chat is not lost, and what has ended is not kept. No model is loaded here."""

import pytest

from linearizer.page.calls import Browser
from linearizer.page.chat import chats, compare
from linearizer.page.chat.chats import Message
from linearizer.page.visitors import EXAMPLE_NAME, find_visitor

MEMORY = {"run": EXAMPLE_NAME}  # of a browser


@pytest.fixture
def visitor(root):
    yield find_visitor()
    chats.CHATS.clear()
    chats.ASKED.clear()


@pytest.fixture
def key(visitor):
    """The key of the chat that the page shows."""
    return chats.key_of(visitor, visitor.find_run(EXAMPLE_NAME), compare.NAME)


def test_a_message_whose_page_is_gone_returns_to_the_field_of_the_next_page(key):
    for text in ("Who?", "When?"):
        chats.ask(key, Message(text))
    with chats.answering(key):
        assert "prompt" not in compare.show_kept(Browser(MEMORY)) and len(chats.asked(key)) == 2
    assert compare.show_kept(Browser(MEMORY))["prompt"] == "Who?\nWhen?"
    assert not chats.asked(key) and "prompt" not in compare.show_kept(Browser(MEMORY))
