"""Loads an encoder and its inputs: texts of one length, or a folder of pictures through its processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linearizer.encoders.modeling_encoder import CLASSES
from linearizer.errors import ModelNotAvailable, TextError, first_line
from linearizer.hub.models import CONFIG, Source, fetch
from linearizer.plan.encoder_plan import EncoderInspection
from linearizer.progress import quiet
from linearizer.teacher.load import SAFELY, fetch_weights, load_intact, load_tokenizer
from linearizer.teacher.text import read_column, read_for_length, too_little_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROCESSOR = "preprocessor_config.json"
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
Inputs = dict[str, torch.Tensor]  # of one text or picture, as a batch of one


@dataclass(frozen=True)
class EncoderFiles:
    """A tokenizer or processor, and how many special tokens it puts around a text."""

    reader: Any  # a tokenizer, or a processor of pictures
    first: int
    last: int


def load_encoder(
    source: Source, config: PreTrainedConfig, auto_class: str, token: str | None = None
) -> PreTrainedModel:
    """Load an encoder in float32."""
    kind, folder = CLASSES[auto_class], fetch_weights(source, token)
    return load_intact(source.name, partial(kind.from_pretrained, folder, config=config, dtype=torch.float32, **SAFELY))


def load_files(source: Source, inspection: EncoderInspection, token: str | None = None) -> EncoderFiles:
    """Load the tokenizer of an encoder, or its processor of pictures."""
    if inspection.reads == "texts":
        tokenizer = load_tokenizer(source, token)
        plain, with_special = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        first = next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)
        return EncoderFiles(tokenizer, first, len(with_special) - len(plain) - first)
    from transformers import AutoImageProcessor

    folder = fetch(source, (CONFIG, PROCESSOR), token)
    with quiet():
        try:
            processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # processors raise errors of many types
            raise ModelNotAvailable(
                f"{source.name!r} has no processor of pictures that can be loaded ({first_line(error)}): put its "
                f"{PROCESSOR} next to its weights"
            ) from error
    return EncoderFiles(processor, inspection.first, 0)


def read_texts_whole(
    source: str, files: EncoderFiles, length: int, learnt: int, judged: int, token: str | None = None
) -> list[list[Inputs]]:
    """Cut the documents of a source into texts of `length` tokens with special tokens; none spans documents.

    Reading ends with enough texts from at least twice as many documents as there are texts to judge on.
    """
    around, documents, tokens = files.reader("a")["input_ids"], list[list[Inputs]](), 0
    before, after, size = around[: files.first], around[len(around) - files.last :], length - files.first - files.last
    for document in read_for_length(source, length, token=token):
        ids = files.reader(document, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += len(ids)
        cuts = (ids[begin : begin + size] for begin in range(0, len(ids) - size + 1, size))
        if texts := [{"input_ids": torch.tensor([[*before, *cut, *after]])} for cut in cuts]:
            documents.append(texts)
        if len(documents) >= 2 * judged and sum(map(len, documents)) >= learnt + judged:
            break
    if not documents:
        raise too_little_text(source, tokens, learnt + judged, length)
    return documents


@dataclass(frozen=True)
class Shares:
    """Inputs to learn from, and others to judge on, with the numbers of their documents."""

    learnt: list[Inputs]
    judged: list[Inputs]
    documents: torch.Tensor  # (judged inputs, 1)


def share_out(documents: Sequence[Sequence[Inputs]], learnt: int, judged: int, least: int) -> Shares:
    """Judge on every other document, or on all if nothing is learnt, first on one text of each; learn from the others.

    If that leaves fewer than `least` texts to learn from, or too few to judge on, judge on the last texts.
    """
    held_out = list(documents[1::2] if learnt else documents)[:judged]
    learnt_documents = [*documents[::2], *documents[1::2][judged:]]
    to_judge = [(number, text) for row in zip_longest(*held_out) for number, text in enumerate(row) if text is not None]
    to_learn = [text for document in learnt_documents for text in document]
    if len(to_judge) < judged or len(to_learn) < least:
        numbered = [(number, text) for number, document in enumerate(documents) for text in document]
        to_judge, to_learn = numbered[-judged:], [text for _, text in numbered[:-judged]]
    numbers = torch.tensor([[number] for number, _ in to_judge[:judged]])
    return Shares(to_learn[:learnt], [text for _, text in to_judge[:judged]], numbers)


def begin_of_text(inputs: Inputs, length: int | None, last: int) -> Inputs:
    """Shorten a text to `length` tokens, including the special ones at its end; a picture has no length."""
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
    """Open the pictures of a folder, by name, or of a data set of the Hub."""
    from PIL import Image

    if not is_dataset(source):
        return map(open_picture, list_pictures(source))
    pictures = read_column(source.partition(":")[2], Image.Image, "image", token)
    return (picture.convert("RGB") for picture in pictures)


def is_dataset(source: str) -> bool:
    """Whether a source of pictures is a data set, not a folder."""
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
    except Exception as error:  # a damaged picture, or one too large, perhaps made to fill the memory
        raise TextError(f"{str(path)!r} is not a picture that can be read ({first_line(error)}): remove it") from error


def batches(inputs: list[Inputs], size: int) -> Iterator[Inputs]:
    """Yield batches of successive inputs of the same shape."""
    begin = 0
    while begin < len(inputs):
        shapes = {name: x.shape for name, x in inputs[begin].items()}
        end = begin + 1
        while end < min(begin + size, len(inputs)) and {name: x.shape for name, x in inputs[end].items()} == shapes:
            end += 1
        yield {name: torch.cat([x[name] for x in inputs[begin:end]]) for name in shapes}
        begin = end
