"""A model that reads pictures is served whole, unless its pictures' tokens see each other, or only text is wanted."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from linearizer import pipeline
from linearizer.cli.text import describe_inspection
from linearizer.errors import RequestError
from linearizer.hub.models import find_model
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.publish.card import CausalCard
from linearizer.serve import kept_state
from linearizer.teacher.chat_template import write_chat
from linearizer.teacher.inspect_model import inspect_model, verify_teacher
from linearizer.teacher.load import load_config, load_teacher
from linearizer.teacher.picture_prompts import NO_PICTURES, load_processor, make_prompt
from linearizer.teacher.support import TESTED_WHOLE
from linearizer.teacher.whole_models import choose_config
from tests.support.cards import describe_teacher
from tests.support.hybrids import SOURCE
from tests.support.whole_models import (
    IMAGE,
    PICTURED,
    TEXT,
    inputs_of,
    pictured_model,
    save_picture,
    save_with_processor,
    whole_config,
)

PARTS = (
    "{% for m in messages %}<u>{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endfor %}<a>"
)


def test_every_family_whose_pictures_are_tested_is_said_to_read_them():
    assert {*PICTURED} == TESTED_WHOLE
    for family in PICTURED:
        inspection = inspect_model(SOURCE, pictured_model(family).config)
        assert inspection.reads_pictures and inspection.tested and inspection.tower_of is None
        assert "its student reads pictures, too" in describe_inspection(inspection)
        assert "It reads pictures, too" in describe_teacher(inspection)


def test_pictures_whose_tokens_see_each_other_are_refused_and_their_text_is_not():
    """Those that see each other only in windows of the teacher's own are left to these."""
    windows = {"text_config": {**TEXT["gemma4"], "use_bidirectional_attention": "vision"}}
    wholes = {"gemma3": whole_config("gemma3"), "gemma4": whole_config("gemma4", **windows)}
    found = {family: inspect_model(SOURCE, choose_config(config, ())) for family, config in wholes.items()}
    assert found["gemma3"].supported and found["gemma4"].supported and found["gemma4"].reads_pictures
    reason = "no pictures, because its tokens of a picture see each other in both directions"
    assert reason in describe_inspection(found["gemma3"])


@torch.no_grad()
def test_a_whole_model_is_found_by_the_names_of_older_files(tmp_path):
    """As llava's were before transformers put all parts into one."""
    whole = pictured_model("llava")
    whole.save_pretrained(tmp_path)
    path, renamed = tmp_path / "model.safetensors", {}
    for name, x in load_file(path).items():
        name = name.replace("model.language_model.", "language_model.model.").replace(
            "lm_head", "language_model.lm_head"
        )
        renamed[name.removeprefix("model.").replace("language_model.language_model", "language_model")] = x
    save_file(renamed, path, {"format": "pt"})
    source = find_model(str(tmp_path))
    inspection, teacher = inspect_model(source, load_config(source)), load_teacher(source)
    assert torch.equal(teacher(**inputs_of("llava")).logits, whole(**inputs_of("llava")).logits)
    verify_teacher(teacher, inspection)


@torch.no_grad()
def test_a_run_ends_in_a_checkpoint_that_reads_pictures(tmp_path):
    whole, picture = save_with_processor(tmp_path / "whole"), save_picture(tmp_path / "red.png", "red")
    path = tmp_path / "whole" / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoProcessor": "code.Of"}}))
    quick = dict(texts=2, length=64, sinks=2, steps=0, dtype="float32", strategy="window", budget=16)
    run = pipeline.begin(tmp_path / "run", Plan(str(tmp_path / "whole"), **quick))
    finish(pipeline.linearize(run))
    processor, student = AutoProcessor.from_pretrained(run.checkpoint), None
    student = AutoModelForImageTextToText.from_pretrained(run.checkpoint, dtype=torch.float32)
    assert "auto_map" not in (run.checkpoint / "processor_config.json").read_text()
    batch = processor(text=f"{IMAGE}What", images=Image.open(picture), return_tensors="pt")
    assert torch.allclose(student(**batch).logits, whole(**batch).logits, atol=1e-4)
    assert (card := CausalCard(run)).task == "image-text-to-text" and "on text alone" in card.write()
    compared = finish(pipeline.compare_run(run, "What", 4, 0, False, pictures=[picture]))
    assert compared.prompt_tokens == batch["input_ids"].shape[1] and compared.student.text == compared.teacher.text
    finish(kept_state.read(run, "What", tmp_path / "state", pictures=[picture]))
    with_picture, plain = (
        finish(kept_state.ask(run, " is it", state, new_tokens=4)).text for state in (tmp_path / "state", None)
    )
    assert with_picture != plain
    with pytest.raises(RequestError, match="is no picture that can be read"):
        finish(kept_state.ask(run, "What", pictures=[path]))


def test_a_prompt_shows_pictures_as_the_template_does(tmp_path):
    save_with_processor(tmp_path)
    processor, red = load_processor(tmp_path), save_picture(tmp_path / "red.png", "red")
    tokenizer = processor.tokenizer

    def written(**how):
        return tokenizer.decode(make_prompt(tokenizer, processor, "What?", [red, Image.open(red)], **how).tokens)

    assert written() == written(raw=True) == IMAGE * 8 + "What?"
    processor.chat_template = PARTS
    assert written() == f"<u>{IMAGE * 8}What?<a>" and written(begins=False) == IMAGE * 8 + "What?<a>"
    tokenizer.chat_template = PARTS
    assert write_chat(tokenizer, [{"role": "user", "content": "What?"}]) == "<u>What?<a>"
    prompt = make_prompt(tokenizer, processor, "What?", [red])
    assert prompt.tokens[prompt.pictures.reach - 1] == processor.image_token_id != prompt.tokens[prompt.pictures.reach]
    with pytest.raises(RequestError, match="reads no pictures"):
        make_prompt(tokenizer, None, "What?", [red])
    assert NO_PICTURES
