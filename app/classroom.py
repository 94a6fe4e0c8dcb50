"""A class that answers together: a short code, and how many devices chose what. In memory, for some hours, nameless.

A device is a random number that its browser made up; nothing else about it is known. Knows lessons' questions;
knows no session, no visitor and no page.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from app.lessons import lessons_payload
from engine.errors import EngineError

LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""No letter that looks like another one."""
CODE_LETTERS = 5
MOST_CLASSES = 64
MOST_DEVICES = 500
KEPT_SECONDS = 6 * 3600.0


class ClassroomError(EngineError, ValueError):
    """A class or an answer that can't be taken; the text says why."""


class NoClassError(ClassroomError, LookupError):
    """There is no class of that code."""


@dataclass(slots=True)
class _Class:
    used: float
    owner: str = ""
    answers: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)


@cache
def questions() -> dict[str, tuple[int, ...]]:
    """Every question by key, such as "predict.guess": how many choices each of its parts has."""
    found = {}
    for lesson in lessons_payload("en")["lessons"]:
        for step in lesson["steps"]:
            question = step.get("question")
            if question:
                parts = (3,) * len(step["marks"]) if question["kind"] == "predict" else (len(question["choices"]),)
                found[f"{lesson['id']}.{step['name']}"] = parts
    return found


class Classroom:
    """All classes of one server. Thread safe.

    Args:
        clock: seconds that only go up; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._classes: dict[str, _Class] = {}

    def begin(self, owner: str = "") -> str:
        """Starts a class and returns its code; of too many, the one unused for longest is forgotten.

        `owner` is an opaque id of the device that began it: that one may present in it.
        """
        with self._lock:
            self._forget_old()
            if len(self._classes) >= MOST_CLASSES:
                del self._classes[min(self._classes, key=lambda code: self._classes[code].used)]
            code = "".join(secrets.choice(LETTERS) for _ in range(CODE_LETTERS))
            while code in self._classes:
                code = "".join(secrets.choice(LETTERS) for _ in range(CODE_LETTERS))
            self._classes[code] = _Class(self._clock(), owner)
            return code

    def answer(self, code: str, question: str, device: str, picks: tuple[int, ...]) -> None:
        """Takes a device's answer; its first one counts.

        Raises:
            NoClassError: no such class. ClassroomError: no such question, choices that it has not, or a full class.
        """
        parts = _parts(question)
        if len(picks) != len(parts) or not all(0 <= pick < most for pick, most in zip(picks, parts, strict=True)):
            raise ClassroomError(f"picks must be {len(parts)} numbers of choices of {question!r}.")
        with self._lock:
            found = self._find(code)
            if device not in found.devices and len(found.devices) >= MOST_DEVICES:
                raise ClassroomError(f"this class has {MOST_DEVICES} devices already: no more can join.")
            found.devices.add(device)
            found.answers.setdefault(question, {}).setdefault(device, picks)

    def tally(self, code: str, question: str) -> tuple[int, list[list[int]]]:
        """(devices that answered, for each part of the question how many chose what).

        Raises:
            NoClassError: no such class. ClassroomError: no such question.
        """
        counts = [[0] * most for most in _parts(question)]
        with self._lock:
            given = list(self._find(code).answers.get(question, {}).values())
        for picks in given:
            for part, pick in zip(counts, picks, strict=True):
                part[pick] += 1
        return len(given), counts

    def owner(self, code: str) -> str:
        """Who began a class; empty where that is not known.

        Raises:
            NoClassError: no such class.
        """
        with self._lock:
            return self._find(code).owner

    def _find(self, code: str) -> _Class:
        self._forget_old()
        found = self._classes.get(code)
        if found is None:
            raise NoClassError("there is no such class: it may have ended.")
        found.used = self._clock()
        return found

    def _forget_old(self) -> None:
        now = self._clock()
        for code in [code for code, found in self._classes.items() if now - found.used > KEPT_SECONDS]:
            del self._classes[code]


def _parts(question: str) -> tuple[int, ...]:
    parts = questions().get(question)
    if parts is None:
        raise ClassroomError(f"there is no question {question[:60]!r}.")
    return parts
