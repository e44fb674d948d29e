"""Loads an encoder, and what it reads: texts of one length, or a folder of pictures through its own processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linearizer.encoders.inspect_encoder import auto_class_of
from linearizer.encoders.modeling_encoder import CLASSES
from linearizer.errors import ModelNotAvailable, TextError, first_line
from linearizer.hub.models import CONFIG, Source, fetch
from linearizer.plan.encoder_inspection import EncoderInspection
from linearizer.quiet import quiet
from linearizer.teacher.load import SAFELY, fetch_weights, load_intact, load_tokenizer
from linearizer.teacher.text import read_column, read_for_length, too_little_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROCESSOR = "preprocessor_config.json"
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
Inputs = dict[str, torch.Tensor]  # of one text or picture, as a batch of one


@dataclass(frozen=True)
class EncoderFiles:
    """What makes inputs of texts or pictures, and how many special tokens it puts around a text."""

    reader: Any  # a tokenizer, or a processor of pictures
    first: int
    last: int


def load_encoder(source: Source, config: PreTrainedConfig, token: str | None = None) -> PreTrainedModel:
    """Load an encoder in float32."""
    kind, folder = CLASSES[auto_class_of(config)], fetch_weights(source, token)
    return load_intact(source.name, partial(kind.from_pretrained, folder, config=config, dtype=torch.float32, **SAFELY))


def load_files(source: Source, inspection: EncoderInspection, token: str | None = None) -> EncoderFiles:
    """Load the tokenizer of an encoder, or its processor of pictures."""
    if inspection.reads == "texts":
        tokenizer = load_tokenizer(source, token)
        plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        first = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return EncoderFiles(tokenizer, first, len(whole) - len(plain) - first)
    from transformers import AutoImageProcessor

    folder = fetch(source, (CONFIG, PROCESSOR), token)
    with quiet():
        try:
            processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # each kind reads its file in its own way, with errors of many types
            raise ModelNotAvailable(
                f"{source.name!r} has no processor of pictures that can be loaded ({first_line(error)}): put its "
                f"{PROCESSOR} next to its weights"
            ) from error
    return EncoderFiles(processor, inspection.first, 0)


def read_texts_whole(
    source: str, files: EncoderFiles, length: int, learnt: int, judged: int, token: str | None = None
) -> list[list[Inputs]]:
    """Cut the documents of a source into texts of `length` tokens with special tokens; none spans documents.

    Reading ends where there are enough texts, in twice as many documents as there are texts to judge on.
    """
    around, documents, seen = files.reader("a")["input_ids"], list[list[Inputs]](), 0
    first, last, fresh = around[: files.first], around[len(around) - files.last :], length - files.first - files.last
    for document in read_for_length(source, length, token=token):
        ids = files.reader(document, add_special_tokens=False, verbose=False)["input_ids"]
        seen += len(ids)
        cuts = (ids[begin : begin + fresh] for begin in range(0, len(ids) - fresh + 1, fresh))
        if texts := [{"input_ids": torch.tensor([[*first, *cut, *last]])} for cut in cuts]:
            documents.append(texts)
        if len(documents) >= 2 * judged and sum(map(len, documents)) >= learnt + judged:
            break
    if not documents:
        raise too_little_text(source, seen, learnt + judged, length)
    return documents


@dataclass(frozen=True)
class Shares:
    """Inputs to learn from, and others to judge on, with the numbers of their documents, each a row."""

    learnt: list[Inputs]
    judged: list[Inputs]
    documents: torch.Tensor  # (judged inputs, 1)


def share_out(documents: Sequence[Sequence[Inputs]], learnt: int, judged: int, least: int) -> Shares:
    """Judge on every other document, first on one text of each, and learn from the others; on all if nothing is learnt.

    Where that leaves fewer than the `least` texts to learn from, or too few to judge on, the last texts are judged.
    """
    held = list(documents[1::2] if learnt else documents)[:judged]
    others = [*documents[::2], *documents[1::2][judged:]]
    turns = [(number, text) for row in zip_longest(*held) for number, text in enumerate(row) if text is not None]
    rest = [text for document in others for text in document]
    if len(turns) < judged or len(rest) < least:
        numbered = [(number, text) for number, document in enumerate(documents) for text in document]
        turns, rest = numbered[-judged:], [text for _, text in numbered[:-judged]]
    numbers = torch.tensor([[number] for number, _ in turns[:judged]])
    return Shares(rest[:learnt], [text for _, text in turns[:judged]], numbers)


def begin_of_text(inputs: Inputs, length: int | None, last: int) -> Inputs:
    """Shorten a text to `length` tokens, with the special ones at its end; a picture has no length."""
    ids = inputs.get("input_ids")
    if ids is None or length is None or length >= ids.shape[1]:
        return inputs
    return {"input_ids": torch.cat([ids[:, : length - last], ids[:, ids.shape[1] - last :]], 1)}


def read_pictures(source: str, files: EncoderFiles, count: int, token: str | None) -> list[Inputs]:
    """Read pictures through the processor of an encoder."""
    pictures = list[Inputs]()
    for picture in islice(open_pictures(source, token), count):
        with quiet():
            pictures.append(dict(files.reader(images=picture, return_tensors="pt")))
    return pictures


def open_pictures(source: str, token: str | None) -> Iterator[Any]:
    """Open the pictures of a folder, in the order of their names, or of a data set of the Hub."""
    from PIL import Image

    if not is_dataset(source):
        return map(open_picture, list_pictures(source))
    found = read_column(source.partition(":")[2], Image.Image, "image", token)
    return (picture.convert("RGB") for picture in found)


def is_dataset(source: str) -> bool:
    """Whether pictures come from a data set, in place of a folder."""
    return source.startswith("dataset:")


def list_pictures(folder: str) -> Iterator[Path]:
    if not Path(folder).is_dir():
        raise TextError(f"{folder!r} is not a folder: name a folder of pictures ({', '.join(ENDINGS)})")
    return (path for path in sorted(Path(folder).iterdir()) if path.suffix.lower() in ENDINGS)


def open_picture(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except Exception as error:  # a damaged picture, or so large that it may be meant to fill the memory
        raise TextError(f"{str(path)!r} is not a picture that can be read ({first_line(error)}): remove it") from error


def batches(inputs: list[Inputs], size: int) -> Iterator[Inputs]:
    """Put inputs of one shape together, a batch at a time."""
    begin = 0
    while begin < len(inputs):
        shapes = {name: x.shape for name, x in inputs[begin].items()}
        end = begin + 1
        while end < min(begin + size, len(inputs)) and {name: x.shape for name, x in inputs[end].items()} == shapes:
            end += 1
        yield {name: torch.cat([each[name] for each in inputs[begin:end]]) for name in shapes}
        begin = end
