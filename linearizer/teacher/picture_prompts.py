"""What a model that reads pictures is given: the tokens of a text, pictures among them, and the pictures' numbers."""

from __future__ import annotations

import hashlib
import inspect
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linearizer.errors import RequestError, first_line
from linearizer.progress import quiet
from linearizer.teacher.chat_template import BETWEEN, CONTINUE, MARKS, turn_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_PICTURES = (
    "this student reads no pictures: leave --picture out, or make one of a model whose pictures are served, as "
    "`linearizer inspect` says"
)
TYPES = "mm_token_type_ids"  # (1, tokens), not 0 at the tokens of pictures


@dataclass(frozen=True)
class Pictures:
    """The arguments for the pictures of a prompt, and the number of its tokens up to the last of a picture."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    reach: int = 0

    def number_with(self, tokens: Sequence[int]) -> int:
        """Return a number of these pictures among these tokens, which others hardly have."""
        hashed = hashlib.sha256(array("q", tokens[: self.reach]).tobytes())
        for name, x in sorted(self.arguments.items()):
            hashed.update(name.encode())
            hashed.update(x.contiguous().numpy().tobytes() if isinstance(x, torch.Tensor) else repr(x).encode())
        return int.from_bytes(hashed.digest()[:7], "big")

    def given_to(self, model: torch.nn.Module, tokens: int) -> dict[str, Any]:
        """Return the arguments that a model takes with the first tokens of the prompt."""
        device, known = next(model.parameters()).device, inspect.signature(model.forward).parameters
        cut = {name: x[:, :tokens] if name == TYPES else x for name, x in self.arguments.items() if name in known}
        return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in cut.items()}


@dataclass(frozen=True)
class Prompt:
    """What a user says, as tokens, and the pictures among them."""

    tokens: list[int]
    pictures: Pictures = field(default_factory=Pictures)


def make_prompt(
    tokenizer: PreTrainedTokenizerBase,
    processor: Any,  # None: the model reads no pictures
    text: str,
    pictures: Sequence[Any] = (),  # files, or pictures of PIL
    begins: bool = True,
    asks: bool = True,
    raw: bool = False,
) -> Prompt:
    """Turn what a user says after showing pictures into tokens; the other arguments are those of `turn_tokens`."""
    if not pictures:
        return Prompt(turn_tokens(tokenizer, text, begins, asks, raw))
    if processor is None:
        raise RequestError(NO_PICTURES)
    if not text:
        raise RequestError("there is no text with the picture: say something about it, too")
    images = [open_picture(each) if isinstance(each, str | Path) else each.convert("RGB") for each in pictures]
    template = None if raw else processor.chat_template or tokenizer.chat_template
    written = write_turn(processor, template, text, len(images), begins, asks)
    return prompt_of(tokenizer, processor, written, images, begins and template is None)


def prompt_of(
    tokenizer: PreTrainedTokenizerBase, processor: Any, written: str, images: Sequence[Any], special: bool
) -> Prompt:
    """Turn a text that names the places of pictures (of PIL) into tokens; `special`: with the start token."""
    with quiet():
        try:
            batch = processor(text=[written], images=[*images], return_tensors="pt", add_special_tokens=special)
        except Exception as error:  # processors raise errors of many types
            raise RequestError(
                f"the model's processor cannot read the picture ({first_line(error)}): show another picture, or no "
                "more than one"
            ) from error
    ids = batch["input_ids"]
    arguments = {name: x for name, x in batch.items() if name not in ("input_ids", "attention_mask")}
    shown = arguments[TYPES] != 0 if TYPES in arguments else ids == image_token_id(tokenizer, processor)
    places = shown[0].nonzero()
    reach = int(places[-1]) + 1 if len(places) else ids.shape[1] - 1
    if reach == ids.shape[1]:
        raise RequestError("nothing follows the picture: put the text behind it")
    return Prompt(ids[0].tolist(), Pictures(arguments, reach))


def write_turn(processor: Any, template: str | None, text: str, count: int, begins: bool, asks: bool) -> str:
    """Write what a user says after `count` pictures, by a chat template if there is one."""
    if template is None:
        missing = count - text.count(processor.image_token)  # a user may place them in the text
        return processor.image_token * max(missing, 0) + text

    def write(pictures: int) -> list[str]:
        content = [{"type": "image"}] * pictures + [{"type": "text", "text": MARKS[0]}]
        messages = [{"role": "user", "content": content}]
        told = dict(chat_template=template, add_generation_prompt=True, tokenize=False)
        return str(processor.apply_chat_template(messages, **told)).split(MARKS[0])

    try:
        (opening, closing), (plain, _) = write(count), write(0)
    except Exception as error:  # a template is a program, and may raise any error
        raise RequestError(f"the model's chat template refuses pictures ({first_line(error)}): {CONTINUE}") from error
    if not begins and not opening.startswith(plain):
        raise RequestError(f"the model's chat template shows pictures in the first turn alone: {CONTINUE}")
    return (opening if begins else opening.removeprefix(plain)) + text + (closing if asks else BETWEEN)


def image_token_id(tokenizer: PreTrainedTokenizerBase, processor: Any) -> int:
    known = getattr(processor, "image_token_id", None)
    return int(tokenizer.convert_tokens_to_ids(processor.image_token) if known is None else known)


def open_picture(path: str | Path) -> Any:
    """Read a picture from a file."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except Exception as error:  # formats raise errors of many types
        raise RequestError(
            f"{str(path)!r} is no picture that can be read ({first_line(error)}): name another file"
        ) from error


def load_processor(folder: Path) -> Any:
    """Load the processor of a model that reads pictures; None if there is none."""
    from transformers import AutoProcessor

    with quiet():
        try:
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # each kind reads its files in its own way, with errors of many types
            raise RequestError(
                f"{str(folder)!r} has no processor of pictures that can be loaded ({first_line(error)}): put its "
                "preprocessor_config.json there, and install what it needs, such as torchvision"
            ) from error
    return processor
