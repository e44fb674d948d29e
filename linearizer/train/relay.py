"""Hands hidden states of the teacher from one process of a training to the next, so that each runs its own blocks.

Processes that train shares of the layers read the same texts. Each leaves what its last block answers for the process
with the layers behind. That begins with it if it is there, and else with the text itself: the bits are the same, and a
process that is ahead of the one before falls back until it need not begin with the text any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from linearizer.model.layers import blocks_of
from linearizer.model.swap import fixed_answer
from linearizer.run.files import UNFINISHED
from linearizer.run.sharing import Share

MOST_AHEAD = 16  # batches that may wait for the next process
HIDDEN = "hidden"
NAME = HIDDEN + "-{number}"  # of the folder, by the share that writes into it


class Enough(Exception):
    """Ends a pass after the last block that is needed."""


class Relay:
    """The part of a teacher that one process runs, and where it begins and ends."""

    def __init__(
        self, blocks: Sequence[nn.Module], first: int, last: int, before: Path | None, after: Path | None
    ) -> None:
        self.blocks, self.first, self.last, self.before, self.after = blocks, first, last, before, after

    @staticmethod
    def of(model: nn.Module, layers: Sequence[int], share: Share, folder: Path | None) -> Relay | None:
        """Make the relay of a share of the layers, which have these numbers in all; None where there is none."""
        blocks, own = blocks_of(model), share.section(layers)
        if share.count == 1 or folder is None or not own or len(blocks) <= max(layers):
            return None
        ahead = Share(share.number - 1, share.count).section(layers) if share.number else []
        before = folder.parent / NAME.format(number=share.number - 1) if ahead else None
        after = folder.parent / NAME.format(number=share.number) if share.number < share.count - 1 else None
        return Relay(blocks, ahead[-1] + 1 if ahead else 0, own[-1], before, after)

    def run(self, model: Any, step: int, ids: torch.Tensor) -> None:
        """Run the blocks of this process on the texts of a step."""
        given = self.take(step)

        def end(block: nn.Module, args: tuple, answer: Any) -> None:
            self.leave(step, answer)
            raise Enough

        with ExitStack() as stack, suppress(Enough):
            if given is not None:
                for block in self.blocks[: self.first]:
                    stack.enter_context(fixed_answer(block, given.to(ids.device)))
            stack.callback(self.blocks[self.last].register_forward_hook(end).remove)
            model.base_model(input_ids=ids, use_cache=False)

    def take(self, step: int) -> torch.Tensor | None:
        """Take what the process before has left for a step, and drop what it left for earlier steps."""
        if self.before is None or not self.before.is_dir():
            return None
        for path in self.before.glob("*.safetensors"):
            if int(path.stem) < step:
                path.unlink(missing_ok=True)
        path = self.before / f"{step}.safetensors"
        if not path.exists():
            return None
        hidden = load_file(path)[HIDDEN]
        path.unlink()
        return hidden

    def leave(self, step: int, answer: Any) -> None:
        """Leave what a block answered for the next process, if that is not far behind."""
        if self.after is None or not isinstance(answer, torch.Tensor):
            return  # what it answers besides may be needed, too
        self.after.mkdir(exist_ok=True)
        if len(list(self.after.glob("*.safetensors"))) < MOST_AHEAD:
            path = self.after / f"{step}.safetensors"
            save_file({HIDDEN: answer.detach().cpu().contiguous()}, path.with_name(path.name + UNFINISHED))
            path.with_name(path.name + UNFINISHED).replace(path)
