"""The HTTP interface, through a real server on a real socket, over a made-up engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware

from app.api import include_routes
from app.api_route import SECURITY_HEADERS
from app.context import AppContext, create_context
from app.gate import Gate
from app.main import StartError, serve
from app.run_body import build_request
from app.settings import ASSETS, Settings
from engine.errors import ConfigError
from engine.trace import EndEvent, ErrorEvent, Keyframe, RunMeta, decode
from engine.trace_board import Board
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions
from tests.app.test_runs import wait_for


class Server:
    """One server in a thread, on a port that the system chose."""

    def __init__(self, folder: Path, engine: FakeEngine, *, parts: dict[str, Any] | None = None, **limits: Any) -> None:
        self.engine = engine
        made_up = {"engine": engine, "loader": FakeLoader(), "options": FakeOptions}
        settings = Settings(data_dir=folder, **{"max_prompt_chars": 1000, "max_new_tokens": 5000, **limits})
        self.context: AppContext = create_context(settings, **(made_up if parts is None else parts))
        gate = Middleware(Gate, settings=settings, signature=self.context.signature, metrics=self.context.runs.metrics)
        app = FastAPI(docs_url=None, openapi_url=None, middleware=[gate])
        include_routes(app, self.context)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/qe"
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        wait_for(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def start(self, prompt: str = "x", **body: Any) -> str:
        answer = self.http.post("/runs", json={"prompt": prompt, **body})
        assert answer.status_code == 202, answer.text
        sid: str = answer.json()["sid"]
        return sid

    def follow(self, sid: str, after: int | None = None, stop_at: int | None = None) -> list[tuple[int, bytes]]:
        """(id, message) until the stream ends, or until message `stop_at`."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        got: list[tuple[int, bytes]] = []
        number = -1
        with httpx.stream("GET", f"{self.url}/s/{sid}/events", headers=headers, timeout=30) as stream:
            if stream.status_code == 204:
                return got
            assert stream.headers["content-type"].startswith("text/event-stream")
            for line in stream.iter_lines():
                if line.startswith("id: "):
                    number = int(line[4:])
                elif line.startswith("data: "):
                    if number >= 0:
                        got.append((number, line[6:].encode()))
                    if stop_at is not None and number >= stop_at:
                        break
                    number = -1
        return got

    def lines(self, path: str) -> list[bytes]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.content.split(b"\n")[:-1]

    def close(self) -> None:
        if self.engine.gate is not None:
            self.engine.gate.set()
        self.http.close()
        self.context.close()
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    built = Server(tmp_path, FakeEngine())
    yield built
    built.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Server]:
    built = Server(tmp_path, FakeEngine(delay=0.005), queue_length=2)
    yield built
    built.close()


def test_start_returns_at_once_and_the_stream_is_the_stored_trace(slow: Server) -> None:
    began = time.monotonic()
    sid = slow.start(options={"max_new_tokens": 200})
    assert slow.context.runs.status(sid).state != "ended", time.monotonic() - began
    got = slow.follow(sid)
    assert [number for number, _ in got] == list(range(len(got)))
    assert [body for _, body in got] == slow.lines(f"/s/{sid}/trace")
    assert decode(got[-1][1]).kind == "end"
    assert slow.follow(sid, after=got[-1][0]) == []


def test_a_stream_is_resumed_where_it_broke_while_running_and_after(slow: Server) -> None:
    sid = slow.start(options={"max_new_tokens": 300})
    got = slow.follow(sid, stop_at=10)
    got += slow.follow(sid, after=got[-1][0], stop_at=30)
    got += slow.follow(sid, after=got[-1][0])
    assert [number for number, _ in got] == list(range(len(got)))
    assert slow.follow(sid, after=20) == got[21:]


