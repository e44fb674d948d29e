"""Reads the Hub: finds a model, pins its revision, downloads its files, and streams data sets. Runs no code of it.

hub/repository.py writes to the Hub. A token is sent only if the caller passes one, or if its owner uses this machine:
a Space never uses its own token for a visitor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml
from huggingface_hub import (
    DatasetCard,
    HfApi,
    ModelCard,
    constants,
    get_token,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    HFValidationError,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from linearizer.errors import LinearizerError, ModelNotAvailable, TextError
from linearizer.hub.errors import ANSWER_ERRORS, HUB_ERRORS, Use, describe_error, describe_missing, redact
from linearizer.hub.gguf_files import read_head, read_local_head, stand_ins, weigh_head, write_stand_in
from linearizer.hub.weight_files import (
    GGUF,
    INDEX,
    SINGLE,
    Weights,
    check_format,
    check_other_format,
    damaged_weights,
    weigh_folder,
)
from linearizer.plan.json_products import quote
from linearizer.run.files import find_carried
from linearizer.run.names import HubName, id_of_address

if TYPE_CHECKING:
    from datasets import IterableDatasetDict

DEMO = "demo"
CONFIG = "config.json"
TERMS = ("license", "license_name", "license_link", "language")  # of a model's card
SEARCH_SECONDS = 4  # limit for the Hub's answer to a search
HUB_SECONDS = 10  # limit for the Hub's answer to a request
MAX_NAME_CHARACTERS = 250  # of an id with its revision
NAMES = "name a folder, a GGUF file, `org/name`, `org/name@revision`, `org/name:FILE.gguf` or `demo`"


@dataclass(frozen=True)
class Source:
    """A model, pinned to one revision."""

    name: str  # as the user wrote it
    folder: Path | None  # of a local model
    repo_id: str | None
    revision: str | None  # the commit; None for a local model
    gated: bool
    weights: Weights
    terms: dict[str, Any] = field(default_factory=dict)  # those of TERMS that its author states
    head: Path | None = None  # of a GGUF file: the file itself, or a stand-in without its weights

    @property
    def licence(self) -> str | None:
        licence = self.terms.get("license")
        if licence == "other":
            licence = self.terms.get("license_name") or licence
        return ", ".join(licence) if isinstance(licence, list) else licence

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that an inspection copies."""
        return {name: getattr(self, name) for name in ("name", "revision", "licence", "gated", "terms")}

    @property
    def pinned(self) -> str | None:
        """The name under which the Hub has the same weights at any time; None for a local model."""
        if self.repo_id is None:
            return None
        return str(HubName(self.repo_id, self.revision, self.weights.files[0] if self.head else None))


def access_token(token: str | None = None) -> str | bool:
    """Choose the token to send: the argument, or the user's own at their own machine, or none (False)."""
    if token:
        return token
    if os.environ.get("SPACE_ID") or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return False
    return get_token() or False


def find_model(name: str, token: str | None = None) -> Source:
    """Find `demo`, a local folder or GGUF file, or a model of the Hub (see HubName), without downloading any weight."""
    if name == DEMO:
        if (folder := find_carried("assets/demo-model")).is_dir():
            return describe_folder(name, folder)
        raise ModelNotAvailable("'demo' was not installed with this package: run from a checkout of the project")
    name = id_of_address(name)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return describe_folder(name, Path(path))
    if os.path.isfile(path):
        if not path.endswith(f".{GGUF}"):
            raise ModelNotAvailable(f"{name!r} is a file: name the folder that holds it, or a GGUF file")
        file, head = Path(path), read_local_head(name, Path(path))
        weights = weigh_head(file.name, head, file.stat().st_size)
        return Source(name, file.parent, None, None, False, weights, terms_of(head.terms), file)
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ModelNotAvailable(f"{quote(name)} is not a name of a model: {NAMES}")
    if name.startswith((".", "/", "~")) or HubName.of(name).repo_id.count("/") > 1 or "@/" in name:
        raise ModelNotAvailable(f"{name!r} is not a folder here: {NAMES}")
    return describe_on_hub(name, token)


