"""Judges the presses of kvpress on texts, in an environment of their own: presses.py calls it there.

  python presses_of_others.py MODEL TEXTS OUT --length 4096 --kept 256 512

TEXTS holds rows of tokens. Each press reads the first LENGTH of a row with the whole cache, prunes it to KEPT tokens,
and reads on; nothing is pruned any more. OUT gets for every press and number of tokens the KL to the model with its
whole cache, its agreement, and its loss, token by token.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import kvpress
import torch
import transformers
from safetensors.torch import load_file

PRESSES = ("StreamingLLM", "TOVA", "SnapKV", "ExpectedAttention", "KeyDiff", "KVzip", "ObservedAttention")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--kept", nargs="+", type=int, required=True)
    parser.add_argument("--presses", nargs="*", default=PRESSES, choices=PRESSES)
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    rows = {"cache": (None, given.length)}
    rows |= {f"{name} {kept}": (name, kept) for kept in given.kept for name in given.presses}
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for number, text in enumerate(load_file(given.texts)["ids"][:, None]):
        expected = None
        for row, (name, kept) in rows.items():
            done = found.setdefault(row, [])
            if len(done) > number:
                continue
            if name is not None and expected is None:
                expected = read(model, None, given.length, text, given.length)
            logits = read(model, name, kept, text, given.length)
            expected = logits if name is None else expected
            done.append(compare(logits, expected, text[:, given.length + 1 :]))
        given.out.write_text(json.dumps(found))
        print(f"text {number + 1}", flush=True)


@torch.inference_mode()
def read(model, name, kept, text, length):
    """Return the logits of the tokens after `length`, the last one left out."""
    press = press_of(name, kept, length)
    model.set_attn_implementation("eager" if name == "ObservedAttention" else "sdpa")
    cache = transformers.DynamicCache()
    with nullcontext() if press is None else press(model):
        model.model(input_ids=text[:, :length], past_key_values=cache)
    after = text[:, length:-1]
    places = torch.arange(length, length + after.shape[1])[None]  # not those of a pruned cache
    return model(input_ids=after, past_key_values=cache, position_ids=places).logits.float()


def press_of(name, kept, length):
    if name is None:
        return None
    return getattr(kvpress, f"{name}Press")(compression_ratio=1 - (kept + 0.5) / length)


def compare(logits, expected, following):
    """Return KL, agreement and loss, token by token."""
    logs, right = logits.log_softmax(-1), expected.log_softmax(-1)
    kl = (right.exp() * (right - logs)).sum(-1)
    loss = -logs.gather(-1, following[..., None])[..., 0]
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float()
    measured = {"kl": kl, "agreement": agreement, "loss": loss}
    return {measure: [round(value, 7) for value in values[0].tolist()] for measure, values in measured.items()}


if __name__ == "__main__":
    main()
