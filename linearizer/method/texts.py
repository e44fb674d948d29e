"""The texts of a run: read once, and shared out to its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.stopping import interruptible
from linearizer.teacher.load import Teacher, texts_of_run
from linearizer.teacher.text import start_tokens

FEW_TEXTS, MIN_LENGTH = 2, 32  # to which defaults shrink where a text is short
COMPARED = 2  # texts that students are compared on
MOST_REPEATED = 64  # tokens of a repeated passage: short ones repeat at many distances
NUMBER, SIX_DIGITS = "\nThe number is {}.", (10**5, 10**6)  # at the begin of a passage

Tensor = torch.Tensor


@dataclass(frozen=True)
class TextsOfRun:
    """What each step of a run reads: (texts, tokens)."""

    profiled: Sequence[Tensor]  # each tensor has texts of one length
    priced: Tensor  # the first half of the profiled texts, in half of which passages are repeated
    compared: Tensor  # texts that no head was priced on, and no adapter trained on
    learnt: Tensor  # to train on
    judged: Tensor  # later texts, which no other step reads
    first_judged: int  # the number of texts before these: fewer than were asked for, if the source is short

    @staticmethod
    def of(run: Run, teacher: Teacher, token: str | None = None, judged: int = 1) -> TextsOfRun:
        """Read the texts of all steps; there may be fewer texts to judge by than are asked for."""
        plan, least, positions = run.plan, min_texts(run.plan), teacher.inspection.max_positions
        start, count = len(start_tokens(teacher.tokenizer)), max(texts_to_learn(plan), plan.texts_measured)
        with interruptible(run):
            texts = texts_of_run(run, teacher, count + judged, token, least=least)
        end = len(texts) - min(judged, len(texts) - least + 1)
        first, priced = texts[: plan.resolved_texts], texts[: plan.texts_priced]
        passage = max(2, min(texts.shape[1] // 16, MOST_REPEATED))

        def write_number(number: int) -> list[int]:
            ids: list[int] = teacher.tokenizer(NUMBER.format(number), add_special_tokens=False)["input_ids"]
            return ids

        return TextsOfRun(
            profiled=[first] if plan.memory else join_texts(first, plan, start, positions),
            priced=with_repeats(priced, passage, plan.seed, write_number),
            compared=join_all(texts[: plan.texts_measured][len(priced) :][:COMPARED], start, positions),
            learnt=choose_learnt(texts[:end], plan),
            judged=texts[end:],
            first_judged=end,
        )


def texts_to_learn(plan: Plan) -> int:
    """Count the texts of which some are trained on: adapters skip the texts that students are compared on."""
    return plan.texts_learnt + COMPARED * plan.distils


def choose_learnt(texts: Tensor, plan: Plan) -> Tensor:
    """Take the texts to train on: adapters learn on texts as long as those that the student is compared on."""
    if plan.distils:
        texts = torch.cat([texts[: plan.texts_priced], texts[plan.texts_priced + COMPARED :]])
    return texts[: plan.texts_learnt]


def join_texts(texts: Tensor, plan: Plan, start: int, positions: int | None) -> list[Tensor]:
    """Join texts in pairs, so that queries are drawn from places up to twice the length that heads are priced on.

    Slots are merged by the mean query, which positions turn: beyond the places that it was measured at, it misleads.
    The second text of a pair loses its start tokens, which the model knows only at the start; an odd text stays alone.
    """
    first, second = texts[: len(texts) // 2 * 2].unflatten(0, (-1, 2)).unbind(1)
    pairs, odd = torch.cat([first, second[:, start:]], 1), texts[2 * len(first) :]
    joined = [x for x in (pairs, odd) if len(x)]
    eligible = sum(x.numel() - len(x) * plan.resolved_sinks for x in joined)
    is_enough = eligible >= plan.samples // 2
    return joined if len(pairs) and is_enough and pairs.shape[1] <= (positions or pairs.shape[1]) else [texts]


def join_all(texts: Tensor, start: int, positions: int | None) -> Tensor:
    """Join texts to one, where the model's positions have room for it."""
    if not len(texts):
        return texts
    joined = torch.cat([texts[0], texts[1:, start:].flatten()])
    return joined[None] if len(joined) <= (positions or len(joined)) else texts


def with_repeats(texts: Tensor, passage: int, seed: int, write_number: Callable[[int], list[int]]) -> Tensor:
    """Repeat earlier passages at random places in the second half of the texts, so that recall has a price.

    One passage in four is a repetition. Each begins with a number: prices that see prose alone do not buy what keeps
    digits apart. The first passage of a text stays as it is, with the start tokens.
    """
    generator, places = torch.Generator().manual_seed(seed), texts.shape[1] // passage
    texts = texts.clone()
    for text in texts[len(texts) // 2 :]:
        for _ in range(texts.shape[1] // (4 * passage)):
            first, second = (torch.randperm(places, generator=generator)[:2].sort().values * passage).tolist()
            number = torch.tensor(write_number(int(torch.randint(*SIX_DIGITS, (1,), generator=generator)))[:passage])
            if first:
                text[first : first + len(number)] = number.to(text)
            text[second : second + passage] = text[first : first + passage].clone()
    return texts


def fit_to_text(plan: Plan, tokens: int, adjustable: Collection[str]) -> Plan:
    """Shrink the options that may be adjusted, first the number of texts and then their length, to a text's tokens."""
    while "texts" in adjustable and needed_tokens(plan) > tokens and plan.resolved_texts > FEW_TEXTS:
        plan = replace(plan, texts=plan.resolved_texts - 1)
    if "length" in adjustable and needed_tokens(plan) > tokens:
        plan = replace(plan, length=max(MIN_LENGTH, tokens // min_texts(plan) // 8 * 8))
    return plan


def needed_tokens(plan: Plan) -> int:
    """Count the tokens that the texts of a run need at least."""
    return min_texts(plan) * plan.resolved_length(None)


def min_texts(plan: Plan) -> int:
    """Count the texts that a run needs at least: those to measure or of one batch, and one more to judge by."""
    return max(plan.texts_measured, plan.batch if plan.trains else 0) + 1
