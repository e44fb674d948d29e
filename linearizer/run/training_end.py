"""How the training of a run ended, by its log: its steps, and what adapters gave."""

from __future__ import annotations

from dataclasses import dataclass

from linearizer.run.events import Event, EventName, events_of_student
from linearizer.run.folder import Run


@dataclass(frozen=True)
class Trained:
    """Steps of a training, over all its phases."""

    done: int
    asked: int
    kl: tuple[float, float] | None = None  # of the student without adapters and with them, on texts kept from them

    @property
    def keeps_adapters(self) -> bool:
        return self.kl is None or self.kl[1] < self.kl[0]

    @property
    def gain_in_words(self) -> str:
        """What adapters gave, if that was measured."""
        if self.kl is None:
            return ""
        without, with_them = self.kl
        end = f" ({1 - with_them / without:.0%} less)" if self.keeps_adapters else ", and they are left out"
        kl = f"a KL of {without:.4f} without them, and of {with_them:.4f} with them{end}"
        return f"on texts that the adapters did not learn from the student has {kl}"

    @property
    def early(self) -> bool:
        return self.done < self.asked

    @property
    def in_words(self) -> str:
        """The steps, and how many were asked for if it was ended early: 12 of 200 steps."""
        return f"{self.done:,} of {self.asked:,} steps" if self.early else f"{self.done:,} steps"


def read_training(run: Run) -> Trained:
    """Read from the log of a run how its training ended."""
    ends = ends_of_phases(run)
    done, asked = (
        sum(int(event.get(name) or event["steps"]) for event in ends.values()) for name in ("steps", "asked")
    )
    kl = next((tuple(event["kl"]) for event in ends.values() if event.get("kl")), None)
    return Trained(done, asked, kl)


def ends_of_phases(run: Run) -> dict[int, Event]:
    """Read from the log of a run how each phase of its training ended; of a resumed phase the last end counts."""
    return {event.get("phase", 0): event for event in events_of_student(run.events(), EventName.DISTILLED)}
