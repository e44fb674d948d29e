"""What making a student costs: seconds, and tokens that go through the model, also over several sittings."""

import json
import time

from linearizer.run.files import write_whole
from linearizer.teacher.layers import blocks_of

FILE, MADE = "cost.json", "made.json"  # of a run: what was spent so far, and in all once the student was there


class Costs:
    """Counts while it is entered; what a run has spent before is in its folder."""

    def __init__(self, run, model):
        self.run, self.blocks, self.spent = run, blocks_of(model), {"seconds": 0.0, "tokens": 0.0}

    def __enter__(self):
        self.begun = time.perf_counter()
        self.hooks = [block.register_forward_hook(self.count) for block in self.blocks]
        return self

    def __exit__(self, error, *_):
        for hook in self.hooks:
            hook.remove()
        self.add({"seconds": time.perf_counter() - self.begun, "tokens": 0.0})
        if (self.run.folder / MADE).exists():  # the student was only made again
            return
        kept = self.run.folder / FILE
        if kept.exists():
            self.add(json.loads(kept.read_text()))
        write_whole(kept, json.dumps(self.spent))
        if error is None:
            write_whole(self.run.folder / MADE, json.dumps(self.in_passes()))

    def count(self, _, args, __):
        """Count the hidden states that a block is given: every block has its share of a token."""
        if args and args[0].ndim == 3:
            self.spent["tokens"] += args[0].shape[0] * args[0].shape[1] / len(self.blocks)

    def add(self, others):
        """Add what was spent elsewhere."""
        self.spent = {name: value + others[name] for name, value in self.spent.items()}

    def in_passes(self):
        """Return seconds, and passes over the texts that the run measured."""
        texts, length = self.run.plan.texts, self.run.plan.resolved_length(self.run.positions)
        passes = self.spent["tokens"] / (texts * length)
        return {"seconds": self.spent["seconds"], "passes": passes, "texts": texts, "length": length}


def made_costs(run):
    """Return what making the student of a run took."""
    return json.loads((run.folder / MADE).read_text())
