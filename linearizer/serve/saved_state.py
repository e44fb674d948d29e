"""Writes the state of a linearized model to a safetensors file, and reads it for the same model.

The file identifies the model by a hash of its config and some numbers of every weight, and contains a checksum. It does
not describe the shapes of a state: these are compared with a state that the model makes of one token. It also has the
states from before the last turns of a conversation, to which `take_back_turn` returns.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from linearizer.plan.json_products import parse_json
from linearizer.student.attention_interface import HALF_READ
from linearizer.student.attention_of_student import tensors
from linearizer.student.cache import FORMAT

WITH_TURNS = "linearized state 5"
EXACT = "exact"  # in names of tensors, where states of heads have a number
DELTAS = "rope_deltas"  # the tensor of positions after pictures (picture_positions.py)
WEIGHTS = "weights"  # the tensor of a file that is not part of the state
MAX_TURNS = 8  # that can be taken back
SAMPLED = 16  # numbers of each weight that tell a model from others
ROUNDING, LEAST = 2**-8, 2**-24  # by which a number may differ between two dtypes such as bf16 and fp16
VOLATILE = {"dtype", "torch_dtype", "transformers_version", "use_cache", "architectures", "id2label", "label2id"}

Tensor = torch.Tensor


def turns_of(cache: Any) -> list:
    """Return the states of a cache from before its turns, the oldest first."""
    turns: list = vars(cache).setdefault("turns", [])
    return turns


def begin_turn(cache: Any) -> None:
    """Store a copy of the state, so that `take_back_turn` can return to it."""
    cache.turns = [*turns_of(cache), cache.fork()][-MAX_TURNS:]


def take_back_turn(cache: Any) -> None:
    """Return to the state at the last `begin_turn`."""
    if not turns_of(cache):
        raise ValueError(f"there is no turn to take back: call begin_turn before each, at most {MAX_TURNS} are kept")
    before = cache.turns.pop()
    cache.layers, cache.rope_deltas, cache.is_half_read = before.layers, before.rope_deltas, before.is_half_read


def write_state(model: PreTrainedModel, cache: Any, path: str | os.PathLike) -> None:
    """Write the state of a cache of the model; an older file stays until the new one is complete.

    The file also contains the states before its turns, the oldest first, under names that begin with their number.
    """
    if not cache.get_seq_length():
        raise ValueError("there is no state to save: the model has read nothing with this cache")
    stored: dict[str, Tensor] = {}
    sizes: list[tuple[int, int]] = []
    turns = turns_of(cache)
    if any(state.is_half_read for state in [*turns, cache]):
        raise ValueError(HALF_READ)
    for turn, state in enumerate([*turns, cache]):
        by_name = {
            name: tensor_at(*place).detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, place in places(state).items()
        }
        sizes.append((state.get_seq_length(), len(next(iter(by_name.values()))) if by_name else 0))
        stored |= {name_in_file(name, turn, len(turns)): x for name, x in by_name.items()}
    facts = {
        **identify(model),
        "format": WITH_TURNS if turns else FORMAT,
        "tokens": str(sizes[-1][0]),
        "texts": str(sizes[-1][1]),
    }
    if turns:
        facts["turns"] = json.dumps(sizes[:-1])
    stored[WEIGHTS] = sample_weights(model)
    facts["checksum"] = checksum(stored, facts)
    unfinished = f"{os.fspath(path)}.unfinished"  # a folder, since safetensors makes a temporary file, too
    shutil.rmtree(unfinished, ignore_errors=True)  # a killed process left it behind
    os.mkdir(unfinished)
    try:
        temporary = os.path.join(unfinished, "state")
        save_file(stored, temporary, facts)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@dataclass(frozen=True)
class StoredState:
    """The content of a file whose checksum fits; what it says may still be wrong, as a checksum is no signature."""

    path: str | os.PathLike
    facts: dict[str, str]
    tensors: dict[str, Tensor]
    sizes: list[tuple[int, int]]  # tokens and texts of the states before its turns, and of the last


def read_state(model: PreTrainedModel, path: str | os.PathLike) -> Any:
    """Read a state for the model that wrote it, into the devices and dtypes of the model."""
    return restore_state(model, read_file(path))


def read_file(path: str | os.PathLike) -> StoredState:
    """Read the file of a state without its model."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # the file may be replaced later
    except SafetensorError as error:
        raise damaged(path, str(error)) from error
    if facts.get("format") not in (FORMAT, WITH_TURNS):
        wrote = f"{facts['format']!r}" if "format" in facts else "no state of a linearized model"
        raise ValueError(f"{os.fspath(path)!r} holds {wrote}, and {WITH_TURNS!r} is read here: read the text again")
    if facts.pop("checksum", None) != checksum(stored, facts):
        raise damaged(path, "its checksum does not fit")
    return StoredState(path, facts, stored, read_sizes(path, facts))


