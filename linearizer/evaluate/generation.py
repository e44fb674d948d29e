"""How a student writes: where it leaves its teacher's path, whether it repeats itself, its loss under the teacher.

All subjects continue the same prompts, and draw tokens with the same noise, so that they part only where they differ.
An end of text is a token like any other: all texts have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

import torch

from linearizer.evaluate.subjects import Subject, read_logits
from linearizer.progress import Progress, Steps
from linearizer.run.results import Generation, GenerationScores
from linearizer.teacher.logits import fresh_cache, logits_at_once, losses_of
from linearizer.teacher.token_loop import choose_likeliest, draw_with_same_noise, write_tokens

Tensor = torch.Tensor
GRAMS = (1, 2, 3)  # tokens in a row for the count of variety
REPEATED = 4  # tokens in a row that count as a repetition


def measure_generation(
    subjects: Sequence[Subject], prompts: Tensor, new_tokens: int, seed: int = 0
) -> Steps[Generation]:
    """Let all subjects continue prompts (texts, tokens): with their likeliest tokens, and with drawn tokens."""
    teacher = subjects[0] if subjects[0].allocation is None else None
    judgements, done = [], 0
    for sampled in (False, True):
        expected: Tensor | None = None
        for subject in subjects:
            texts = write(subject, prompts, new_tokens, seed if sampled else None)
            expected = texts if subject is teacher else expected
            judgements.append(judge_texts(subject.name, sampled, prompts, texts, teacher, expected))
            done += 1
            yield Progress("generation", done, 2 * len(subjects), "texts")
    return Generation(len(prompts), prompts.shape[1], new_tokens, tuple(judgements))


def write(subject: Subject, prompts: Tensor, count: int, seed: int | None) -> Tensor:  # (texts, count)
    """Continue prompts with the likeliest tokens, or draw tokens with the noise of a seed."""
    choose = choose_likeliest if seed is None else draw_with_same_noise(seed)
    with subject.prepared() as model:
        tokens = write_tokens(model, prompts.to(model.device), fresh_cache(model), choose)
        return torch.cat(list(islice(tokens, count)), 1).cpu()


def judge_texts(
    name: str, sampled: bool, prompts: Tensor, texts: Tensor, teacher: Subject | None, expected: Tensor | None
) -> GenerationScores:
    """Measure the texts that one subject wrote."""
    loss, likeliest = (None, None) if teacher is None else judge_by_teacher(teacher, prompts, texts)
    return GenerationScores(
        name=name,
        sampled=sampled,
        diverged=None if expected is None else tuple(map(count_alike_tokens, texts, expected)),
        repeated=fmean(1 - variety(text, REPEATED) for text in texts.tolist()),
        distinct=tuple(fmean(variety(text, size) for text in texts.tolist()) for size in GRAMS),
        loss=loss,
        likeliest=likeliest,
    )


def judge_by_teacher(teacher: Subject, prompts: Tensor, texts: Tensor) -> tuple[float, float]:
    """Return the teacher's loss on texts after prompts, and the share of tokens that are its first choice."""
    kept = texts.shape[1] + 1
    at_once = logits_at_once(teacher.model, kept)
    losses, matches = [], []
    for prompt, text in zip(prompts.split(at_once), texts.split(at_once), strict=True):
        logits = read_logits(teacher, torch.cat([prompt, text], 1), None, kept)[:, :-1]
        losses.append(losses_of(logits, text))
        matches.append(logits.argmax(-1).cpu() == text)
    return torch.cat(losses).mean().item(), torch.cat(matches).double().mean().item()


def count_alike_tokens(text: Tensor, expected: Tensor) -> int:
    """Count the tokens before the first that differs."""
    return int((text == expected).long().cumprod(0).sum())


def variety(text: Sequence[int], size: int) -> float:
    """Return the share of distinct runs of `size` tokens."""
    runs = [tuple(text[begin : begin + size]) for begin in range(len(text) - size + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
