"""Lessons as the page gets them: positions, words with their figures filled in, questions with their answers.

Puts lessons, traces, figures and texts together for one language; knows no component and no route.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from app.glossary import bare, marked
from app.lesson_facts import Fact, Facts, figure_facts, measured, measured_facts, place_facts, trace_facts
from app.lesson_trace import LessonTrace, Place, load_trace
from app.settings import ASSETS
from app.texts import language, read_texts, text
from engine.trace import Tier
from presets.lessons import Lesson, LessonError, Question, Step, TraceShape, check_place, load_lessons

PLACEHOLDER = re.compile(r"\{(\w+)\}")
LABELS = "ABCDEFGH"
LEADER = "first"
"""The recording that the others follow."""
TIER_CHOICES = (Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED)
CHANGES = ("less", "same", "more")


@cache
def lesson_texts(lang: str) -> Mapping[str, str]:
    """All words of the lessons in one language, by flat key such as "three_tiers.title"."""
    return read_texts(ASSETS / "texts" / f"lessons-{language(lang)}.toml")


def say(lang: str, key: str, facts: Facts | None = None) -> str:
    """A text of the lessons with its figures filled in, and without its marked terms.

    Raises:
        LessonError: there is no such text, or it names a figure that there is not.
    """
    return _fill(lang, key, bare(_words(lang, key)), facts)


def told(lang: str, key: str, facts: Facts | None = None) -> list[list[str]]:
    """The same text in parts, [words, term of the glossary or ""]. A figure never makes a mark: tokens are untrusted.

    Raises:
        LessonError: as `say`.
    """
    return [[_fill(lang, key, words, facts), term] for words, term in marked(_words(lang, key))]


def _words(lang: str, key: str) -> str:
    found = lesson_texts(lang).get(key)
    if found is None:
        raise LessonError(f"lessons-{language(lang)}.toml must have a text {key!r}.")
    return found


def _fill(lang: str, key: str, words: str, facts: Facts | None) -> str:
    def fill(match: re.Match[str]) -> str:
        fact = (facts or {}).get(match[1])
        if fact is None:
            raise LessonError(f"lessons-{language(lang)}.toml: {key} names {match[1]!r}, which is no figure there.")
        return fact.say(lang)

    return PLACEHOLDER.sub(fill, words)


@cache
def lessons_payload(lang: str) -> dict[str, Any]:
    """Every lesson in one language, ready for JSON.

    Raises:
        LessonError, TraceError: a lesson, a text or a trace does not fit the others.
    """
    words = lesson_texts(lang)
    lessons = [_Told(lesson, language(lang)).body() for lesson in load_lessons()]
    ui = {key.removeprefix("ui."): value for key, value in words.items() if key.startswith("ui.")}
    tiers = {name: text(lang, f"tier.{name}") for name in ("full", "quant", "evicted")}
    return {"lang": language(lang), "ui": ui, "tiers": tiers, "lessons": lessons}


def find_lesson(name: str) -> Lesson | None:
    """The lesson of that id."""
    return next((lesson for lesson in load_lessons() if lesson.id == name), None)


def place_of(lesson: Lesson, step: Step) -> Place:
    """Where a step stands in its trace.

    Raises:
        LessonError: the place is not in the trace.
    """
    trace = load_trace(step.trace)
    if step.at:
        found = trace.find(step.at)
        # Runs that are compared are shown in one row: the first recording's, whose scores are known.
        row = min(load_trace(LEADER).row, trace.meta.rows - 1) if step.at in ("start", "end") else found.row
        place = Place(found.event, row, (*found.windows, *step.windows))
    else:
        place = Place(step.event, trace.row if step.row is None else step.row, step.windows)
    check_place(lesson, step, place.event, place.row, place.windows, shape_of(trace))
    return place


def shape_of(trace: LessonTrace) -> TraceShape:
    """How far a trace reaches."""
    return TraceShape(trace.last_event, trace.meta.rows, trace.windows)


def step_facts(lesson: Lesson, step: Step) -> Facts:
    """Every figure that the words of a step may name."""
    trace = load_trace(step.trace)
    facts = trace_facts(trace) | place_facts(trace, place_of(lesson, step))
    for name in lesson.traces:
        facts |= {f"{_plain(name)}_{key}": fact for key, fact in trace_facts(load_trace(name)).items()}
    return facts | figure_facts(lesson) | measured_facts(measured())


def _plain(name: str) -> str:
    return name.replace("-", "_")


class _Told:
    """One lesson in one language."""

    def __init__(self, lesson: Lesson, lang: str) -> None:
        self.lesson, self.lang = lesson, lang

    def body(self) -> dict[str, Any]:
        lesson = self.lesson
        title = say(self.lang, f"{lesson.id}.title")
        return {"id": lesson.id, "title": title, "steps": [self.step(step) for step in lesson.steps]}

    def step(self, step: Step) -> dict[str, Any]:
        trace, place = load_trace(step.trace), place_of(self.lesson, step)
        facts = step_facts(self.lesson, step)
        key = f"{self.lesson.id}.{step.name}"
        labels = LABELS if len(place.windows) > 1 or step.question else [""]
        body: dict[str, Any] = {
            "name": step.name,
            "say": say(self.lang, key, facts),
            "told": told(self.lang, key, facts),
            "trace": step.trace,
            "event": place.event,
            "row": place.row,
            "marks": [
                {"window": window, "label": label, "text": " ".join(trace.text_of(window).split())}
                for window, label in zip(place.windows, labels, strict=False)
            ],
            "parts": list(step.parts),
            "regret": step.regret,
            "play": step.play,
            "arrive": step.at == "reveal" and not step.ranks and step.question is None,
            "done": step.done,
            "sources": [self.source(name, facts) for name in step.sources],
        }
        if step.ranks:
            body["ranks"] = self.ranks(trace, place)
        if step.table is not None:
            body["table"] = self.table(step, facts)
        if step.question is not None:
            body["question"] = {
                "ask": say(self.lang, f"{key}_ask", facts),
                "why": told(self.lang, f"{key}_why", facts),
                **self.question(step.question, key, trace, place, facts),
            }
        return body

    def source(self, name: str, facts: Facts) -> str:
        known = name != "measured" or facts["machine"].value is not None
        return say(self.lang, f"source.{name if known else 'unmeasured'}", facts)

    def ranks(self, trace: LessonTrace, place: Place) -> list[dict[str, str]]:
        """Place and score of each marked window among the candidates of the event, and where it went."""
        out = []
        for window, label in zip(place.windows, LABELS, strict=False):
            ranked = trace.rank(place.event, place.row, window)
            tier = trace.tier(place.event, place.row, window)
            out.append(
                {
                    "label": label,
                    "tier": tier.name.lower(),
                    "rank": "" if ranked is None else f"{ranked.place} / {ranked.of}",
                    "score": "" if ranked is None else Fact(ranked.share, "share").say(self.lang),
                }
            )
        return out

    def table(self, step: Step, facts: Facts) -> dict[str, Any]:
        if step.table is None:
            return {}
        rows = []
        for row in step.table.rows:
            cells = [self.cell(step, row, column, facts).say(self.lang) for column in step.table.columns]
            rows.append({"name": self.row_name(row, facts), "cells": cells})
        return {"columns": [say(self.lang, f"column.{column}") for column in step.table.columns], "rows": rows}

    def row_name(self, row: str, facts: Facts) -> str:
        """What the lesson calls a run or a method, else what all lessons call it."""
        own = f"{self.lesson.id}.row_{row}"
        return say(self.lang, own if own in lesson_texts(self.lang) else f"row.{row}", facts)

    def cell(self, step: Step, row: str, column: str, facts: Facts) -> Fact:
        names = [f"{_plain(row)}_{column}", *([row] if column == "value" else [])]
        found = next((facts[name] for name in names if name in facts), None)
        if found is None:
            raise LessonError(f"{self.lesson.path}: steps.{step.name}.table has no figure {row!r} / {column!r}.")
        return found

    def question(self, question: Question, key: str, trace: LessonTrace, place: Place, facts: Facts) -> dict[str, Any]:
        kinds: dict[str, Callable[[], dict[str, Any]]] = {
            "predict": lambda: self.predict(trace, place),
            "tier": lambda: self.tier(trace, place),
            "text": lambda: self.chosen(question, [say(self.lang, f"{key}_{c}", facts) for c in question.choices]),
            "number": lambda: self.chosen(question, [facts[c].say(self.lang) for c in question.choices]),
            "least": lambda: self.extreme(question, facts, min),
            "most": lambda: self.extreme(question, facts, max),
            "change": lambda: self.change(question, facts),
        }
        return kinds[question.kind]()

    def predict(self, trace: LessonTrace, place: Place) -> dict[str, Any]:
        event = place.event + 1
        tiers = [trace.tier(event, place.row, window) for window in place.windows]
        return {"kind": "predict", "event": event, "answers": [tier.name.lower() for tier in tiers]}

    def tier(self, trace: LessonTrace, place: Place) -> dict[str, Any]:
        answer = TIER_CHOICES.index(trace.tier(place.event, place.row, place.windows[0]))
        choices = [text(self.lang, f"tier.{tier.name.lower()}") for tier in TIER_CHOICES]
        return {"kind": "choice", "choices": choices, "answer": answer}

    def chosen(self, question: Question, choices: list[str]) -> dict[str, Any]:
        return {"kind": "choice", "choices": choices, "answer": question.choices.index(question.answer)}

    def extreme(self, question: Question, facts: Facts, pick: Callable[..., str]) -> dict[str, Any]:
        def value(name: str) -> float:
            found = facts[f"{_plain(name)}_{question.fact}"].value
            if not isinstance(found, (int, float)):
                raise LessonError(f"{self.lesson.path}: trace {name!r} has no figure {question.fact!r}.")
            return float(found)

        answer = pick(question.choices, key=value)
        choices = [self.row_name(name, facts) for name in question.choices]
        return {"kind": "choice", "choices": choices, "answer": question.choices.index(answer)}

    def change(self, question: Question, facts: Facts) -> dict[str, Any]:
        before, after = (facts[name].value for name in (question.before, question.after))
        if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
            raise LessonError(f"{self.lesson.path}: {question.before} and {question.after} must be figures.")
        gap = float(after) - float(before)
        answer = 1 if abs(gap) <= question.tolerance else 0 if gap < 0 else 2
        choices = [say(self.lang, f"choice.{name}") for name in CHANGES]
        return {"kind": "choice", "choices": choices, "answer": answer}
