"""The verdict on a student: a few sentences from its evaluation, which begin every report of a result.

At each length that was judged, a student is better or worse than a plain window of the same bytes if the interval of
their paired difference shows it. Before that, prices predict its KL: a price is of one head alone, so students that
were measured correct the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

from linearizer.errors import LinearizerError
from linearizer.method.by_prices import allocate_by_prices
from linearizer.method.decide import offers_of
from linearizer.plan.allocation import Allocation, StateSize
from linearizer.plan.plan import Plan
from linearizer.report.tables import Rows, Table, in_ten_thousand
from linearizer.run.folder import Run
from linearizer.run.measured import Candidates
from linearizer.run.results import LengthResult, Part, ShortPredictions

Kind = Literal["good", "note", "bad"]
NEAR, FAR = 0.9, 0.5  # agreement from which on a student is near its teacher, and below which it is far from it
WHOLE_SHARE = 0.8  # of a text: a window that holds this much forgets next to nothing
ROUNDING = 0.001  # nats: if a window forgets nothing, its KL comes from rounding, and so may the student's
ADVICE = "Another recipe, a larger budget or more training may do better."
WINDOW = "a plain window of the same bytes"


@dataclass(frozen=True)
class Verdict:
    """The comparison of a student with a plain window of the same bytes."""

    kind: Kind
    sentence: str
    agreement: float | None  # share of tokens at which the likeliest is the teacher's; None: there was no teacher
    kl: float | None  # nats per token
    length: int  # tokens of the texts on which it has this kl and agreement
    lengths: tuple[int, ...]  # tokens of all texts on which it was judged


def judge_run(run: Run) -> Verdict | None:
    """Return the verdict on the student of a run; None until it is judged."""
    parts: Mapping[str, Part] = run.results
    if (allocation := run.allocation) is None or (part := parts.get("language")) is None:
        return None
    return judge_lengths(part.result.lengths, StateSize.of(allocation, run.layers))


def judge_lengths(results: Sequence[LengthResult], state: StateSize) -> Verdict:
    """Compare the predictions of a student with the predictions of a window of the same bytes."""
    kind, words, decisive = weigh(results)
    student = of_subject(decisive, "student")
    sentences = [words, *describe_catastrophes(decisive), describe_lengths(results), f"{state.in_words}."]
    sentences += [ADVICE] * (kind == "bad")
    sentences += ["The teacher was not there to compare with."] * (student.kl is None)
    agreement, kl = (None if estimate is None else estimate.mean for estimate in (student.agreement, student.kl))
    lengths = tuple(result.length for result in results)
    return Verdict(kind, " ".join(sentences), agreement, kl, decisive.length, lengths)


def weigh(results: Sequence[LengthResult]) -> tuple[Kind, str, LengthResult]:
    """Choose the kind of a verdict, its first sentences, and the longest texts that decide it."""
    better, unsure, worse = (find(results, name) for name in ("better", "no difference shown", "worse"))
    shorter: list[LengthResult] = []  # than all texts on which it is better
    if better and unsure and unsure[-1].length < better[0].length:
        shorter, unsure = unsure, []
    decisive = (worse or unsure or better or results)[-1]
    student, window = describe_pair(decisive, "on the longest " * (len(worse or unsure or better) > 1))
    elsewhere = f" (better on {texts_of(better)})" if better else ""
    if worse:
        return "bad", f"Worse than {WINDOW} on {texts_of(worse)}{elsewhere}: {student}, {window}.", decisive
    if unsure:
        text = f"No difference from {WINDOW} is shown on {texts_of(unsure)}{elsewhere}: {student}, {window}."
        return "note", text, decisive
    if not better:
        reason = no_test([decisive])[0] + ", so nothing is shown of what it forgets" * fits_whole(decisive)
        return "note", f"Not tested: {reason}. {student[0].upper()}{student[1:]}, {window}.", decisive
    remark = f" (on {texts_of(shorter)} no difference is shown)" if shorter else ""
    text = f"Better than {WINDOW} on {texts_of(better)}{remark}: {student}, {window}."
    agreement = of_subject(decisive, "student").agreement
    if agreement is None or FAR <= agreement.mean < NEAR:
        return "note", text, decisive
    if agreement.mean < FAR:
        return "bad", f"{text} That is far from its teacher.", decisive
    return "good", text, decisive


def find(results: Sequence[LengthResult], name: str) -> list[LengthResult]:
    """Find the lengths at which the comparison with the window has the outcome `name`, and is a test.

    Texts that strain the teacher are no test; on texts that the state holds whole, a student can only be worse.
    """
    tests = [result for result in results if not result.strained and (name == "worse" or not fits_whole(result))]
    return [result for result in tests if comparison(result) == name]


def describe_pair(result: LengthResult, place: str = "") -> tuple[str, str]:
    """Describe the agreement of student and window with the teacher at one length; without a teacher, their losses."""
    student, window = of_subject(result, "student"), of_subject(result, "window")
    if student.kl is None or student.agreement is None or window.kl is None or window.agreement is None:
        return f"{place}loss {student.loss.mean:.3f} nats per token", f"the window {window.loss.mean:.3f}"
    return (
        f"{place}it agrees with its teacher on {student.agreement.mean:.1%} of tokens (KL {student.kl.mean:.4f})",
        f"the window on {window.agreement.mean:.1%} (KL {window.kl.mean:.4f})",
    )


def describe_catastrophes(result: LengthResult) -> list[str]:
    """Count the positions at which student and window are far off though the teacher is sure."""
    shares = [of_subject(result, name).catastrophic for name in ("student", "window")]
    if None in shares:  # there was no teacher, or a former version judged
        return []
    student, window = map(in_ten_thousand, shares)
    return [f"At {student} in 10,000 positions it misses what its teacher is sure of, the window at {window}."]


def describe_lengths(results: Sequence[LengthResult]) -> str:
    """Name the lengths at which a student was judged, and which of them are no test."""
    is_said = all(map(fits_whole, results)) and not find(results, "worse")  # then the first sentence is this reason
    reasons = no_test(results)[is_said:]
    remark = f" ({'; '.join(reasons)})" if reasons else ""
    return f"Judged on {texts_of(results)}{remark}; longer than {results[-1].length:,} tokens: not judged."


def no_test(results: Sequence[LengthResult]) -> list[str]:
    """Explain why texts show nothing of what a student forgets."""
    reasons = []
    if fitting := [result for result in results if fits_whole(result)]:
        nearly = "" if all(result.window >= result.length for result in fitting) else "nearly "
        reasons.append(f"{texts_of(fitting)} fit into the state {nearly}whole")
    if strained := [result for result in results if result.strained]:
        reasons.append(f"the teacher itself predicts the end of {texts_of(strained)} worse than a window does")
    return reasons


def comparison(result: LengthResult) -> str:
    """Compare student and window at one length by the interval of their paired difference."""
    if result.difference is None:
        return "no difference shown"
    low, high = result.difference.interval
    least = ROUNDING if fits_whole(result) else 0.0
    return "better" if high < 0 else "worse" if low > least else "no difference shown"


def fits_whole(result: LengthResult) -> bool:
    """Whether texts are so short that a window of the same bytes holds them nearly whole."""
    return result.window >= WHOLE_SHARE * result.length


def of_subject(result: LengthResult, name: str) -> ShortPredictions:
    """Find a subject by its name."""
    return next(subject for subject in result.subjects if subject.name == name)


def texts_of(results: Sequence[LengthResult]) -> str:
    """Name texts by their lengths: texts of 512, 2,048 and 4,096 tokens."""
    *firsts, last = (f"{result.length:,}" for result in results)
    return f"texts of {', '.join(firsts)} and {last} tokens" if firsts else f"texts of {last} tokens"


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
    if not (predicted := fsum(offer.kl for offer in offers.taken(allocate_by_prices(offers, run.plan.strategy)))) > 0:
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