def search_models(query: str, count: int, token: str | None = None) -> list[str]:
    """List the text-generating models of the Hub whose name contains a query, the most downloaded first.

    A single request: without a network the Hub's client would repeat it for half a minute.
    """
    fields = {"filter": "text-generation", "sort": "downloads", "limit": str(count)} | (
        {"search": query} if query else {}
    )
    try:
        headers, address = build_hf_headers(token=access_token(token)), f"{constants.ENDPOINT}/api/models"
        answer = get_session().get(address, params=fields, headers=headers, timeout=SEARCH_SECONDS)
        hf_raise_for_status(answer)
        return [model["id"] for model in answer.json()]
    except HUB_ERRORS as error:
        use = Use("searched", ModelNotAvailable, ModelNotAvailable, "connect, or name a local folder or `demo`")
        raise describe_error("the Hub", error, use) from error


def fetch(source: Source, patterns: tuple[str, ...], token: str | None = None) -> Path:
    """Download the matching files of a model that are not in the cache; return their folder."""
    if source.folder is not None:
        return source.folder
    assert source.repo_id is not None
    with explain_model_errors(source.name, token):
        folder = snapshot_download(
            source.repo_id, revision=source.revision, allow_patterns=list(patterns), token=access_token(token)
        )
    return Path(folder)


def download_bytes(source: Source) -> int:
    """Estimate the bytes of a model's weights that are not in the cache yet."""
    if source.folder is not None or source.repo_id is None:
        return 0
    files = source.weights.files
    cached = (try_to_load_from_cache(source.repo_id, file, revision=source.revision) for file in files)
    return source.weights.bytes * sum(not isinstance(path, str) for path in cached) // len(files)


def local_weight_files(source: Source) -> tuple[Path, ...]:
    """List the files of a model's weights on this machine; none if one of them is missing."""
    if source.folder is not None:
        return tuple(source.folder / file for file in source.weights.files)
    assert source.repo_id is not None
    paths = [try_to_load_from_cache(source.repo_id, file, revision=source.revision) for file in source.weights.files]
    return tuple(Path(path) for path in paths if isinstance(path, str)) if None not in paths else ()


def cache_folder() -> Path:
    """Return the folder of downloaded models."""
    return Path(constants.HF_HUB_CACHE)


def home_folder() -> Path:
    """Return the Hub's folder of this machine, which is made if there is none."""
    home = Path(constants.HF_HOME)
    home.mkdir(parents=True, exist_ok=True)
    return home


@contextmanager
def explain_model_errors(name: str, token: str | None = None) -> Iterator[None]:
    """Turn errors of the Hub into one sentence."""
    page = f"{constants.ENDPOINT}/{HubName.of(name).repo_id}"
    try:
        yield
    except RevisionNotFoundError as error:
        raise ModelNotAvailable(
            f"{name!r} names a revision that does not exist: see {page}/tree/main for the model's branches and commits"
        ) from error
    except RemoteEntryNotFoundError as error:
        raise damaged_weights(name, "a file that it names is missing") from error
    except SafetensorsParsingError as error:
        raise damaged_weights(name, error) from error
    except HFValidationError as error:
        raise ModelNotAvailable(f"{name!r} is neither a folder here nor an id of the Hub: {NAMES}") from error
    except HUB_ERRORS as error:
        connect, signed_in = advise_offline(name), bool(access_token(token))
        use = Use("loaded", ModelNotAvailable, ModelNotAvailable, connect, page=page, signed_in=signed_in)
        raise describe_error(repr(name), error, use) from error


def stream_dataset(identifier: str, config: str | None, token: str | None = None) -> IterableDatasetDict:
    """Open every split of a data set of the Hub, or of a local folder of data files, as a stream."""
    from datasets import get_dataset_config_names, load_dataset

    hub, revision = HfApi(token=access_token(token)), None
    if not Path(identifier).exists():  # `datasets` tries for half a minute, and does not tell gated from missing
        hub.auth_check(identifier, repo_type="dataset")
        revision = hub.dataset_info(identifier, timeout=HUB_SECONDS).sha  # what is checked is what is read
    check_data_files(identifier, hub, revision)
    if config is not None:
        configs = get_dataset_config_names(identifier, revision=revision, token=access_token(token))
        if config not in configs:
            raise TextError(f"{identifier!r} has no config {config!r}: it has {', '.join(configs)}")
    return load_dataset(identifier, config, revision=revision, streaming=True, token=access_token(token))


