"""Loads the config, tokenizer and weights of a source, and the texts of a run. Never runs code of its repository."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from linearizer.amounts import size
from linearizer.errors import ModelNotAvailable, UnsupportedModel, first_line
from linearizer.hub.gguf_files import load_gguf_config, read_gguf
from linearizer.hub.models import CONFIG, Source, fetch, find_model
from linearizer.hub.weight_files import (
    INDEX,
    SINGLE,
    damaged_weights,
    list_shards,
    read_json,
    read_tensors,
    write_tensors,
)
from linearizer.plan.inspection import Inspection
from linearizer.plan.json_products import quote
from linearizer.plan.plan import Plan
from linearizer.progress import quiet
from linearizer.run.events import EventName
from linearizer.run.files import remove
from linearizer.run.folder import Run
from linearizer.run.weight_digests import PROCESSOR, TOKENIZER
from linearizer.student.modeling_linearized import class_of
from linearizer.teacher.config_bounds import MAX_BYTES, check_counts
from linearizer.teacher.devices import choose_device, compute_anywhere
from linearizer.teacher.inspect_model import inspect_model, verify_teacher
from linearizer.teacher.observing import implementation_of_teacher
from linearizer.teacher.quantised import (
    READ_HERE,
    expand_weights,
    forget_quantisation,
    is_packed,
    keep_as_stored,
    method_of,
    name_unpacked,
    quantisation_of,
    state_quantisation,
)
from linearizer.teacher.ram import return_freed_memory
from linearizer.teacher.streaming import leave_states_in_place, load_with_experts, place_weights, streamed_weights
from linearizer.teacher.support import build_blueprint, names_in_files, whole_of
from linearizer.teacher.text import read_texts
from linearizer.teacher.whole_models import choose_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TEMPLATE = "chat_template.json"
GENERATION = "generation_config.json"
KINDS_OF_SETTINGS: dict[str, tuple[type, ...]] = {  # transformers does not check these
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "top_k", "max_length", "max_new_tokens"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    "do_sample": (bool,),
}
SAFELY: dict[str, Any] = {  # options of from_pretrained
    "trust_remote_code": False,
    "use_safetensors": True,
    "ignore_mismatched_sizes": True,  # check_complete reads them in the report
    "output_loading_info": True,
}
TEXTS = "state/texts.safetensors"  # of a run's folder


def load_config(source: Source, token: str | None = None, text_only: bool = False) -> PreTrainedConfig:
    """Load a model's config: that of its text tower, if its pictures are not served, or with `text_only`."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    if source.head is not None:
        config = load_gguf_config(source.name, source.head)
        check_counts(source.name, {"num_hidden_layers": config.num_hidden_layers}, len(source.weights.names))
        return config
    folder = fetch(source, (CONFIG,), token)
    if (folder / CONFIG).stat().st_size > MAX_BYTES:
        raise UnsupportedModel(f"{source.name!r} has a {CONFIG} of more than {size(MAX_BYTES)}: repair that file")
    content = read_json(source.name, folder / CONFIG)
    check_counts(source.name, content, len(source.weights.names))
    kind = content.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise UnsupportedModel(
            f"{source.name!r} has a {CONFIG} with a `model_type` that is not a string: repair that file"
        )
    for section in (content, content.get("text_config")):
        if isinstance(section, dict) and not isinstance(section.get("quantization_config", {}), dict | None):
            raise UnsupportedModel(
                f"{source.name!r} has a {CONFIG} with a `quantization_config` that is not an object: repair that file"
            )
    if kind not in CONFIG_MAPPING and "auto_map" in content:
        raise UnsupportedModel(
            f"{source.name!r} needs code from its repository, which is never run here: "
            f"name a model of a kind that transformers itself knows"
        )
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{source.name!r} is of the kind {kind!r}, which transformers {transformers.__version__} does not know: "
            f"name another model, or update transformers"
        )
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            state_quantisation(config)
            return choose_config(config, source.weights.names, text_only)
        except Exception as error:  # each kind checks its config in its own way, with errors of many types
            raise UnsupportedModel(
                f"{source.name!r} has a {CONFIG} that transformers refuses ({first_line(error)}): repair that file"
            ) from error


def stored_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """Return the type that a model's weights are stored in, as its config states it."""
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


