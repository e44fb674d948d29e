"""A tiny student behind an endpoint."""

import httpx
import pytest
from transformers import AutoTokenizer

from linearizer.hub.models import find_model
from linearizer.serve.engine import Engine
from linearizer.serve.served import Served
from tests.support.models import student_of
from tests.support.serving import listening

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def served():
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo").folder)
    tokenizer.chat_template = TEMPLATE
    student = student_of("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    student.generation_config.eos_token_id = None
    with Engine(student, 2**24) as engine:
        known = Served("tiny", student, tokenizer, 512, engine, 3600.0)
        with listening(known) as url, httpx.Client(base_url=url, timeout=60) as client:
            client.served = known
            yield client
