"""Reads lessons: TOML files that say where a recorded run stands, what is marked, and what is asked.

A lesson holds no words and no figures of a run: words are keys into assets/texts/lessons-*.toml, figures and answers
are read from the trace when the lesson is shown. Everything unknown, of a wrong type or not in the trace is refused
with file, key and rule. Knows the form of a lesson; knows no trace and no page.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

FOLDER = Path(__file__).resolve().parent / "lessons"
PLACES = ("start", "end", "busiest", "promotion", "predict", "reveal", "regret", "return")
"""Places that are found in the trace, so that a new recording needs no new lesson; else `event` and `row` say it."""
PARTS = ("legend", "lanes", "full", "quant", "evicted", "memory", "fmm", "churn", "atlas", "text", "transport")
"""Parts of the board that a step can frame."""
DONE = ("seen", "answered", "reached")
"""What counts as done: it was shown, its question was answered, or the replay was brought to its end."""
QUESTIONS = {
    "predict": (),
    "tier": (),
    "text": ("choices", "answer"),
    "number": ("choices", "answer"),
    "least": ("choices", "fact"),
    "most": ("choices", "fact"),
    "change": ("before", "after", "tolerance"),
}
"""Kinds of question, and what each needs. Only "text" names its answer; all others take it from the figures."""
UNITS = ("count", "exact", "bytes", "share", "percent", "plain", "ms", "rate", "gigabytes", "times")

_LESSON_KEYS = ("order", "document", "preset", "traces", "figures", "steps")
_STEP_KEYS = (
    *("name", "trace", "at", "event", "row", "windows", "parts", "regret", "ranks", "play", "done", "sources", "table"),
    "question",
)
_TABLE_KEYS = ("rows", "columns")
_FIGURE_KEYS = ("value", "unit")


class LessonError(ConfigError):
    """A lesson that can't be used; the text names file, key and rule."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that no trace of ours holds: the article's. `unit` is one of `UNITS`."""

    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Table:
    """A small table: a row for each name in `rows`, a column for each fact in `columns`."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        kind: one of `QUESTIONS`.
        choices: names of the choices: text keys, facts, or traces, by kind.
        answer: the right choice of a "text" or "number" question.
        fact: what "least" and "most" compare among the traces.
        before, after: the two facts of a "change"; within `tolerance` they count as the same.
    """

    kind: str
    choices: tuple[str, ...] = ()
    answer: str = ""
    fact: str = ""
    before: str = ""
    after: str = ""
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step: where the replay stands, what is marked, what is asked.

    Attributes:
        name: unique in its lesson; its words are `<lesson>.<name>` and the like.
        trace: the recording's id.
        at: one of `PLACES`, or "" where `event` and `row` say the place; `row` None is the liveliest.
        windows: marked windows besides those that the place brings along.
        parts: framed parts of the board.
        regret: whether the regret layer is shown. ranks: whether a table tells place and score of the marked windows.
        play: whether the replay starts by itself.
        done: one of `DONE`. sources: text keys of where figures come from.
    """

    name: str
    trace: str
    at: str
    event: int
    row: int | None
    windows: tuple[int, ...]
    parts: tuple[str, ...]
    regret: bool
    ranks: bool
    play: bool
    done: str
    sources: tuple[str, ...]
    table: Table | None
    question: Question | None


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson. `traces` are the recordings that its figures may compare; `document` and `preset` start it live."""

    id: str
    order: int
    document: str
    preset: str
    traces: tuple[str, ...]
    figures: Mapping[str, Figure]
    steps: tuple[Step, ...]
    path: Path


@dataclass(frozen=True, slots=True)
class TraceShape:
    """How far a trace reaches: last routing event, board rows, windows at the end."""

    last_event: int
    rows: int
    windows: int


@functools.cache
def load_lessons() -> tuple[Lesson, ...]:
    """All lessons that come with the product, in their order.

    Raises:
        LessonError: one of the files can't be used, or two have the same place.
    """
    lessons = sorted((load_lesson(path) for path in FOLDER.glob("*.toml")), key=lambda lesson: lesson.order)
    for before, after in itertools.pairwise(lessons):
        if before.order == after.order:
            raise LessonError(f"{after.path}: order must be unique, but {before.path.name} has {after.order} too.")
    return tuple(lessons)


def load_lesson(path: Path) -> Lesson:
    """The lesson in the file at `path`; its id is the file's stem.

    Raises:
        LessonError: unreadable, not TOML, an unknown key, a wrong type, or a name that stands for nothing.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LessonError(f"{path}: the file must be readable UTF-8 text ({error}).") from error
    except tomllib.TOMLDecodeError as error:
        raise LessonError(f"{path}: the file must be TOML ({error}).") from error
    read = _Reader(path, "", table, _LESSON_KEYS)
    figures = {}
    for name, body in read.table("figures").items():
        figure = _Reader(path, f"figures.{name}.", body, _FIGURE_KEYS)
        figures[name] = Figure(figure.number("value"), figure.one_of("unit", UNITS))
    steps = tuple(
        _step(_Reader(path, f"steps[{place}].", body, _STEP_KEYS)) for place, body in enumerate(read.tables("steps"))
    )
    if not steps:
        raise LessonError(f"{path}: steps must hold at least one step.")
    names = [step.name for step in steps]
    if len(set(names)) != len(names):
        raise LessonError(f"{path}: steps must have different names, got {', '.join(names)}.")
    return Lesson(
        id=path.stem,
        order=read.whole("order"),
        document=read.text("document"),
        preset=read.text("preset"),
        traces=read.texts("traces"),
        figures=figures,
        steps=steps,
        path=path,
    )


