"""Where a presenter stands: the small state that followers of a shared link are shown.

Reads and checks it; knows no route, no session and no follower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.errors import EngineError

LARGEST: Final = 2**31 - 1
_NAME = re.compile(r"[A-Za-z0-9_-]{0,40}")
_NUMBERS: Final = {"r": 0, "row": 0}
_FLAGS: Final = ("live", "playing", "regret", "marks")


class PlaceError(EngineError, ValueError):
    """What was sent is no place to stand; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A position on a board.

    Attributes:
        r: routing event, from 0.
        row: board row, from 0.
        live: whether the presenter stays at the newest event of a run that goes on.
        playing: whether a replay plays there. Followers are sent every event, so they only say it.
        regret: whether the regret layer is shown.
        marks: whether notes are shown.
        cursor: window that is pointed at, -1 = sink, None = none.
        zoom: first and last window that are shown, None = all.
        lesson: id of the lesson, empty outside of lessons.
        step: name of its step.
    """

    r: int = 0
    row: int = 0
    live: bool = False
    playing: bool = False
    regret: bool = False
    marks: bool = True
    cursor: int | None = None
    zoom: tuple[int, int] | None = None
    lesson: str = ""
    step: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **{name: getattr(self, name) for name in (*_NUMBERS, *_FLAGS, "cursor", "lesson", "step")},
            "zoom": None if self.zoom is None else list(self.zoom),
        }


def read_place(body: Mapping[str, Any]) -> Place:
    """A place from JSON; what is absent has its default.

    Raises:
        PlaceError: an unknown key, or a value that can't be.
    """
    known = {*_NUMBERS, *_FLAGS, "cursor", "zoom", "lesson", "step"}
    unknown = sorted(set(body) - known)
    if unknown:
        raise PlaceError(f"unknown key {unknown[0][:40]!r}; known are {', '.join(sorted(known))}.")
    values: dict[str, Any] = {name: _whole(name, body[name], least) for name, least in _NUMBERS.items() if name in body}
    for name in _FLAGS:
        if name in body:
            if not isinstance(body[name], bool):
                raise PlaceError(f"{name} must be true or false.")
            values[name] = body[name]
    if body.get("cursor") is not None:
        values["cursor"] = _whole("cursor", body["cursor"], -1)
    if body.get("zoom") is not None:
        zoom = body["zoom"]
        if not isinstance(zoom, list) or len(zoom) != 2:
            raise PlaceError("zoom must be two windows.")
        values["zoom"] = (_whole("zoom", zoom[0], 0), _whole("zoom", zoom[1], 0))
    for name in ("lesson", "step"):
        value = body.get(name, "")
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise PlaceError(f"{name} must be a name of at most 40 letters, digits, - and _.")
        values[name] = value
    return Place(**values)


def _whole(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise PlaceError(f"{name} must be a whole number in [{least}, {LARGEST}], got {str(value)[:40]!r}.")
    return value
