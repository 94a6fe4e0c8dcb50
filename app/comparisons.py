"""The store of comparisons, in the session database: listed for its maker, read by whoever has its link.

Writes and reads through the session store's own thread and connections. Knows the table `comparison`; knows no
engine and no page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from sqlite_utils import Database

from app.session_info import clean_title
from app.sessions import Sessions, UnknownSessionError, empty_log

STATES = ("running", "done", "stopped", "interrupted")
_SHORT = "id, created, user, state, title, model, mode, request, result is not null as whole"


class UnknownComparisonError(UnknownSessionError):
    """There is no comparison of that id."""


@dataclass(frozen=True, slots=True)
class ComparisonInfo:
    """One comparison's row. `created` is seconds since 1970; `title` and `model` are untrusted text.

    `whole` says whether it has figures and a board: one that was cut off has none. `user` is never shown to anybody.
    """

    id: str
    created: float
    state: str
    title: str
    model: str
    mode: str
    systems: tuple[str, ...]
    request: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    user: str = ""

    def shown(self) -> dict[str, Any]:
        """Everything but `user` and the prompt, as plain values."""
        values = asdict(self)
        del values["user"]
        values["systems"] = list(self.systems)
        values["request"] = {name: value for name, value in self.request.items() if name != "prompt"}
        return values


Infos: TypeAlias = list[ComparisonInfo]


class Comparisons:
    """All comparisons of one session store. Safe from any thread.

    Every method raises StoreError where the database can't be read or written.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def begin(self, comparison: str, request: Mapping[str, Any], *, user: str = "") -> None:
        """Stores what is asked; `request` has at least prompt, title, model, mode and systems."""
        title = str(request["title"]) or str(request["prompt"]).strip()[:80]
        self._sessions.open()
        row = {
            "id": comparison,
            "created": time.time(),
            "user": user,
            "owner": self._sessions.owner,
            "state": "running",
            "title": clean_title(title),
            "model": str(request["model"]),
            "mode": str(request["mode"]),
            "request": json.dumps(dict(request), ensure_ascii=False),
            "result": None,
            "board": None,
        }
        self._sessions.work(lambda db: db.table("comparison").insert(row))

    def finish(self, comparison: str, state: str, record: Mapping[str, Any], board: bytes) -> None:
        """Stores what was found; one that was deleted in the meantime stays so."""
        values = [state, str(record["model"]), json.dumps(dict(record), ensure_ascii=False), board, comparison]
        sql = "update comparison set state = ?, model = ?, result = ?, board = ? where id = ?"

        def write(db: Database) -> None:
            with db.atomic():
                db.execute(sql, values)

        self._sessions.work(write)

    def cut(self, comparison: str) -> None:
        """Says that a comparison ended with nothing to show."""

        def write(db: Database) -> None:
            with db.atomic():
                db.execute("update comparison set state = 'interrupted' where id = ?", [comparison])

        self._sessions.work(write)

    def list(self, limit: int = 200, offset: int = 0, user: str | None = None) -> Infos:
        """Comparisons, newest first; with `user`, those of one visitor."""
        which = "" if user is None else "where user = ? "
        sql = f"select {_SHORT} from comparison {which}order by created desc, id limit ? offset ?"
        return [_info(row) for row in self._sessions.select(sql, [*([] if user is None else [user]), limit, offset])]

    def get(self, comparison: str) -> ComparisonInfo:
        """One comparison.

        Raises:
            UnknownComparisonError: no such comparison.
        """
        rows = self._sessions.select(f"select {_SHORT} from comparison where id = ?", [comparison])
        if not rows:
            raise UnknownComparisonError(f"there is no comparison {comparison[:40]!r}.")
        return _info(rows[0])

    def holds(self, comparison: str) -> bool:
        """Whether it is stored."""
        return bool(self._sessions.select("select 1 from comparison where id = ?", [comparison]))

    def record(self, comparison: str) -> dict[str, Any] | None:
        """What was found, see `app.compare_record`; None where there is nothing."""
        rows = self._sessions.select("select result from comparison where id = ?", [comparison])
        try:
            found = json.loads(rows[0]["result"]) if rows and rows[0]["result"] else None
        except ValueError:
            return {}
        return found if found is None or isinstance(found, dict) else {}

    def board(self, comparison: str) -> bytes | None:
        """The board as the browser gets it, gzipped JSON; None where there is none."""
        rows = self._sessions.select("select board from comparison where id = ?", [comparison])
        return rows[0]["board"] if rows else None

    def delete(self, comparison: str) -> None:
        """Removes a comparison from the file: freed pages are overwritten, the log emptied.

        Raises:
            UnknownComparisonError: no such comparison.
            ForbiddenError: it is somebody else's.
        """
        self._sessions.demand(self.get(comparison).user)
        self.drop(comparison)

    def drop(self, comparison: str) -> None:
        """Removes a comparison, whosever it is: one that failed has nothing to show."""

        def remove(db: Database) -> None:
            with db.atomic():
                db.execute("delete from comparison where id = ?", [comparison])

        self._sessions.work(remove)
        self._sessions.work(empty_log)

    def delete_older(self, before: float) -> int:
        """Removes all comparisons made before a time, in seconds since 1970, and returns how many; none that go on."""
        old = "created < ? and state <> 'running'"
        rows = self._sessions.select(f"select id from comparison where {old}", [before])
        if not rows:
            return 0

        def remove(db: Database) -> None:
            with db.atomic():
                db.execute(f"delete from comparison where {old}", [before])

        self._sessions.work(remove)
        self._sessions.work(empty_log)
        return len(rows)


def _info(row: Mapping[str, Any]) -> ComparisonInfo:
    try:
        request = json.loads(row["request"])
        systems = tuple(str(name) for name in request["systems"])
    except (ValueError, TypeError, KeyError):
        request, systems = {}, ()
    return ComparisonInfo(
        id=row["id"],
        created=row["created"],
        state=row["state"],
        title=row["title"],
        model=row["model"],
        mode=row["mode"],
        systems=systems,
        request=request,
        whole=bool(row["whole"]),
        user=row["user"],
    )
