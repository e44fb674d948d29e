"""The run of an encoder, by its command: what it makes, what it keeps when it is stopped, and what it refuses."""

import io
import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel
from transformers.models.auto.tokenization_auto import AutoTokenizer

from linearizer import pipeline
from linearizer.cli.main import main
from linearizer.encoders import distill_encoder, encoder_run
from linearizer.encoders.attention_both_ways import BothWays
from linearizer.encoders.attention_interface import IMPLEMENTATION
from linearizer.encoders.distill_encoder import distil, read_states, states_loss
from linearizer.encoders.encoder_folder import BY_PRICE, WAYS, ChosenWays, EncoderRun
from linearizer.encoders.encoder_inputs import share_out
from linearizer.encoders.encoder_quality import LayerTime, Outputs, describe_scores, log_similarities, score
from linearizer.encoders.kinds import ENCODER
from linearizer.encoders.layer_times import crossing
from linearizer.evaluate.language import Units
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.encoders import SIZES, WORDS
from tests.support.publishing import HOW_THE_HUB_SENDS, ME, files_of, publish


def options(text, folder, **changes):
    given = {"budget": 40, "length": 160, "text": text, "texts": 6, "steps": 2, "batch": 2, "out": folder, **changes}
    return [word for name, value in given.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def product(sentence_encoder, topics, tmp_path_factory):
    """What a run prints as JSON, with the folder of the run, which no test may change but for its judgements."""
    folder, out = tmp_path_factory.mktemp("made") / "runs" / "sentences", io.StringIO()
    with redirect_stdout(out):
        assert main([str(word) for word in ("run", sentence_encoder, *options(topics, folder), "--json")]) == 0
    return json.loads(out.getvalue()), folder


@pytest.fixture(scope="module")
def made(product):
    return product[1]


def test_a_run_makes_a_student_that_loads_and_is_judged_beside_controls(sentence_encoder, product):
    product, folder = product
    (judged,) = product["quality"]
    assert list(judged["rows"]) == ["student", "before training", "merged tokens", "window"]
    steps = [event["done"] for event in Run(folder).events() if event["event"] == "distill"]
    assert steps == [1, 2, 1, 2]  # of the student, and of its control
    assert all(row["kl"]["mean"] >= 0 and row["keys"] <= 40 for row in judged["rows"].values())
    low, high = judged["rows"]["window"]["apart"]["interval"]
    difference = judged["rows"]["student"]["kl"]["mean"] - judged["rows"]["window"]["kl"]["mean"]
    assert low <= difference <= high and judged["rows"]["student"]["apart"] is None
    assert "Judged on 6 texts; with other numbers of tokens than 160: not judged." in product["verdict"]["sentence"]
    tokens = [each["tokens"] for each in product["times"]]
    assert len(tokens) > 1 and all(after == 2 * before > 40 for before, after in pairwise(tokens))
    assert all(each["student"] > 0 < each["sdpa"] for each in product["times"])
    student = AutoModel.from_pretrained(folder / "checkpoint", trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    given = tokenizer(" ".join(WORDS * 2), return_tensors="pt")
    ours = encoder_run.load_student(folder / "checkpoint")
    with torch.no_grad():
        assert torch.equal(student(**given).last_hidden_state, ours(**given).last_hidden_state)
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        assert (folder / "checkpoint" / name).read_bytes() == (sentence_encoder / name).read_bytes()
    for name in ("config.json", "README.md"):
        assert str(sentence_encoder.parent) not in (folder / "checkpoint" / name).read_text()


def test_a_run_that_was_stopped_goes_on_after_its_last_finished_part(sentence_encoder, made, topics, tmp_path, said):
    plan = EncoderPlan(str(sentence_encoder), 40, 160, topics, texts=6, steps=2, batch=2)
    encoder = ENCODER.begin(tmp_path / "run", plan)
    steps = pipeline.linearize(encoder.run)
    for _ in steps:
        if encoder.run.checkpoint.is_dir():
            break
    steps.close()
    weights = (encoder.run.checkpoint / "model.safetensors").stat().st_mtime_ns
    assert not encoder.judgements and control.state_of(encoder.run) == "stopped"
    code, _, error = said("run", sentence_encoder, *options(topics, tmp_path / "run"), "--resume")
    assert code == 0, error
    assert encoder.judgements == EncoderRun(Run(made)).judgements
    assert (encoder.run.checkpoint / "model.safetensors").stat().st_mtime_ns == weights


def test_a_run_in_the_background_is_listed_followed_and_deleted(sentence_encoder, topics, tmp_path, said):
    root = tmp_path / "runs"
    words = options(topics, root / "sentences", steps=0, texts=4)
    code, _, error = said("run", sentence_encoder, *words, "--detach")
    assert code == 0, error
    code, out, error = said("runs", "attach", "sentences", "--root", root)
    assert code == 0 and "A window" not in out and "on texts of 160 tokens" in out, error
    _, out, _ = said("runs", "--root", root, "--json")
    (listed,) = json.loads(out)
    assert (listed["state"], listed["budget"], listed["model"]) == ("done", 40, str(sentence_encoder))
    code, _, error = said("runs", "delete", "sentences", "--root", root)
    assert code == 0 and not (root / "sentences").exists(), error


def test_an_evaluation_judges_other_lengths_and_keeps_what_was_judged(made, said):
    code, out, error = said("evaluate", made, "--length", 100, "--json")
    assert code == 0, error
    encoder = EncoderRun(Run(made))
    own, short = (encoder_run.read_shares(encoder, replace(encoder.plan, length=n), None) for n in (160, 100))
    for whole, begin in zip(own.judged, short.judged, strict=True):
        assert begin["input_ids"].tolist() == [[*whole["input_ids"][0, :99].tolist(), whole["input_ids"][0, -1]]]
    (judged,) = json.loads(out)["quality"]
    assert judged["tokens"] == 100 and [each.tokens for each in EncoderRun(Run(made)).judgements.values()] == [160, 100]
    assert "than 100 and 160: not judged" in json.loads(out)["verdict"]["sentence"]
    before = (made / "quality.json").read_bytes()
    assert said("evaluate", made)[0] == 0 and (made / "quality.json").read_bytes() == before


@pytest.mark.parametrize(
    "words, reason",
    [
        (["compare"], "is of an encoder, which writes no text and keeps no state"),
        (["allocate", "--budget", 30], "is of an encoder"),
        (
            ["evaluate", "--parts", "needle"],
            "--parts is not for the student of this encoder: it is judged by",
        ),
        (["evaluate", "--length", 200], "kept 6 texts of 160 tokens from its training: ask for fewer or shorter ones"),
        (["evaluate", "--texts", 8], "kept 6 texts of 160 tokens from its training: ask for fewer or shorter ones"),
        (["evaluate", "--length", 300, "--text", "builtin"], "reads 256 tokens at most"),
    ],
)
def test_a_command_that_does_not_serve_an_encoder_says_so_in_a_sentence(words, reason, made, said):
    code, _, error = said(words[0], made, *words[1:])
    assert code == 2 and reason in error and error.count("\n") == 1


@pytest.mark.filterwarnings(HOW_THE_HUB_SENDS)
def test_a_student_is_published_with_its_card_and_loads_from_its_snippet(hub, made, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", ME)
    done = publish(Run(made), "me/sentences")
    sent = files_of(hub, "me/sentences")
    card = sent["README.md"].decode()
    assert "changed the weights: the layers were distilled for 2 steps" in card
    assert "pipeline_tag: feature-extraction" in card and "on texts of 160 tokens" in card and "| window |" in card
    assert {"config.json", "modeling_encoder.py", "attention_both_ways.py", "1_Pooling/config.json"} <= set(sent)
    assert "AutoTokenizer.from_pretrained(name, revision=revision)" in done.snippet
    assert all(str(made.parents[1]).encode() not in content for content in sent.values())
    student = AutoModel.from_pretrained("me/sentences", revision=done.revision, trust_remote_code=True)
    for name, weight in encoder_run.load_student(made / "checkpoint").state_dict().items():
        assert torch.equal(student.state_dict()[name], weight)


def test_longer_texts_get_positions_between_those_that_were_learned(sentence_encoder, topics, tmp_path, said):
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"text": " ".join(WORDS * 20)}) + "\n" for _ in range(4)))
    words = options(f"file:{long}", tmp_path / "run", length=600, steps=0, texts=4)
    code, out, error = said("run", sentence_encoder, *words)
    assert code == 0 and "256 positions, stretched to 600 by interpolation" in out, error
    config = json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())
    assert config["teacher"]["positions"] == 256 and config["base"]["max_position_embeddings"] == 600
    student = AutoModel.from_pretrained(tmp_path / "run" / "checkpoint", trust_remote_code=True)
    learned = AutoModel.from_pretrained(sentence_encoder).embeddings.position_embeddings.weight
    found = student.embeddings.position_embeddings.weight
    torch.testing.assert_close(found[[0, -1]], learned[[0, -1]])
    between = (learned[127] + learned[128]) / 2
    torch.testing.assert_close((found[299] + found[300]) / 2, between, rtol=0.02, atol=0.02)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint")
    given = tokenizer(" ".join(WORDS * 11), return_tensors="pt", truncation=True)
    assert given["input_ids"].shape[1] == 600
    assert torch.isfinite(student(**given).last_hidden_state).all()
    assert "stretched to 600" in (tmp_path / "run" / "checkpoint" / "README.md").read_text()