def read_sizes(path: str | os.PathLike, facts: dict[str, str]) -> list[tuple[int, int]]:
    """Return the tokens and texts of each state in a file, the oldest first."""
    try:
        last = int(facts["tokens"]), int(facts["texts"])
        turns = [(int(tokens), int(texts)) for tokens, texts in parse_json(facts.get("turns", "[]"))]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged(path, "it does not say how many tokens it has read") from error
    if len(turns) > MAX_TURNS or last[0] < 1 or not all(0 <= tokens <= last[0] for tokens, _ in turns):
        raise damaged(path, "it names turns that no state has")
    return [*turns, last]


def restore_state(model: PreTrainedModel, read: StoredState) -> Any:
    """Restore a state that was read, for the model that wrote it."""
    path, stored, sizes = read.path, {**read.tensors}, read.sizes
    refuse_other_model(path, read.facts, stored.pop(WEIGHTS, torch.empty(0)), model)
    turns = len(sizes) - 1
    states = [form_of(model, [name for name in stored if turn_of(name, turns) == turn]) for turn in range(turns + 1)]
    expected = {name_in_file(name, turn, turns) for turn, state in enumerate(states) for name in places(state)}
    if expected != stored.keys() or not places(states[-1]):
        raise damaged(path, "it names other tensors than a state of this model has")
    for turn, (state, (tokens, texts)) in enumerate(zip(states, sizes, strict=True)):
        by_name = {name: stored[name_in_file(name, turn, turns)] for name in places(state)}
        fill(state, by_name, tokens, texts, path)
    states[-1].turns = states[:-1]
    return states[-1]


def name_in_file(name: str, turn: int, turns: int) -> str:
    """Name a tensor of the state before a turn by the number of the turn; the last state's names are unchanged."""
    return name if turn == turns else f"turn {turn}: {name}"


def turn_of(name: str, turns: int) -> int:
    """Return the number of the turn before which a state has a tensor with this name in a file."""
    turn, colon, _ = name.removeprefix("turn ").partition(": ")
    return int(turn) if colon and turn.isdecimal() else turns


def form_of(model: Any, names: list[str]) -> Any:
    """Return a cache after one token, or none if there are no names, with states of the kinds that are named."""
    if not names:
        return model.empty_cache()
    plain = [name.rpartition(": ")[2] for name in names]
    states = {name.split(".")[1] for name in plain if "." in name}
    of_heads = any(map(str.isdecimal, states))
    cache = begin_cache(model, not of_heads)
    if of_heads and EXACT in states:  # some of its texts are exact
        for layer, beside in zip(cache.layers, begin_cache(model, True).layers, strict=True):
            if has_states := getattr(beside, "memory", None):
                layer.memory += has_states
    if DELTAS in plain:
        cache.rope_deltas = torch.zeros(1, 1, dtype=torch.long)
    return cache


@torch.no_grad()
def begin_cache(model: Any, exact: bool) -> Any:
    """Read one token, exactly if short texts are."""
    cache, students = model.empty_cache(), model.students()
    limits = [student.exact_tokens for student in students]
    start = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        for student in students:
            student.exact_tokens *= exact
        model(input_ids=start, cache=cache, use_cache=True, logits_to_keep=1)
    finally:
        for student, limit in zip(students, limits, strict=True):
            student.exact_tokens = limit
    return cache


def fill(cache: Any, stored: dict[str, Tensor], tokens: int, texts: int, path: str | os.PathLike) -> None:
    """Put the tensors of a file into a cache that has read one token, or none."""
    for name, (holder, attribute) in places(cache).items():
        current, tensor = tensor_at(holder, attribute), stored[name]
        same_kind = current.dtype == tensor.dtype or (current.is_floating_point() and tensor.is_floating_point())
        alike = same_kind and tensor.dim() == current.dim()
        if not alike or list(tensor.shape) != shape_of(current, tensor, holder, attribute, texts, tokens):
            raise damaged(path, f"{name} is {tuple(tensor.shape)} of {tensor.dtype}")
        if attribute == "count" and not ((tensor >= 0) & (tensor <= tokens)).all():
            raise damaged(path, f"{name} counts other tokens than were read")
        put_tensor(holder, attribute, tensor.to(current.device, current.dtype))
    for layer in cache.layers:
        for counter in ("tokens_read", "cumulative_length"):
            if hasattr(layer, counter):
                setattr(layer, counter, tokens)


