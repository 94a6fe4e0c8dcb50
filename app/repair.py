"""Mending a damaged session database: what can be read is kept, what cannot is left in a file beside it.

Knows the tables and SQLite's errors; knows no server.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sqlite_utils import Database

from app.migrations import MIGRATIONS, unknown_steps
from app.store_file import StoreError, is_dead

TABLES = ("session", "event", "mark", "answer")
JSON_COLUMNS = ("settings", "versions", "summary")


def fix(path: Path) -> list[str]:
    """Mends the database and returns what was done, one sentence each.

    Raises:
        StoreError: there is no database, a server has it open, or a later release made it.
    """
    if not path.is_file():
        raise StoreError(f"there is no database {path}: nothing to mend.")
    with (path.parent / "opening.lock").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for lock in path.parent.glob("*.owner"):
            if not is_dead(path.parent, lock.stem):
                raise StoreError(f"a server has {path} open: end it first.")
        said = [] if _is_sound(path) else _rebuild(path)
        try:
            with closing(sqlite3.connect(path)) as connection:
                said += _mend_rows(Database(connection))
                connection.execute("vacuum")
        except sqlite3.Error as error:
            raise StoreError(f"{path} can't be mended: {error}.") from error
    return said or ["The database is sound."]


def _is_sound(path: Path) -> bool:
    try:
        with closing(sqlite3.connect(path)) as connection:
            database = Database(connection)
            if unknown_steps(database):
                raise StoreError(f"{path} was made by a later release: update this program.")
            if connection.execute("pragma integrity_check").fetchone()[0] != "ok":
                return False
            MIGRATIONS.apply(database)
    except sqlite3.Error:
        return False
    return True


def _rebuild(path: Path) -> list[str]:
    """A new database from every row of the old one that can be read."""
    fresh = path.with_name(f"{path.name}.mended")
    fresh.unlink(missing_ok=True)
    kept = dict.fromkeys(TABLES, 0)
    lost = 0
    with closing(sqlite3.connect(fresh)) as new, closing(sqlite3.connect(path)) as old:
        MIGRATIONS.apply(Database(new))
        for table in TABLES:
            columns = [row[1] for row in new.execute(f"pragma table_info({table})")]
            for row in _rows(old, table):
                if row is None:
                    lost += 1
                    continue
                known = {name: value for name, value in row.items() if name in columns}
                try:
                    new.execute(
                        f"insert or ignore into {table} ({', '.join(known)}) values ({', '.join('?' * len(known))})",
                        list(known.values()),
                    )
                except sqlite3.Error:
                    lost += 1
                    continue
                kept[table] += 1
        new.commit()
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    os.replace(path, aside)
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    os.replace(fresh, path)
    os.chmod(path, 0o600)
    return [
        f"The database was damaged: {kept['session']} sessions with {kept['event']} messages could be read and are "
        f"in a new one{f'; {lost} rows or pages were lost' if lost else ''}.",
        f"The damaged file was kept as {aside.name}.",
    ]


def _rows(old: sqlite3.Connection, table: str) -> Iterator[dict[str, object] | None]:
    """Every row that can be read, by its number; None for a stretch that can't."""
    last, step = 0, 1
    while True:
        try:
            cursor = old.execute(f"select rowid as rowid_, * from {table} where rowid > ? order by rowid", [last])
            names = [column[0] for column in cursor.description]
            for values in cursor:
                last, step = values[0], 1
                yield dict(zip(names[1:], values[1:], strict=True))
            return
        except sqlite3.Error:
            yield None
            last, step = last + step, step * 2
            if step > 2**40:
                return


def _mend_rows(database: Database) -> list[str]:
    """Rows that are whole for SQLite and wrong for us."""
    said = []
    with database.atomic():
        orphans = database.execute("delete from event where session not in (select id from session)").rowcount
        orphans += database.execute("delete from mark where session not in (select id from session)").rowcount
        if orphans:
            said.append(f"{orphans} rows that belong to no session were removed.")
        for row in list(database.query("select id, settings, versions, summary, state from session")):
            bad = [name for name in JSON_COLUMNS if not _is_table(row[name])]
            for name in bad:
                database.execute(f"update session set {name} = '{{}}' where id = ?", [row["id"]])
            if bad:
                said.append(f"Session {row['id']}: its {', '.join(bad)} could not be read and were emptied.")
        wrong = database.execute(
            "update session set num_events = (select coalesce(max(seq) + 1, 0) from event where session = session.id) "
            "where num_events > (select coalesce(max(seq) + 1, 0) from event where event.session = session.id)"
        ).rowcount
        if wrong:
            said.append(f"The number of messages was wrong in {wrong} sessions and was counted again.")
    return said


def _is_table(value: object) -> bool:
    try:
        return isinstance(json.loads(value if isinstance(value, str | bytes) else ""), dict)
    except ValueError:
        return False