def load_tokenizer(source: Source, token: str | None = None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer."""
    from transformers import AutoTokenizer

    if source.head is not None:
        folder, options, remedy = source.head.parent, {"gguf_file": source.head.name}, "name a file that has one"
    else:
        folder, options = fetch(source, (CONFIG, *TOKENIZER), token), {}
        remedy = "put its tokenizer's files next to its weights"
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
            tokenizer("a")  # wrong settings fail only here
            return tokenizer
        except Exception as error:  # each kind reads its files in its own way, with errors of many types
            raise ModelNotAvailable(
                f"{source.name!r} has no tokenizer that can be loaded ({first_line(error)}): {remedy}"
            ) from error


def load_processor_files(source: Source, token: str | None = None) -> dict[str, dict[str, Any]]:
    """Read the files that say how a model's pictures are prepared, by name, without the code that they may name."""
    folder = fetch(source, (CONFIG, *PROCESSOR), token)
    paths = sorted({path for pattern in PROCESSOR for path in folder.glob(pattern)})
    files = {path.name: read_json(source.name, path) for path in paths}
    return {name: {key: x for key, x in content.items() if key != "auto_map"} for name, content in files.items()}


def load_teacher(
    source: Source,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    token: str | None = None,
    places: dict[str, str] | None = None,
    text_only: bool = False,
) -> PreTrainedModel:
    """Load a model frozen, in evaluation mode; check that every weight is present, of the right shape and finite.

    `places` says where its parts lie; None: all on the device.
    """
    from transformers import GenerationConfig

    # MKL divides its work otherwise once the number of threads was set, as measuring does: a process that resumes after
    # that would compute other bits.
    torch.set_num_threads(torch.get_num_threads())
    config = load_config(source, token, text_only)
    packed, read_here, quantised = is_packed(config), method_of(config) in READ_HERE, method_of(config) is not None
    folder = fetch_weights(source, token)
    read = partial(read_model, source, folder, config, dtype, {"": device} if packed else places)
    model = load_with_experts(places, lambda experts: load_intact(source.name, partial(read, experts)))
    if packed:
        keep_as_stored(model)
        return model
    if read_here and (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if quantised:
        forget_quantisation(model)
    if places is None:
        return model.to(device)
    leave_states_in_place(model)
    return model


def load_intact(name: str, read: Callable[[], tuple[PreTrainedModel, dict[str, Any]]]) -> PreTrainedModel:
    """Read a model frozen, in evaluation mode; refuse weights that are damaged, missing, or not finite."""
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys")  # of parameters that are in no submodule
        try:
            model, report = read()
        except (SafetensorError, OSError) as error:
            raise damaged_weights(name, first_line(error)) from error
    check_complete(name, report)
    check_finite_weights(name, model)
    compute_anywhere(model)
    return model.requires_grad_(False).eval()


def fetch_weights(source: Source, token: str | None) -> Path:
    """Download the files of a model except its tokenizer, and check that all of them are there."""
    folder = fetch(source, (CONFIG, GENERATION, INDEX, *source.weights.files), token)
    missing = [file for file in source.weights.files if not (folder / file).is_file()]
    if missing:  # without a network, the Hub's client returns the files that it has
        raise ModelNotAvailable(f"{source.name!r} lacks {missing[0]}, no network: connect, or name a local folder")
    if source.head is None:
        if (folder / INDEX).is_file() and SINGLE not in source.weights.files:
            list_shards(source.name, read_json(source.name, folder / INDEX))
        if (folder / GENERATION).is_file():
            check_generation(source.name, read_json(source.name, folder / GENERATION))
    return folder


def check_generation(name: str, settings: dict[str, Any]) -> None:
    """Refuse settings of generation that transformers cannot use: it would fail only in the middle of a run."""
    from transformers import GenerationConfig

    try:
        for key, kinds in KINDS_OF_SETTINGS.items():
            value = settings.get(key)
            values = value if isinstance(value, list) and key == "eos_token_id" else [value]
            if value is not None and not all(type(each) in kinds for each in values):
                raise TypeError(f"{key} is {quote(str(value))}")
        with quiet():
            GenerationConfig.from_dict(settings).validate()
    except Exception as error:  # each setting is read in its own way, with errors of many types
        raise ModelNotAvailable(
            f"{name!r} has a {GENERATION} that cannot be used ({first_line(error)}): repair that file, or remove it"
        ) from error


def read_model(
    source: Source,
    folder: Path,
    config: PreTrainedConfig,
    dtype: str | torch.dtype,
    places: Any,
    experts: Path | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Let transformers make a model from its files, or from weights expanded here; report missing and wrong weights."""
    kind = class_of(type(config))
    attention = implementation_of_teacher(kind, config)
    options: dict[str, Any] = {**SAFELY, "dtype": dtype, "device_map": places, "attn_implementation": attention}
    options |= {} if experts is None else {"offload_folder": experts}
    tower = None
    if whole_of(config):
        tower = names_in_files(blueprint := build_blueprint(config), source.weights.names)
        name_unpacked(config, blueprint, tower, source.weights.names)
    if (method := method_of(config)) in READ_HERE:
        stated = quantisation_of(config)
        del config.quantization_config
        paths, blueprint = [folder / file for file in source.weights.files], build_blueprint(config)
        compute_dtype = computing_dtype(dtype, config)
        weights = expand_weights(source.name, paths, str(method), stated, blueprint, compute_dtype, tower)
        return type(blueprint).from_pretrained(None, state_dict=weights, config=config, **options)
    if source.head is not None:
        return read_gguf(folder / source.weights.files[0], config, {**options, "dtype": computing_dtype(dtype, config)})
    if method is not None and not is_packed(config):
        config.quantization_config = {**quantisation_of(config), "dequantize": True}
    return kind.from_pretrained(folder, config=config, key_mapping=tower, **options)


def check_complete(name: str, report: dict) -> None:
    """Refuse weights that do not fill the model: transformers would draw the missing ones at random."""
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise damaged_weights(name, f"{len(missing)} of its parameters are missing, such as {missing[0]}")
    if report["mismatched_keys"]:
        key, stored, expected = sorted(report["mismatched_keys"])[0]
        raise damaged_weights(name, f"{key} is stored as {tuple(stored)} and should be {tuple(expected)}")


def check_finite_weights(name: str, model: torch.nn.Module) -> None:
    resident = ((key, parameter) for key, parameter in model.named_parameters() if not parameter.is_meta)
    for key, parameter in chain(resident, streamed_weights(model)):
        if not torch.isfinite(parameter).all():
            raise ModelNotAvailable(
                f"{name!r} has weights that are not finite ({key} holds NaN or infinity): name an intact model"
            )


@dataclass(frozen=True)
class Teacher:
    """A teacher in memory, checked against its inspection."""

    source: Source
    inspection: Inspection
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stored: torch.dtype | None  # the type of its stored weights, if its config states it
    pictured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the files that prepare its pictures


def load_teacher_of(plan: Plan, token: str | None = None, inspection: Inspection | None = None) -> Teacher:
    """Load the teacher of a plan; without its inspection, first refuse a model that cannot be linearized."""
    source = find_model(plan.model, token)
    text_only = plan.text_only or (inspection is not None and inspection.tower_of is not None)
    config = load_config(source, token, text_only)
    if inspection is None:
        inspection = inspect_model(source, config)
        inspection.require_support()
    tokenizer = load_tokenizer(source, token)
    pictured = load_processor_files(source, token) if inspection.reads_pictures else {}
    if not tokenizer.chat_template:  # older models keep it among the files of their processor
        tokenizer.chat_template = pictured.get(TEMPLATE, {}).get("chat_template")
    places = place_weights(config, source, computing_dtype(plan.dtype, config), plan.device)
    if places is not None:
        return_freed_memory()
    model = load_teacher(source, plan.dtype, choose_device(plan.device), token, places, text_only)
    verify_teacher(model, inspection)
    return Teacher(source, inspection, model, tokenizer, stored_dtype(config), pictured)


def computing_dtype(dtype: str | torch.dtype, config: PreTrainedConfig) -> torch.dtype:
    """Return the type that a model computes in, if `dtype` is requested."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return (stored_dtype(config) or torch.float32) if dtype == "auto" else getattr(torch, dtype)


def texts_of(
    plan: Plan, teacher: Teacher, texts: int, token: str | None, least: int | None = None
) -> torch.Tensor:  # (texts, tokens)
    """Take the first texts of a plan's source, at the plan's length."""
    length = plan.resolved_length(teacher.inspection.max_positions)
    return read_texts(
        plan.text, teacher.tokenizer, length, texts, least=least, model=teacher.model, seed=plan.seed, token=token
    )


def texts_of_run(
    run: Run, teacher: Teacher, texts: int, token: str | None, least: int | None = None
) -> torch.Tensor:  # (texts, tokens)
    """Take the first texts of a run; later changes of its source do not change the texts that were read before."""
    stored, requested = read_kept_texts(run)
    if requested >= texts and len(stored) >= (texts if least is None else least):  # fewer only if the source ended
        return stored[:texts]
    read = texts_of(run.plan, teacher, texts, token, least)
    if requested:
        read = torch.cat([stored, read[len(stored) :]])
    write_tensors(run.folder / TEXTS, {"texts": read.int()}, str(texts))
    return read[:texts]


def read_kept_texts(run: Run) -> tuple[torch.Tensor, int]:  # (texts, tokens)
    """Read the texts that a run has stored, and the number of texts that was requested; drop damaged texts."""
    try:
        tensors, requested = read_tensors(run.folder / TEXTS)
        return tensors["texts"].long(), int(requested)
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        run.log(EventName.DROPPED, file=TEXTS, why=str(error))
        remove(run.folder / TEXTS)
    return torch.empty(0, 0, dtype=torch.long), 0