def check_place(lesson: Lesson, step: Step, event: int, row: int, windows: Sequence[int], shape: TraceShape) -> None:
    """Refuses a place that is not in the trace.

    Raises:
        LessonError: the event, the row or a window lies beyond it.
    """
    for key, value, last in (
        ("event", event, shape.last_event),
        ("row", row, shape.rows - 1),
        *(("windows", window, shape.windows - 1) for window in windows),
    ):
        if not 0 <= value <= last:
            where = f"{lesson.path}: steps.{step.name}.{key}"
            raise LessonError(f"{where} must be in 0 to {last}, where trace {step.trace!r} ends, got {value}.")


def _step(read: _Reader) -> Step:
    at = read.text("at", "")
    if at and at not in PLACES:
        raise read.error("at", f"must be one of {', '.join(PLACES)}, got {at!r}")
    if at and ("event" in read.body or "row" in read.body):
        raise read.error("at", "must be left out where event or row says the place")
    for part in read.texts("parts"):
        if part not in PARTS:
            raise read.error("parts", f"must be of {', '.join(PARTS)}, got {part!r}")
    table = None
    if "table" in read.body:
        inner = _Reader(read.path, f"{read.prefix}table.", read.table("table"), _TABLE_KEYS)
        table = Table(inner.texts("rows"), inner.texts("columns"))
    question = _question(read) if "question" in read.body else None
    done = read.one_of("done", DONE, "answered" if question else "seen")
    if done == "answered" and question is None:
        raise read.error("done", "must not be 'answered' in a step without a question")
    return Step(
        name=read.text("name"),
        trace=read.text("trace"),
        at=at,
        event=read.whole("event", 0),
        row=read.whole("row") if "row" in read.body else None,
        windows=read.wholes("windows"),
        parts=read.texts("parts"),
        regret=read.flag("regret"),
        ranks=read.flag("ranks"),
        play=read.flag("play"),
        done=done,
        sources=read.texts("sources"),
        table=table,
        question=question,
    )


def _question(read: _Reader) -> Question:
    body = read.table("question")
    kind = body.get("kind")
    if kind not in QUESTIONS:
        raise read.error("question.kind", f"must be one of {', '.join(QUESTIONS)}, got {kind!r}")
    inner = _Reader(read.path, f"{read.prefix}question.", body, ("kind", *QUESTIONS[kind]))
    missing = [key for key in QUESTIONS[kind] if key not in body]
    if missing:
        raise inner.error(missing[0], "must be there")
    question = Question(
        kind=kind,
        choices=inner.texts("choices"),
        answer=inner.text("answer", ""),
        fact=inner.text("fact", ""),
        before=inner.text("before", ""),
        after=inner.text("after", ""),
        tolerance=inner.number("tolerance", 0.0),
    )
    if question.answer and question.answer not in question.choices:
        raise inner.error("answer", f"must be one of the choices, got {question.answer!r}")
    return question


class _Reader:
    """Typed access to one table of a file; refuses keys beyond `known`."""

    def __init__(self, path: Path, prefix: str, body: Any, known: Sequence[str]) -> None:
        self.path, self.prefix = path, prefix
        if not isinstance(body, dict):
            raise LessonError(f"{path}: {prefix.rstrip('.')} must be a table.")
        self.body: dict[str, Any] = body
        for key in body:
            if key not in known:
                raise self.error(key, f"is an unknown key; known are {', '.join(known)}")

    def error(self, key: str, rule: str) -> LessonError:
        return LessonError(f"{self.path}: {self.prefix}{key} {rule}.")

    def _typed(self, key: str, kinds: tuple[type, ...], wanted: str, default: Any) -> Any:
        value = self.body.get(key, default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(key, f"must be {wanted}, got {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, (str,), "text", default))

    def one_of(self, key: str, known: Sequence[str], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in known:
            raise self.error(key, f"must be one of {', '.join(known)}, got {value!r}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, (int,), "a whole number", default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, (int, float), "a number", default))

    def flag(self, key: str) -> bool:
        return bool(self._typed(key, (bool,), "true or false", False))

    def texts(self, key: str) -> tuple[str, ...]:
        return self._all(key, (str,), "a list of texts")

    def wholes(self, key: str) -> tuple[int, ...]:
        return self._all(key, (int,), "a list of whole numbers")

    def table(self, key: str) -> dict[str, Any]:
        return dict(self._typed(key, (dict,), "a table", {}))

    def tables(self, key: str) -> tuple[dict[str, Any], ...]:
        return self._all(key, (dict,), "a list of tables")

    def _all(self, key: str, kinds: tuple[type, ...], wanted: str) -> tuple[Any, ...]:
        found = self._typed(key, (list,), wanted, [])
        if not all(isinstance(item, kinds) and not isinstance(item, bool) for item in found):
            raise self.error(key, f"must be {wanted}, got {found!r}")
        return tuple(found)
