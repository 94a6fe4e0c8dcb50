"""The database file itself: opening, migrating, who owns a run, and what SQLite's errors mean.

Knows SQLite and file locks; knows no sessions.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import IO

from sqlite_utils import Database

from app.migrations import MIGRATIONS, unknown_steps
from engine.errors import EngineError


class StoreError(EngineError, RuntimeError):
    """The session store can't be read or written; the text says why and what to do."""


def explain(error: Exception, path: Path) -> StoreError:
    """One sentence for an error of SQLite or of the file system."""
    text = str(error).lower()
    if "full" in text or "no space" in text:
        why = f"the disk that holds {path} is full: free some space."
    elif "locked" in text or "busy" in text:
        why = f"{path} is locked by another program: close it."
    elif "readonly" in text or "read-only" in text or "permi" in text or "unable to open" in text:
        why = f"{path} can't be written: set QEVICT_DATA_DIR to a folder that can."
    elif "malformed" in text or "not a database" in text or "corrupt" in text:
        why = f"{path} is damaged: move it away, a new one is made."
    else:
        why = f"{path}: {error}."
    return StoreError(f"sessions can't be stored: {why}")


def open_database(path: Path, wait_seconds: float, *, read_only: bool = False) -> Database:
    """A connection for the calling thread, or for one thread after the other."""
    where = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    connection = sqlite3.connect(where, uri=True, timeout=wait_seconds, check_same_thread=False)
    database = Database(connection)
    if not read_only:
        # The log survives a killed process; only a power cut may lose the last transactions.
        database.execute("pragma synchronous = normal")
        database.execute("pragma secure_delete = on")
    return database


class Owner:
    """A name for this process that others can tell dead: it holds a file lock as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self.name = secrets.token_hex(8)
        self._path = folder / f"{self.name}.owner"
        self._file: IO[str] = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Gives the name up."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def is_dead(folder: Path, name: str) -> bool:
    """Whether the process that had this owner name has ended; its lock file goes."""
    path = folder / f"{name}.owner"
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def prepare(path: Path, wait_seconds: float, recover: Callable[[Database, Callable[[str], bool]], None]) -> Owner:
    """Makes or migrates the database, runs `recover(database, dead)` and returns this process's owner.

    Two processes that start at once do this one after the other.

    Raises:
        StoreError: see `explain`; or the file was made by a later release.
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "opening.lock").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            database = open_database(path, wait_seconds)
            try:
                database.enable_wal()
                late = unknown_steps(database)
                if late:
                    raise StoreError(
                        f"{path} was made by a later release (it has step {late[0]}): "
                        "update this program, or set QEVICT_DATA_DIR to another folder."
                    )
                MIGRATIONS.apply(database)
                recover(database, lambda name: is_dead(folder, name))
            finally:
                database.close()
            owner = Owner(folder)
        os.chmod(path, 0o600)
    except (sqlite3.Error, OSError) as error:
        raise explain(error, path) from error
    return owner
