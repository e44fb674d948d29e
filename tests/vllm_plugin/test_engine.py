"""Students in vLLM: tokens equal `generate`, alone and among others, whatever the engine does with their states.

They run where vLLM can be imported: `bash tests/vllm_plugin/run` makes such an environment.
"""

import gc
import importlib.util
import os
from contextlib import contextmanager

import psutil
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run `bash tests/vllm_plugin/run`", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: its memory can be measured, and its scheduler seen
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
from linearizer.kernels import trial  # noqa: E402
from linearizer.kernels.triton.rows import PoolRow  # noqa: E402
from linearizer.plan.head_bytes import Head  # noqa: E402
from tests.support.altered import student_of as altered_of  # noqa: E402
from tests.support.hybrids import HYBRIDS  # noqa: E402
from tests.support.hybrids import student_of as hybrid_of  # noqa: E402
from tests.support.models import student_of, tokens  # noqa: E402

IN_C = [Head(window=9, slots=12), Head(window=20, bits=8), Head(window=8, slots=10, bits=4)]
HEADS = [*IN_C, Head(window=6, features=16)]  # of which the last one, in the last layer, is read by PyTorch
NEW, CHUNK, BLOCK, LONGEST = 12, 64, 32, 4000
CLOSE = 1e-4  # of predictions, where vLLM's own layers round in another way
EXACT = 45  # tokens of the longest text that keeps all keys: prompts are shorter, longer, and become longer
LENGTHS = [1, 2, 5, 16, 31, 32, 33, 64, 65, 100, 128, 150, 200, 256, 300, 400, 700, 1000, 2500, LONGEST, *range(40, 52)]


@contextmanager
def engine(folder, **options):
    """An engine that reads in chunks, with prefix caching, few rows for states, and a model of one process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=LONGEST + 96,
        hf_overrides={"max_position_embeddings": LONGEST + 96}, max_num_batched_tokens=CHUNK, max_num_seqs=8,
        enable_prefix_caching=True, block_size=BLOCK, max_logprobs=-1, **options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def save(heads, folder):
    model = student_of("llama", heads, exact_tokens=EXACT)
    model.config.max_position_embeddings = LONGEST + 96
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None  # `generate` would end there, or never write it
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A student with its own layers, and the engine that serves it."""
    folder = tmp_path_factory.mktemp("student")
    model = save(HEADS, folder)
    with engine(folder, additional_config={"linearizer_layers": "checkpoint"}) as llm:
        yield model, llm


def prompt(length, seed=0):
    return tokens(1, length, seed)[0].tolist()


@torch.no_grad()
def generated(model, ids, new=NEW):
    given = torch.tensor([ids])
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def sampling(new=NEW, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **more)


def answers(llm, prompts, new=NEW):
    """The tokens that the engine writes after prompts that it reads together, and how many of each it had cached."""
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling(new), use_tqdm=False)
    return [[*out.outputs[0].token_ids] for out in outs], [out.num_cached_tokens for out in outs]


def divergence(model, llm, prompts):
    """The largest mean divergence of what the engine predicts after the tokens of a prompt from what the model does."""
    vocabulary, found = model.config.vocab_size, []
    given = [{"prompt_token_ids": ids} for ids in prompts if len(ids) > 1]
    for out in llm.generate(given, sampling(1, prompt_logprobs=vocabulary), use_tqdm=False):
        with torch.no_grad():
            expected = model(torch.tensor([out.prompt_token_ids])).logits[0, :-1].log_softmax(-1)
        engines = torch.tensor([[row[token].logprob for token in range(vocabulary)] for row in out.prompt_logprobs[1:]])
        found.append(float((expected.exp() * (expected - engines)).sum(-1).mean()))
    return max(found)


def test_many_requests_of_any_length_each_equal_generate(served):
    model, llm = served
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    assert answers(llm, prompts)[0] == [generated(model, ids) for ids in prompts]


def test_a_prefix_that_was_read_is_not_read_again(served):
    model, llm = served
    first = prompt(300, seed=100)
    answer = answers(llm, [first])[0][0]
    again, cached = answers(llm, [first, first + answer + prompt(40, seed=101), prompt(300, seed=102)])
    assert again[0] == answer and again[1] == generated(model, first + answer + prompt(40, seed=101))
    assert cached[0] >= 256 and cached[1] >= 256 and not cached[2]


