"""The one thread that writes to the session database.

Takes work from a queue and puts what has gathered into one transaction. What the disk refuses is kept and tried
again, so that a short fault loses nothing. Knows tables `session` and `event`; knows no meaning.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from app.store_file import StoreError, explain, open_database

log = logging.getLogger("qevict.store")

Row = tuple[str, int, str, int | None, bytes]
"""session, seq, kind, routing event or None, wire bytes."""

RETRY_SECONDS = 1.0

_INSERT = """insert or replace into event (session, seq, kind, r, body)
    select ?, ?, ?, ?, ? where exists (select 1 from session where id = ?)"""
_COUNT = "update session set num_events = max(num_events, ?) where id = ?"


@dataclass(slots=True)
class _Rows:
    rows: Sequence[Row]
    future: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class _Statement:
    sql: str
    values: Sequence[Any]
    future: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class _Work:
    run: Callable[[Database], Any]
    future: Future[None] = field(default_factory=Future)


class Writer:
    """Writes in the background; every call returns a future that ends when the work is on disk.

    A future that fails holds a `StoreError`; rows and statements are nevertheless kept and tried again, up to
    `max_backlog` rows. `trouble` is a sentence while the last try has failed, else empty.
    """

    def __init__(self, path: Path, wait_seconds: float, max_backlog: int) -> None:
        self._path = path
        self._wait_seconds = wait_seconds
        self._max_backlog = max_backlog
        self._queue: queue.Queue[_Rows | _Statement | _Work | None] = queue.Queue()
        self._backlog: list[_Rows | _Statement] = []
        self._backlog_rows = 0
        self._database: Database | None = None
        self._closed = False
        self._lock = threading.Lock()
        self.trouble = ""
        self._thread = threading.Thread(target=self._loop, name="qevict-store", daemon=True)
        self._thread.start()

    def rows(self, rows: Sequence[Row]) -> Future[None]:
        """Queues messages."""
        return self._put(_Rows(rows))

    def statement(self, sql: str, values: Sequence[Any]) -> Future[None]:
        """Queues one statement that takes its turn among the messages."""
        return self._put(_Statement(sql, values))

    def work(self, run: Callable[[Database], Any]) -> Future[None]:
        """Queues a function that is called once, after everything queued before; not tried again."""
        return self._put(_Work(run))

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _put(self, item: _Rows | _Statement | _Work) -> Future[None]:
        with self._lock:
            if self._closed:
                item.future.set_exception(StoreError("the session store is closed."))
            else:
                self._queue.put(item)
        return item.future

    def _loop(self) -> None:
        try:
            ended = False
            while not ended:
                batch = self._gather()
                ended = None in batch
                self._run([item for item in batch if item is not None])
            if self._backlog:
                log.error("%d messages could not be stored: %s", self._backlog_rows, self.trouble)
        finally:
            if self._database is not None:
                self._database.close()

    def _gather(self) -> list[_Rows | _Statement | _Work | None]:
        """Everything that is waiting, at least one item unless there is a backlog to try again."""
        try:
            batch = [self._queue.get(timeout=RETRY_SECONDS if self._backlog else None)]
        except queue.Empty:
            return []
        while True:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                return batch

    def _run(self, batch: Sequence[_Rows | _Statement | _Work]) -> None:
        """Writes in order: rows and statements together, each piece of work after what came before it."""
        group: list[_Rows | _Statement] = []
        for item in batch:
            if isinstance(item, _Work):
                self._write(group)
                group = []
                self._call(item)
            else:
                group.append(item)
        self._write(group)

    def _write(self, group: Sequence[_Rows | _Statement]) -> None:
        everything = [*self._backlog, *group]
        if not everything:
            return
        try:
            self._transaction(everything)
        except (sqlite3.Error, OSError, StoreError) as error:
            reason = error if isinstance(error, StoreError) else explain(error, self._path)
            if not self.trouble:
                log.error("%s", reason)
            self.trouble = str(reason)
            for item in group:
                if not item.future.done():
                    item.future.set_exception(reason)
            self._keep(group)
            return
        self._backlog, self._backlog_rows, self.trouble = [], 0, ""
        for item in everything:
            if not item.future.done():
                item.future.set_result(None)

    def _keep(self, group: Sequence[_Rows | _Statement]) -> None:
        for item in group:
            size = len(item.rows) if isinstance(item, _Rows) else 1
            if self._backlog_rows + size <= self._max_backlog:
                self._backlog.append(item)
                self._backlog_rows += size

    def _call(self, item: _Work) -> None:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                item.run(self._connection())
            except (sqlite3.Error, OSError) as error:
                if _is_lock(error) and time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                item.future.set_exception(explain(error, self._path))
            except StoreError as error:
                item.future.set_exception(error)
            else:
                item.future.set_result(None)
            return

    def _transaction(self, items: Sequence[_Rows | _Statement]) -> None:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            database = self._connection()
            try:
                with database.atomic():
                    for item in items:
                        if isinstance(item, _Statement):
                            database.conn.execute(item.sql, item.values)
                        else:
                            database.conn.executemany(_INSERT, [(*row, row[0]) for row in item.rows])
                            for session, top in {row[0]: row[1] + 1 for row in item.rows}.items():
                                database.conn.execute(_COUNT, [top, session])
            except sqlite3.OperationalError as error:
                if _is_lock(error) and time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                raise
            return

    def _connection(self) -> Database:
        if self._database is None:
            self._database = open_database(self._path, self._wait_seconds)
        return self._database


def _is_lock(error: Exception) -> bool:
    text = str(error).lower()
    return "locked" in text or "busy" in text
