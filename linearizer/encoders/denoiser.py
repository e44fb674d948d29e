"""Denoisers: the part of a diffusers pipeline that a student replaces. No code of a pipeline's folder is run."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linearizer.encoders.attention_both_ways import BothWays
from linearizer.errors import ModelNotAvailable, RequestError, UnsupportedModel, first_line
from linearizer.hub.weight_files import read_json
from linearizer.progress import quiet

PIPELINE = "model_index.json"
STUDENTS = {  # of each kind of teacher
    "DiTTransformer2DModel": "LinearizedDiT",
    "PixArtTransformer2DModel": "LinearizedPixArt",
    "UNet2DConditionModel": "LinearizedUNet",
}
CODE = "modeling_denoiser"  # of a checkpoint's part
CARRIED = ("attention_both_ways", CODE)  # its modules, each before those that import it
COPIED = (".json", ".safetensors", ".txt", ".model")  # endings of a pipeline's files without code
LIBRARIES = ("diffusers", "transformers", "stable_diffusion", None)  # stable_diffusion is a part of diffusers


@dataclass(frozen=True)
class Pipeline:
    """The folder of a pipeline, and the name and kind of its denoiser."""

    folder: Path
    part: str
    kind: str

    @staticmethod
    def is_at(model: str) -> bool:
        return os.path.isfile(os.path.join(os.path.expanduser(model), PIPELINE))

    @staticmethod
    def find(model: str) -> Pipeline:
        """Read the index of a pipeline; refuse it if its denoiser cannot be linearized, or if it needs other code."""
        folder = Path(os.path.expanduser(model))
        index = read_json(model, folder / PIPELINE)
        pairs = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
        parts = {name: pair for name, pair in pairs.items() if all(isinstance(value, str | None) for value in pair)}
        for name, (library, _) in parts.items():
            if library not in LIBRARIES:
                raise UnsupportedModel(
                    f"{model!r} needs code from its repository for its {name}, which is never run here: name a "
                    "pipeline whose parts are all of diffusers and transformers"
                )
        for name in ("transformer", "unet"):
            kind = parts.get(name, (None, None))[1]
            if kind in STUDENTS:
                return Pipeline(folder, name, kind)
        kinds = ", ".join(kind for name, (_, kind) in parts.items() if name in ("transformer", "unet") and kind)
        raise UnsupportedModel(
            f"{model!r} cannot be linearized, because its denoiser is not of a kind whose picture attends to itself "
            f"alone ({kinds or 'it has none'}): name a pipeline with {', '.join(STUDENTS)}"
        )

    def load_denoiser(self) -> Any:
        """Load the denoiser in float32, with replaceable attention; it attends as the teacher."""
        kind = getattr(modeling(), STUDENTS[self.kind])
        with explain_errors(self.folder):
            model = kind.from_pretrained(self.folder / self.part, use_safetensors=True)
        return model.float().requires_grad_(False).eval()

    def load_with(self, denoiser: Any) -> Any:
        """Load all other parts in float32."""
        from diffusers import DiffusionPipeline

        kwargs = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
        with explain_errors(self.folder):
            result = DiffusionPipeline.from_pretrained(self.folder, **{self.part: denoiser}, **kwargs).to(torch.float32)
        result.set_progress_bar_config(disable=True)
        return result

    def write_denoiser(self, folder: Path, denoiser: Any, way: BothWays) -> None:
        """Write the denoiser of a student, with its code."""
        denoiser.register_to_config(**{modeling().SETTING: {"block": list(way.block), "slots": way.slots}})
        denoiser.save_pretrained(folder / self.part)
        (folder / self.part / f"{CODE}.py").write_text(code_in_one_file(), encoding="utf-8")

    def write_others(self, folder: Path) -> None:
        """Write all other files of the teacher's pipeline, and an index from which diffusers loads the student."""

        def left_out(place: str, names: list[str]) -> list[str]:
            files = (name for name in names if not (Path(place) / name).is_dir())
            return [self.part, *(name for name in files if name.startswith(".") or not name.endswith(COPIED))]

        shutil.copytree(self.folder, folder, ignore=left_out, dirs_exist_ok=True)
        index = {**read_json(str(self.folder), self.folder / PIPELINE), self.part: [CODE, STUDENTS[self.kind]]}
        (folder / PIPELINE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def modeling() -> Any:
    """Import the module that needs diffusers."""
    try:
        from linearizer.encoders import modeling_denoiser
    except ImportError as error:
        raise RequestError("a pipeline needs diffusers: pip install 'linearizer[diffusion]'") from error
    return modeling_denoiser


def code_in_one_file() -> str:
    """Join the modules that a denoiser needs, without the imports between them."""
    sources = ((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in CARRIED)
    lines = (line for source in sources for line in [*source.splitlines(), "", ""])
    return "\n".join(line for line in lines if not line.startswith("from .")) + "\n"


@contextmanager
def explain_errors(folder: Path) -> Iterator[None]:
    """Turn diffusers' errors about a damaged pipeline into one sentence."""
    from diffusers.utils import logging

    try:
        with quiet(logging):
            yield
    except Exception as error:  # the parts of pipelines raise errors of many types
        raise ModelNotAvailable(
            f"{str(folder)!r} cannot be loaded by diffusers from safetensors alone ({first_line(error)}): repair it, "
            "or download it again"
        ) from error


@dataclass(frozen=True)
class Call:
    """A pipeline's inputs to its denoiser, and the noise that this found; students get the same inputs."""

    inputs: dict[str, Any]
    noise: torch.Tensor

    def ask(self, denoiser: Any) -> torch.Tensor:
        return noise_of(self.inputs, denoiser(**self.inputs))

    def kl(self, noise: torch.Tensor, scheduler: Any) -> torch.Tensor:
        """Return the KL of a step with other noise, in nats: |ε - ε'|² / 2σ², with the σ of ε in a step of DDPM."""
        time = torch.as_tensor(self.inputs["timestep"]).long().cpu()
        signal, added = scheduler.alphas_cumprod.cpu()[time], scheduler.betas.cpu()[time]
        weight = added / (2 * (1 - added) * (1 - signal))
        if scheduler.config.prediction_type == "v_prediction":
            weight = weight * signal
        return (weight.to(noise.device) * (noise - self.noise).square().flatten(1).sum(1)).mean()


def noise_of(inputs: dict[str, Any], out: Any) -> torch.Tensor:
    """Return the noise in a denoiser's output, where variances may follow it."""
    latents = inputs["sample"] if "sample" in inputs else inputs["hidden_states"]
    return out[0][:, : latents.shape[1]]


def check_scheduler(model: str, scheduler: Any) -> None:
    """Refuse a scheduler that does not say how much noise a step adds."""
    kind = getattr(scheduler.config, "prediction_type", None)
    if not hasattr(scheduler, "alphas_cumprod") or kind not in ("epsilon", "v_prediction"):
        raise UnsupportedModel(
            f"{model!r} has a scheduler ({type(scheduler).__name__}) whose steps have no variance that is known here: "
            "put a DDIM or DDPM scheduler that predicts noise or velocity into its folder"
        )


def draw_calls(pipeline: Any, denoiser: Any, prompt: str, seed: int, steps: int) -> list[Call]:
    """Let the teacher draw a picture for a prompt, or for one of its classes, and record the denoiser's calls."""
    signature = inspect.signature(super(modeling().BothWaysDenoiser, denoiser).forward)
    calls = list[Call]()

    def note(module: Any, args: tuple, kwargs: dict, out: Any) -> None:
        inputs = {**signature.bind(*args, **kwargs).arguments, "return_dict": False}
        calls.append(Call(inputs, noise_of(inputs, out)))

    generator = torch.Generator().manual_seed(seed)
    classes = getattr(denoiser.config, "num_embeds_ada_norm", None) or 1
    label = int(torch.randint(classes, (1,), generator=generator))
    by_prompt = "prompt" in inspect.signature(pipeline.__call__).parameters
    topic = {"prompt": prompt, "output_type": "latent"} if by_prompt else {"class_labels": [label], "output_type": "np"}
    hook = denoiser.register_forward_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            pipeline(**topic, num_inference_steps=steps, generator=generator)
    finally:
        hook.remove()
    return calls
