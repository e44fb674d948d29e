"""What a page shows of a run: pieces, each with a mark that changes when the piece does.

A page polls, and gets the pieces whose marks it has not seen. Pieces are kept and shared, so twenty pages that watch
one run take hardly more time than one page.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from linearizer.method.decide import decidable
from linearizer.page import cards, plan_cards
from linearizer.page.chat import answers
from linearizer.page.visitors import is_example
from linearizer.report import markup, plotly_charts
from linearizer.report.head_needs import Measuring
from linearizer.report.parts import PART_VIEWS
from linearizer.run import events
from linearizer.run.events import Event, EventName, WorkTime
from linearizer.run.folder import Run
from linearizer.run.measured import CANDIDATES
from linearizer.run.results import Part
from linearizer.workers import control
from linearizer.workers.control import LIVE, Status

MAX_AGE_SECONDS = 2.0  # of pieces that are sent again without reading the run
CURVE_SECONDS = 2.5  # between two drawings of a curve that grows
MAX_WATCHED_RUNS = 64  # whose pieces are kept
PART_PREFIX = "part "  # begins the name of a piece that shows a part of an evaluation


@dataclass(frozen=True)
class Piece:
    """A piece of the page, and a mark that differs when the piece does."""

    mark: str
    value: Any


class RunState:
    """The pieces of one run."""

    def __init__(self, run: Run) -> None:
        self.run, self.lock = run, threading.Lock()
        self.place = 0
        self.training: list[dict[str, Any]] = []  # steps are counted over all losses
        self.begin, self.ends = 0, dict[int, int]()  # in this list: of the current loss, and of each that has ended
        self.pieces: dict[str, Piece] = {}
        self.measuring = Measuring()
        self.worked = WorkTime()
        self.read_at = self.drawn = 0.0
        self.evaluated: int | None = None  # time of the evaluation file that is drawn

    def read_pieces(self, now: float) -> dict[str, Piece]:
        """Return all pieces; read the run again if they are older than MAX_AGE_SECONDS."""
        with self.lock:
            if not 0 <= now - self.read_at < MAX_AGE_SECONDS:
                self.read()
                self.draw(control.status(self.run), now)
                self.read_at = now
            return dict(self.pieces)

    def read(self) -> None:
        """Read the new events of the log."""
        new_events, self.place = events.read_events(self.run.log_file, self.place)
        for event in new_events:
            if self.run.owns_event(event):
                self.worked.add(event)
            if self.run.is_encoder_run and event["event"] != EventName.PUBLISHED:
                continue
            if event["event"] in (EventName.PROFILE, EventName.PRICE):
                self.measuring.add(event)
            elif event["event"] == EventName.DISTILL and self.run.owns_event(event):
                self.add_step(event)
            elif event["event"] == EventName.DISTILLED and self.run.owns_event(event):
                self.begin = self.ends.setdefault(event.get("phase", 0), len(self.training))
            elif event["event"] == EventName.STARTED and self.run.owns_event(event):
                self.begin = 0  # the log reports losses that have ended again
            elif event["event"] == EventName.ALLOCATED and event.get("changed"):
                self.training, self.begin, self.ends = [], 0, {}
            elif event["event"] == EventName.PUBLISHED:
                self.put("published", f"{event['time']} {event['revision']}", lambda event=event: event)

    def add_step(self, event: Event) -> None:
        """Add a step of a training; a resumed loss replaces its steps from there on."""
        earlier_steps = self.training[self.begin - 1]["done"] if self.begin else 0
        while len(self.training) > self.begin and self.training[-1]["done"] >= earlier_steps + event["done"]:
            self.training.pop()
        self.training.append({**event, "done": earlier_steps + event["done"], "total": earlier_steps + event["total"]})

    def put(self, name: str, mark: object, value: Any) -> None:
        """Keep a piece; `value` is called only if the mark is new."""
        piece = self.pieces.get(name)
        if piece is None or piece.mark != str(mark):
            self.pieces[name] = Piece(str(mark), value())

    def draw(self, status: Status, now: float) -> None:
        """Bring every piece up to date."""
        run, live, evaluation = self.run, status.state in LIVE, status.evaluation
        values = {
            "id": run.id,
            "state": status.state,
            "stage": step_of_page(status),
            "trains": cards.trains(run),
            "can": possible_actions(status),
            "card": cards.run_card(status, run.folder.name, now, self.worked.seconds),
            "training": cards.training_card(status, self.training),
            "evaluating": "" if evaluation is None else evaluation.state,
            "evaluating card": cards.evaluation_card(evaluation, now),
        }
        for name, value in values.items():
            self.put(name, value, lambda value=value: value)
        if not live or now - self.drawn > CURVE_SECONDS or now < self.drawn:
            self.drawn, steps = now, self.training
            mark = (len(steps), steps[-1]["done"] if steps else 0)
            self.put("losses", mark, lambda: plotly_charts.draw_training_losses(steps).to_json() if steps else None)
        if is_example(run) or run.checkpoint.is_dir():  # which may come after the result
            self.put("usage", "a student", lambda: cards.use_card(run))
        if run.is_encoder_run:
            self.draw_encoder()
        else:
            self.draw_profile()
            self.draw_evaluation()

    def draw_profile(self) -> None:
        """Draw the heads as far as they are measured, and the curves of layers once all are."""
        run = self.run
        if "curves" not in self.pieces and (profile := run.profile) is not None:
            self.put("curves", "measured", lambda: plotly_charts.draw_freedom_curves(profile).to_json())
        if decidable(run):
            path = run.folder / "allocation.json"
            decided = path.stat().st_mtime_ns if path.is_file() else "predicted"
            mark = decided, run.has_file(CANDIDATES), run.has_file("evaluation.json")
            self.put("shares", mark, lambda: cache(partial(plan_cards.draw_shares, run)))
        elif self.measuring.count and run.has_file("inspection.json"):
            draw = partial(plan_cards.draw_measuring, run, self.measuring)
            self.put("measuring", self.measuring.count, lambda: cache(draw))

    def draw_encoder(self) -> None:
        """Show the result of an encoder's run, if there is one."""
        from linearizer.encoders.encoder_folder import QUALITY, TIMES, EncoderRun
        from linearizer.page import encoder_cards

        files = [self.run.folder / name for name in (QUALITY, TIMES)]
        if mark := [path.stat().st_mtime_ns for path in files if path.is_file()]:
            self.put("verdict", mark, lambda: encoder_cards.result_card(EncoderRun(self.run)))

    def draw_evaluation(self) -> None:
        """Show the results of the evaluation, if there are any."""
        run, path = self.run, self.run.folder / "evaluation.json"
        mark = path.stat().st_mtime_ns if path.is_file() else None
        if mark in (None, self.evaluated):
            return
        parts, allocation = run.results, run.allocation
        for name, part in parts.items():
            draw = cache(partial(draw_part, name, part))
            self.put(PART_PREFIX + name, hashlib.sha256(repr(part).encode()).hexdigest()[:16], lambda draw=draw: draw)
        if "language" in parts and allocation is not None:
            self.put("verdict", mark, lambda: cards.result_card(run, allocation, parts["language"]))
        self.evaluated = mark


