"""What goes wrong on real machines, one test each: a clear message, and a server that goes on."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Settings
from engine import embedded
from engine.errors import ModelError
from engine.trace import EndEvent, ErrorEvent, RoutingEvent, RunMeta, decode
from tests.app.fake_engine import FakeEngine, FakeLoader
from tests.app.test_api import Server
from tests.app.test_runs import wait_for
from tests.faults.server import ServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    built = Server(tmp_path, FakeEngine(), store_wait_seconds=0)
    yield built
    built.close()


def runs_to_its_end(server: Server) -> None:
    sid = server.start("after the fault", options={"max_new_tokens": 8})
    assert server.context.runs.wait(sid, 20)
    assert decode(server.follow(sid)[-1][1]).kind == "end"


def test_kill_9_in_mid_run_loses_at_most_the_last_interval(tmp_path: Path) -> None:
    first = ServerProcess(tmp_path)
    try:
        sid = first.start(options={"max_new_tokens": 4000})
        seen = [decode(body.encode()) for body in first.follow(sid, stop_at=60)]
    finally:
        first.kill()
    heard = max(event.event_id for event in seen if isinstance(event, RoutingEvent))
    second = ServerProcess(tmp_path)
    try:
        info = httpx.get(f"{second.url}/s/{sid}").json()
        assert info["state"] == "interrupted" and info["damage"] == ""
        events = [decode(body.encode()) for body in second.follow(sid)]
        assert [event.seq for event in events] == list(range(len(events)))
        assert isinstance(events[-1], EndEvent) and events[-1].why == "interrupted"
        stored = max(event.event_id for event in events if isinstance(event, RoutingEvent))
        assert stored >= heard - 1, "nothing older than the last routing interval is lost"
        assert second.follow(second.start(options={"max_new_tokens": 8}))
    finally:
        second.end()


def test_disk_full_is_said_in_the_run_and_later_runs_are_stored_again(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(), store_wait_seconds=0)
    runs_to_its_end(server)
    full = threading.Event()
    writer: Any = server.context.sessions._writer
    transaction = writer._transaction

    def refuse(items: Any) -> None:
        if full.is_set():
            raise sqlite3.OperationalError("database or disk is full")
        transaction(items)

    writer._transaction = refuse
    full.set()
    sid = server.start(options={"max_new_tokens": 64})
    assert server.context.runs.wait(sid, 30)
    said = [
        event.message
        for event in map(decode, (body for _, body in server.follow(sid)))
        if isinstance(event, ErrorEvent)
    ]
    assert len(said) == 1 and "is full: free some space" in said[0]
    health = server.http.get("/health").json()
    assert health["status"] == "degraded" and "is full" in health["store"]
    full.clear()
    runs_to_its_end(server)
    wait_for(lambda: server.http.get("/health").json()["status"] == "ok")
    assert len(server.lines(f"/s/{sid}/trace")) > 10, "what was kept in memory is written once there is room"
    server.close()


def read_only_folder(tmp_path: Path) -> Path:
    """A folder in which the system lets nobody write; rights do not bind the superuser, some file systems do."""
    chosen = tmp_path / "data"
    chosen.mkdir()
    chosen.chmod(0o555)
    for place in (chosen, Path("/sys/kernel"), Path("/proc/sys")):
        try:
            (place / "probe").mkdir()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return place / "inside" if place != chosen else place
        else:
            (place / "probe").rmdir()
    pytest.skip("this user may write everywhere")


def test_a_data_folder_that_can_not_be_written(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, data=read_only_folder(tmp_path))
    try:
        sid = server.start(options={"max_new_tokens": 8})
        events = [decode(body.encode()) for body in server.follow(sid)]
        meta = next(event for event in events if isinstance(event, RunMeta))
        assert "can't be written: set QEVICT_DATA_DIR" in meta.notices[0]
        assert isinstance(events[-1], EndEvent) and events[-1].why == "length"
        listed = httpx.get(f"{server.url}/sessions")
        assert listed.status_code == 503 and "set QEVICT_DATA_DIR" in listed.json()["detail"]
        assert "can't be written" in server.log() and "Traceback" not in server.log()
    finally:
        server.end()


def test_a_database_that_another_program_has_locked(server: Server) -> None:
    runs_to_its_end(server)
    with sqlite3.connect(server.context.settings.database, isolation_level=None) as other:
        other.execute("begin exclusive")
        sid = server.start(options={"max_new_tokens": 16})
        assert server.context.runs.wait(sid, 30)
        events = [decode(body) for _, body in server.follow(sid)]
        notices = [notice for event in events if isinstance(event, RunMeta) for notice in event.notices]
        assert "locked by another program: close it" in notices[0]
        other.execute("rollback")
    other.close()
    runs_to_its_end(server)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"\0" * 4096])
def test_a_broken_gguf_is_one_sentence_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        embedded.convert(source, tmp_path / "converted")
    assert "\n" not in str(caught.value) and str(source.name) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_a_model_that_does_not_load_ends_one_run_only(tmp_path: Path) -> None:
    loader_error = ModelError("model.gguf is not a whole file: fetch it again.")
    server = Server(tmp_path, FakeEngine())
    loader: Any = server.context.runs.models._loader
    assert isinstance(loader, FakeLoader)
    loader.error = loader_error
    sid = server.start()
    assert server.context.runs.wait(sid, 20)
    events = [decode(body) for _, body in server.follow(sid)]
    assert isinstance(events[0], ErrorEvent) and events[0].message == str(loader_error)
    loader.error = None
    runs_to_its_end(server)
    server.close()


@pytest.mark.parametrize(
    "damage",
    [
        "update session set settings = '{\"prompt\": '",
        "update session set summary = '[1, 2]', versions = x'00ff'",
        "update session set num_events = -7, title = '<script>' || char(27) || '[2J'",
        "update event set body = x'00ff' where seq = 3",
        "delete from event where seq = 2",
        "update event set kind = 'nonsense', r = -5 where seq = 1",
    ],
)
def test_a_corrupt_row_opens_as_far_as_it_goes(server: Server, damage: str) -> None:
    sid = server.start(options={"max_new_tokens": 16})
    assert server.context.runs.wait(sid, 20)
    with sqlite3.connect(server.context.settings.database) as db:
        db.execute(damage)
    db.close()
    assert server.http.get(f"/s/{sid}").status_code == 200
    assert [info["id"] for info in server.http.get("/sessions").json()["sessions"]] == [sid]
    events = [decode(body) for body in server.lines(f"/s/{sid}/trace")]
    assert isinstance(events[-1], EndEvent)
    for kind in ("html", "csv", "jsonl"):
        assert server.http.get(f"/s/{sid}/export.{kind}").status_code in (200, 422), kind
    runs_to_its_end(server)


def test_a_model_that_runs_out_of_memory(tmp_path: Path) -> None:
    engine = FakeEngine(fail_after=5, error=RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    server = Server(tmp_path, engine)
    sid = server.start()
    assert server.context.runs.wait(sid, 20)
    said = [event for event in map(decode, (body for _, body in server.follow(sid))) if isinstance(event, ErrorEvent)]
    assert "ran out of memory: take a shorter prompt" in said[0].message
    assert not server.context.runs.models.has("embedded"), "its memory is given back"
    assert server.http.get(f"/s/{sid}").json()["state"] == "error"
    engine.fail_after = None
    runs_to_its_end(server)
    server.close()


def test_a_client_that_goes_away_in_mid_stream(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(delay=0.002))
    sid = server.start(options={"max_new_tokens": 400})
    for _ in range(8):
        server.follow(sid, stop_at=3)
    wait_for(lambda: server.context.bus.followers == 0)
    assert server.context.runs.wait(sid, 30)
    assert server.http.get(f"/s/{sid}").json()["state"] == "done"
    server.close()


def test_a_client_that_reads_nothing_costs_no_memory_and_no_time(tmp_path: Path) -> None:
    import socket

    server = Server(tmp_path, FakeEngine(), ring_size=64)
    sid = server.start(options={"max_new_tokens": 3000})
    host, port = server.url.split("//")[1].split("/")[0].split(":")
    deaf = [socket.create_connection((host, int(port))) for _ in range(4)]
    for one in deaf:
        one.sendall(f"GET /qe/s/{sid}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert server.context.runs.wait(sid, 60)
    for one in deaf:
        one.close()
    wait_for(lambda: server.context.bus.followers == 0)
    runs_to_its_end(server)
    server.close()


def test_a_clock_that_is_set_back_and_forth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, FakeEngine(delay=0.002), keep_days=1, max_run_seconds=30, abandon_seconds=30)
    real = time.time
    sids = []
    for jump in (0.0, -5e6, 5e8):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        sid = server.start(options={"max_new_tokens": 64})
        assert server.context.runs.wait(sid, 20)
        assert server.http.get(f"/s/{sid}").json()["state"] == "done", "no limit goes by the clock on the wall"
        server.context.housekeeping.forget_old()
        sids.append(sid)
    assert {info["id"] for info in server.http.get("/sessions").json()["sessions"]} == set(sids)
    server.close()


def test_a_store_that_is_closed_under_a_run(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(delay=0.002))
    sid = server.start(options={"max_new_tokens": 200})
    server.follow(sid, stop_at=10)
    server.context.sessions.close()
    assert server.context.runs.wait(sid, 30)
    assert server.http.get(f"/s/{sid}").status_code == 200
    runs_to_its_end(server)
    server.close()


def test_a_bad_setting_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="QEVICT_RING_SIZE must be in"):
        ServerProcess(tmp_path, QEVICT_RING_SIZE="0")
    with pytest.raises(Exception, match="QEVICT_LOGIN must be name:password"):
        Settings.from_env({"QEVICT_LOGIN": "teacher"})