def test_what_is_judged_comes_from_documents_of_which_nothing_is_learnt():
    documents = [[{"input_ids": torch.tensor([[d, n]])} for n in range(d % 3 + 1)] for d in range(20)]
    shares = share_out(documents, 12, 8, 1)
    owner = [int(each["input_ids"][0, 0]) for each in shares.judged]
    assert len(set(owner)) == 8 and len(shares.learnt) == 12
    assert not {int(each["input_ids"][0, 0]) for each in shares.learnt} & {*owner}
    alone = share_out([documents[0] * 9], 5, 3, 1)
    assert len(alone.judged) == 3 and len(alone.learnt) == 5


def test_pictures_are_read_through_the_processor_of_their_model(tmp_path, said):
    config = AutoConfig.for_model("dinov2", **SIZES, image_size=56, patch_size=4)
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    size = {"size": {"height": 56, "width": 56}, "do_center_crop": False, "image_processor_type": "BitImageProcessor"}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(size))
    (tmp_path / "pictures").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    words = ["--budget", 40, "--texts", 4, "--steps", 1, "--batch", 2, "--pictures", tmp_path / "pictures"]
    code, out, error = said("run", tmp_path / "model", *words, "--out", tmp_path / "run", "--json")
    assert code == 0, error
    product = json.loads(out)
    assert product["tokens"] == 197 and product["ways"]["ways"] == [[[1, 1], 21]]
    words[-1] = f"dataset:{tmp_path / 'pictures'}"
    code, out, error = said("run", tmp_path / "model", *words, "--out", tmp_path / "of_dataset", "--json")
    assert code == 0 and json.loads(out)["quality"][0]["rows"] == product["quality"][0]["rows"], error
    code, _, error = said("run", tmp_path / "model", *words, "--texts", 9, "--out", tmp_path / "more")
    assert code == 2 and "has 8 pictures, and 13 are needed" in error
    (tmp_path / "pictures" / "0.png").write_bytes(b"none")
    for folder in ("", "dataset:"):
        words[-1] = f"{folder}{tmp_path / 'pictures'}"
        code, _, error = said("run", tmp_path / "model", *words, "--out", tmp_path / "again")
        assert code == 2 and ("cannot be read" if folder else "0.png' is not a picture that can be read") in error


