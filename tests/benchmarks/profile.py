"""How long measuring takes, and how much memory, on a model of GPT-2's shape: python -m tests.benchmarks.profile."""

import argparse
import resource
import time

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from linearizer.method.measure_run import measure_profile
from linearizer.plan.head_bytes import Layer
from linearizer.plan.profile import ProfileSettings


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--texts", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    head = config.n_embd // config.n_head
    layers = (Layer(config.n_head, config.n_head, head, head),) * config.n_layer
    windows = torch.randint(config.vocab_size, (arguments.texts, 1024))
    before, start, runs = peak_gigabytes(), time.perf_counter(), 0.0
    steps = measure_profile(model, windows, layers, ProfileSettings(samples=arguments.samples))
    try:
        while True:
            if next(steps).unit == "batches":
                runs = time.perf_counter() - start
    except StopIteration as end:
        profile = end.value.profile
    seconds, memory = time.perf_counter() - start, peak_gigabytes() - before
    size = len(profile.to_json()) / len(layers) / 1024
    print(f"{seconds:.1f} s, of which the model runs {runs:.1f} s")
    print(f"peak {memory:.2f} GB above the model's {before:.2f} GB")
    print(f"the profile {size:.1f} KB per layer; {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
