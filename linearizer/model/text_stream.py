"""The text of tokens that come one by one."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no letter yet
CONTEXT = 8  # tokens before the first token that comes
MOST_UNFINISHED = 16  # tokens that one letter may take: bytes that are no letter are written as such after these


class TextStream:
    """Decodes tokens one by one: a token may hold part of a letter, and its text may depend on those `before`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: list[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = before[-CONTEXT:]  # the last ones that were written, then those that were not
        self.written = len(self.tokens)  # how many of them were written

    def add(self, token: int) -> str:
        """Give the text that this token completes; "" while a letter is incomplete."""
        self.tokens.append(token)
        text = self.new_text()
        if text.endswith(UNFINISHED) and len(self.tokens) - self.written < MOST_UNFINISHED:
            return ""
        self.tokens, self.written = self.tokens[self.written :], len(self.tokens) - self.written
        return text

    def rest(self) -> str:
        """Give the text of what is incomplete at the end."""
        text, self.tokens, self.written = self.new_text(), [], 0
        return text

    def new_text(self) -> str:
        """Decode the tokens that were not written, in the sight of those before."""
        before, all_of = (
            self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for tokens in (self.tokens[: self.written], self.tokens)
        )
        return all_of[len(before) :]
