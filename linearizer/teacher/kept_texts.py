"""The texts of a run: read from their source once, and kept as tokens, so that all steps and resumes have the same."""

from __future__ import annotations

import torch
from safetensors import SafetensorError

from linearizer.hub.weight_files import read_tensors, write_tensors
from linearizer.run.events import EventName
from linearizer.run.files import remove
from linearizer.run.folder import Run
from linearizer.teacher.load import Teacher, texts_of

TEXTS = "state/texts.safetensors"  # of a run's folder


def texts_of_run(
    run: Run, teacher: Teacher, texts: int, token: str | None, least: int | None = None
) -> torch.Tensor:  # (texts, tokens)
    """Take the first texts of a run; what its source holds later changes none of those that were read before."""
    kept, asked = read_kept_texts(run)
    if asked >= texts and len(kept) >= (texts if least is None else least):  # fewer only where the source ended
        return kept[:texts]
    read = texts_of(run.plan, teacher, texts, token, least)
    if asked:
        read = torch.cat([kept, read[len(kept) :]])
    write_tensors(run.folder / TEXTS, {"texts": read.int()}, str(texts))
    return read[:texts]


def read_kept_texts(run: Run) -> tuple[torch.Tensor, int]:  # (texts, tokens)
    """Read the first texts of a source that a run has kept, and how many were asked for; drop damaged texts."""
    try:
        tensors, asked = read_tensors(run.folder / TEXTS)
        return tensors["texts"].long(), int(asked)
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        run.log(EventName.DROPPED, file=TEXTS, why=str(error))
        remove(run.folder / TEXTS)
    return torch.empty(0, 0, dtype=torch.long), 0
