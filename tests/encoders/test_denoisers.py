"""The denoiser of a pipeline becomes a student that diffusers loads; what is not served is refused with its reason."""

import json
import subprocess
import sys

import pytest
import torch

from linearizer.encoders import denoiser
from linearizer.encoders.attention_both_ways import BothWays

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers, which takes seconds to import

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 16, "patch_size": 1}
UNET = {"sample_size": 18, "block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 8}
BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
CAPTION = {"caption_channels": 8, "cross_attention_dim": 16, "norm_type": "ada_norm_single", "out_channels": 8}


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def pipeline(diffusers, tmp_path_factory):
    """The folder of a small pipeline with random weights."""
    folder = tmp_path_factory.mktemp("teacher") / "dit"
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(**HEADS, num_embeds_ada_norm=1000, out_channels=8)
    decoder = diffusers.AutoencoderKL(latent_channels=4, norm_num_groups=4, block_out_channels=(8,))
    diffusers.DiTPipeline(transformer, decoder, diffusers.DDIMScheduler()).save_pretrained(folder)
    return folder


def kinds(diffusers):
    prompt = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    sizes = {"resolution": None, "aspect_ratio": None}
    return {
        "DiT": (
            diffusers.DiTTransformer2DModel,
            {**HEADS, "num_embeds_ada_norm": 1000},
            {"class_labels": torch.tensor([3])},
        ),
        "PixArt": (
            diffusers.PixArtTransformer2DModel,
            {**HEADS, **CAPTION},
            {"encoder_hidden_states": prompt, "added_cond_kwargs": sizes},
        ),
        "UNet": (
            diffusers.UNet2DConditionModel,
            {**UNET, **BLOCKS, "norm_num_groups": 4, "attention_head_dim": 4},
            {"encoder_hidden_states": prompt},
        ),
    }


@pytest.mark.parametrize("kind", ["DiT", "PixArt", "UNet"])
def test_a_student_with_keys_for_all_patches_is_its_teacher_and_with_fewer_is_not(kind, diffusers):
    make, sizes, given = kinds(diffusers)[kind]
    torch.manual_seed(0)
    teacher = make(**sizes).eval()
    student = getattr(denoiser.modeling(), f"Linearized{kind}")(**sizes).eval()
    student.load_state_dict(teacher.state_dict())
    side = sizes["sample_size"]
    latents = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = teacher(latents, timestep=torch.tensor([7]), **given).sample
        for how, same in ((None, True), (BothWays((side, side), 40), True), (BothWays((2, 2), 9), False)):
            student.attend_with(how)
            found = student(latents, timestep=torch.tensor([7]), **given).sample
            assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4) is same


def test_a_picture_that_is_not_square_keeps_its_rows(diffusers):
    grid_of = denoiser.modeling().grid_of
    assert grid_of(24 * 10, 48, 20) == (24, 10)
    assert grid_of(12 * 5, 24, 9) == (12, 5)
    with pytest.raises(ValueError, match="61 tokens are not the patches"):
        grid_of(61, 24, 9)


def test_the_kl_of_a_step_is_that_of_its_gaussians(diffusers):
    """Two steps of DDPM from the same latents have equal variances, and means that differ by their noise."""
    scheduler, time = diffusers.DDIMScheduler(), 600
    latents, noise, other = torch.randn(3, 1, 4, 6, 6, generator=torch.Generator().manual_seed(3)).unbind()
    beta, kept = scheduler.betas[time], scheduler.alphas_cumprod[time]
    means = [(latents - beta / (1 - kept).sqrt() * each) / (1 - beta).sqrt() for each in (noise, other)]
    steps = [torch.distributions.Normal(mean, beta.sqrt()) for mean in means]
    exact = torch.distributions.kl_divergence(*steps).sum()
    call = denoiser.Call({"timestep": time, "sample": latents}, noise)
    torch.testing.assert_close(call.kl(other, scheduler), exact, rtol=1e-4, atol=1e-5)


def test_a_run_makes_a_pipeline_that_loads_without_this_package(pipeline, tmp_path, said):
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"text": "picture {n}"}}\n' for n in range(12)))
    words = ["--budget", 60, "--text", f"file:{tmp_path / 'prompts.jsonl'}", "--texts", 4, "--steps", 4, "--batch", 2]
    code, out, error = said("run", pipeline, *words, "--out", tmp_path / "run", "--json")
    assert code == 0, error
    product = json.loads(out)
    (judged,) = product["quality"]
    assert list(judged["rows"]) == ["student", "before training", "merged tokens", "window"]
    assert judged["rows"]["student"]["kl"]["mean"] <= judged["rows"]["before training"]["kl"]["mean"]
    assert "Judged on 4 latents; with other numbers of tokens than 256: not judged." in product["verdict"]["sentence"]
    program = f"""
import sys, torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained({str(tmp_path / "run" / "checkpoint")!r}, trust_remote_code=True)
assert "linearizer" not in sys.modules and type(pipe.transformer).__name__ == "LinearizedDiT"
torch.manual_seed(0)
with torch.no_grad():
    out = pipe.transformer(torch.randn(1, 4, 16, 16), torch.tensor([9]), torch.tensor([1])).sample
torch.save(out, {str(tmp_path / "out.pt")!r})
pipe([1], num_inference_steps=2)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    student = denoiser.Pipeline(tmp_path / "run" / "checkpoint", "transformer", "DiTTransformer2DModel").load_denoiser()
    torch.manual_seed(0)
    with torch.no_grad():
        expected = student(torch.randn(1, 4, 16, 16), torch.tensor([9]), torch.tensor([1])).sample
    assert torch.equal(torch.load(tmp_path / "out.pt"), expected)
    code, out, error = said("evaluate", tmp_path / "run")
    assert code == 2 and "is judged by its run alone" in error
    assert "from diffusers import DiffusionPipeline" in (tmp_path / "run" / "checkpoint" / "README.md").read_text()


@pytest.mark.parametrize(
    "entry, reason",
    [
        (
            ["diffusers", "FluxTransformer2DModel"],
            "its denoiser is not of a kind whose picture attends to itself alone",
        ),
        (["diffusers", ["odd"]], "attends to itself alone (it has none)"),
        (["modeling_own", "DiTTransformer2DModel"], "needs code from its repository for its transformer"),
    ],
)
def test_a_pipeline_that_is_not_served_is_refused_before_its_weights_are_read(entry, reason, tmp_path, said):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", "transformer": entry}))
    code, _, error = said("inspect", tmp_path)
    assert code == 2 and reason in error and error.count("\n") == 1