def places(cache: Any) -> dict[str, tuple[Any, Any]]:
    """Return the object and the attribute, or key, of every tensor of a cache, by name; none before the first token."""
    places_by_name: dict[str, tuple[Any, Any]] = {}
    for index, layer in enumerate(cache.layers):
        for group, state in enumerate(getattr(layer, "memory", ())):
            place = EXACT if getattr(state, "is_exact", False) else group
            places_by_name |= {f"{index}.{place}.{name}": (state, name) for name in tensors(state)}
        for name in ("keys", "values"):  # of the teacher's own kind
            if isinstance(getattr(layer, name, None), Tensor):
                places_by_name[f"{index}.{name}"] = (layer, name)
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None) or {}
            places_by_name |= {f"{index}.{name}.{key}": (states, key) for key, x in states.items() if x is not None}
    if isinstance(getattr(cache, DELTAS, None), Tensor):
        places_by_name[DELTAS] = (cache, DELTAS)
    return places_by_name


def tensor_at(holder: Any, name: Any) -> Tensor:
    """Return a tensor of an object, or of a dictionary: the recurrent part of a layer has these."""
    tensor: Tensor = holder[name] if isinstance(holder, dict) else getattr(holder, name)
    return tensor


def put_tensor(holder: Any, name: Any, tensor: Tensor) -> None:
    """Replace a tensor of an object or of a dictionary."""
    if isinstance(holder, dict):
        holder[name] = tensor
    else:
        setattr(holder, name, tensor)


def shape_of(current: Tensor, tensor: Tensor, holder: Any, attribute: Any, texts: int, tokens: int) -> list[int]:
    """Return the shape of a tensor that is `current` after one token of one text."""
    shape, axis = [texts, *current.shape[1:]], -1 if attribute == "real" else -2
    if getattr(holder, "is_exact", False):
        shape[axis] = min(tensor.shape[axis], tokens)  # without columns that no text has
    elif attribute in ("k", "v", "real", "keys", "values"):  # all tokens, or those in a native window
        window = getattr(holder, "sliding_window", None)
        shape[axis] = tokens if window is None else min(tokens, window - 1)
    return shape


def identify(model: Any) -> dict[str, str]:
    """Describe a model: its teacher, its revision, its dtype, and a hash of its config."""
    config = model.config
    base = {name: value for name, value in config.of_teacher().items() if name not in VOLATILE}
    described = [base, *(config.linearized[name] for name in ("layers", "sinks", "feature_map"))]
    teacher = "@".join(filter(None, map(config.linearized["teacher"].get, ("name", "revision", "file"))))
    return {
        "teacher": teacher or "unnamed",
        "revision": getattr(config, "_commit_hash", None) or "",
        "config": hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def sample_weights(model: Any) -> Tensor:
    """Take some numbers of every weight; none at all if weights are offloaded."""
    samples = []
    for weight in model.parameters():
        if weight.is_meta:
            return torch.empty(0)
        numbers = weight.detach().flatten()
        samples.append(numbers[:: max(1, len(numbers) // SAMPLED)][:SAMPLED].float().cpu())
    return torch.cat(samples)


def refuse_other_model(path: str | os.PathLike, facts: dict[str, str], weights: Tensor, model: Any) -> None:
    """Refuse a state of another model, or of another revision of this one."""
    expected = identify(model)
    unlike = [] if facts.get("config") == expected["config"] else ["config"]
    if not unlike and not alike(weights, sample_weights(model), facts.get("dtype") == expected["dtype"]):
        unlike = ["weights"]
    if unlike:
        wrote, reads = (
            f"a student of {x.get('teacher')!r}" + (f" at {x['revision']!r}" if x.get("revision") else "")
            for x in (facts, expected)
        )
        raise ValueError(
            f"{os.fspath(path)!r} is the state of another model ({wrote}; this is {reads}, and their {unlike[0]} "
            "differs): load it with the model that read the text, or read the text again"
        )


def alike(weights: Tensor, expected: Tensor, same_dtype: bool) -> bool:
    """Whether two samples are of the same weights: equal in bf16, or close enough for two dtypes."""
    if not weights.numel() or not expected.numel():
        return True
    if weights.shape != expected.shape:
        return False
    if torch.equal(weights.bfloat16(), expected.bfloat16()):
        return True
    return not same_dtype and torch.allclose(weights, expected, rtol=ROUNDING, atol=LEAST)


def damaged(path: str | os.PathLike, why: str) -> ValueError:
    return ValueError(f"{os.fspath(path)!r} is damaged ({why}): read the text again")


def checksum(stored: dict[str, Tensor], facts: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(stored):
        digest.update(name.encode())
        digest.update(as_bytes(stored[name]))
    return digest.hexdigest()


def as_bytes(x: Tensor) -> bytes:
    return x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
