"""Rows of a running batch without an endpoint, and what they should write."""

import torch

from linearizer.serve.row import Row


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids, **_):
        return "".join(chr(64 + token) for token in ids)


def row_of(ids, count, **how):
    heard = []
    row = Row(ids, heard.append, Letters(), count, **how)
    row.heard = heard
    return row


def alone(model, ids, count):
    """What `generate` writes after a prompt."""
    given = torch.tensor([ids], device=model.device)
    options = dict(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(given, attention_mask=torch.ones_like(given), **options)[0].tolist()


@torch.inference_mode()
def work(engine, arrivals, most=400):
    """Step until all is done; `arrivals` says after how many steps which rows come."""
    for step in range(most):
        for row in arrivals.pop(step, []):
            assert engine.submit(row)
        if not (engine.rows or engine.unread or arrivals):
            return
        engine.step()
    raise AssertionError("it does not end")
