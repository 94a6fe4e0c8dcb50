"""The session store: what it keeps, what it forgets, and what it does when the disk will not."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlite_utils import Database

from app.migrations import MIGRATIONS, names
from app.sessions import Sessions, UnknownSessionError, clean_title
from app.store_file import StoreError, explain
from engine.trace import EndEvent, ErrorEvent, Progress, RoutingEvent, decode, encode
from tests.app.test_events import message

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Sessions]:
    sessions = Sessions(tmp_path / "data" / "sessions.db", wait_seconds=0.3, max_backlog=50)
    sessions.open()
    yield sessions
    sessions.close()


def create(store: Sessions, title: str = "t") -> str:
    return store.create(model="m", policy="qevict", settings={"a": 1}, title=title)


def test_what_is_stored_comes_back_byte_for_byte(store: Sessions) -> None:
    session = create(store)
    rows = [message(seq) for seq in range(700)]
    store.append(session, rows[:300])
    store.append(session, rows[300:]).result(5)
    assert list(store.events(session)) == rows
    assert list(store.events(session, 650)) == rows[650:]
    assert store.last_seq(session) == 699
    assert store.get(session).num_events == 700
    store.finish(session, "done", {"text": "ü"}).result(5)
    info = store.get(session)
    assert (info.state, info.summary, info.settings) == ("done", {"text": "ü"}, {"a": 1})


def test_kinds_and_keyframes(store: Sessions) -> None:
    session = create(store)
    kinds = ["meta", "key", "tok", "route", "tok", "route", "key", "tok", "route", "late"]
    store.append(session, [message(seq, kind) for seq, kind in enumerate(kinds)]).result(5)
    assert [decode_seq(body) for body in store.events(session, 0, ("tok", "late"))] == [2, 4, 7, 9]
    assert [store.keyframe_before(session, seq) for seq in (1, 2, 6, 7, 99)] == [None, 1, 1, 6, 6]
    assert [decode_seq(body) for body in store.catch_up(session, 2)] == [2, 4, 6, 7, 8, 9]
    assert [decode_seq(body) for body in store.catch_up(session, 7)] == [7, 8, 9]


def decode_seq(body: bytes) -> int:
    from app.events import head

    return head(body)[1]


def test_ids_cannot_be_guessed_and_titles_are_one_clean_line(store: Sessions) -> None:
    ids = {create(store, title="a\x1b[31m\n b\u202e" + "x" * 500) for _ in range(20)}
    assert len(ids) == 20 and all(len(session) == 22 for session in ids)
    title = store.list()[0].title
    assert len(title) == 200 and "\x1b" not in title and "\n" not in title and "\u202e" not in title
    assert clean_title("  a \t b ") == "a b"


def test_listing_is_newest_first_and_paged(store: Sessions) -> None:
    ids = [create(store, str(number)) for number in range(5)]
    assert [info.id for info in store.list(3)] == ids[::-1][:3]
    assert [info.id for info in store.list(3, 3)] == ids[::-1][3:]


def test_deleting_leaves_no_trace_in_the_files(store: Sessions) -> None:
    secret = "correct-horse-battery-staple"
    kept = create(store)
    session = store.create(model="m", policy="p", settings={"prompt": secret}, title=secret)
    store.append(session, [encode(EndEvent("eos", {"text": secret * 40}, seq)) for seq in range(50)]).result(5)
    assert any(secret.encode() in file.read_bytes() for file in store.path.parent.iterdir())
    store.delete(session)
    assert not any(secret.encode() in file.read_bytes() for file in store.path.parent.iterdir())
    with pytest.raises(UnknownSessionError):
        store.get(session)
    store.append(session, [message(0)]).result(5)  # a late message of a run that was going on
    assert store.last_seq(session) == -1
    assert store.get(kept).id == kept


def test_unknown_sessions_are_named(store: Sessions) -> None:
    for call in (store.get, store.delete, store.events, store.catch_up):
        with pytest.raises(UnknownSessionError, match="there is no session 'nobody'"):
            call(*(["nobody"] if call in (store.get, store.delete) else ["nobody", 0]))
    with pytest.raises(UnknownSessionError):
        store.rename("nobody", "x")


def test_renaming_marks_and_answers(store: Sessions) -> None:
    session = create(store)
    store.rename(session, "new\nname")
    assert store.get(session).title == "new name"
    store.mark(session, 3, 1, [4, 5], "look", "teacher")
    (mark,) = store.marks(session)
    assert (mark["r"], mark["windows"], mark["text"]) == (3, [4, 5], "look")
    store.answer("tiers", "2", "B", correct=False, ms=900)


@pytest.mark.parametrize("damage", ["not json", '{"k":"prog","s":99}', None])
def test_a_damaged_message_opens_up_to_it_and_says_so(store: Sessions, damage: str | None) -> None:
    session = create(store)
    store.append(session, [message(seq) for seq in range(10)]).result(5)
    with sqlite3.connect(store.path) as db:
        if damage is None:
            db.execute("delete from event where session = ? and seq = 6", [session])
        else:
            db.execute("update event set body = ? where session = ? and seq = 6", [damage.encode(), session])
    db.close()
    *good, error, end = [decode(body) for body in store.events(session)]
    assert [event.seq for event in good] == [0, 1, 2, 3, 4, 5]
    assert isinstance(error, ErrorEvent) and "6" in error.message and "shown" in error.message
    assert isinstance(end, EndEvent) and end.why == "interrupted"


def test_a_damaged_session_row_still_opens(store: Sessions) -> None:
    session = create(store)
    with sqlite3.connect(store.path) as db:
        db.execute("update session set settings = 'x{', summary = '[1]' where id = ?", [session])
    db.close()
    info = store.get(session)
    assert info.settings == {} and info.summary == {} and "damaged" in info.damage
    assert store.list()[0].id == session


def test_a_locked_database_is_waited_for(store: Sessions) -> None:
    session = create(store)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("begin immediate")
    written = store.append(session, [message(0)])
    time.sleep(0.1)
    assert not written.done()
    other.execute("rollback")
    written.result(5)
    other.close()


def test_a_lock_that_stays_is_said_and_nothing_is_lost_when_it_goes(store: Sessions) -> None:
    session = create(store)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(StoreError, match="locked by another program"):
        store.append(session, [message(0)]).result(10)
    assert "locked" in store.trouble
    with pytest.raises(StoreError, match="locked"):
        create(store)
    other.execute("rollback")
    other.close()
    store.append(session, [message(1)]).result(10)
    assert list(store.events(session)) == [message(0), message(1)]
    assert store.trouble == ""


def test_a_full_disk_is_said_and_the_store_goes_on_afterwards(store: Sessions) -> None:
    session = create(store)
    writer = store._writer
    assert writer is not None

    def limit(pages: int) -> None:
        writer.work(lambda db: db.execute(f"pragma max_page_count = {pages}").fetchall()).result(5)

    limit(1)  # never below what is used already
    big = [encode(ErrorEvent("x" * 20_000, "", seq)) for seq in range(3)]
    with pytest.raises(StoreError, match="is full: free some space"):
        store.append(session, big[:1]).result(10)
    store.append(session, big[1:2]).exception(10)
    limit(100_000)
    store.append(session, big[2:]).result(10)
    assert list(store.events(session)) == big


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    store = Sessions(blocked / "sessions.db")
    with pytest.raises(StoreError, match="sessions can't be stored"):
        store.list()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (sqlite3.OperationalError("attempt to write a readonly database"), "can't be written: set QEVICT_DATA_DIR"),
        (sqlite3.OperationalError("unable to open database file"), "can't be written: set QEVICT_DATA_DIR"),
        (PermissionError(13, "Permission denied"), "can't be written: set QEVICT_DATA_DIR"),
        (OSError(28, "No space left on device"), "is full: free some space"),
        (sqlite3.OperationalError("database is locked"), "is locked by another program"),
        (sqlite3.DatabaseError("database disk image is malformed"), "is damaged: move it away"),
        (sqlite3.OperationalError("no such table: event"), "no such table: event"),
    ],
)
def test_every_fault_is_one_sentence(error: Exception, said: str) -> None:
    sentence = str(explain(error, Path("/x/sessions.db")))
    assert sentence.startswith("sessions can't be stored: ") and said in sentence and "\n" not in sentence


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(StoreError, match="damaged"):
        Sessions(path).open()


def test_a_database_of_a_later_release(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    first = Sessions(path)
    first.open()
    first.close()
    with sqlite3.connect(path) as db:
        db.execute(
            "insert into _sqlite_migrations (migration_set, name, applied_at) values ('qevict', '999_later', '2099')"
        )
    db.close()
    with pytest.raises(StoreError, match=r"later release.*999_later"):
        Sessions(path).open()


@pytest.mark.parametrize("step", [None, *names()])
def test_every_earlier_schema_is_brought_up_to_date(tmp_path: Path, step: str | None) -> None:
    path = tmp_path / "sessions.db"
    old = Database(path)
    if step is not None:
        later = names()[names().index(step) + 1 :]
        MIGRATIONS.apply(old, stop_before=later[:1])
        old.table("session").insert(
            {
                "id": "old",
                "created": 1.0,
                "model": "m",
                "policy": "p",
                "settings": "{}",
                "title": "from before",
                "state": "done",
                "num_events": 1,
                "owner": "",
            }
        )
        old.table("event").insert({"session": "old", "seq": 0, "kind": "prog", "r": None, "body": message(0)})
    old.close()
    store = Sessions(path)
    store.open()
    if step is not None:
        assert store.get("old").title == "from before"
        assert list(store.events("old")) == [message(0)]
    session = create(store)
    store.mark(session, 0, 0, [1], "x")
    store.close()
    fresh = Database(memory=True)
    MIGRATIONS.apply(fresh)
    assert Database(path).schema == fresh.schema


def test_a_session_of_a_live_process_is_left_alone(store: Sessions) -> None:
    session = create(store)
    second = Sessions(store.path)
    second.open()
    assert second.get(session).state == "running"
    second.close()


KILLED = """
import sys, threading
from pathlib import Path
from app.events import Bus
from app.runs import RunManager, RunRequest
from app.sessions import Sessions
from app.settings import Settings
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions

class Telling(FakeEngine):
    def _route(self, *args):
        event = super()._route(*args)
        say(f"r {event.event_id}")
        return event

def say(line):
    sys.stdout.write(line + "\\n")  # one write: two threads speak here
    sys.stdout.flush()

settings = Settings(data_dir=Path(sys.argv[1]))
sessions = Sessions(settings.database)
bus = Bus(100, sessions.catch_up)
runs = RunManager(settings, sessions, bus, engine=Telling(), loader=FakeLoader(), options=FakeOptions)
say("s " + runs.start(RunRequest("x", options={"max_new_tokens": 4000})))
threading.Event().wait()
"""


def test_a_killed_process_loses_at_most_the_last_interval(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    )
    stdout = process.stdout
    assert stdout is not None
    session, said = "", 0
    try:
        while said < 60 or not session:
            kind, value = stdout.readline().split()
            session, said = (value, said) if kind == "s" else (session, int(value))
    finally:
        process.send_signal(signal.SIGKILL)
        rest = [int(line[2:]) for line in stdout.read().split("\n")[:-1]]
        process.wait(10)
        stdout.close()
    said = max([said, *rest])

    store = Sessions(tmp_path / "sessions.db")
    store.open()
    info = store.get(session)
    assert info.state == "interrupted"
    events = [decode(body) for body in store.events(session)]
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(events[-1], EndEvent) and events[-1].why == "interrupted"
    last = max(event.event_id for event in events if isinstance(event, RoutingEvent))
    # The engine said `said` when it made that event; the one before had been sent on by then.
    assert last >= said - 2
    assert info.num_events == len(events)
    assert not any(isinstance(event, ErrorEvent) for event in events)
    assert sum(isinstance(event, Progress) for event in events) == 1
    store.close()