def test_a_gap_is_mended_from_the_keyframe_before_it(slow: Server) -> None:
    sid = slow.start(options={"max_new_tokens": 600})
    got = slow.follow(sid, stop_at=120)
    lines = slow.lines(f"/s/{sid}/key?before=100")
    first = decode(lines[0])
    assert isinstance(first, Keyframe) and first.seq < 100
    numbers = [decode(line).seq for line in lines]
    assert numbers == list(range(first.seq, first.seq + len(lines))) and numbers[-1] >= 120
    meta = decode(got[0][1])
    assert isinstance(meta, RunMeta)
    whole, mended = Board(meta), Board(meta)
    rest = slow.follow(sid, after=numbers[-1])
    for body in [body for _, body in slow.follow(sid)]:
        whole.forward(decode(body))
    for body in [*lines, *(body for _, body in rest)]:
        mended.forward(decode(body))
    assert (whole.tiers == mended.tiers).all() and whole.event_id == mended.event_id > 60


def test_thirty_followers_get_one_identical_sequence(slow: Server) -> None:
    sid = slow.start(options={"max_new_tokens": 160})
    results: list[list[tuple[int, bytes]]] = []
    threads = [threading.Thread(target=lambda: results.append(slow.follow(sid))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stored = slow.lines(f"/s/{sid}/trace")
    assert len(results) == 32
    for got in results:
        assert [body for _, body in got] == stored
    wait_for(lambda: slow.context.bus.followers == 0)


def test_a_closed_client_costs_nothing_and_the_run_goes_on(slow: Server) -> None:
    sid = slow.start(options={"max_new_tokens": 200})
    slow.follow(sid, stop_at=3)
    wait_for(lambda: slow.context.bus.followers == 0)
    assert slow.context.runs.wait(sid, 20)
    assert slow.http.get(f"/s/{sid}").json()["state"] == "done"


def test_stop_before_the_first_token(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(gate=threading.Event()))
    sid = server.start()
    assert server.http.post(f"/s/{sid}/stop").json() == {"stopped": True}
    assert server.engine.gate is not None
    server.engine.gate.set()
    end = decode(server.follow(sid)[-1][1])
    assert isinstance(end, EndEvent) and end.why == "stop"
    assert end.summary.get("num_tokens", 0) <= 1
    assert server.http.post(f"/s/{sid}/stop").json() == {"stopped": False}
    server.close()


def test_two_runs_queue_and_a_full_queue_says_so(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(gate=threading.Event()), queue_length=1)
    first, second = server.start("a", options={"max_new_tokens": 8}), server.start("b", options={"max_new_tokens": 8})
    status = server.http.get(f"/s/{second}/status").json()
    assert (status["state"], status["ahead"]) == ("queued", 1)
    refused = server.http.post("/runs", json={"prompt": "c"})
    assert refused.status_code == 429 and "waiting" in refused.json()["detail"]
    assert server.engine.gate is not None
    server.engine.gate.set()
    for sid in (first, second):
        assert decode(server.follow(sid)[-1][1]).kind == "end"
    assert server.engine.started == ["a", "b"]
    server.close()


def test_deleting_a_running_session_stops_it_first(slow: Server) -> None:
    sid = slow.start(options={"max_new_tokens": 4000})
    slow.follow(sid, stop_at=5)
    assert slow.http.delete(f"/s/{sid}").json() == {"deleted": True}
    for path in ("", "/trace", "/events", "/key?before=1", "/export.jsonl"):
        answer = slow.http.get(f"/s/{sid}{path}")
        assert answer.status_code == 404 and "there is no session" in answer.json()["detail"]
    assert slow.http.delete(f"/s/{sid}").status_code == 404
    assert slow.http.get("/sessions").json() == {"sessions": []}


def test_the_list_has_no_prompts_and_can_be_kept_to_each_visitor(tmp_path: Path) -> None:
    server = Server(tmp_path / "a", FakeEngine())
    sid = server.start("my secret", title="t")
    assert server.context.runs.wait(sid, 20)
    listed = server.http.get("/sessions").json()["sessions"]
    assert [info["id"] for info in listed] == [sid] and "my secret" not in json.dumps(listed)
    assert server.http.get(f"/s/{sid}").json()["settings"]["prompt"] == "my secret"
    server.close()
    closed = Server(tmp_path / "b", FakeEngine(), list_sessions=False)
    mine = closed.start("mine")
    assert closed.context.runs.wait(mine, 20)
    assert [info["id"] for info in closed.http.get("/sessions").json()["sessions"]] == [mine]
    assert httpx.get(f"{closed.url}/sessions").json() == {"sessions": []}
    closed.close()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": ""}, 422, "prompt is empty"),
        ({"prompt": "x" * 1001}, 422, "at most 1000 characters"),
        ({"prompt": 3}, 422, "prompt must be of type str"),
        ({"prompt": "x", "promt": 1}, 422, "unknown key 'promt'"),
        ({"prompt": "x", "config": {"quant_share": 1.4}}, 422, r"quant_share must be in [0, 1], got 1.4"),
        ({"prompt": "x", "config": {"nope": 1}}, 422, "unknown setting 'nope'"),
        ({"prompt": "x", "config": [1]}, 422, "config must be of type dict"),
        ({"prompt": "x", "options": {"nope": 1}}, 422, "unknown option 'nope'"),
        ({"prompt": "x", "options": {"max_new_tokens": 6000}}, 422, "max_new_tokens must be at most 5000"),
        ({"prompt": "x", "options": {"max_new_tokens": "6"}}, 422, "max_new_tokens must be of type int"),
        ({"prompt": "x", "preset": "no-such-preset"}, 422, "no-such-preset"),
        ({"prompt": "x", "watched_row": True}, 422, "watched_row must be of type int"),
        ([1], 400, "must be a JSON object"),
    ],
)
def test_bad_settings_are_one_sentence(server: Server, body: Any, status: int, said: str) -> None:
    answer = server.http.post("/runs", json=body)
    assert answer.status_code == status
    assert said in answer.json()["detail"]
    assert server.engine.started == []


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 413),
        (b"[" * 50_000, "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "\\ud800"}', "application/json", 422),
        (b" " * 200_000, "application/json", 413),
    ],
)
def test_a_bad_body_is_refused(server: Server, content: bytes, kind: str, status: int) -> None:
    answer = server.http.post("/runs", content=content, headers={"content-type": kind})
    assert answer.status_code == status and answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/s/nobody/events", 404),
        ("GET", "/s/nobody/trace", 404),
        ("GET", "/s/nobody/key?before=3", 404),
        ("GET", "/s/nobody/key", 422),
        ("GET", "/s/nobody/key?before=99999999999999999999999", 422),
        ("GET", "/s/nobody/key?before=-1", 422),
        ("GET", "/s/a%00b/trace", 404),
        ("GET", "/s/" + "x" * 99 + "/trace", 404),
        ("POST", "/s/nobody/stop", 404),
        ("POST", "/s/nobody/row?row=2", 404),
        ("POST", "/s/nobody/row?row=-2", 422),
        ("DELETE", "/s/nobody", 404),
        ("GET", "/s/nobody/export.html", 404),
        ("GET", "/s/nobody/export.exe", 404),
        ("GET", "/sessions?limit=0", 422),
        ("GET", "/static/texts/en.toml", 404),
        ("GET", "/static/js/../texts/en.toml", 404),
        ("GET", "/static/js/%2e%2e/texts/en.toml", 404),
        ("GET", "/static/js/%2e%2e/%2e%2e/app/main.py", 404),
        ("GET", "/static//etc/passwd", 404),
        ("GET", "/static/js/%00.js", 404),
        ("GET", "/static/js", 404),
    ],
)
def test_bad_addresses_are_clear_4xx(server: Server, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status, answer.text
    assert isinstance(answer.json()["detail"], str) or answer.json()["detail"] == "Not Found"


def test_a_bad_last_event_id_is_refused(server: Server) -> None:
    sid = server.start()
    assert server.context.runs.wait(sid, 20)
    for value in (b"x", b"-1", b"1.5", b"9" * 30, "²".encode()):
        answer = server.http.get(f"/s/{sid}/events", headers=[(b"Last-Event-ID", value)])
        assert answer.status_code == 400, value


def test_our_routes_carry_security_headers(server: Server) -> None:
    sid = server.start()
    assert server.context.runs.wait(sid, 20)
    for path in ("/ping", "/health", "/sessions", f"/s/{sid}", f"/s/{sid}/trace", f"/s/{sid}/events", "/s/none"):
        answer = server.http.get(path)
        assert {name: answer.headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS, path


def test_static_files_are_revalidated_or_kept(server: Server) -> None:
    name = min(path.name for path in (ASSETS / "js").glob("*.js"))
    answer = server.http.get(f"/static/js/{name}")
    assert answer.status_code == 200 and answer.content == (ASSETS / "js" / name).read_bytes()
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.headers["cache-control"] == "no-cache"
    etag = answer.headers["etag"]
    assert server.http.get(f"/static/js/{name}", headers={"If-None-Match": etag}).status_code == 304
    assert "immutable" in server.http.get(f"/static/js/{name}?v=1").headers["cache-control"]


def test_the_watched_row_is_set_over_http(slow: Server) -> None:
    sid = slow.start(options={"max_new_tokens": 2000})
    wait_for(lambda: slow.engine.rows_watched)
    assert slow.http.post(f"/s/{sid}/row?row=3").json() == {"watched": True}
    wait_for(lambda: 3 in slow.engine.rows_watched)
    slow.http.post(f"/s/{sid}/stop")


def test_jsonl_export_is_the_trace(server: Server) -> None:
    sid = server.start()
    assert server.context.runs.wait(sid, 20)
    answer = server.http.get(f"/s/{sid}/export.jsonl")
    assert "attachment" in answer.headers["content-disposition"]
    assert answer.content.split(b"\n")[:-1] == server.lines(f"/s/{sid}/trace")


def test_a_session_without_a_run_cannot_be_exported(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(smallest_share=0.9))
    sid = server.start()
    assert server.context.runs.wait(sid, 20)
    assert isinstance(decode(server.lines(f"/s/{sid}/trace")[0]), ErrorEvent)
    answer = server.http.get(f"/s/{sid}/export.html")
    assert answer.status_code == 422 and "nothing to export" in answer.json()["detail"]
    server.close()


def test_a_run_that_cannot_be_stored_can_be_followed_and_read(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    server = Server(blocked / "inside", FakeEngine())
    sid = server.start()
    assert server.context.runs.wait(sid, 20)
    got = server.follow(sid)
    assert [number for number, _ in got] == list(range(len(got)))
    assert server.lines(f"/s/{sid}/trace") == [body for _, body in got]
    meta = decode(got[0][1])
    assert isinstance(meta, RunMeta) and "can't be stored" in meta.notices[0]
    assert server.http.get("/sessions").status_code == 503
    server.close()


def test_health_and_ping(server: Server) -> None:
    assert server.http.get("/ping").json() == {"ok": True}
    health = server.http.get("/health").json()
    assert (health["status"], health["store"], health["running"]) == ("ok", "ok", 0)


def test_a_preset_is_the_base_and_config_changes_it() -> None:
    request = build_request(
        {
            "prompt": "x",
            "preset": "paper-20",
            "config": {"bits": 4},
            "options": {"max_new_tokens": 7},
            "raise_budget": True,
        }
    )
    assert (request.config.kv_budget, request.config.bits, request.config.planned_new_tokens) == (0.2, 4, 7)
    assert request.preset == "paper-20" and request.raise_budget
    with pytest.raises(ConfigError):
        build_request({"prompt": "x", "preset": "paper-20", "config": {"bits": 3}})


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} is taken"):
            serve(Settings(data_dir=tmp_path, port=port))
