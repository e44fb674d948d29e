"""Whether a hybrid's students are as fast as those of a plain model, and its other layers as its teacher's.

  python -m tests.benchmarks.hybrid_speed
  python -m tests.benchmarks.hybrid_speed falcon_h1 lfm2 --length 2048

Models have random weights and heads of one shape. A row says how long a layer takes to read a text and to write a
token: the student of a softmax layer, over the same in the plain model; and a recurrent or convolution layer in the
student, over the same in its teacher. Models take turns, and medians over calls are compared.
"""

import argparse
import time
from statistics import median

import torch

from linearizer.amounts import columns
from linearizer.plan.head_bytes import Head
from linearizer.student.cache import CACHE
from linearizer.student.layer_student import LayerStudent
from tests.support import hybrids, models
from tests.support.models import tokens

PLAIN, KINDS = "qwen3", ("qwen3_5_text", "qwen3_next", "falcon_h1", "lfm2", "nemotron_h")
SHAPE = dict(head_dim=64, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8192)
HEADS = [Head(window=64, slots=192, bits=8), Head(window=64, slots=192, bits=4)]
RECURRENT = ("linear_attn", "mamba", "conv", "mixer")  # the names of modules in layers
ROUNDS, WRITTEN = 5, 20


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text")
    given = parser.parse_args(arguments)
    plain = Timed(models.student_of(PLAIN, HEADS, **SHAPE))
    lines = [["", "student reads", "student writes", "recurrent reads", "recurrent writes"]]
    for kind in given.kinds:
        student = Timed(hybrids.student_of(kind, HEADS, **SHAPE))
        teacher = Timed(hybrids.teacher_of(kind, **SHAPE))
        for _ in range(ROUNDS):
            for model in (plain, student, teacher):
                model.read_and_write(given.length)
        lines.append([kind, *ratios(student.softmax, plain.softmax), *ratios(student.recurrent, teacher.recurrent)])
    print(columns(lines))


class Timed:
    """A model, and the seconds that its layers took: by kind, of texts and of tokens."""

    def __init__(self, model):
        self.model, self.softmax, self.recurrent, self.kind = model.eval(), ([], []), ([], []), 0
        for name, module in self.model.named_modules():
            if isinstance(module, LayerStudent):
                self.time(module, self.softmax)
            elif name.rpartition(".")[2] in RECURRENT and not hasattr(module, "student"):
                self.time(module, self.recurrent)

    def time(self, module, seconds):
        forward = module.forward

        def timed(*arguments, **options):
            begun = time.perf_counter()
            out = forward(*arguments, **options)
            seconds[self.kind].append(time.perf_counter() - begun)
            return out

        module.forward = timed

    @torch.inference_mode()
    def read_and_write(self, length):
        """Read a text, and write some tokens after it."""
        self.kind, cache = 0, None
        text = tokens(1, length + WRITTEN)
        for begin, end in [(0, length), *((at, at + 1) for at in range(length, length + WRITTEN))]:
            out = self.model(text[:, begin:end], use_cache=True, **{CACHE: cache})
            self.kind, cache = 1, out[CACHE]


def ratios(mine, others):
    """Divide medians: of reading, and of writing."""
    return [f"{median(a) / median(b):.2f}" if a and b else "" for a, b in zip(mine, others, strict=True)]


if __name__ == "__main__":
    main()
