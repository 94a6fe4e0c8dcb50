"""The session store: every run as it happens, in SQLite.

What is stored is the very wire bytes, so that a live view, a replay, an export and a test read the same thing.
All writing happens in one thread, in few large transactions; reading opens its own connection. Knows no server,
no engine beyond the trace's error texts.
"""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sqlite_utils import Database

from app.events import head
from app.session_info import SessionInfo, clean_title, info_of
from app.store_file import Owner, StoreError, explain, open_database, prepare
from app.store_writer import Writer
from engine.errors import EngineError, TraceError
from engine.trace import EndEvent, ErrorEvent, encode

__all__ = ["SessionInfo", "Sessions", "UnknownSessionError", "clean_title", "new_session_id"]

log = logging.getLogger("qevict.sessions")

STATES = ("queued", "running", "done", "stopped", "interrupted", "error")
PAGE = 256
SKIPPED_BY_A_KEYFRAME = ("route", "key", "score", "prog")

Result = TypeVar("Result")


class UnknownSessionError(EngineError, KeyError):
    """There is no session of that id."""

    def __str__(self) -> str:
        return str(self.args[0])


Rows: TypeAlias = list[dict[str, Any]]
Infos: TypeAlias = list[SessionInfo]


def new_session_id() -> str:
    """An id that can't be guessed: 128 random bits, and never a command's option: it begins with no dash."""
    while (session := secrets.token_urlsafe(16)).startswith("-"):
        pass
    return session