def test_a_head_counts_with_no_more_keys_than_there_are_tokens(sentence_encoder, topics, tmp_path):
    encoder = ENCODER.begin(tmp_path / "run", EncoderPlan(str(sentence_encoder), 40, 160, topics))
    whole = encoder.uniform_layers(BothWays((54,), 0, 1, 1))
    encoder.run.write_product(WAYS, ChosenWays.of(BY_PRICE, whole, {}).to_json())
    assert whole[0].ways[0].keys > encoder.keys == 160


def test_distillation_brings_a_student_nearer_to_its_teacher_or_leaves_it(
    sentence_encoder, topics, tmp_path, monkeypatch
):
    plan = EncoderPlan(str(sentence_encoder), 40, 160, topics, texts=4, steps=8, batch=1)
    encoder = ENCODER.begin(tmp_path / "run", plan)
    learnt = encoder_run.read_shares(encoder, plan, None).learnt
    student = encoder_run.make_student(encoder, encoder_run.load_teacher(encoder), encoder.ways.layers)
    with torch.no_grad():
        target = read_states(student, learnt[0], "sdpa")

    def loss():
        with torch.no_grad():
            return float(states_loss(read_states(student, learnt[0], IMPLEMENTATION), target))

    before, weights = loss(), {name: x.clone() for name, x in student.state_dict().items()}
    with monkeypatch.context() as patched:
        patched.setattr(distill_encoder, "RATE", 10.0)
        finish(distil(student, learnt, 1))
    assert all(torch.equal(x, weights[name]) for name, x in student.state_dict().items())  # it only did harm
    finish(distil(student, learnt, 1))
    assert loss() < 0.95 * before
    assert not any(weight.requires_grad for weight in student.parameters())


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--budget", 300], "the budget of 300 is not less: ask for a smaller one"),
        (
            ["--length", 20000],
            "has 256 positions, which are stretched to at most 16,384: ask for a --length of as many",
        ),
        (["--recipe", "swa"], "--recipe is for causal language models: leave it out"),
        (["--pictures", "."], "--pictures is for models of pictures"),
        (["--budget", 5], "ask for 7 or more"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_work(words, reason, sentence_encoder, topics, tmp_path, said):
    code, _, error = said("run", sentence_encoder, *options(topics, tmp_path / "run"), *words)
    assert code == 2 and reason in error and not (tmp_path / "run").exists()


def test_a_module_with_weights_in_a_pickle_alone_is_refused(sentence_encoder, topics, tmp_path, said):
    model = shutil.copytree(sentence_encoder, tmp_path / "model")
    (model / "2_Dense" / "model.safetensors").rename(model / "2_Dense" / "pytorch_model.bin")
    code, _, error = said("run", model, *options(topics, tmp_path / "run"))
    assert code == 2 and "has no 2_Dense/model.safetensors, and a pickle can run any code" in error
    (model / "modules.json").write_text('[{"path": 2}]')
    code, _, error = said("run", model, *options(topics, tmp_path / "run"))
    assert code == 2 and "has a damaged modules.json" in error and not (tmp_path / "run").exists()


def test_neither_a_causal_model_nor_a_job_takes_options_of_encoders(said):
    code, _, error = said("run", "demo", "--pictures", ".")
    assert code == 2 and "--pictures is for encoders, and 'demo' is not an encoder: leave it out" in error
    code, _, error = said("run", "demo", "--no-slots", "--job", "l4x1")
    assert code == 2 and "--slots is for encoders, which no job runs: leave out --job for an encoder" in error


def test_inspect_tells_the_share_of_attention(sentence_encoder, said):
    code, out, _ = said("inspect", sentence_encoder)
    assert code == 0 and "an encoder of texts" in out and "of the model's operations" in out


def test_outputs_that_agree_have_no_kl_and_others_some():
    means = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    other = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    same, far = (Outputs([*x[:, None]], []) for x in (means, other))
    over = Units(torch.arange(8)[:, None])
    exact, apart = score(same, same), score(same, far)
    row = describe_scores(1, exact, exact, over)
    assert row.kl.mean == 0 and row.agreement.mean == row.nearest.mean == 1 and row.hidden.mean == pytest.approx(1)
    worse = describe_scores(1, apart, exact, over)
    assert worse.kl.mean > 0.1 and worse.nearest.mean < 1 and worse.apart.interval[1] < 0
    assert worse.kl.interval[0] < worse.kl.mean < worse.kl.interval[1]
    torch.testing.assert_close(log_similarities(means).exp().sum(-1), torch.ones(8))


def test_student_and_sdpa_take_as_long_where_their_lines_cross():
    times = [LayerTime(tokens, 1e-3 * tokens, 1e-6 * tokens**2) for tokens in (250, 500, 2000, 4000)]
    assert crossing(times) == pytest.approx(1000)
    assert crossing(times[:2]) is None and crossing(times[2:]) is None