def draw_part(name: str, part: Part) -> tuple[str, str | None]:
    """Show the result of a part: its tables, folded where it has a chart, and the chart."""
    figure = PART_VIEWS[name].draw(part)
    return markup.part_html(name, part, opened=figure is None), figure and figure.to_json()


def step_of_page(status: Status) -> int:
    """Return the step of the page that shows a run now: 3 measure, 4 train, 5 result."""
    if status.run.is_encoder_run:
        return 5
    step = status.step["event"] if status.step else EventName.PROFILE
    return 5 if status.state == "done" or step == EventName.EVALUATE else 4 if step == EventName.DISTILL else 3


def possible_actions(status: Status) -> dict[str, bool]:
    """Return the actions that a run allows now."""
    training = status.state == "running" and status.step is not None and status.step["event"] == EventName.DISTILL
    return {
        "stop": status.state in ("queued", "running"),
        "resume": status.state in ("stopped", "failed", "lost"),
        "pay": False,  # shown once resuming has asked for an agreement
        "use": training and cards.trains(status.run) and not status.run.has_request("use"),
        "student": status.run.checkpoint.is_dir(),
        "compare": answers.has_student(status.run) and not status.run.is_encoder_run,
        "pictures": answers.reads_pictures(status.run),
        "recorded": is_example(status.run),
        "prompts": not is_example(status.run),
    }


WATCHED: OrderedDict[tuple[Path, str], RunState] = OrderedDict()
WATCHED_LOCK = threading.Lock()


def read_pieces(run: Run, now: float) -> dict[str, Piece]:
    """Return the pieces of a run, for any number of pages."""
    with WATCHED_LOCK:
        watched = WATCHED.pop(run.key, None) or RunState(run)
        WATCHED[run.key] = watched
        while len(WATCHED) > MAX_WATCHED_RUNS:
            WATCHED.popitem(last=False)
    return watched.read_pieces(now)