def test_requests_that_leave_do_not_change_the_others(served):
    model, llm = served
    prompts, found = {str(seed): prompt(40 * seed + 3, seed + 200) for seed in range(6)}, {}
    for name, ids in prompts.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling(20))
    for step in range(400):
        if step == 6:
            llm.llm_engine.abort_request(["1", "4"])
        found |= {out.request_id: [*out.outputs[0].token_ids] for out in llm.llm_engine.step() if out.finished}
        if not llm.llm_engine.has_unfinished_requests():
            break
    assert found == {name: generated(model, prompts[name], 20) for name in ("0", "2", "3", "5")}


def test_memory_is_flat_over_many_requests(served):
    _, llm = served
    process, sizes = psutil.Process(), []
    for part in range(4):
        answers(llm, [prompt(20 + seed % 30, seed + 1000 * part) for seed in range(50)], 4)
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert sizes[-1] - sizes[0] < 8e6


def test_vllms_own_layers_predict_as_the_student_and_preempted_requests_go_on(tmp_path):
    """Few rows for states: requests are preempted, and read again."""
    model = save(IN_C, tmp_path)
    prompts = [prompt(length, seed) for seed, length in enumerate((200, 1, 90, 33, 600, 64, 65, 31))]
    with engine(tmp_path, num_gpu_blocks_override=9) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []

        def see(request, *arguments, **options):
            preempted.append(request.request_id)
            return preempt(request, *arguments, **options)

        scheduler._preempt_request = see
        together = answers(llm, prompts, 70)[0]
        alone = [answers(llm, [ids], 70)[0][0] for ids in prompts]
        assert preempted and together == alone
        assert divergence(model, llm, prompts) < CLOSE


@pytest.mark.parametrize("family", ["falcon_h1", "gemma2", "gpt_oss"])
def test_recurrent_layers_windows_and_capped_scores_are_the_teachers(family, tmp_path):
    """The states of recurrent layers and of the teacher's windows lie in a request's row, beside those of students."""
    model = (hybrid_of if family in HYBRIDS else altered_of)(family, IN_C)
    model.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 9, 33, 70))]
    with engine(tmp_path) as llm:
        assert answers(llm, prompts)[0] == [generated(model, ids) for ids in prompts]
        again, cached = answers(llm, prompts)
        assert again == [generated(model, ids) for ids in prompts] and cached[3] >= 64
        assert divergence(model, llm, prompts) < CLOSE


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # in rows that hold nothing
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_tritons_kernels_read_and_write_rows_in_place(family, tmp_path, monkeypatch):
    """As on a GPU; without one their interpreter runs them. Prompts are within EXACT, beyond it, and become longer."""
    monkeypatch.setattr(trial, "DEVICES", {"cpu"})
    read_texts, batches = PoolRow.read_texts, set()

    def see(row, student, pool, rows, counts, least, *inputs):
        batches.add((len(rows), inputs[0].shape[2]))
        return read_texts(row, student, pool, rows, counts, least, *inputs)

    monkeypatch.setattr(PoolRow, "read_texts", see)
    if family == "llama":
        model = save(IN_C, tmp_path)
    else:
        (model := altered_of(family, IN_C)).save_pretrained(tmp_path)
        model.generation_config.eos_token_id = None
    prompts = [prompt(length, seed) for seed, length in enumerate((1, EXACT - 2, EXACT + 15, 70))]
    with engine(tmp_path) as llm:
        found = answers(llm, prompts, 5)[0]
    monkeypatch.undo()
    assert found == [generated(model, ids, 5) for ids in prompts]
    assert {tokens for _, tokens in batches} > {1} and max(texts for texts, _ in batches) > 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes of vLLM need two cores")
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_processes_that_share_the_heads_of_a_layer_answer_as_one(family, tmp_path, monkeypatch):
    """Tensor parallelism; a row is as large in each process, although their heads hold different amounts."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = save(IN_C, tmp_path) if family == "llama" else hybrid_of(family, IN_C)
    model.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 33, EXACT - 1, EXACT, EXACT + 1, 200))]
    with engine(tmp_path, tensor_parallel_size=2) as llm:
        expected = [generated(model, ids) for ids in prompts]
        assert answers(llm, prompts)[0] == expected
        again, cached = answers(llm, prompts)
        assert again == expected and cached[-1] >= 160
