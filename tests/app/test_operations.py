"""Running a server: log, figures, copies, old sessions, mending, the window."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import backup, desktop
from app.api_route import program_version
from app.cli import main
from app.context import create_context
from app.housekeeping import DAY, Housekeeping
from app.logs import JsonLines, PlainLines
from app.main import open_store
from app.metrics import Metrics, memory_bytes
from app.repair import fix
from app.sessions import Sessions
from app.settings import Settings
from app.store_file import StoreError
from app.visitors import KEY_FILE, Signature
from engine.trace import EndEvent, StepEvent, encode
from tests.app.fake_engine import FakeEngine
from tests.app.test_api import Server
from tests.app.test_main import ROOT, free_port


def make_session(store: Sessions, title: str, created: float | None = None, state: str = "done") -> str:
    sid = store.create(model="m", policy="qevict", settings={"prompt": "x"}, title=title, state=state)
    store.append(sid, [encode(StepEvent(1, ["a"], [1]), 0), encode(EndEvent("length"), 1)]).result(10)
    if created is not None:
        with sqlite3.connect(store.path) as db:
            db.execute("update session set created = ? where id = ?", [created, sid])
        db.close()
    return sid


def test_a_json_line_holds_ids_and_the_traceback() -> None:
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        record = logging.LogRecord("qevict.runs", logging.ERROR, "f", 1, "run %s\x1b[31m", ("ab",), sys.exc_info())
    record.run, record.session = "ab12", "s" * 22
    line = JsonLines().format(record)
    assert "\n" not in line and "\x1b" not in line
    read = json.loads(line)
    assert (read["level"], read["run"], read["session"]) == ("error", "ab12", "s" * 22)
    assert "ValueError: bad" in read["trace"] and re.match(r"\d{4}-\d\d-\d\dT", read["time"])


def test_a_plain_line_can_not_steer_the_terminal() -> None:
    record = logging.LogRecord("qevict", logging.INFO, "f", 1, "title \x1b[2J\r\nnext", (), None)
    line = PlainLines().format(record)
    assert "\x1b" not in line and "\n" not in line and "title" in line


def test_figures_are_in_the_form_that_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.count("qevict_runs_total", why='a"b\\c\nd')
    for seconds in (0.001, 0.3, 4000.0):
        metrics.observe("qevict_run_seconds", seconds)
    text = metrics.text({"qevict_memory_bytes": memory_bytes(), "qevict_info": (1.0, {"version": "1"})})
    sample = re.compile(r'^[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)+\})? [0-9.e+-]+$')
    for line in text.splitlines():
        assert line.startswith("# ") or sample.match(line), line
    assert 'qevict_run_seconds_bucket{le="0.5"} 2' in text
    assert 'qevict_run_seconds_bucket{le="+Inf"} 3' in text and "qevict_run_seconds_count 3" in text
    assert memory_bytes() > 1e6


def test_the_servers_figures_count_its_runs(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine())
    assert server.context.runs.wait(server.start(options={"max_new_tokens": 16}), 20)
    text = httpx.get(server.url.removesuffix("/qe") + "/metrics").text
    assert 'qevict_runs_total{why="length"} 1' in text and "qevict_tokens_total 16" in text
    assert 'qevict_request_seconds_count{status="2xx"}' in text
    assert f'qevict_info{{version="{program_version()}"}} 1' in text
    assert server.http.get("/health").json()["version"] == program_version() != "unknown"
    server.close()


def test_a_copy_brings_sessions_and_cookies_back(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", backup_dir=tmp_path / "copy")
    context = create_context(settings)
    open_store(context)
    sid = make_session(context.sessions, "kept")
    _, cookie = Signature(settings.data_dir).new()
    context.close()
    shutil.rmtree(settings.data_dir)
    again = create_context(settings)
    open_store(again)
    assert again.sessions.get(sid).title == "kept" and len(list(again.sessions.events(sid))) == 2
    assert again.signature.read(cookie) is not None
    assert (settings.data_dir / KEY_FILE).stat().st_mode & 0o077 == 0
    again.close()


def test_a_torn_copy_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    store = Sessions(tmp_path / "data" / "sessions.db")
    sid = make_session(store, "first")
    store.close()
    for _ in range(2):
        backup.save(store.path, tmp_path / "copy")
    newest = tmp_path / "copy" / backup.NEWEST
    newest.write_bytes(newest.read_bytes()[:5000])
    shutil.rmtree(tmp_path / "data")
    assert backup.restore(store.path, tmp_path / "copy") == backup.BEFORE
    assert store.get(sid).title == "first"
    store.close()
    assert backup.restore(store.path, tmp_path / "copy") == "", "a database that is there is left alone"


def test_a_copy_that_can_not_be_made_is_said_and_the_server_goes_on(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("x")
    settings = Settings(data_dir=tmp_path / "data", backup_dir=tmp_path / "file" / "inside")
    context = create_context(settings)
    open_store(context)
    make_session(context.sessions, "x")
    context.housekeeping.save()
    context.housekeeping.save()
    assert "could not be copied" in context.housekeeping.trouble
    assert sum("could not be copied" in line for line in caplog.messages) == 1
    context.close()


class Clock:
    def __init__(self) -> None:
        self.wall, self.steady = time.time(), 1000.0


def test_old_sessions_go_and_a_clock_that_jumps_deletes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    settings = Settings(data_dir=tmp_path, keep_days=7)
    store = Sessions(settings.database)
    old, new = make_session(store, "old", clock.wall - 8 * DAY), make_session(store, "new", clock.wall - 6 * DAY)
    running = make_session(store, "running", clock.wall - 9 * DAY, state="running")
    keeper = Housekeeping(settings, store, lambda: clock.wall, lambda: clock.steady)
    clock.wall += 400 * DAY
    assert keeper.forget_old() == 0, "a year can not have passed in no time"
    clock.wall -= 400 * DAY
    assert keeper.forget_old() == 0 and keeper.forget_old() == 1
    assert {info.id for info in store.list()} == {new, running} and old not in {info.id for info in store.list()}
    clock.wall += 2 * DAY
    clock.steady += 2 * DAY
    assert keeper.forget_old() == 1
    store.close()


def test_housekeeping_works_by_itself(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, keep_days=1)
    store = Sessions(settings.database)
    make_session(store, "old", time.time() - 3 * DAY)
    keeper = Housekeeping(settings, store)
    keeper.start()
    deadline = time.monotonic() + 10
    while store.list() and time.monotonic() < deadline:
        time.sleep(0.02)
    keeper.close()
    assert store.list() == []
    store.close()


def test_uploads_are_deleted_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / "gradio" / "a" / "old.txt", tmp_path / "gradio" / "b" / "new.txt"
    for path in (old, new):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    os.utime(old, (time.time() - 2 * DAY,) * 2)
    settings = Settings(data_dir=tmp_path)
    keeper = Housekeeping(settings, Sessions(settings.database))
    assert keeper.forget_uploads() == 1 and new.exists() and not old.exists()
    keeper.forget_uploads()
    assert not old.parent.exists()


def test_mending_keeps_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = Sessions(path)
    sids = [make_session(store, f"session {number} " + "x" * 150) for number in range(60)]
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("pragma journal_mode = delete")
        size = db.execute("pragma page_size").fetchone()[0]
        root = db.execute("select rootpage from sqlite_master where name = 'session'").fetchone()[0]
        pages = (
            [row[0] for row in db.execute("select pageno from dbstat where name = 'session' and pagetype = 'leaf'")]
            if _has_dbstat(db)
            else []
        )
    db.close()
    raw = bytearray(path.read_bytes())
    target = pages[len(pages) // 2] if pages else root
    raw[(target - 1) * size + 8 : target * size - 8] = b"\xff" * (size - 16)
    path.write_bytes(raw)
    said = fix(path)
    assert "damaged" in said[0] and list(tmp_path.glob("sessions.db.damaged-*"))
    mended = Sessions(path)
    left = {info.id for info in mended.list(1000)}
    assert left < set(sids) and (not pages or len(left) > 10)
    for sid in left:
        assert len(list(mended.events(sid))) == 2
    make_session(mended, "new")
    mended.close()
    assert fix(path) == ["The database is sound."]


def _has_dbstat(db: sqlite3.Connection) -> bool:
    try:
        db.execute("select count(*) from dbstat")
    except sqlite3.OperationalError:
        return False
    return True


def test_mending_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    path.write_bytes(b"not a database" * 500)
    said = fix(path)
    assert "0 sessions" in said[0]
    store = Sessions(path)
    assert store.list() == []
    store.close()


def test_rows_that_say_nonsense_are_emptied(tmp_path: Path) -> None:
    store = Sessions(tmp_path / "sessions.db")
    sid, whole = make_session(store, "bad"), make_session(store, "good")
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute("update session set settings = '{broken', num_events = 99 where id = ?", [sid])
        db.execute("insert into event values ('nobody', 0, 'end', null, x'00')")
    db.close()
    said = " ".join(fix(store.path))
    assert (
        f"Session {sid}: its settings" in said and "1 rows that belong to no session" in said and "1 sessions" in said
    )
    assert store.get(sid).settings == {} and store.get(sid).num_events == 2 and store.get(whole).settings
    store.close()


def test_mending_waits_for_no_server(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("QEVICT_DATA_DIR", str(tmp_path))
    assert main(["doctor", "--fix-database"]) == 2 and "nothing to mend" in capsys.readouterr().err
    store = Sessions(tmp_path / "sessions.db")
    make_session(store, "x")
    with pytest.raises(StoreError, match="end it first"):
        fix(store.path)
    store.close()
    assert main(["doctor", "--fix-database"]) == 0 and "sound" in capsys.readouterr().out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_told_to_end_keeps_its_run(tmp_path: Path, how: int) -> None:
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("QEVICT_", "GRADIO_", "SPACE_"))}
    env |= {"QEVICT_DATA_DIR": str(tmp_path / "data"), "QEVICT_BACKUP_DIR": str(tmp_path / "copy"), "PORT": str(port)}
    env |= {"QEVICT_LOG_JSON": "1", "PYTHONPATH": str(ROOT)}
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen([sys.executable, "-m", "tests.app.served"], cwd=ROOT, env=env, stdout=log, stderr=log)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                body = {"prompt": "x", "options": {"max_new_tokens": 4000}}
                sid = httpx.post(f"{base}/qe/runs", json=body, timeout=5).json()["sid"]
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
        with httpx.stream("GET", f"{base}/qe/s/{sid}/events", timeout=20) as stream:
            lines = stream.iter_lines()
            while not next(lines).startswith("id: 20"):
                pass
            process.send_signal(how)
            rest = [line for line in lines if line.startswith("data: ")]
        assert '"why":"interrupted"' in rest[-1], "a follower hears the end"
        assert process.wait(20) in (0, 130, -how), "ended by itself, not killed"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        log.close()
    for folder in ("data", "copy"):
        store = Sessions(tmp_path / folder / "sessions.db")
        assert store.get(sid).state == "interrupted"
        store.close()
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    assert {record.get("session") for record in records if record["logger"] == "qevict.runs"} == {sid}


def test_the_window_is_left_out_where_it_can_not_be(monkeypatch: Any) -> None:
    assert desktop.why_not({}, "linux") == "there is no display"
    monkeypatch.setattr(desktop.importlib.util, "find_spec", lambda name: None)
    assert "pywebview is not installed" in desktop.why_not({"DISPLAY": ":0"}, "linux")
    said: list[str] = []
    waited: list[bool] = []
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(desktop.sys, "platform", "linux")
    desktop.show("http://127.0.0.1:1/", said.append, lambda: waited.append(True))
    assert "http://127.0.0.1:1/" in said[0] and "no display" in said[0] and waited == [True]


def test_a_window_that_fails_leaves_the_page(monkeypatch: Any) -> None:
    monkeypatch.setattr(desktop, "why_not", lambda env: "")

    def broken(url: str) -> None:
        raise RuntimeError("no toolkit")

    opened: list[str] = []
    monkeypatch.setattr(desktop, "_window", broken)
    monkeypatch.setattr(desktop.webbrowser, "open", lambda url: opened.append(url))
    said: list[str] = []
    desktop.show("http://127.0.0.1:1/", said.append, lambda: None)
    assert "no toolkit" in said[0]


def test_a_toolkit_that_ends_its_process_leaves_the_server(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "webview.py").write_text(
        "import os, sys\n"
        "def create_window(title, url, **size): print(url, file=sys.stderr, flush=True)\n"
        "def start():\n"
        "    print('no platform plugin', file=sys.stderr, flush=True)\n"
        "    os.abort() if os.environ['HOW'] == 'abort' else None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(desktop, "why_not", lambda env: "")
    monkeypatch.setattr(desktop.webbrowser, "open", lambda url: None)
    said: list[str] = []
    waited: list[bool] = []
    monkeypatch.setenv("HOW", "abort")
    desktop.show("http://127.0.0.1:1/", said.append, lambda: waited.append(True))
    assert "the window failed (no platform plugin)" in said[0] and waited == [True]
    monkeypatch.setenv("HOW", "close")
    desktop.show("http://127.0.0.1:1/", said.append, lambda: waited.append(True))
    assert len(said) == 1 and waited == [True]  # closed by its owner: the server may end
