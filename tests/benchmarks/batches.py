"""What a batch changes in its rows: python -m tests.benchmarks.batches [--model FOLDER].

Three texts are read, then continued token by token, together and each alone, by SmolLM2 135M and by students of it
whose heads hold a window and slots. Printed is the KL of the rows of the batch to the rows alone, in bf16: the mean and
the largest over the tokens that were given one by one, and the mean over a batch of texts of different lengths, which
padding fills. In fp32 all rows agree.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearizer.amounts import columns
from linearizer.method.checkpoint import put_student_into
from linearizer.plan.head_bytes import Head
from linearizer.teacher.logits import kl_of
from tests.benchmarks.real_texts import WORK, documents_to_judge, real_model
from tests.support.models import allocation_of, layers_of

SUBJECTS = {"teacher": None, "16 bits": 16, "8 bits": 8, "4 bits": 4}
TOKENS, READ, SINKS = 512, 448, 2  # of a text, and how many of them are read at once
PADDING = (0, 37, 150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the folder of SmolLM2 135M, where it is made already")
    folder = parser.parse_args().model or real_model(WORK)
    documents = documents_to_judge(AutoTokenizer.from_pretrained(folder), TOKENS, len(PADDING))
    ids = torch.cat([document.ids for document in documents])[:, :TOKENS]
    rows = [("", "mean", "largest", "mean, padded")]
    for name, bits in SUBJECTS.items():
        rows.append((name, *(f"{x:.1e}" for x in measure(subject(folder, bits), ids))))
    print(columns(rows))


def subject(folder, bits):
    """Load the teacher, or make a student with so many bits a number of it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    if bits is None:
        return model
    layers = layers_of(model)
    return put_student_into(model, layers, allocation_of(layers, [Head(window=32, slots=64, bits=bits)], SINKS))


@torch.no_grad()
def measure(model, ids):
    """Return the mean and the largest KL to rows alone, and the mean in a padded batch."""
    padded, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, padding in enumerate(PADDING):
        padded[row, padding:], mask[row, padding:] = ids[row, : TOKENS - padding], 1
    together, ragged = read(model, ids), read(model, padded, mask)
    plain, with_padding = [], []
    for row, padding in enumerate(PADDING):
        plain.append(kl_of(read(model, ids[row : row + 1]), together[row : row + 1])[0, READ:])
        alone = read(model, ids[row : row + 1, : TOKENS - padding])
        with_padding.append(kl_of(alone, ragged[row : row + 1, padding:])[0, READ - padding :])
    plain, with_padding = torch.cat(plain), torch.cat(with_padding)
    return plain.mean(), plain.max(), with_padding.mean()


def read(model, ids, mask=None):
    """Read a text in one call, then token by token; return all logits."""
    memory, logits = None, []
    for begin, end in [(0, READ), *((at, at + 1) for at in range(READ, ids.shape[1]))]:
        given = {}
        if mask is not None:
            given = {"attention_mask": mask[:, :end], "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, begin:end]}
        answer = model(ids[:, begin:end], past_key_values=memory, use_cache=True, **given)
        memory = answer.past_key_values
        logits.append(answer.logits.float())
    return torch.cat(logits, 1)


if __name__ == "__main__":
    main()
