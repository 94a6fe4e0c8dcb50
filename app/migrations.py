"""The session database's schema, as numbered steps from an empty file to today.

A step that has been released is never edited; a new one is added after it. Knows tables, no sessions.
"""

from __future__ import annotations

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

MIGRATIONS = Migrations("qevict")


@MIGRATIONS(name="001_sessions_and_events")
def _sessions_and_events(db: Database) -> None:
    """One row for each run, one row for each wire message."""
    db.table("session").create(
        {
            "id": str,
            "created": float,
            "model": str,
            "policy": str,
            "settings": str,
            "title": str,
            "state": str,
            "versions": str,
            "summary": str,
            "num_events": int,
            "owner": str,
        },
        pk="id",
        not_null={"created", "model", "policy", "settings", "title", "state", "num_events", "owner"},
        defaults={"versions": "{}", "summary": "{}", "num_events": 0},
    )
    db.table("session").create_index(["created"])
    db.table("event").create(
        {"session": str, "seq": int, "kind": str, "r": int, "body": bytes},
        pk=("session", "seq"),
        not_null={"kind", "body"},
    )
    db.table("event").create_index(["session", "kind", "seq"])


@MIGRATIONS(name="002_marks_and_answers")
def _marks_and_answers(db: Database) -> None:
    """Notes on windows of a session, and answers that were given in lessons."""
    db.table("mark").create(
        {
            "id": int,
            "session": str,
            "r": int,
            "row": int,
            "windows": str,
            "text": str,
            "author": str,
            "created": float,
        },
        pk="id",
        not_null={"session", "r", "row", "windows", "text", "created"},
    )
    db.table("mark").create_index(["session"])
    db.table("answer").create(
        {
            "id": int,
            "lesson": str,
            "step": str,
            "choice": str,
            "correct": int,
            "ms": int,
            "created": float,
        },
        pk="id",
        not_null={"lesson", "step", "choice", "created"},
    )


@MIGRATIONS(name="003_user")
def _user(db: Database) -> None:
    """Who made a session; empty = nobody who is known, as for all sessions from before."""
    db.table("session").add_column("user", str, not_null_default="")
    db.table("session").create_index(["user", "created"])


@MIGRATIONS(name="004_comparisons")
def _comparisons(db: Database) -> None:
    """One row for each comparison: what was asked, what was found, and its board as the browser gets it."""
    db.table("comparison").create(
        {
            "id": str,
            "created": float,
            "user": str,
            "owner": str,
            "state": str,
            "title": str,
            "model": str,
            "mode": str,
            "request": str,
            "result": str,
            "board": bytes,
        },
        pk="id",
        not_null={"created", "user", "owner", "state", "title", "model", "mode", "request"},
        defaults={"user": "", "owner": ""},
    )
    db.table("comparison").create_index(["user", "created"])


def names() -> list[str]:
    """Names of all steps, oldest first."""
    return [step.name for step in MIGRATIONS._migrations]


def unknown_steps(db: Database) -> list[str]:
    """Steps that the file has been through and this release does not know: it was made by a later one."""
    known = set(names())
    return [step.name for step in MIGRATIONS.applied(db) if step.name not in known]