class Sessions:
    """All sessions of one database file. Safe from any thread.

    Args:
        path: the database; its folder is made.
        wait_seconds: how long a locked database is tried.
        max_backlog: messages kept in memory while the disk refuses them; later ones are lost.
        demand: raises where the current visitor may not change what belongs to this user; None = all may.
    """

    def __init__(
        self,
        path: Path,
        *,
        wait_seconds: float = 5.0,
        max_backlog: int = 8192,
        demand: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self._wait_seconds = wait_seconds
        self._max_backlog = max_backlog
        self._demand = demand or _all_may
        self._writer: Writer | None = None
        self._owner: Owner | None = None
        self._opening = threading.Lock()

    def open(self) -> None:
        """Makes or migrates the database and starts the writer; sessions of dead processes become "interrupted".

        Raises:
            StoreError: the folder or file can't be written, is not ours, is damaged, or comes from a later release.
        """
        with self._opening:
            if self._writer is not None:
                return
            owner = prepare(self.path, self._wait_seconds, self._interrupt)
            self._owner = owner
            self._writer = Writer(self.path, self._wait_seconds, self._max_backlog)

    def close(self) -> bool:
        """Writes what is waiting and lets the file go; `open` may be called again. False if it was not open."""
        with self._opening:
            writer, self._writer = self._writer, None
            owner, self._owner = self._owner, None
        if writer is not None:
            writer.close()
        if owner is not None:
            owner.release()
        return writer is not None

    @property
    def trouble(self) -> str:
        """One sentence if the store can't write at the moment, else empty."""
        return "" if self._writer is None else self._writer.trouble

    # writing

    def create(
        self,
        *,
        model: str,
        policy: str,
        settings: Mapping[str, Any],
        title: str = "",
        versions: Mapping[str, Any] | None = None,
        session: str | None = None,
        state: str = "running",
        user: str = "",
    ) -> str:
        """Stores a new session and returns its id.

        Raises:
            StoreError: it could not be stored.
        """
        self.open()
        row = {
            "id": session or new_session_id(),
            "created": time.time(),
            "model": model,
            "policy": policy,
            "settings": json.dumps(dict(settings), ensure_ascii=False),
            "title": clean_title(title),
            "state": state,
            "versions": json.dumps(dict(versions or {}), ensure_ascii=False),
            "summary": "{}",
            "num_events": 0,
            "owner": self.owner,
            "user": user,
        }
        self.work(lambda db: db.table("session").insert(row))
        return str(row["id"])

    def append(self, session: str, rows: Sequence[bytes]) -> Future[None]:
        """Queues wire messages; the future is done when they are on disk, or holds a `StoreError`.

        A message of a session that has been deleted is dropped.
        """
        numbered = []
        for body in rows:
            kind, seq, event_id = head(body)
            numbered.append((session, seq, kind, event_id, body))
        return self._ready().rows(numbered)

    def update(self, session: str, **values: Mapping[str, Any] | str) -> Future[None]:
        """Queues new values of `model`, `title`, `state`, `versions` or `summary`."""
        changes = {
            name: clean_title(value) if name == "title" else value
            for name, value in values.items()
            if isinstance(value, str)
        } | {
            name: json.dumps(dict(value), ensure_ascii=False)
            for name, value in values.items()
            if isinstance(value, Mapping)
        }
        unknown = set(changes) - {"model", "title", "state", "versions", "summary"}
        if unknown:
            raise StoreError(f"a session has no changeable field {sorted(unknown)[0]!r}.")
        if changes.get("state", "running") not in STATES:
            raise StoreError(f"state must be one of {', '.join(STATES)}, got {changes['state']!r}.")
        sets = ", ".join(f"{name} = ?" for name in changes)
        return self._ready().statement(f"update session set {sets} where id = ?", [*changes.values(), session])

    def finish(self, session: str, state: str, summary: Mapping[str, Any] | None = None) -> Future[None]:
        """Queues a session's end; `state` is one of "done", "stopped", "interrupted", "error"."""
        return self.update(session, state=state, summary=summary or {})

    def rename(self, session: str, title: str) -> None:
        """Changes the title; control characters go.

        Raises:
            UnknownSessionError: no such session.
            ForbiddenError: it is somebody else's.
        """
        self._demand(self.get(session).user)
        self._result(self.update(session, title=title))

    def delete(self, session: str) -> None:
        """Removes a session and everything in it from the file: freed pages are overwritten, the log emptied.

        Raises:
            UnknownSessionError: no such session.
            ForbiddenError: it is somebody else's.
        """
        self._demand(self.get(session).user)

        def remove(db: Database) -> None:
            with db.atomic():
                for table, column in (("event", "session"), ("mark", "session"), ("session", "id")):
                    db.execute(f"delete from {table} where {column} = ?", [session])

        self.work(remove)
        self.work(empty_log)

    def delete_older(self, before: float) -> int:
        """Removes all sessions made before a time, in seconds since 1970, and returns how many; none that go on."""
        rows = self.select(
            "select id from session where created < ? and state not in ('queued', 'running') limit 10000", [before]
        )
        if not rows:
            return 0

        def remove(db: Database) -> None:
            with db.atomic():
                for row in rows:
                    for table, column in (("event", "session"), ("mark", "session"), ("session", "id")):
                        db.execute(f"delete from {table} where {column} = ?", [row["id"]])

        self.work(remove)
        self.work(empty_log)
        return len(rows)

    def mark(self, session: str, event_id: int, row: int, windows: Sequence[int], text: str, author: str = "") -> int:
        """Stores a note on windows of a session, or on an event where there are none, and returns its number.

        Raises:
            UnknownSessionError: no such session.
            ForbiddenError: it is somebody else's.
        """
        self._demand(self.get(session).user)
        note = {
            "session": session,
            "r": event_id,
            "row": row,
            "windows": json.dumps(list(windows)),
            "text": text,
            "author": author,
            "created": time.time(),
        }
        made: list[int] = []
        self.work(lambda db: made.append(int(str(db.table("mark").insert(note).last_pk))))
        return made[0]

    def change_mark(self, session: str, number: int, text: str | None) -> bool:
        """Changes a note's text, or removes the note where that is None. False if there is no such note.

        Raises:
            UnknownSessionError: no such session.
            ForbiddenError: it is somebody else's.
        """
        self._demand(self.get(session).user)
        touched: list[int] = []

        def change(db: Database) -> None:
            with db.atomic():
                sql, values = "delete from mark where session = ? and id = ?", [session, number]
                if text is not None:
                    sql, values = "update mark set text = ? where session = ? and id = ?", [text, session, number]
                touched.append(db.execute(sql, values).rowcount)

        self.work(change)
        return touched[0] > 0

    def answer(self, lesson: str, step: str, choice: str, correct: bool | None = None, ms: int = 0) -> None:
        """Stores an answer given in a lesson; nothing says by whom."""
        row = {
            "lesson": lesson,
            "step": step,
            "choice": choice,
            "correct": None if correct is None else int(correct),
            "ms": ms,
            "created": time.time(),
        }
        self.work(lambda db: db.table("answer").insert(row))

    def flush(self) -> None:
        """Returns when everything queued before is on disk."""
        self.work(lambda db: None)

    # reading

    def list(self, limit: int = 200, offset: int = 0, user: str | None = None) -> Infos:
        """Sessions, newest first; with `user`, those of one visitor."""
        which = "" if user is None else "where user = ? "
        sql = f"select * from session {which}order by created desc, id limit ? offset ?"
        return [info_of(row) for row in self.select(sql, [*([] if user is None else [user]), limit, offset])]

    def get(self, session: str) -> SessionInfo:
        """One session.

        Raises:
            UnknownSessionError: no such session.
        """
        rows = self.select("select * from session where id = ?", [session])
        if not rows:
            raise UnknownSessionError(f"there is no session {session[:40]!r}.")
        return info_of(rows[0])

    def marks(self, session: str) -> Rows:
        """Notes of a session, oldest first; `windows` is a list."""
        rows = self.select("select * from mark where session = ? order by id", [session])
        return [{**row, "windows": json.loads(row["windows"])} for row in rows]

    def last_seq(self, session: str) -> int:
        """Number of the newest stored message, -1 if there is none."""
        return int(self.select("select coalesce(max(seq), -1) as n from event where session = ?", [session])[0]["n"])

    def keyframe_before(self, session: str, seq: int) -> int | None:
        """Number of the last keyframe before message `seq`, None if there is none."""
        sql = "select max(seq) as n from event where session = ? and kind = 'key' and seq < ?"
        number = self.select(sql, [session, seq])[0]["n"]
        return None if number is None else int(number)

    def events(self, session: str, from_seq: int = 0, kinds: Sequence[str] | None = None) -> Iterator[bytes]:
        """Stored messages in order, read page by page.

        Where the store is damaged, an `err` message says so and an `end` closes the trace: a reader gets all that
        comes before the damage.

        Raises:
            UnknownSessionError: no such session (at the call).
            StoreError: the database can't be read at all (at the call).
        """
        self.get(session)
        return self._pages(session, from_seq, kinds, None)

    def catch_up(self, session: str, from_seq: int) -> Iterator[bytes]:
        """What brings a reader at `from_seq` up to now: text and figures in full, the board from the last keyframe."""
        self.get(session)
        return self._pages(session, from_seq, None, self.keyframe_before(session, self.last_seq(session) + 1))

    def _pages(self, session: str, from_seq: int, kinds: Sequence[str] | None, keyframe: int | None) -> Iterator[bytes]:
        sql = "select seq, body from event where session = ? and seq >= ?"
        tail: tuple[Any, ...] = ()
        whole = kinds is None and keyframe is None
        if kinds is not None:
            sql += f" and kind in ({', '.join('?' * len(kinds))})"
            tail += tuple(kinds)
        if keyframe is not None:
            sql += f" and (seq >= ? or kind not in ({', '.join('?' * len(SKIPPED_BY_A_KEYFRAME))}))"
            tail += (keyframe, *SKIPPED_BY_A_KEYFRAME)
        sql += " order by seq limit ?"
        while True:
            try:
                rows = self.select(sql, [session, from_seq, *tail, PAGE])
            except StoreError as error:
                yield from _damaged(from_seq, str(error))
                return
            for row in rows:
                if whole and row["seq"] != from_seq:
                    yield from _damaged(from_seq, f"messages {from_seq} to {row['seq'] - 1} are not in the store.")
                    return
                from_seq = row["seq"] + 1
                if not _sound(row["body"], row["seq"]):
                    log.warning("session %s: message %d is damaged", session, row["seq"])
                    yield from _damaged(row["seq"], f"the stored trace is damaged at message {row['seq']}.")
                    return
                yield row["body"]
            if len(rows) < PAGE:
                return

    def select(self, sql: str, values: Sequence[Any]) -> Rows:
        """Rows of a query, read by a connection of its own.

        Raises:
            StoreError: the database can't be read.
        """
        self.open()
        try:
            with closing(open_database(self.path, self._wait_seconds, read_only=True)) as db:
                return list(db.query(sql, values))
        except (sqlite3.Error, OSError) as error:
            raise explain(error, self.path) from error

    def _ready(self) -> Writer:
        self.open()
        writer = self._writer
        if writer is None:
            raise StoreError("the session store is closed.")
        return writer

    def work(self, work: Callable[[Database], Any]) -> None:
        """Calls `work` in the writing thread, after everything queued before, and waits for it.

        Raises:
            StoreError: it could not be written.
        """
        self._result(self._ready().work(work))

    def demand(self, user: str) -> None:
        """Raises ForbiddenError where the current visitor may not change what belongs to `user`."""
        self._demand(user)

    @property
    def owner(self) -> str:
        """Name of this process in the store, by which others can tell whether it lives; empty while not open."""
        return "" if self._owner is None else self._owner.name

    def _result(self, future: Future[Result]) -> Result:
        return future.result()

    def _interrupt(self, db: Database, dead: Callable[[str], bool]) -> None:
        """Closes the traces of runs whose process has died."""
        for row in list(db.query("select id, owner from session where state in ('queued', 'running')")):
            if not dead(row["owner"]):
                continue
            last = next(iter(db.query("select max(seq) as n from event where session = ?", [row["id"]])))["n"]
            seq = 0 if last is None else int(last) + 1
            end = encode(EndEvent("interrupted", {}, seq))
            with db.atomic():
                db.execute("insert into event values (?, ?, 'end', null, ?)", [row["id"], seq, end])
                db.execute(
                    "update session set state = 'interrupted', num_events = ? where id = ?", [seq + 1, row["id"]]
                )
            log.info("session %s was cut off; it is kept as interrupted", row["id"])
        for row in list(db.query("select id, owner from comparison where state = 'running'")):
            if dead(row["owner"]):
                db.execute("update comparison set state = 'interrupted' where id = ?", [row["id"]])


def empty_log(db: Database) -> None:
    """Moves the write-ahead log into the file and cuts it; a reader may hold it up for a moment."""
    for _ in range(40):
        busy, _, _ = db.execute("pragma wal_checkpoint(truncate)").fetchone()
        if not busy:
            return
        time.sleep(0.05)


def _all_may(user: str) -> None:
    """Nobody is refused."""


def _sound(body: object, seq: int) -> bool:
    """Whether a stored body is the whole wire message that it should be."""
    if not isinstance(body, bytes):
        return False
    try:
        json.loads(body)
        return head(body)[1] == seq
    except (ValueError, TraceError):
        return False


def _damaged(seq: int, sentence: str) -> Iterator[bytes]:
    yield encode(ErrorEvent(f"{sentence} What comes before it is shown."), seq)
    yield encode(EndEvent("interrupted"), seq + 1)
