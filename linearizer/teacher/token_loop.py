"""Reads texts into a cache, piece by piece; continues them, token by token; and decodes the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from linearizer.kernels.graphs.text_parts import expects_parts
from linearizer.student.cache import CACHE
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.student.picture_positions import numbering_part, place_tokens
from linearizer.teacher.picture_prompts import Pictures

Tensor = torch.Tensor
PIECE_TOKENS = 2048  # tokens that are read at once: a longer piece takes more memory, and hardly less time
LONG_PIECE = (
    16384  # of all texts, if a student's layers read parts of them at the same time (kernels/graphs/text_parts.py)
)
NONE = Pictures()
HALF_LETTER = "\ufffd"  # a decoder writes it for bytes that are not a complete letter
CONTEXT = 8  # tokens that are decoded before the first new token
MAX_LETTER_TOKENS = 16  # after these, bytes that are not a letter are written as such
Choose = Callable[[Tensor], Tensor]  # logits (texts, vocabulary) -> next tokens (texts, 1)


def read_tokens(model: PreTrainedModel, ids: Tensor, cache: Cache, pictures: Pictures = NONE) -> Iterator[int]:
    """Read tokens (texts, tokens) that follow those in the cache; yield after each piece how many were read.

    The first piece has all pictures.
    """
    start = 0
    while start < ids.shape[1]:
        end = start + (max(PIECE_TOKENS, LONG_PIECE // len(ids)) if expects_parts(model) else PIECE_TOKENS)
        end = min(max(end, pictures.reach), ids.shape[1])
        shown = pictures.given_to(model, end) if pictures.arguments and not start else {}
        with torch.inference_mode():
            piece = ids[:, start:end].to(model.device)
            model(use_cache=True, logits_to_keep=1, **placed(model, piece, cache, **shown))
        start = end
        yield start


def write_tokens(model: PreTrainedModel, ids: Tensor, cache: Cache, choose: Choose) -> Iterator[Tensor]:
    """Yield the next token of every text (texts, 1), endlessly; `ids` (texts, tokens) follow those in the cache."""
    while True:
        with torch.inference_mode():
            out = model(use_cache=True, logits_to_keep=1, **placed(model, ids, cache))
            ids = choose(out.logits[:, -1].float())
        yield ids


def placed(model: PreTrainedModel, ids: Tensor, cache: Cache, **shown: Any) -> dict[str, Any]:
    """Return tokens, cache and pictures as arguments, and the positions of tokens where a model's code needs these.

    A hybrid's code may begin at 0 again, and a teacher's code after another text's pictures.
    """
    arguments = {"input_ids": ids, CACHE: cache, **shown}
    if numbering_part(model) is not None:
        if not isinstance(model, LinearizedForCausalLM):
            place_tokens(model, arguments, cache)
    elif any(hasattr(layer, "recurrent_states") for layer in cache.layers):
        past = cache.get_seq_length()
        arguments["position_ids"] = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
    return arguments


def choose_likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


def draw_tokens(seeds: Sequence[int], device: torch.device) -> Choose:
    """Draw from the softmax of the logits, each text with the random numbers of its own seed."""
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def choose(logits: Tensor) -> Tensor:
        chances = zip(logits.softmax(-1), generators, strict=True)
        return torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in chances])

    return choose


def draw_with_same_noise(seed: int) -> Choose:
    """Draw so that models whose logits are equal draw the same tokens, on any device."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:  # the largest of logits with Gumbel noise is a draw from their softmax
        noise = torch.rand(logits.shape, generator=generator).clamp_min(1e-20).log().neg().log()
        return choose_likeliest(logits.cpu() - noise).to(logits.device)

    return choose


def generate_tokens(
    model: PreTrainedModel,
    ids: Tensor,  # (1, tokens)
    cache: Cache,
    new_tokens: int,
    seed: int,
    sample: bool,
    before: Tensor | None = None,  # (1, tokens) that the cache has read: a penalty of repetitions counts these, too
    keep_logits: Callable[[Tensor], None] = lambda logits: None,  # called with (1, vocabulary) for every token
) -> Iterator[int]:
    """Yield the tokens of the model's `generate`: with its own temperature, and up to its own end of text."""

    def loop(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Callable[[Tensor, Tensor], Tensor],
        stopping_criteria: Callable[[Tensor, Any], Tensor],
        generation_config: GenerationConfig,
        **_: object,
    ) -> Iterator[int]:
        choose, texts = draw_tokens([seed], model.device) if sample else choose_likeliest, input_ids

        def choose_next(logits: Tensor) -> Tensor:
            keep_logits(logits)
            all_texts = texts if before is None else torch.cat([before, texts], 1)
            return choose(logits_processor(all_texts, logits))

        for token in write_tokens(model, input_ids, cache, choose_next):
            texts = torch.cat([texts, token], 1)
            yield int(token)
            if stopping_criteria(texts, None).all():
                return

    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=sample,
        pad_token_id=model.generation_config.pad_token_id or 0,
        custom_generate=loop,
        **{CACHE: cache},
    )


def ends_of(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])


class TextStream:
    """Decodes token by token: a token may hold part of a letter, and its text may depend on the tokens `before`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: list[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = before[-CONTEXT:]  # the last written tokens, then the unwritten ones
        self.written = len(self.tokens)  # number of written tokens among them

    def add(self, token: int) -> str:
        """Return the text that this token completes; "" while a letter is incomplete."""
        self.tokens.append(token)
        text = self.new_text()
        if text.endswith(HALF_LETTER) and len(self.tokens) - self.written < MAX_LETTER_TOKENS:
            return ""
        self.tokens, self.written = self.tokens[self.written :], len(self.tokens) - self.written
        return text

    def rest(self) -> str:
        """Return the text of incomplete letters at the end."""
        text, self.tokens, self.written = self.new_text(), [], 0
        return text

    def new_text(self) -> str:
        """Decode the unwritten tokens in the context of the written ones."""
        written, text = (
            self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for tokens in (self.tokens[: self.written], self.tokens)
        )
        return text[len(written) :]
