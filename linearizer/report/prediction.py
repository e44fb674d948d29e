"""The KL that prices predict of a student, corrected by the KL of whole students: a price is of one head alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

from linearizer.errors import LinearizerError
from linearizer.method.by_prices import allocate_by_prices
from linearizer.method.decide import offers_of
from linearizer.plan.allocation import Allocation
from linearizer.plan.plan import Plan
from linearizer.report.tables import Rows, Table
from linearizer.run.folder import Run
from linearizer.run.prices import Candidates


@dataclass(frozen=True)
class Correction:
    """The KL that prices predict of the student they chose, and the KL that was measured of it."""

    predicted: float
    measured: float
    length: int  # tokens of the text that it was measured on

    @property
    def factor(self) -> float:
        """The factor that corrects the predictions of this run."""
        return self.measured / self.predicted

    @property
    def in_words(self) -> str:
        predicted, measured = f"{self.predicted:.4f} predicted", f"{self.measured:.4f} measured"
        return (
            f"KL on {self.length:,} tokens of text that was not priced: {predicted}, where each doubling of a text "
            f"counts alike; {measured}"
        )


def find_correction(run: Run) -> Correction | None:
    """Find by how much this run's predictions are off; None where no student by prices was measured."""
    if (candidates := run.candidates) is None or run.prices is None:
        return None
    offers = offers_of(run, run.plan, run.layers)
    if not (predicted := fsum(offer.kl for offer in offers.taken(allocate_by_prices(offers)))) > 0:
        return None
    length, priced = run.plan.kept_length(run.positions), candidates.measured[0]  # the first is that by prices
    own = dict(zip(candidates.lengths, priced.kl, strict=True))
    length = length if length in own else candidates.lengths[-1]
    return Correction(predicted, own[length], length)


def predict_kl(run: Run, plan: Plan, allocation: Allocation) -> str:
    """Describe the KL that prices predict of an allocation, scaled by what this run measured; "" without prices."""
    if plan.rules.decided_by != "prices":
        return ""
    try:
        offers = offers_of(run, plan, run.layers)
        taken = offers.taken(allocation)
    except (LinearizerError, KeyError):  # a plain allocation was kept, which is not made of priced offers
        return ""
    predicted = fsum(offer.kl for offer in taken)
    last = all(offer is own[-1] for offer, own in zip(taken, offers.offers, strict=True))
    most = "; more buys nothing: every head has all it can use" * last
    if (correction := find_correction(run)) is None:
        return f"{predicted:.4f} predicted: no whole student was measured{most}"
    factor = f"× {correction.factor:.2g} as this run measured"
    return f"about {predicted * correction.factor:.4f}: {predicted:.4f} predicted, {factor}{most}"


def kl_sentences(run: Run) -> list[str]:
    """Describe the predicted and the measured KL of a run's student, and which allocation was kept and why."""
    correction, candidates = find_correction(run), run.candidates
    predicted = [] if correction is None else [f"{correction.in_words}."]
    return predicted + ([] if candidates is None else [candidates.in_words])


def candidates_table(candidates: Candidates) -> Table:
    """Show the KL of every allocation that was measured before one was kept."""
    rows: Rows = [("KL over the first … tokens", *(f"{length:,}" for length in candidates.lengths))]
    rows += [(each.name, *(f"{kl:.4f}" for kl in each.kl)) for each in candidates.measured]
    note = "of text that was not priced; kept is the smallest by ratio over all lengths, less than 0.001 being rounding"
    return Table(rows, (note,))
