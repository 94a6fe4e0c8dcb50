"""Runs that come back from a file: whole and alike, notes among them; and what is no such file."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api import include_routes
from app.context import create_context
from app.sessions import Sessions
from app.settings import Settings
from app.trace_files import with_marks
from app.trace_import import MOST_CELLS, ImportFileError, import_trace
from engine.trace import Mark, RunMeta, StepEvent, decode, encode
from tests.visuals.synthetic import Plan, synthetic_rows
from visuals.replay import to_html

SMALL = Plan(rows=4, prompt=200, events=6, full=3, quant=8, local=16, nasty=True)
NASTY = "</script><img src=x onerror=alert(1)>"
MARKS = [
    {"r": 3, "row": 2, "windows": [5], "text": NASTY, "author": "Ada"},
    {"r": 4, "row": 0, "windows": [], "text": "看这里", "author": None},
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Sessions]:
    made = Sessions(tmp_path / "sessions.db")
    made.open()
    yield made
    made.close()


def test_an_exported_page_comes_back_as_it_was(store: Sessions) -> None:
    rows = synthetic_rows(SMALL)
    page = to_html(with_marks(rows, MARKS), f"A {NASTY} title", {}, "en")
    session = import_trace(store, page.encode(), user="me")
    info = store.get(session)
    assert (info.user, info.state, info.title) == ("me", "done", f"A {NASTY} title")
    back = [decode(body) for body in store.events(session)]
    assert [event.seq for event in back] == list(range(len(rows)))
    for event, row in zip(back, rows, strict=True):
        was = decode(row)
        if isinstance(was, StepEvent):
            was = replace(was, ids=[])  # an offline page leaves them out
        assert encode(event, 0) == encode(was, 0)
    found = store.marks(session)
    assert [(one["r"], one["row"], one["windows"], one["text"]) for one in found] == [
        (3, 2, [5], NASTY),
        (4, 0, [], "看这里"),
    ]
    again = to_html(with_marks(store.events(session), found), info.title, {}, "en")
    assert again == to_html(with_marks(rows, MARKS), info.title, {}, "en")


def test_lines_come_back_too_and_a_cut_run_is_interrupted(store: Sessions) -> None:
    rows = synthetic_rows(SMALL)
    assert store.get(import_trace(store, b"\n".join(rows))).state == "done"
    cut = import_trace(store, b"\n".join(rows[:9]), name="mine.jsonl")
    assert (store.get(cut).state, store.get(cut).title) == ("interrupted", "mine.jsonl")
    assert [decode(body).kind for body in store.events(cut)][-1] == "end"


def test_a_packed_page_that_lacks_its_scores_is_numbered_anew(store: Sessions) -> None:
    lines = [row for number, row in enumerate(synthetic_rows(SMALL)) if number != 4]
    packed = base64.b64encode(gzip.compress(b"\n".join(lines))).decode()
    data = json.dumps({"packed": packed, "texts": {}, "lang": "en"})
    session = import_trace(store, f'<script type="application/json" id="qe-trace">{data}</script>'.encode())
    assert len(list(store.events(session))) == len(lines)


def _meta() -> RunMeta:
    event = decode(synthetic_rows(SMALL)[0])
    assert isinstance(event, RunMeta)
    return event


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html></html>",
        b"\x00\xff",
        b"{}",
        b'<script type="application/json" id="qe-trace">{"packed": "AAAA"}</script>',
        b'<script type="application/json" id="qe-trace">[1]</script>',
        b'<script type="application/json" id="qe-trace">{"rows": 3}</script>',
        b"\n".join(synthetic_rows(SMALL)[1:]),
        b"\n".join(synthetic_rows(SMALL) * 2),
        encode(replace(_meta(), rows=MOST_CELLS, max_windows=2)),
        encode(replace(_meta(), rows=-1)),
        encode(_meta()) + b"\n" + encode(StepEvent(10**15, [], [], 1)),
        encode(_meta()) + b"\n" + b'{"k":"tok","s":1,"t":"many","p":[],"i":[]}',
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(store: Sessions, data: bytes) -> None:
    with pytest.raises(ImportFileError):
        import_trace(store, data)
    assert store.list() == []


def test_a_bomb_is_not_unpacked(store: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.trace_import.MOST_BYTES", 1000)
    packed = base64.b64encode(gzip.compress(b" " * 100_000)).decode()
    with pytest.raises(ImportFileError, match="at most"):
        import_trace(store, f'<script type="application/json" id="qe-trace">{{"packed":"{packed}"}}</script>'.encode())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_lines_are_taken_or_refused_never_a_crash(data: st.DataObject) -> None:
    rows = b"\n".join(synthetic_rows(SMALL))
    at = data.draw(st.integers(0, len(rows) - 2))
    broken = rows[:at] + data.draw(st.binary(min_size=1, max_size=4)) + rows[at + 1 :]

    class Nowhere(Sessions):
        def __init__(self) -> None:
            """Keeps nothing."""

        def create(self, **_: object) -> str:
            return "x"

        def append(self, *_: object) -> None:  # type: ignore[override]
            return None

        def finish(self, *_: object) -> None:  # type: ignore[override]
            return None

        def flush(self) -> None:
            return None

    try:
        import_trace(Nowhere(), broken)
    except ImportFileError as error:
        assert str(error)


def test_strange_notes_are_left_out(store: Sessions) -> None:
    marks = [encode(Mark(-1, 0, [], "x"), 900), encode(Mark(1, 0, ["1"], "x"), 901), encode(Mark(1, 0, [], " "), 902)]  # type: ignore[list-item]
    session = import_trace(store, b"\n".join([*synthetic_rows(SMALL), *marks]))
    assert store.marks(session) == []


def test_the_route(tmp_path: Path) -> None:
    context = create_context(Settings(data_dir=tmp_path))
    app = FastAPI()
    include_routes(app, context)
    page = to_html(with_marks(synthetic_rows(SMALL), MARKS), "t", {}, "en")
    with TestClient(app) as client:
        answer = client.post("/qe/import", content=page.encode(), headers={"Content-Type": "text/html"})
        assert answer.status_code == 201
        sid = answer.json()["sid"]
        assert len(client.get(f"/qe/s/{sid}/marks").json()["marks"]) == 2
        again = client.get(f"/qe/s/{sid}/export.html").text
        assert again.count("看这里") == 1
        lines = client.get(f"/qe/s/{sid}/export.jsonl").content.splitlines()
        assert [decode(line).kind for line in lines[-3:]] == ["end", "mark", "mark"]
        assert client.post("/qe/import", content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415
        refused = client.post("/qe/import", content=b"<p>", headers={"Content-Type": "text/html"})
        assert refused.status_code == 422 and "holds no run" in refused.json()["detail"]
    context.close()
