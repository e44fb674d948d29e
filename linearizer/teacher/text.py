"""Reads text from its source as a stream, and packs it into texts with equal numbers of tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch

from linearizer.errors import TextError
from linearizer.hub.models import explain_dataset_errors, stream_dataset
from linearizer.plan.json_products import parse_json
from linearizer.plan.plan import USUAL_LENGTH
from linearizer.teacher.pdf_files import BEGINS, read_pdf

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Value = TypeVar("Value")
SOURCES = "`builtin`, `file:PATH`, `dataset:ID[:config][:split][:column]` or `self`"
PIECE_CHARACTERS = 1 << 16  # read at a time
ROWS = 16  # texts sampled at a time
LONG_CHARACTERS = 3  # per token of a text: a document with fewer may be shorter than a text
SORTED_CHARACTERS = 1 << 22  # of a source, in which long documents are put first
SAMPLED = 32  # texts at most that a model writes if fewer are enough, since they take long


def check_source(source: str) -> None:
    """Refuse a string that is not a source of text, or a file that does not exist, before anything reads it."""
    kind, name = split_source(source)
    if kind == "file":
        with explain_file_errors(path := Path(os.path.expanduser(name))), path.open("rb"):
            return
    if kind == "dataset":
        split_dataset_name(name)


def split_source(source: str) -> tuple[str, str]:
    """Split the kind of a source from its path or id."""
    kind, _, name = source.partition(":")
    if source in ("builtin", "self") or (kind in ("file", "dataset") and name):
        return kind, name
    raise TextError(f"{source!r} is not a source of text: write {SOURCES}")


def read_documents(source: str, *, token: str | None = None) -> Iterator[str]:
    """Read the documents of `builtin`, `file:PATH` or `dataset:ID[:config][:split][:column]`."""
    kind, name = split_source(source)
    if kind == "builtin":  # the language reference, which every CPython contains
        from pydoc_data.topics import topics

        return iter(topics.values())
    if kind == "self":
        raise TextError("'self' is text that the model itself writes, and there is no model here: name another source")
    path = Path(os.path.expanduser(name))
    return refuse_empty(source, read_text_file(path) if kind == "file" else read_column(name, str, "text", token))


def read_for_length(source: str, length: int, *, token: str | None = None) -> Iterator[str]:
    """Read the documents of a source for texts of `length` tokens; a plain file is one document in its own order."""
    documents = read_documents(source, token=token)
    in_order = source.startswith("file:") and not source.endswith(".jsonl")
    return documents if length <= USUAL_LENGTH or in_order else put_long_first(documents, length)


def put_long_first(documents: Iterable[str], length: int) -> Iterator[str]:
    """Put documents that fill a text of `length` tokens before shorter ones, in each part of a source.

    Memory across the border of two documents is useless.
    """
    least, short, characters = LONG_CHARACTERS * length, list[str](), 0
    for document in documents:
        if len(document) >= least:
            yield document
        else:
            short.append(document)
        characters += len(document)
        if characters >= SORTED_CHARACTERS:
            yield from short
            short, characters = [], 0
    yield from short


def pack_texts(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Generator[torch.Tensor, None, int]:
    """Pack documents, with an end token between them, into texts of `length` tokens; return the number left over.

    Every text begins with the tokenizer's start token, if there is one, because models rely on it.
    """
    start, end = start_tokens(tokenizer), end_tokens(tokenizer)
    fresh = length - len(start)
    pending: list[int] = []
    for document in documents:
        pending += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"] + end
        complete = len(pending) // fresh * fresh
        for begin in range(0, complete, fresh):
            yield torch.tensor(start + pending[begin : begin + fresh])
        pending = pending[complete:]
    return len(pending)


def count_tokens(source: str, tokenizer: PreTrainedTokenizerBase, enough: int, token: str | None = None) -> int:
    """Count the tokens of a source; stop reading at `enough`."""
    tokens = 0
    for document in read_documents(source, token=token):
        tokens += len(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
        if tokens >= enough:
            break
    return tokens


def document_numbers(texts: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:  # (texts, tokens)
    """Number the document of each token in consecutive texts; a document ends with an end token."""
    end = end_tokens(tokenizer)
    ends = (texts == end[0]).long() if end else torch.zeros_like(texts)
    ends[:, : len(start_tokens(tokenizer))] = 0  # some models start a text with the token that ends a document
    return (ends.flatten().cumsum(0) - ends.flatten()).view_as(texts)


def read_texts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    *,
    least: int | None = None,
    model: PreTrainedModel | None = None,
    seed: int = 0,
    token: str | None = None,
) -> torch.Tensor:  # (count, length), or at least (least, length) where the text ends before
    """Read the first texts of a source, or say how much text is missing; the source `self` needs the model."""
    least = count if least is None else least
    if length < 2:
        raise TextError(f"a text of {length} token has nothing to predict: ask for a --length of at least 2")
    if source == "self" and model is not None:
        return sample_from(model, tokenizer, length, max(least, min(count, SAMPLED)), seed)
    texts: list[torch.Tensor] = []
    packed = pack_texts(read_for_length(source, length, token=token), tokenizer, length)
    while len(texts) < count:
        try:
            texts.append(next(packed))
        except StopIteration as end:
            if len(texts) >= least:
                break
            raise too_little_text(source, len(texts) * length + end.value, least, length) from None
    return torch.stack(texts)


def too_little_text(source: str, tokens: int, least: int, length: int) -> TextError:
    return TextError(
        f"{source!r} has {tokens} tokens, and {least * length} are needed ({least} texts of {length}): name a longer "
        "text, or ask for fewer or shorter texts"
    )


def repeated_passages(texts: torch.Tensor, passage: int, gap: int) -> torch.Tensor:
    """Make each text (texts, tokens) end in a passage, a gap of other text, and the same passage."""
    tokens = texts.shape[1]
    begin = tokens - 2 * passage - gap
    if begin < 0:
        raise ValueError(f"a passage of {passage} twice and a gap of {gap} take {tokens - begin} tokens, not {tokens}")
    return torch.cat([texts[:, : tokens - passage], texts[:, begin : begin + passage]], 1)


def sample_from(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int
) -> torch.Tensor:  # (count, length)
    """Let a model write `count` texts of `length` tokens, each from the start of a text; the same for the same seed.

    Their number does not change them, unless a device rounds the logits of few and many texts differently.
    """
    from linearizer.teacher.logits import fresh_cache
    from linearizer.teacher.token_loop import draw_tokens, write_tokens

    first = start_tokens(tokenizer) or end_tokens(tokenizer)
    if not first:
        raise TextError("'self' needs a token to start from, and this tokenizer has neither bos nor eos: use `builtin`")
    texts = []
    for begin in range(0, count, ROWS):
        numbers = range(begin, min(begin + ROWS, count))
        start = torch.full((len(numbers), 1), first[0], device=model.device)
        digests = [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in numbers]
        choose = draw_tokens([int.from_bytes(digest[:7], "big") for digest in digests], model.device)
        tokens = write_tokens(model, start, fresh_cache(model), choose)
        texts.append(torch.cat([start, *islice(tokens, length - 1)], 1).cpu())
    return torch.cat(texts)


def read_whole(path: Path) -> str:
    """Read a file of text, a PDF, or the texts of a file of JSON lines, as one text."""
    if path.suffix.lower() == ".pdf":
        with explain_file_errors(path):
            return decode_document(str(path), path.read_bytes())
    return ("\n" if path.suffix == ".jsonl" else "").join(read_text_file(path))


def decode_document(name: str, content: bytes) -> str:
    """Return the text of a PDF, or of a file in UTF-8."""
    return read_pdf(name, content) if content.startswith(BEGINS) else decode_text(name, content)


def decode_text(name: str, content: bytes) -> str:
    """Decode a text in UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise undecodable(name, error) from error


