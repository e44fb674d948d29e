"""The KL that prices predict for a student. A price is of one head alone, so measured students correct the sum."""

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
    """The KL that prices predict for the student they chose, and its measured KL."""

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
    """Compare this run's prediction with a measurement; None if no student by prices was measured."""
    if (candidates := run.candidates) is None or run.prices is None:
        return None
    offers = offers_of(run, run.plan, run.layers)
    if not (predicted := fsum(offer.kl for offer in offers.taken(allocate_by_prices(offers)))) > 0:
        return None
    length, priced = run.plan.resolved_length(run.positions), candidates.measured[0]  # the first is by prices
    by_length = dict(zip(candidates.lengths, priced.kl, strict=True))
    length = length if length in by_length else candidates.lengths[-1]
    return Correction(predicted, by_length[length], length)


def predict_kl(run: Run, plan: Plan, allocation: Allocation) -> str:
    """Describe the KL that prices predict for an allocation, scaled by the correction; "" without prices."""
    if plan.strategy_spec.decided_by != "prices":
        return ""
    try:
        offers = offers_of(run, plan, run.layers)
        bought = offers.taken(allocation)
    except (LinearizerError, KeyError):  # a plain allocation was chosen, which has no priced offers
        return ""
    predicted = fsum(offer.kl for offer in bought)
    exhausted = all(offer is choices[-1] for offer, choices in zip(bought, offers.offers, strict=True))
    limit = "; more buys nothing: every head has all it can use" * exhausted
    if (correction := find_correction(run)) is None:
        return f"{predicted:.4f} predicted: no whole student was measured{limit}"
    factor = f"× {correction.factor:.2g} as this run measured"
    return f"about {predicted * correction.factor:.4f}: {predicted:.4f} predicted, {factor}{limit}"


def kl_sentences(run: Run) -> list[str]:
    """Describe the predicted and the measured KL of a run's student, and which allocation was kept and why."""
    correction, candidates = find_correction(run), run.candidates
    predicted = [] if correction is None else [f"{correction.in_words}."]
    return predicted + ([] if candidates is None else [candidates.in_words])


def candidates_table(candidates: Candidates) -> Table:
    """Show the KL of every allocation that was measured before one was kept."""
    rows: Rows = [("KL over the first … tokens", *(f"{length:,}" for length in candidates.lengths))]
    rows += [(candidate.name, *(f"{kl:.4f}" for kl in candidate.kl)) for candidate in candidates.measured]
    note = "of text that was not priced; kept is the smallest by ratio over all lengths, less than 0.001 being rounding"
    return Table(rows, (note,))
