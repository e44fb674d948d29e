"""How long a token of a student takes in vLLM, relative to its teacher's, on this machine.

    python -m tests.benchmarks.vllm_tokens RUN/checkpoint TEACHER [--requests 1 8] [--lengths 256 2048]

Run it where vLLM is installed (tests/vllm_plugin/run makes such an environment). The engines, in one process, take
their steps by turns, so that whatever else the machine does slows all; the median of the ratios of neighbouring steps
counts.
"""

import argparse
import json
import os
import statistics
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
STEPS, WARM, READS, MOST = 48, 4, 3, 64
KINDS = {"student": {}, "student, its checkpoint's layers": {"linearizer_layers": "checkpoint"}, "teacher": {}}


def make_engine(path, longest, dtype, options, compiled):
    from vllm import LLM

    return LLM(
        model=path, dtype=dtype, enforce_eager=not compiled, max_model_len=longest, max_num_seqs=MOST,
        hf_overrides={"max_position_embeddings": longest}, additional_config=options, enable_prefix_caching=False,
    ).llm_engine  # fmt: skip


def begin(engine, prompts):
    """Read prompts up to the first token of each; return the seconds that this takes."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=STEPS + WARM + 8, ignore_eos=True, detokenize=False)
    for index, ids in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
    start, begun = time.perf_counter(), set()
    while len(begun) < len(prompts):
        begun |= {out.request_id for out in engine.step()}
    return time.perf_counter() - start


def leave(engine):
    """End all requests."""
    engine.abort_request([str(index) for index in range(MOST)])
    while engine.has_unfinished_requests():
        engine.step()


def measure(engines, requests, length, vocabulary):
    """Return the least seconds of reading the prompts, and those of each step of all requests, by engine."""
    import torch

    drawn = torch.randint(vocabulary, (requests, length), generator=torch.Generator().manual_seed(0)).tolist()
    read = {name: [] for name in engines}
    for _ in range(READS):
        for name, engine in engines.items():
            leave(engine)
            read[name].append(begin(engine, drawn))
    steps = {name: [] for name in engines}
    for _ in range(WARM + STEPS):
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.step()
            steps[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in read.items()}, {
        name: seconds[WARM:] for name, seconds in steps.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student")
    parser.add_argument("teacher")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile the models")
    arguments = parser.parse_args()
    longest = max(arguments.lengths) + STEPS + WARM + 16
    engines = {
        name: make_engine(getattr(arguments, name.split(",")[0]), longest, arguments.dtype, options, arguments.compiled)
        for name, options in KINDS.items()
    }
    vocabulary = engines["teacher"].model_config.get_vocab_size()
    for length in arguments.lengths:
        for requests in arguments.requests:
            read, steps = measure(engines, requests, length, vocabulary)
            for name in [*KINDS][:-1]:
                ratio = statistics.median(x / y for x, y in zip(steps[name], steps["teacher"], strict=True))
                found = {
                    "tokens": length,
                    "requests": requests,
                    "model": name,
                    "token": round(ratio, 2),
                    "text": round(read[name] / read["teacher"], 2),
                    "ms": round(1e3 * statistics.median(steps[name]), 2),
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
