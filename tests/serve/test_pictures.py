"""The engine reads pictures in prompts, and the endpoint takes them as OpenAI's does, in URLs that hold them."""

import base64
import io
from concurrent.futures import Future
from dataclasses import replace

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from linearizer.method.checkpoint import put_student_into
from linearizer.plan.head_bytes import Head
from linearizer.serve.cache_rows import take_shift
from linearizer.serve.engine import Engine
from linearizer.serve.served import Served
from linearizer.student.cache import CACHE
from linearizer.student.picture_positions import deltas_of
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.picture_prompts import Pictures, Prompt
from tests.support.hybrids import SOURCE
from tests.support.models import allocation_of, tokens
from tests.support.rows import row_of, work
from tests.support.serving import listening
from tests.support.whole_models import IMAGE, PICTURE, inputs_of, pictured_student, save_with_processor

HEADS = [Head(window=4, slots=6), Head(window=3)]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}<a>"
)


def shown_row(inputs, count):
    """The row of a prompt with a picture."""
    ids = inputs["input_ids"][0].tolist()
    reach = max(place for place, token in enumerate(ids) if token == PICTURE) + 1
    pictures = Pictures({name: x for name, x in inputs.items() if name != "input_ids"}, reach)
    row = row_of([-1 - pictures.number_with(ids)] * reach + ids[reach:], count)
    row.shown = Prompt(ids, pictures)
    return row


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_5", "gemma4"])
def test_rows_with_pictures_are_written_beside_others_as_alone(family):
    student = pictured_student(family, HEADS)
    asked = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    inputs = [inputs_of(family, seed=seed, after=range(8, 12 + seed)) for seed in (0, 1, 0)]
    expected = [student.generate(**each, **asked)[0, -8:].tolist() for each in inputs]
    text = tokens(1, 9)
    rows = [*(shown_row(each, 8) for each in inputs), row_of(text[0].tolist(), 8)]
    engine = Engine(student, 2**24)
    work(engine, {0: [rows[0], rows[3]], 2: [rows[1]], 30: [rows[2]]})
    assert [row.tokens[-8:] for row in rows[:3]] == expected and expected[0] != expected[1]
    assert rows[3].tokens[-8:] == student.generate(text, **asked)[0, -8:].tolist()
    assert rows[2].reused == len(rows[2].prompt) - 1  # its picture was shown before


@torch.no_grad()
def test_a_state_that_is_handed_over_after_a_picture_goes_on_at_its_positions():
    student, inputs, following = pictured_student("qwen2_5_vl", HEADS), inputs_of("qwen2_5_vl"), tokens(1, 6)
    engine, row = Engine(student, 2**24), shown_row(inputs, 4)
    row.state = Future()
    work(engine, {0: [row]})
    expected, kept = student.empty_cache(), row.state.result()
    student(**inputs, **{CACHE: expected})
    student(torch.tensor([row.tokens[-4:]]), **{CACHE: expected})
    assert deltas_of(kept).item() == deltas_of(expected).item() != 0 and kept.get_seq_length() == 15
    logits = student(following, **{CACHE: expected}).logits
    torch.testing.assert_close(student(following, **{CACHE: kept.fork()}).logits, logits, atol=1e-3, rtol=1e-3)
    later = row_of([-1] * 15 + following[0].tolist(), 1, begun=15)
    later.shift, later.cache = take_shift(kept), kept
    work(engine, {0: [later]})
    assert later.tokens[-1] == logits[0, -1].argmax()


def url_of(picture):
    picture.save(file := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    teacher = save_with_processor(folder)
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.chat_template = TEMPLATE
    layers = inspect_model(SOURCE, teacher.config).layers
    student = put_student_into(teacher, layers, allocation_of(layers, HEADS, 2))
    student.generation_config.eos_token_id = None
    with Engine(student, 2**24) as engine:
        known = Served("tiny", student, processor.tokenizer, 512, engine, 60.0, folder / "states")
        known = replace(known, processor=lambda: processor)
        with listening(known) as url, httpx.Client(base_url=url, timeout=60) as client:
            client.served = known
            yield client


def show(client, *urls, text="What?", **options):
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    asked = {"temperature": 0, "max_tokens": 6, **options}
    return client.post("chat/completions", json={"messages": [message], **asked})


def test_a_chat_shows_pictures(server):
    student, processor = server.served.model, server.served.processor()
    red, blue = (Image.new("RGB", (20, 24), colour) for colour in ("red", "blue"))
    for pictures in ([red], [blue], [red, blue], [red]):
        answer = show(server, *map(url_of, pictures))
        assert answer.status_code == 200, answer.text
        written = f"<u>{IMAGE * len(pictures)}What?<a>"
        batch = processor(text=[written], images=pictures, return_tensors="pt", add_special_tokens=False)
        out = student.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=0)
        text = processor.tokenizer.decode(out[0, -6:], skip_special_tokens=True)
        assert answer.json()["choices"][0]["message"]["content"] == text
        assert answer.json()["usage"]["prompt_tokens"] == batch["input_ids"].shape[1]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 4  # the first picture again


def test_what_is_no_picture_is_refused_in_a_sentence(server):
    small = url_of(Image.new("RGB", (4, 4)))
    bomb = url_of(Image.new("1", (8000, 8000)))
    refused = {
        "https://example.org/cat.png": "nothing is fetched",
        "file:///etc/passwd": "nothing is fetched",
        "data:text/plain;base64,aGVsbG8=": "nothing is fetched",
        "data:image/png;base64,aGVsbG8=": "is no picture that can be read",
        "data:image/png;base64,***": "is no picture that can be read",
        bomb: "million points",
    }
    for url, why in refused.items():
        answer = show(server, url)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], (url[:40], answer.text)
    audio = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    assert "'input_audio'" in server.post("chat/completions", json={"messages": [audio]}).json()["error"]["message"]
    assert "9 pictures are more than the 8 of a chat" in show(server, *[small] * 9).json()["error"]["message"]
    large = show(server, f"data:image/png;base64,{'A' * 2**26}")
    assert large.status_code == 413
    silent = server.served
    with listening(replace(silent, processor=None)) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert "this model reads no pictures" in show(client, small).json()["error"]["message"]
