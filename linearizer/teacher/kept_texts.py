"""The texts of a run: read from their source once, and kept as tokens, so that all steps and resumes have the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from linearizer.hub.weight_files import read_tensors, write_tensors
from linearizer.run.events import EventName
from linearizer.run.files import remove
from linearizer.run.folder import Run
from linearizer.teacher.load import Teacher, texts_of

TEXTS = "state/texts.safetensors"  # of a run's folder


@dataclass(frozen=True)
class KeptTexts:
    """The first texts of a source, and how many were asked for: fewer are there only where the source ended."""

    texts: torch.Tensor  # (texts, tokens)
    asked: int


def texts_of_run(
    run: Run, teacher: Teacher, texts: int, token: str | None, least: int | None = None
) -> torch.Tensor:  # (texts, tokens)
    """Take the first texts of a run; what its source holds later changes none of those that were read before."""
    kept = read_kept_texts(run)
    if kept is not None and kept.asked >= texts and len(kept.texts) >= (texts if least is None else least):
        return kept.texts[:texts]
    read = texts_of(run.plan, teacher, texts, token, least)
    if kept is not None:
        read = torch.cat([kept.texts, read[len(kept.texts) :]])
    write_tensors(run.folder / TEXTS, {"texts": read.int()}, str(texts))
    return read[:texts]


def read_kept_texts(run: Run) -> KeptTexts | None:
    """Read the texts that a run has kept; drop them where they are damaged."""
    if not run.has_file(TEXTS):
        return None
    try:
        tensors, asked = read_tensors(run.folder / TEXTS)
        return KeptTexts(tensors["texts"].long(), int(asked))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        run.log(EventName.DROPPED, file=TEXTS, why=str(error))
        remove(run.folder / TEXTS)
        return None
