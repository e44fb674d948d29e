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
        cache.seen = seen = [*getattr(cache, "seen", []), *input_ids[0].tolist()]
        if len(seen) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        logits = torch.zeros(1, input_ids.shape[1], 4096)
        for place in range(input_ids.shape[1]):
            end = len(seen) - input_ids.shape[1] + place + 1
            for before in range(max(3, end - self.reach), end):
                if end > 3 and seen[before - 3 : before] == seen[end - 3 : end]:
                    logits[0, place, seen[before]] = 100.0
        return CausalLMOutput(logits=logits[:, -logits_to_keep:])


def looking_up(**traits):
    model = LooksUp(tiny_config("llama"))
    for name, value in traits.items():
        setattr(model, name, value)
    return Subject("looks up", model)
