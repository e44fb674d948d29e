"""Writes the state of a linearized model to a file of safetensors, and reads it for the model that it is of.

The file names the model by a hash of its config and some numbers of every weight, and holds a checksum of its own. What
a state looks like is not written down: it is compared with a state that the model makes of one token.
"""

import hashlib
import json
import os
import shutil
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .state import tensors

FORMAT = "linearized state 2"  # of a layer in memory, too: one copy of this code takes another's
WITH_TURNS = "linearized state 3"
WEIGHTS = "weights"  # the tensor of a file that is not part of the state
SAMPLED = 16  # numbers of each weight that tell a model from others
ROUNDING, LEAST = 2**-8, 2**-24  # by which a number may differ in two dtypes, bf16 and fp16 among them
VOLATILE = {"dtype", "torch_dtype", "transformers_version", "use_cache", "architectures", "id2label", "label2id"}

Tensor = torch.Tensor


def write_state(cache: Any, model: PreTrainedModel, path: str | os.PathLike) -> None:
    """Write the state that a cache of the model holds; an older file stays until the new one is complete.

    States before its turns lie next to it, the oldest first, under names that begin with their number.
    """
    if not cache.get_seq_length():
        raise ValueError("there is no state to save: the model has read nothing with this cache")
    held: dict[str, Tensor] = {}
    sizes: list[tuple[int, int]] = []
    for turn, state in enumerate([*cache.turns, cache]):
        own = {
            name: getattr(*place).detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, place in places(state).items()
        }
        sizes.append((state.get_seq_length(), len(next(iter(own.values()))) if own else 0))
        held |= {name_in_file(name, turn, len(cache.turns)): x for name, x in own.items()}
    facts = {
        **identify(model),
        "format": WITH_TURNS if cache.turns else FORMAT,
        "tokens": str(sizes[-1][0]),
        "texts": str(sizes[-1][1]),
    }
    if cache.turns:
        facts["turns"] = json.dumps(sizes[:-1])
    held[WEIGHTS] = sample_weights(model)
    facts["checksum"] = checksum(held, facts)
    unfinished = f"{os.fspath(path)}.unfinished"  # a folder, for the temporary file of safetensors, too
    shutil.rmtree(unfinished, ignore_errors=True)  # a killed process left it behind
    os.mkdir(unfinished)
    try:
        whole = os.path.join(unfinished, "state")
        save_file(held, whole, facts)
        os.replace(whole, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_state(model: PreTrainedModel, path: str | os.PathLike) -> Any:
    """Read a state for the model that wrote it, into the devices and dtypes that the model computes with."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            held = {name: file.get_tensor(name).clone() for name in file.keys()}  # the file may be replaced later
    except SafetensorError as error:
        raise damaged(path, str(error)) from error
    if facts.get("format") not in (FORMAT, WITH_TURNS):
        wrote = f"{facts['format']!r}" if "format" in facts else "no state of a linearized model"
        raise ValueError(f"{os.fspath(path)!r} holds {wrote}, and {WITH_TURNS!r} is read here: read the text again")
    if facts.pop("checksum", None) != checksum(held, facts):
        raise damaged(path, "its checksum does not fit")
    refuse_other_model(path, facts, held.pop(WEIGHTS, torch.empty(0)), model)
    sizes = [*json.loads(facts.get("turns", "[]")), (int(facts["tokens"]), int(facts["texts"]))]
    start = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    cache = model.empty_cache()
    with torch.no_grad():
        model(input_ids=start, cache=cache, use_cache=True, logits_to_keep=1)
    states, last = [cache.fork() if tokens else model.empty_cache() for tokens, _ in sizes], len(sizes) - 1
    expected = {name_in_file(name, turn, last) for turn, state in enumerate(states) for name in places(state)}
    if expected != held.keys():
        raise damaged(path, "it names other tensors than a state of this model has")
    for turn, (state, (tokens, texts)) in enumerate(zip(states, sizes, strict=True)):
        own = {name: held[name_in_file(name, turn, last)] for name in places(state)}
        fill(state, own, tokens, texts, path)
    states[-1].turns = states[:-1]
    return states[-1]


def name_in_file(name: str, turn: int, turns: int) -> str:
    """Name a tensor of the state before a turn, by the number of the turn; after the last one, the name is its own."""
    return name if turn == turns else f"turn {turn}: {name}"


def fill(cache: Any, held: dict[str, Tensor], tokens: int, texts: int, path: str | os.PathLike) -> None:
    """Put the tensors of a file into a cache that has read one token, or none."""
    for name, (holder, attribute) in places(cache).items():
        own, stored = getattr(holder, attribute), held[name]
        same_kind = own.dtype == stored.dtype or (own.is_floating_point() and stored.is_floating_point())
        if not same_kind or list(stored.shape) != shape_of(own, holder, attribute, texts, tokens):
            raise damaged(path, f"{name} is {tuple(stored.shape)} of {stored.dtype}")
        if attribute == "count" and not ((stored >= 0) & (stored <= tokens)).all():
            raise damaged(path, f"{name} counts other tokens than were read")
        setattr(holder, attribute, stored.to(own.device, own.dtype))
    for layer in cache.layers:
        for counter in ("tokens_read", "cumulative_length"):
            if hasattr(layer, counter):
                setattr(layer, counter, tokens)


def places(cache: Any) -> dict[str, tuple[Any, str]]:
    """Return the object and the name of every tensor of a cache; one that has read nothing has none."""
    places_by_name: dict[str, tuple[Any, str]] = {}
    for index, layer in enumerate(cache.layers):
        if not layer.is_initialized:
            continue
        if not hasattr(layer, "memory"):  # the teacher's own kind
            places_by_name |= {f"{index}.{name}": (layer, name) for name in ("keys", "values")}
        else:
            for group, state in enumerate(layer.memory):
                places_by_name |= {f"{index}.{group}.{name}": (state, name) for name in tensors(state)}
    return places_by_name


def shape_of(own: Tensor, holder: Any, attribute: str, texts: int, tokens: int) -> list[int]:
    """Return the shape of a tensor that is `own` after one token of one text."""
    shape = [texts, *own.shape[1:]]
    if attribute in ("k", "v", "real", "keys", "values"):  # all tokens, or those that a native window holds
        window = getattr(holder, "sliding_window", None)
        shape[-1 if attribute == "real" else -2] = tokens if window is None else min(tokens, window - 1)
    return shape


def identify(model: Any) -> dict[str, str]:
    """Describe a model: its teacher, its revision, its dtype, and a hash of its config."""
    config = model.config
    base = {name: value for name, value in config.to_dict()["base"].items() if name not in VOLATILE}
    described = [base, config.layers, config.sinks, config.feature_map]
    teacher = "@".join(filter(None, map(config.teacher.get, ("name", "revision", "file"))))
    return {
        "teacher": teacher or "unnamed",
        "revision": getattr(config, "_commit_hash", None) or "",
        "config": hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def sample_weights(model: Any) -> Tensor:
    """Take some numbers of every weight; none at all where weights are elsewhere."""
    samples = []
    for weight in model.parameters():
        if weight.is_meta:
            return torch.empty(0)
        numbers = weight.detach().flatten()
        samples.append(numbers[:: max(1, len(numbers) // SAMPLED)][:SAMPLED].float().cpu())
    return torch.cat(samples)


def refuse_other_model(path: str | os.PathLike, facts: dict[str, str], weights: Tensor, model: Any) -> None:
    """Refuse a state that another model, or another revision of this one, has made."""
    own = identify(model)
    unlike = [] if facts.get("config") == own["config"] else ["config"]
    if not unlike and not alike(weights, sample_weights(model), facts.get("dtype") == own["dtype"]):
        unlike = ["weights"]
    if unlike:
        wrote, reads = (
            f"a student of {known.get('teacher')}" + (f" at {known['revision']}" if known.get("revision") else "")
            for known in (facts, own)
        )
        raise ValueError(
            f"{os.fspath(path)!r} is the state of another model ({wrote}; this is {reads}, and their {unlike[0]} "
            "differs): load it with the model that read the text, or read the text again"
        )


def alike(weights: Tensor, own: Tensor, same_dtype: bool) -> bool:
    """Whether two samples are of the same weights: equal in bf16, or near enough for two dtypes."""
    if not len(weights) or not len(own):
        return True
    if weights.shape != own.shape:
        return False
    if torch.equal(weights.bfloat16(), own.bfloat16()):
        return True
    return not same_dtype and torch.allclose(weights, own, rtol=ROUNDING, atol=LEAST)


def damaged(path: str | os.PathLike, why: str) -> ValueError:
    return ValueError(f"{os.fspath(path)!r} is damaged ({why}): read the text again")


def checksum(held: dict[str, Tensor], facts: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(held):
        digest.update(name.encode())
        digest.update(as_bytes(held[name]))
    return digest.hexdigest()


def as_bytes(x: Tensor) -> bytes:
    return x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
