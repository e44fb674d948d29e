"""The run of an encoder, by its command: what it makes, what it keeps when it is stopped, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import AutoTokenizer

from linearizer.encoders import distill_encoder, encoder_run
from linearizer.encoders.attention_interface import IMPLEMENTATION
from linearizer.encoders.distill_encoder import distil, read_states, states_loss
from linearizer.encoders.encoder_plan import EncoderPlan
from linearizer.encoders.encoder_quality import Outputs, alike, compare
from linearizer.progress import finish

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, initializer_range=0.2)
WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory):
    """A small sentence encoder, with the files by which sentence-transformers knows it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("teacher") / "sentences"
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **SIZES, vocab_size=64, max_position_embeddings=256)
    AutoModel.from_config(config).save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS])}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    (folder / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "Transformer"}]')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words of a few topics, each a passage of its own."""
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("text") / "words.jsonl"
    topics = [draw.choice(WORDS, 12) for _ in range(5)]
    rows = [" ".join(draw.choice(topics[number % 5], 200)) for number in range(12)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return f"file:{path}"


def options(text, folder, **changes):
    given = {"budget": 40, "length": 160, "text": text, "texts": 6, "steps": 2, "batch": 2, "out": folder, **changes}
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def test_a_run_makes_a_student_that_loads_and_is_judged_beside_controls(sentence_encoder, text, tmp_path, said):
    code, out, error = said("run", sentence_encoder, *options(text, tmp_path / "run"), "--json")
    assert code == 0, error
    product = json.loads(out)
    assert list(product["quality"]) == ["student", "before training", "window", "merged tokens"]
    assert all(row["kl"] >= 0 and row["keys"] <= 40 for row in product["quality"].values())
    student = AutoModel.from_pretrained(tmp_path / "run" / "checkpoint", trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint")
    given = tokenizer(" ".join(WORDS * 2), return_tensors="pt")
    ours = encoder_run.load_student(tmp_path / "run" / "checkpoint")
    with torch.no_grad():
        assert torch.equal(student(**given).last_hidden_state, ours(**given).last_hidden_state)
    kept = (sentence_encoder / "1_Pooling" / "config.json").read_text()
    assert (tmp_path / "run" / "checkpoint" / "1_Pooling" / "config.json").read_text() == kept
    assert str(sentence_encoder.parent) not in (tmp_path / "run" / "checkpoint" / "config.json").read_text()


def test_a_run_that_was_stopped_goes_on_after_its_last_finished_part(sentence_encoder, text, tmp_path):
    plan = EncoderPlan(str(sentence_encoder), 40, 160, text, texts=6, steps=2, batch=2)
    whole = finish(encoder_run.linearize(encoder_run.begin(tmp_path / "whole", plan)))
    run = encoder_run.begin(tmp_path / "run", plan)
    for progress in encoder_run.linearize(run):  # noqa: B007
        if run.checkpoint.is_dir():
            break
    weights = (run.checkpoint / "model.safetensors").stat().st_mtime_ns
    assert not run.quality
    assert finish(encoder_run.linearize(encoder_run.begin(tmp_path / "run", plan, resume=True))) == whole
    assert (run.checkpoint / "model.safetensors").stat().st_mtime_ns == weights


def test_pictures_are_read_through_the_processor_of_their_model(tmp_path, said):
    config = AutoConfig.for_model("dinov2", **SIZES, image_size=56, patch_size=4)
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    size = {"size": {"height": 56, "width": 56}, "do_center_crop": False, "image_processor_type": "BitImageProcessor"}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(size))
    (tmp_path / "pictures").mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    words = ["--budget", 40, "--texts", 4, "--steps", 1, "--batch", 2, "--pictures", tmp_path / "pictures"]
    code, out, error = said("run", tmp_path / "model", *words, "--out", tmp_path / "run", "--json")
    assert code == 0, error
    product = json.loads(out)
    assert product["tokens"] == 197 and product["both_ways"] == {"block": [1, 1], "slots": 21, "first": 1, "last": 0}
    (tmp_path / "pictures" / "0.png").write_bytes(b"none")
    code, _, error = said("run", tmp_path / "model", *words, "--out", tmp_path / "again")
    assert code == 2 and "0.png' is not a picture that can be read" in error


def test_distillation_brings_a_student_nearer_to_its_teacher_or_leaves_it(
    sentence_encoder, text, tmp_path, monkeypatch
):
    plan = EncoderPlan(str(sentence_encoder), 40, 160, text, texts=4, steps=8, batch=1)
    run = encoder_run.begin(tmp_path / "run", plan)
    learnt, _ = encoder_run.read_inputs(run, None)
    config = encoder_run.load_config(run.source)
    student = encoder_run.make_student(run, encoder_run.load_encoder(run.source, config))
    target = [x.clone() for x in read_states(student, learnt[0], "sdpa")]

    def loss():
        with torch.no_grad():
            return float(states_loss(read_states(student, learnt[0], IMPLEMENTATION), target))

    before, weights = loss(), {name: x.clone() for name, x in student.state_dict().items()}
    with monkeypatch.context() as patched:
        patched.setattr(distill_encoder, "RATE", 10.0)
        finish(distil(student, learnt, 1))
    assert all(torch.equal(x, weights[name]) for name, x in student.state_dict().items())  # it only did harm
    finish(distil(student, learnt, 1))
    assert loss() < 0.9 * before
    assert not any(weight.requires_grad for weight in student.parameters())


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--budget", 300], "the budget of 300 is not less: ask for a smaller one"),
        (["--length", 4000], "has 256 positions: ask for a --length of as many or fewer"),
        (["--recipe", "swa"], "--recipe is for causal language models: leave it out"),
        (["--pictures", "."], "--pictures is for models of pictures"),
        (["--budget", 5], "ask for 7 or more"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_work(words, reason, sentence_encoder, text, tmp_path, said):
    code, _, error = said("run", sentence_encoder, *options(text, tmp_path / "run"), *words)
    assert code == 2 and reason in error and not (tmp_path / "run").exists()


def test_a_causal_model_takes_no_options_of_encoders(said):
    code, _, error = said("run", "demo", "--pictures", ".")
    assert code == 2 and "--pictures is for encoders, and 'demo' is none" in error


def test_inspect_tells_the_share_of_attention(sentence_encoder, said):
    code, out, _ = said("inspect", sentence_encoder)
    assert code == 0 and "an encoder of texts" in out and "of the model's operations" in out


def test_outputs_that_agree_have_no_kl_and_others_some():
    means = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    other = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    same, hidden = Outputs([means], means, None), [means]
    exact, far = compare(same, same, 1), compare(same, Outputs(hidden, other, None), 1)
    assert exact.kl == 0 and exact.agreement == 1 and exact.cosine == pytest.approx(1)
    assert far.kl > 0.1 and far.agreement < 1
    torch.testing.assert_close(alike(means).exp().sum(-1), torch.ones(8))