def undecodable(name: str, error: UnicodeDecodeError) -> TextError:
    return TextError(f"{name!r} is not text in UTF-8 (byte {error.start}): convert it, or name another file")


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the start token that the tokenizer puts before every text, if there is one."""
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that ends a document, or else the token that begins the next document."""
    token = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return [] if token is None else [token]


def refuse_empty(source: str, documents: Iterator[str]) -> Iterator[str]:
    empty = True
    for document in documents:
        if document.strip():
            empty = False
            yield document
    if empty:
        raise TextError(f"{source!r} holds no text: name another source, such as `builtin`")


def read_text_file(path: Path) -> Iterator[str]:
    with explain_file_errors(path), path.open(encoding="utf-8-sig") as file:
        yield from read_rows(path, file) if path.suffix == ".jsonl" else read_in_pieces(path, file)


@contextmanager
def explain_file_errors(path: Path) -> Iterator[None]:
    """Turn errors of a file of text into one sentence."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise undecodable(str(path), error) from error
    except IsADirectoryError as error:
        raise TextError(f"{str(path)!r} is a folder: name one file in it") from error
    except FileNotFoundError as error:
        raise TextError(f"{str(path)!r} does not exist: check the path") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TextError(f"{str(path)!r} cannot be read ({reason}): check the path and its permissions") from error


def read_in_pieces(path: Path, file: IO[str]) -> Iterator[str]:
    """Read a text in pieces of whole lines."""
    while piece := file.read(PIECE_CHARACTERS):
        if "\0" in piece:
            raise TextError(f"{str(path)!r} contains zero bytes, so it is not text: name a text file")
        yield piece + file.readline(PIECE_CHARACTERS)


def read_rows(path: Path, file: IO[str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row: Any = parse_json(line)
        except ValueError as error:
            raise TextError(f"{str(path)!r} has no JSON in line {number} ({error}): repair that line") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise TextError(f'{str(path)!r} has no string named "text" in line {number}: each line needs it')
        yield row["text"]


def split_dataset_name(spec: str) -> list[str]:
    """Split ID[:config][:split][:column]; missing parts are empty."""
    parts = spec.split(":")
    if len(parts) > 4:
        raise TextError(f"'dataset:{spec}' has {len(parts)} parts and may have 4: write {SOURCES}")
    if "/" not in parts[0]:
        raise TextError(f"{parts[0]!r} is not the id of a data set: write `org/name`")
    return parts + [""] * (4 - len(parts))


def read_column(spec: str, kind: type[Value], kind_name: str, token: str | None) -> Iterator[Value]:
    """Stream a column of a data set with values of a kind; its default name is the name of the kind.

    Config, split and column of the specification may be left empty. Rows without a value are left out.
    """
    identifier, config, split, column = split_dataset_name(spec)
    split, column = split or "train", column or kind_name
    with explain_dataset_errors(identifier, token):
        splits = stream_dataset(identifier, config or None, token)
        if split not in splits:
            raise TextError(f"{identifier!r} has no split {split!r}: it has {', '.join(splits)}")
        for row in splits[split]:
            value = row.get(column)
            if value is None and column in row:
                continue
            if not isinstance(value, kind):
                columns = ", ".join(name for name, value in row.items() if isinstance(value, kind)) or "no column"
                raise TextError(f"{identifier!r} has no {kind_name} in a column {column!r}: it has some in {columns}")
            yield value
