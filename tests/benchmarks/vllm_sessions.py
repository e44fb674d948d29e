"""How many sessions fit on a GPU in vLLM: arithmetic from the shapes of models, not measured. Prints README's table.

    python -m tests.benchmarks.vllm_sessions [--memory 24e9] [--tokens 32768] [--budgets 256 1024]

vLLM gives nine tenths of the memory (its default) to weights in bf16 and to caches; activations are left out. A
student's row of states has as many bytes as its teacher's cache at the budget, in every session of any length.
"""

import argparse
from dataclasses import dataclass

GIVEN = 0.9
NUMBER = 2  # bytes of a number in bf16


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    tied: bool
    dim: int

    def weights(self) -> int:
        """Count the bytes of the weights."""
        attention = 2 * self.hidden * self.dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return NUMBER * (self.layers * layer + (2 - self.tied) * self.vocabulary * self.hidden + self.hidden)

    def cache(self, tokens: int) -> int:
        """Count the bytes of a cache of keys and values in bf16."""
        return NUMBER * 2 * self.layers * self.kv_heads * self.dim * tokens


SHAPES = {
    "Llama-3.2-1B": Shape(128_256, 2048, 16, 32, 8, 8192, True, 64),
    "Llama-3.1-8B": Shape(128_256, 4096, 32, 32, 8, 14_336, False, 128),
}


def rows(memory: float, tokens: int, budgets: list[int]) -> list[list[str]]:
    """Return the rows of the table, the first with the names of its columns."""
    found = [["model", "teacher", "teacher, fp8 cache", *(f"student, budget {budget}" for budget in budgets)]]
    for name, shape in SHAPES.items():
        room = GIVEN * memory - shape.weights()
        sizes = [shape.cache(tokens), shape.cache(tokens) // 2, *map(shape.cache, budgets)]
        found.append([name, *(f"{int(room // size):,}" for size in sizes)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=24e9, help="bytes of the GPU (default: %(default)g)")
    parser.add_argument("--tokens", type=int, default=32_768, help="of each session (default: %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 1024])
    arguments = parser.parse_args()
    header, *others = rows(arguments.memory, arguments.tokens, arguments.budgets)
    for row in (header, ["---", *["--:"] * (len(header) - 1)], *others):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
