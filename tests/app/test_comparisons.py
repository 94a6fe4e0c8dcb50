"""Stored comparisons: what is kept, who sees it, what deletion removes, what another process reads; no browser."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlite_utils import Database

from app import backup
from app.api import include_routes
from app.compare_lines import FIGURES, value_of
from app.compare_list import links_html, recent_html
from app.compare_record import from_record, request_record, to_csv, to_record
from app.compare_request import CompareRequest
from app.compare_runs import CompareRuns
from app.compare_table import comparison_html
from app.comparisons import ComparisonInfo, Comparisons, UnknownComparisonError
from app.context import AppContext, create_context
from app.housekeeping import DAY, Housekeeping
from app.migrations import MIGRATIONS, names
from app.sessions import Sessions
from app.settings import Settings
from app.store_file import StoreError
from app.visitors import ForbiddenError, Visitor, current
from engine.compare import iter_compare
from tests.app.fake_engine import FakeEngine, FakeOptions
from tests.app.test_compare_tab import REQUEST, WAIT, Loader

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
SHORT = replace(REQUEST, max_new_tokens=10)
FREE = replace(SHORT, mode="free", budget={"share": 0.4})


def _make(folder: Path, loader: Any = None, **settings: Any) -> AppContext:
    return create_context(
        Settings(data_dir=folder, **settings), engine=FakeEngine(), loader=loader or Loader(), options=FakeOptions
    )


def _finish(context: AppContext, request: CompareRequest = SHORT, compares: CompareRuns | None = None) -> str:
    compares = compares or context.compares
    session = compares.start(request)
    assert context.runs.wait(session, WAIT)
    assert compares.outcome(session) is not None, compares.standing(session).error
    return session


@contextmanager
def _asking(user: str) -> Iterator[None]:
    token = current.set(Visitor(user))
    try:
        yield
    finally:
        current.reset(token)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AppContext, dict[str, str]]]:
    """A server with a teacher-forced comparison and a free one, made by one that has ended."""
    folder = tmp_path_factory.mktemp("kept")
    first = _make(folder)
    made = {request.mode: _finish(first, request) for request in (SHORT, FREE)}
    tables = {mode: comparison_html(_outcome(first, session), "zh") for mode, session in made.items()}
    boards = {mode: first.compares.board(session) for mode, session in made.items()}
    first.close()
    second = _make(folder, loader=_no_model)
    for mode, session in made.items():
        assert comparison_html(_outcome(second, session), "zh") == tables[mode]
        assert second.compares.board(session) == boards[mode] is not None
    yield second, made
    second.close()


def _no_model(name: str, **_: Any) -> Any:
    raise AssertionError(f"{name} was loaded, but opening a stored comparison runs nothing")


def _outcome(context: AppContext, session: str) -> Any:
    found = context.compares.outcome(session)
    assert found is not None
    return found


def test_another_process_reads_the_same_board_and_table(kept: tuple[AppContext, dict[str, str]]) -> None:
    context, made = kept
    listed = context.listed_comparisons()
    assert [info.id for info in listed] == [made["free"], made["teacher"]]
    assert {info.state for info in listed} == {"done"} and all(info.whole for info in listed)
    assert listed[0].systems == REQUEST.systems and listed[0].model == "Tiny llama"
    assert "prompt" not in listed[0].shown()["request"] and "user" not in listed[0].shown()
    assert request_record(_outcome(context, made["free"]).request) == request_record(FREE)


def test_free_systems_have_lanes_of_their_own_tokens(kept: tuple[AppContext, dict[str, str]]) -> None:
    context, made = kept
    board = context.compares.board(made["free"])
    assert board is not None
    wire = json.loads(gzip.decompress(board))
    result = _outcome(context, made["free"]).result
    assert wire["mode"] == "free" and wire["longest"] == 10
    for sent, system in zip(wire["systems"], result.systems, strict=True):
        assert [frame["t"] for frame in sent["frames"]] == [wire["prompt_tokens"], wire["prompt_tokens"] + 8]
        assert "".join(sent["pieces"]) == system.text and len(sent["pieces"]) == len(system.token_ids)
        assert sent["first_difference"] == system.first_difference
    assert any(sent["first_difference"] is not None for sent in wire["systems"])


@pytest.mark.parametrize("mode", ["teacher", "free"])
def test_exports(kept: tuple[AppContext, dict[str, str]], mode: str) -> None:
    context, made = kept
    app = FastAPI()
    include_routes(app, context)
    client = TestClient(app)
    session, result = made[mode], _outcome(context, made[mode]).result
    answer = client.get(f"/qe/compare/{session}/export.json")
    assert answer.headers["content-disposition"].startswith("attachment")
    body = answer.json()
    assert body["request"]["prompt"] == REQUEST.prompt and body["mode"] == mode
    assert [system["bytes"] for system in body["systems"]] == [system.bytes for system in result.systems]
    assert body["board"] == client.get(f"/qe/compare/{session}").json()
    rows = list(csv.DictReader(io.StringIO(client.get(f"/qe/compare/{session}/export.csv").text)))
    assert [row["system"] for row in rows] == list(REQUEST.systems)
    for row, system in zip(rows, result.systems, strict=True):
        for name in FIGURES:
            value = value_of(system, name)
            assert row[name] == ("" if value is None else str(value))
        at = system.first_difference
        assert row["first_difference"] == ("" if mode == "teacher" else "none" if at is None else str(at + 1))
    assert client.get(f"/qe/compare/{session}/export.gif").status_code == 404
    assert client.get("/qe/compare/nobody/export.json").status_code == 404
    assert [row["id"] for row in client.get("/qe/compares?limit=1").json()["comparisons"]] == [made["free"]]


def test_a_name_is_no_formula(kept: tuple[AppContext, dict[str, str]]) -> None:
    context, made = kept
    wicked = replace(_outcome(context, made["free"]), model="=cmd()")
    assert "'=cmd()" in to_csv(wicked, "en") and ",=cmd()" not in to_csv(wicked, "en")


def test_what_a_record_lacks_or_adds(kept: tuple[AppContext, dict[str, str]]) -> None:
    outcome = _outcome(*_first(kept))
    request, record = request_record(outcome.request), json.loads(json.dumps(to_record(outcome)))
    record["result"]["from_a_later_release"] = record["result"]["systems"][0]["too"] = 1
    assert comparison_html(from_record(request, record), "en") == comparison_html(outcome, "en")
    del record["result"]["systems"][0]["keeps"]
    with pytest.raises(StoreError, match="no keeps"):
        from_record(request, record)
    for broken in ({}, {"result": 3}, record | {"agrees": None}):
        with pytest.raises(StoreError, match="damaged"):
            from_record(request, broken)


def _first(kept: tuple[AppContext, dict[str, str]]) -> tuple[AppContext, str]:
    return kept[0], kept[1]["teacher"]


def test_a_visitor_lists_and_deletes_only_their_own(tmp_path: Path) -> None:
    context = _make(tmp_path, list_sessions=False)
    try:
        with _asking("one"):
            mine = _finish(context)
        with _asking("two"):
            assert context.listed_comparisons() == []
            assert context.compares.outcome(mine) is not None  # a link is enough to look
            with pytest.raises(ForbiddenError):
                context.comparisons.delete(mine)
        with _asking("one"):
            assert [info.id for info in context.listed_comparisons()] == [mine]
            context.comparisons.delete(mine)
            assert context.listed_comparisons() == []
        assert context.compares.outcome(mine) is None and context.compares.board(mine) is None
        with pytest.raises(UnknownComparisonError):
            context.comparisons.delete(mine)
    finally:
        context.close()


def test_deleting_takes_it_out_of_the_file(tmp_path: Path) -> None:
    context = _make(tmp_path)
    secret = "walrus-0451"
    app = FastAPI()
    include_routes(app, context)
    client = TestClient(app)
    try:
        session = _finish(context, replace(SHORT, prompt=f"{secret} {SHORT.prompt}"))

        def held() -> bool:
            return any(secret.encode() in file.read_bytes() for file in tmp_path.glob("sessions.db*"))

        assert held()
        assert client.delete(f"/qe/compare/{session}").json() == {"deleted": True}
        assert not held()
        assert client.get(f"/qe/compare/{session}").status_code == 404
        assert client.delete(f"/qe/compare/{session}").status_code == 404
    finally:
        context.close()


def test_a_server_that_ends_keeps_what_was_compared_so_far(tmp_path: Path) -> None:
    context = _make(tmp_path)
    reached = threading.Event()

    def slow(*given: Any, **named: Any) -> Iterator[Any]:
        for event in iter_compare(*given, **named):
            if getattr(event, "step", 0) == 6:
                reached.set()
            time.sleep(0.01)
            yield event

    compares = CompareRuns(context.runs, context.bus, slow, store=context.comparisons)
    session = compares.start(replace(REQUEST, max_new_tokens=400))
    assert reached.wait(WAIT)
    context.close()
    later = _make(tmp_path, loader=_no_model)
    try:
        (info,) = later.listed_comparisons()
        assert (info.id, info.state, info.whole) == (session, "interrupted", True)
        result = _outcome(later, session).result
        assert result.stopped and 6 <= len(result.systems[0].kl_steps) < 399
        assert "qe-cmp-table" in comparison_html(_outcome(later, session), "en")
    finally:
        later.close()


def test_one_of_a_dead_process_is_interrupted(tmp_path: Path) -> None:
    store = Sessions(tmp_path / "sessions.db")
    Comparisons(store).begin("left", request_record(REQUEST))
    store.work(lambda db: db.execute("update comparison set owner = 'nobody'"))
    store.close()
    context = _make(tmp_path)
    try:
        (info,) = context.listed_comparisons()
        assert (info.state, info.whole) == ("interrupted", False)
        assert context.compares.outcome("left") is None
    finally:
        context.close()


def test_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    context = _make(tmp_path)
    try:
        session = context.compares.start(replace(REQUEST, budget={"share": 0.01}))
        assert context.runs.wait(session, WAIT)
        assert "smallest feasible" in context.compares.standing(session).error
        assert context.listed_comparisons() == []
    finally:
        context.close()


def test_a_store_that_refuses_does_not_end_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = _make(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreError("the disk is full.")

    monkeypatch.setattr(context.comparisons, "begin", refuse)
    try:
        outcome = _outcome(context, _finish(context))
        assert not outcome.kept and context.listed_comparisons() == []
        board = context.compares.board(next(iter(context.compares._outcomes)))
        assert board is not None and json.loads(gzip.decompress(board))["mode"] == "teacher"
    finally:
        context.close()


def test_old_ones_are_forgotten_and_running_ones_are_not(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, keep_days=2)
    sessions = Sessions(settings.database)
    comparisons = Comparisons(sessions)
    for name, days, state in (("old", 3, "done"), ("on", 3, "running"), ("new", 1, "done")):
        comparisons.begin(name, request_record(REQUEST))
        values = [time.time() - days * DAY, state, name]
        sessions.work(
            lambda db, values=values: db.execute("update comparison set created = ?, state = ? where id = ?", values)
        )
    try:
        assert Housekeeping(settings, sessions).forget_old() == 1
        assert {info.id for info in comparisons.list()} == {"on", "new"}
    finally:
        sessions.close()


def test_a_copy_holds_comparisons_too(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", backup_dir=tmp_path / "copy")
    store = Sessions(settings.database)
    Comparisons(store).begin("copied", request_record(REQUEST))
    store.close()
    backup.save(settings.database, tmp_path / "copy")
    assert backup.restore(tmp_path / "other" / "sessions.db", tmp_path / "copy")
    other = Sessions(tmp_path / "other" / "sessions.db")
    try:
        assert Comparisons(other).get("copied").systems == REQUEST.systems
    finally:
        other.close()


@pytest.mark.parametrize("step", names()[: names().index("004_comparisons")])
def test_a_database_from_before_takes_comparisons(tmp_path: Path, step: str) -> None:
    path = tmp_path / "sessions.db"
    old = Database(path)
    MIGRATIONS.apply(old, stop_before=names()[names().index(step) + 1 :][:1])
    old.close()
    store = Sessions(path)
    try:
        Comparisons(store).begin("one", request_record(REQUEST))
        assert Comparisons(store).get("one").state == "running"
    finally:
        store.close()


def test_a_damaged_row_is_no_crash(tmp_path: Path) -> None:
    context = _make(tmp_path)
    try:
        session = _finish(context)
        with closing(sqlite3.connect(context.settings.database)) as db, db:
            db.execute("update comparison set result = '[', request = '[' where id = ?", [session])
        context.compares._outcomes.clear()
        assert context.compares.outcome(session) is None and context.compares.board(session) is None
        (info,) = context.listed_comparisons()
        assert info.systems == () and session in recent_html([info], "en")
    finally:
        context.close()


def test_the_list_escapes_and_asks_before_deleting() -> None:
    row = ComparisonInfo(
        "id-1", 1.0, "stopped", "<img src=x>", "<b>m</b>", "free", ("qevict", "kivi-2"), {"budget": {"tokens": 300}}
    )
    html = recent_html([row], "en", shown="id-1")
    assert "<img" not in html and "<b>m" not in html and "&lt;img src=x&gt;" in html
    assert 'aria-current="true"' in html and "QEvict, KIVI-2" in html and "300 tokens" in html
    assert html.count('data-name="id-1"') == 2 and 'data-act="open"' in html and 'data-act="ask"' in html
    asked = recent_html([row], "zh", asked="id-1")
    assert 'data-act="delete"' in asked and 'data-act="keep"' in asked and 'data-act="open"' not in asked
    assert "bytes of KIVI-2" in recent_html([replace(row, request={"match_to": "kivi-2"})], "en")
    assert recent_html([], "en") == ""
    assert 'href="?c=id-1"' in links_html("id-1", "en", kept=True)
    assert "?c=" not in links_html("id-1", "en", kept=False)


def test_two_threads_can_need_the_engine_at_once() -> None:
    """In a fresh process, since it is about the first import: each of these asks for another part of it."""
    program = """
import threading
from app.compare_request import CompareRequest
from app.loaded_models import LoadedModels
from app.tabs.compare_fields import known_systems

said = []

def load():
    try:
        LoadedModels(1).get("/nowhere", "cpu", "auto", lambda progress: None)
    except Exception as error:
        said.append(type(error).__name__)

asked = [
    threading.Thread(target=load),
    threading.Thread(target=lambda: said.append(len(known_systems(imported=True)) > 4)),
    threading.Thread(target=lambda: said.append(CompareRequest("x", ("qevict", "kivi-2")).check())),
]
for thread in asked:
    thread.start()
for thread in asked:
    thread.join()
print(sorted(map(str, said)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "['ModelNotFoundError', 'None', 'True']", done.stderr[-2000:]
