"""Copies of the session database in another folder, such as a mounted bucket, and taking one back.

A database is never opened there: storage of that kind locks and tears it. Whole copies are made beside the database
and moved over. Knows SQLite's files; knows no sessions.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

log = logging.getLogger("qevict.backup")

NEWEST, BEFORE = "sessions.db", "sessions.db.before"


class BackupError(Exception):
    """A copy could not be made; the text says why."""


def save(database: Path, folder: Path, *extra: Path) -> None:
    """Copies the database as it stands, and the files in `extra`; the copy before is kept as well.

    Raises:
        BackupError: the folder can't be written, or the database not be read.
    """
    if not database.is_file():
        return
    whole = database.with_name(f"{database.name}.copy")
    try:
        whole.unlink(missing_ok=True)
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
            connection.execute("vacuum into ?", [str(whole)])
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{NEWEST}.part"
        shutil.copyfile(whole, part)
        if (folder / NEWEST).exists():
            os.replace(folder / NEWEST, folder / BEFORE)
        os.replace(part, folder / NEWEST)
        for file in extra:
            if file.is_file():
                shutil.copyfile(file, folder / f"{file.name}.part")
                os.chmod(folder / f"{file.name}.part", 0o600)
                os.replace(folder / f"{file.name}.part", folder / file.name)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"the sessions could not be copied to {folder}: {error}.") from error
    finally:
        whole.unlink(missing_ok=True)


def restore(database: Path, folder: Path, *extra: Path) -> str:
    """Takes the newest sound copy where there is no database yet; returns its name, empty if there was none to take."""
    for file in extra:
        if not file.exists() and (folder / file.name).is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file.name, file)
            os.chmod(file, 0o600)
    if database.exists():
        return ""
    for name in (NEWEST, BEFORE):
        source = folder / name
        if not source.is_file():
            continue
        part = database.with_name(f"{database.name}.restored")
        try:
            database.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, part)
            _demand_sound(part)
            os.chmod(part, 0o600)
            os.replace(part, database)
        except (OSError, sqlite3.Error) as error:
            log.warning("the copy %s can't be used: %s", source, error)
            part.unlink(missing_ok=True)
            continue
        log.info("sessions were restored from %s", source)
        return name
    return ""


def _demand_sound(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        said = connection.execute("pragma quick_check").fetchone()[0]
        if said != "ok" or not connection.execute("select count(*) from sqlite_master").fetchone()[0]:
            raise sqlite3.DatabaseError(f"it is damaged ({said})")
