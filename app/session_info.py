"""One stored session as others see it, and what becomes of a title.

Knows a row of the session table; knows no database.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TITLE_CHARS = 200


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session's row. `created` is seconds since 1970; `title` and `model` are untrusted text.

    `user` says who made it, see `app.visitors`: it is never shown to anybody.
    """

    id: str
    created: float
    model: str
    policy: str
    title: str
    state: str
    num_events: int
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    damage: str = ""
    user: str = ""

    def shown(self) -> dict[str, Any]:
        """Everything but `user`, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "user"}


def clean_title(text: str, most: int = TITLE_CHARS) -> str:
    """One line of at most `most` characters, without control characters."""
    line = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in text)
    line = " ".join(line.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def info_of(row: Mapping[str, Any]) -> SessionInfo:
    """The session in a row; what can't be read of it is empty, and `damage` says so."""
    damage = ""
    values: dict[str, dict[str, Any]] = {}
    for name in ("settings", "versions", "summary"):
        try:
            parsed = json.loads(row[name] or "{}")
            if not isinstance(parsed, dict):
                raise ValueError("not a table")
        except (ValueError, TypeError):
            parsed, damage = {}, f"the stored {name} are damaged."
        values[name] = parsed
    return SessionInfo(
        id=row["id"],
        created=row["created"],
        model=row["model"],
        policy=row["policy"],
        title=row["title"],
        state=row["state"],
        num_events=row["num_events"],
        damage=damage,
        user=row["user"],
        **values,
    )