def fetch_from_dataset(name: str, file: str, token: str | None = None) -> Path:
    """Download a file of a data set of the Hub, named as a model is."""
    pinned, hub = HubName.of(name), HfApi(token=access_token(token))
    with explain_dataset_errors(name, token):
        try:
            return Path(hub.hf_hub_download(pinned.repo_id, file, repo_type="dataset", revision=pinned.revision))
        except RemoteEntryNotFoundError as error:
            raise TextError(f"{name!r} has no {file}: name a data set that `linearizer push --state` made") from error


def check_data_files(identifier: str, hub: HfApi, revision: str | None) -> None:
    """Refuse a data set whose configs name files outside of it: `datasets` would read any file of this machine."""
    for name in ("README.md", ".huggingface.yaml"):
        path = Path(identifier) / name
        if revision is not None:
            try:
                path = Path(hub.hf_hub_download(identifier, name, repo_type="dataset", revision=revision))
            except RemoteEntryNotFoundError:
                continue
        if path.is_file():
            is_card = path.suffix == ".md"
            stated = DatasetCard.load(path).data if is_card else yaml.safe_load(path.read_text(encoding="utf-8"))
            for text in list_texts((stated or {}).get("configs")):
                if leads_outside(text):
                    raise TextError(
                        f"{identifier!r} names files outside of itself ({quote(text)}): name another data set"
                    )


def leads_outside(path: str) -> bool:
    """Whether `datasets` would look for a data file elsewhere than in its data set."""
    return bool(urlsplit(path).scheme) or "::" in path or path.startswith(("/", "~")) or ".." in path.split("/")


