"""What a server does by itself now and then: delete old sessions and uploads, copy the database.

Knows the store and the settings; knows no run and no page.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from app import backup
from app.comparisons import Comparisons
from app.sessions import Sessions
from app.settings import Settings
from app.store_file import StoreError
from app.visitors import KEY_FILE

log = logging.getLogger("qevict.housekeeping")

DAY = 86_400.0
UPLOADS = "gradio"
"""Folder in the data folder that the page keeps uploads in."""
RETENTION_SECONDS = 3600.0
CLOCK_SLACK = 600.0
"""How far the clock may move by itself, in seconds, before its word is not taken for deleting."""


class Housekeeping:
    """Works in a thread of its own between `start` and `close`.

    Args:
        wall, steady: the clock that people set, and one that only runs on.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        wall: Callable[[], float] = lambda: time.time(),
        steady: Callable[[], float] = time.monotonic,
        *,
        comparisons: Comparisons | None = None,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._comparisons = comparisons or Comparisons(sessions)
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._saved = 0.0
        self.trouble = ""

    def start(self) -> None:
        """Begins; call once."""
        self._thread = threading.Thread(target=self._work, name="qevict-housekeeping", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. The last copy is made by `save`, once the store is closed."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(30)

    def restore(self) -> None:
        """Takes the sessions from the last copy, where there are none here; call before the store is opened."""
        settings = self._settings
        if settings.backup_dir is not None:
            backup.restore(settings.database, settings.backup_dir, settings.data_dir / KEY_FILE)

    def save(self) -> None:
        """Makes a copy now; a failure is said in the log and in `trouble`."""
        settings = self._settings
        if settings.backup_dir is None:
            return
        try:
            backup.save(settings.database, settings.backup_dir, settings.data_dir / KEY_FILE)
            self.trouble = ""
        except backup.BackupError as error:
            if not self.trouble:
                log.error("%s", error)
            self.trouble = str(error)

    def forget_old(self) -> int:
        """Deletes sessions and comparisons that are too old and counts them; none while the clock is in doubt."""
        days = self._settings.keep_days
        if not days:
            return 0
        jump = self._wall() - self._steady() - self._offset
        if abs(jump) > CLOCK_SLACK:
            log.warning("the clock moved by %.0f seconds: no old session is deleted by it this time", jump)
            self._offset = self._wall() - self._steady()
            return 0
        try:
            before = self._wall() - days * DAY
            count = self._sessions.delete_older(before) + self._comparisons.delete_older(before)
        except StoreError as error:
            log.warning("old sessions could not be deleted: %s", error)
            return 0
        if count:
            log.info("%d sessions and comparisons older than %d days were deleted", count, days)
        return count

    def forget_uploads(self) -> int:
        """Deletes what visitors uploaded a day ago and returns how many files; a run has long taken its text."""
        count = 0
        for path in sorted((self._settings.data_dir / UPLOADS).rglob("*"), reverse=True):
            try:
                if path.is_file() and self._wall() - path.stat().st_mtime > DAY:
                    path.unlink()
                    count += 1
                elif path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
            except OSError as error:
                log.warning("an upload could not be deleted: %s", error)
        return count

    def _work(self) -> None:
        due_copy = self._steady() + self._settings.backup_minutes * 60.0
        due_forget = self._steady()
        while True:
            now = self._steady()
            if now >= due_forget:
                self.forget_old()
                self.forget_uploads()
                due_forget = now + RETENTION_SECONDS
            if self._settings.backup_dir is not None and now >= due_copy:
                self.save()
                due_copy = now + self._settings.backup_minutes * 60.0
            if self._ended.wait(max(0.05, min(due_copy, due_forget) - self._steady())):
                return
