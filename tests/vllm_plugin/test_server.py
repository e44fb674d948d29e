"""vLLM's OpenAI server with a student: a chat, a tool call and a JSON schema, by the openai client."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run `bash tests/vllm_plugin/run`", allow_module_level=True)
import shutil  # noqa: E402

import openai  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from linearizer.method.checkpoint import put_student_into  # noqa: E402
from linearizer.plan.head_bytes import Head  # noqa: E402
from tests.support.models import allocation_of, layers_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
HELD = [Head(window=48, slots=64, bits=8), Head(window=64, slots=48, bits=4)]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "tomorrow": {"type": "boolean"}},
    "required": ["city", "tomorrow"],
    "additionalProperties": False,
}
ASK = {"model": "student", "temperature": 0, "messages": [{"role": "user", "content": "The weather in Rome tomorrow?"}]}
START = 240  # seconds, on a busy machine


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server, without remote code, of a student of the demo model."""
    folder = tmp_path_factory.mktemp("served")
    demo = "assets/demo-model"
    teacher = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, attn_implementation="sdpa").eval()
    layers = layers_of(teacher)
    put_student_into(teacher, layers, allocation_of(layers, HELD, 1), "prf").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{demo}/{name}", folder)
    (folder / "template.jinja").write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": folder, "--served-model-name": "student", "--host": "127.0.0.1", "--port": port,
        "--dtype": "float32", "--max-model-len": 512,
        "--chat-template": folder / "template.jinja", "--tool-call-parser": "hermes",
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--enable-auto-tool-choice",
    ]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [*command, *(str(part) for pair in options.items() for part in pair)],
            env=os.environ | quiet | {"TORCH_CPP_LOG_LEVEL": "ERROR"}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health", folder / "log")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as found:
            yield found
    finally:
        server.terminate()
        server.wait(60)


def wait_for(server, url, log):
    for _ in range(START * 2):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def words_of_demo():
    """List the texts of all tokens of the demo model."""
    tokenizer = AutoTokenizer.from_pretrained("assets/demo-model")
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


def test_a_chat_is_answered_whole_and_in_parts(client):
    whole = client.chat.completions.create(**ASK, max_tokens=12, logprobs=True)
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**ASK, max_tokens=12, stream=True)
    ]
    assert whole.usage.completion_tokens == 12 == len(whole.choices[0].logprobs.content)
    assert "".join(parts) == whole.choices[0].message.content != ""


def test_a_tool_is_called_with_arguments_of_its_schema(client):
    tool = {"type": "function", "function": {"name": "forecast", "parameters": WEATHER, "strict": True}}
    chosen = {"type": "function", "function": {"name": "forecast"}}
    blank = {str(token): -100 for token, text in enumerate(words_of_demo()) if not text.strip()}  # else it writes lines
    answer = client.chat.completions.create(**ASK, tools=[tool], tool_choice=chosen, max_tokens=90, logit_bias=blank)
    (call,) = answer.choices[0].message.tool_calls
    given = json.loads(call.function.arguments)
    assert (
        call.function.name == "forecast" and given["city"] in ("Paris", "Rome") and given["tomorrow"] in (True, False)
    )


def test_an_answer_follows_a_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(**ASK, response_format=form, max_tokens=60)
    assert json.loads(answer.choices[0].message.content).keys() == {"city", "tomorrow"}