def list_texts(value: Any) -> Iterator[str]:
    """List the texts in nested lists and dictionaries, except the names of configs."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from list_texts(item)
    elif isinstance(value, dict):
        yield from list_texts([item for name, item in value.items() if name != "config_name"])


@contextmanager
def explain_dataset_errors(identifier: str, token: str | None = None) -> Iterator[None]:
    """Turn errors of a data set into one sentence."""
    from datasets.exceptions import DatasetNotFoundError

    signed_in = bool(access_token(token))
    try:
        yield
    except LinearizerError:
        raise
    except DatasetNotFoundError as error:
        raise TextError(describe_missing(repr(identifier), signed_in)) from error
    except ANSWER_ERRORS as error:
        page = f"{constants.ENDPOINT}/datasets/{identifier}"
        connect = "connect, or use `builtin` or `file:PATH`"
        use = Use("read", TextError, TextError, connect, page=page, signed_in=signed_in)
        raise describe_error(repr(identifier), error, use) from error
    except Exception as error:  # each format is read in its own way, with errors of many types
        raise TextError(f"{identifier!r} cannot be read ({redact(error)}): name another data set") from error


def describe_folder(name: str, folder: Path) -> Source:
    if not (folder / CONFIG).is_file():
        check_other_format(name, [path.name for path in folder.iterdir()])
        raise ModelNotAvailable(f"{name!r} is a folder without {CONFIG}: name the folder of a model")
    card = None
    if (folder / "README.md").is_file():
        with suppress(ValueError, TypeError, RecursionError, yaml.YAMLError):  # nothing depends on a damaged card
            card = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    return Source(name, folder, None, None, False, weigh_folder(name, folder), terms_of(card))


def describe_on_hub(name: str, token: str | None) -> Source:
    """Describe a model of the Hub from its headers; fetch only the head of a GGUF file."""
    parsed, hub, path = HubName.of(name), HfApi(token=access_token(token)), None
    with explain_model_errors(name, token):
        info = hub.model_info(parsed.repo_id, revision=parsed.revision, files_metadata=True, timeout=HUB_SECONDS)
        sizes, terms = {file.rfilename: file.size or 0 for file in info.siblings or ()}, terms_of(info.card_data)
        if parsed.file:
            path = find_head(name, HubName(info.id, info.sha, parsed.file), sizes, token)
            head = read_local_head(name, path)
            weights, terms = weigh_head(parsed.file, head, sizes[parsed.file]), {**terms_of(head.terms), **terms}
        else:
            weights = weigh_repository(name, hub, info.id, info.sha, sizes)
    return Source(name, None, info.id, info.sha, bool(info.gated), weights, terms, path)


def find_head(name: str, pinned: HubName, sizes: Mapping[str, int], token: str | None) -> Path:
    """Return a file of the Hub if it is in the cache, or else its stand-in."""
    if (file := str(pinned.file)) not in sizes:
        files = ", ".join(sorted(path for path in sizes if path.endswith(f".{GGUF}")))
        raise ModelNotAvailable(f"{name!r} names a file that does not exist: there is {files or 'no GGUF file'}")
    if isinstance(cached := try_to_load_from_cache(pinned.repo_id, file, revision=pinned.revision), str):
        return Path(cached)
    path = stand_ins() / repo_folder_name(repo_id=pinned.repo_id, repo_type="model") / str(pinned.revision) / file
    if not path.exists():
        address = hf_hub_url(pinned.repo_id, file, revision=pinned.revision)

        def read(count: int) -> bytes:
            headers = {**build_hf_headers(token=access_token(token)), "range": f"bytes=0-{count - 1}"}
            answer = get_session().get(address, headers=headers, timeout=HUB_SECONDS)
            hf_raise_for_status(answer)
            return answer.content

        _, data = read_head(name, sizes[file], read)
        write_stand_in(path, data, sizes[file])
    return path


def weigh_repository(name: str, hub: HfApi, repo_id: str, revision: str | None, sizes: dict[str, int]) -> Weights:
    """Count the parameters of a repository from its headers, which must match the length of each file."""
    if CONFIG not in sizes:
        check_other_format(name, sizes)
        raise ModelNotAvailable(f"{name!r} has no {CONFIG}: name a model that transformers can load")
    check_format(name, sizes)
    try:
        headers = hub.get_safetensors_metadata(repo_id, revision=revision).files_metadata
        needed = {
            file: 8 + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
            for file, header in headers.items()
        }
        parameters = sum(sum(header.parameter_count.values()) for header in headers.values())
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # the client checks no types
        raise damaged_weights(name, f"its {INDEX} or a header cannot be read: {error}") from error
    if not headers:
        raise damaged_weights(name, f"{INDEX} names no files")
    for file, least in needed.items():
        if sizes.get(file, 0) < least:
            raise damaged_weights(name, f"{file} has {sizes.get(file, 0)} bytes and should have more than {least}")
    names = frozenset(tensor for header in headers.values() for tensor in header.tensors)
    return Weights(tuple(sorted(headers)), parameters, sum(sizes[file] for file in headers), names)


def terms_of(card: Any) -> dict[str, Any]:
    """Keep the terms that a student's card copies from its teacher's, if they are texts or lists of texts."""
    stated = {name: card.get(name) for name in TERMS} if card else {}
    texts = {name: value if isinstance(value, list) else [value] for name, value in stated.items() if value != ""}
    return {name: stated[name] for name, values in texts.items() if all(isinstance(text, str) for text in values)}


def advise_offline(name: str) -> str:
    """Describe what to do without a network: name a copy in the cache, which has a folder for each revision."""
    parsed = HubName.of(name)
    snapshots = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=parsed.repo_id, repo_type="model") / "snapshots"
    for folder in snapshots.glob(parsed.revision or "*"):
        if parsed.file and (folder / parsed.file).exists():
            return f"a copy is in the cache, so name that file instead ({folder / parsed.file}), or connect"
        if (folder / CONFIG).exists() and ((folder / SINGLE).exists() or (folder / INDEX).exists()):
            return f"a copy is in the cache, so name its folder instead ({folder}), or connect"
    return "it is not in the cache either, so connect, or name a local folder"
