"""How much of the training that was asked for a run has done: less, where someone chose to use what there was."""

from __future__ import annotations

from dataclasses import dataclass

from linearizer.run.folder import Run, events


@dataclass(frozen=True)
class Trained:
    """Steps of all phases of a training."""

    done: int
    asked: int

    @property
    def early(self) -> bool:
        return self.done < self.asked


def trained(run: Run) -> Trained:
    """Read from the log of a run how its training ended; a phase that was taken up again counts as it ended last."""
    ends = {event.get("phase", 0): event for event in events.of_student(run.events(), "distilled")}
    done = sum(event["steps"] for event in ends.values())
    return Trained(done, sum(int(event.get("asked") or event["steps"]) for event in ends.values()))
