"""A model that looks up what it foretells, so that a test knows what it recalls."""

import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from linearizer.evaluate.subjects import Subject
from linearizer.student.cache import CACHE
from tests.support.families import tiny_config


class LooksUp(LlamaForCausalLM):
    """Foretells what followed when the last three tokens stood there before, within a reach; else nothing."""

    reach, most = 10**9, 10**9

    def forward(self, input_ids, logits_to_keep=0, **given):
        cache = given[CACHE]
        texts = getattr(cache, "seen", [[] for _ in input_ids])
        cache.seen = [[*seen, *new] for seen, new in zip(texts, input_ids.tolist(), strict=True)]
        if len(cache.seen[0]) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        logits = torch.zeros(*input_ids.shape, 4096)
        for row, seen in zip(logits, cache.seen, strict=True):
            for place in range(len(row)):
                end = len(seen) - len(row) + place + 1
                for before in range(max(3, end - self.reach), end):
                    if end > 3 and seen[before - 3 : before] == seen[end - 3 : end]:
                        row[place, seen[before]] = 100.0
        return CausalLMOutput(logits=logits[:, -logits_to_keep:])


def looking_up(**traits):
    model = LooksUp(tiny_config("llama"))
    for name, value in traits.items():
        setattr(model, name, value)
    return Subject("looks up", model)
