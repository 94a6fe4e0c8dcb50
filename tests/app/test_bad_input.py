"""Bad input of every kind: each address with made-up requests, settings and wire messages, hostile text everywhere.

FUZZ_EXAMPLES raises the number of examples; 10000 takes some minutes.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api_route import printable
from app.events import head
from app.run_body import build_request
from app.run_request import OPTIONS, check
from app.settings import VARIABLES, Settings
from engine.config import QEvictConfig
from engine.errors import EngineError, TraceError
from engine.trace import decode
from tests.app.fake_engine import FakeEngine
from tests.app.test_api import Server

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))
many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)

HOSTILE = (
    "<script>window.taken = 1</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><svg onload=alert(1)>",
    "${7*7} {{7*7}} `backtick`",
    "\x1b[2J\x1b]0;title\x07 \x9b31m",
    "nul \x00 bell \x07 backspace \x08 delete \x7f",
    "line\r\nSet-Cookie: a=b\u2028\u2029",
    "\u202eright to left\u202c \u200bzero\u2060 width\ufeff",
    "'; drop table session; --",
    "../../etc/passwd\x00.txt",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0301\u0301\u0301 \ud7ff \ufffe",
    "%00%0d%0a%s%n{0}",
)


class Echo(FakeEngine):
    """Says its prompt back as tokens: the worst that a model can write."""

    def _events(self, loaded: Any, prompt: str, *rest: Any) -> Iterator[Any]:
        import dataclasses

        from engine.trace import StepEvent

        for event in super()._events(loaded, prompt, *rest):
            yield dataclasses.replace(event, pieces=[prompt]) if isinstance(event, StepEvent) else event


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    built = Server(tmp_path_factory.mktemp("bad"), Echo(), queue_length=10_000, max_prompt_chars=2000)
    yield built
    built.close()


def operations(server: Server) -> list[Any]:
    schemathesis = pytest.importorskip("schemathesis")
    base = server.url.removesuffix("/qe")
    schema = schemathesis.openapi.from_dict(httpx.get(f"{base}/openapi.json").json())
    return [found.ok() for found in schema.get_all_operations()]


def exercise(operation: Any, base: str, sid: str, bad: list[str]) -> int:
    """Calls one address with made-up requests and returns how often; answers of 5xx go to `bad`."""
    name = f"{operation.method.upper()} {operation.path}"
    tried = 0

    @settings(
        max_examples=max(6, EXAMPLES // 25), deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(), real=st.booleans())
    def call(case: Any, real: bool) -> None:
        nonlocal tried
        if real and "sid" in (case.path_parameters or {}) and not name.startswith("DELETE"):
            case.path_parameters["sid"] = sid
        if isinstance(case.body, dict) and "/v1/" in name:
            case.body = {**case.body, "max_tokens": 2}  # long runs would only make the test long
        answer = case.call(base_url=base, timeout=30)
        tried += 1
        if answer.status_code >= 500:
            bad.append(f"{name}: {answer.status_code} {answer.text[:200]} {case.body!r:.200}")

    call()
    return tried


@pytest.mark.filterwarnings("ignore")
def test_no_address_answers_with_an_error_of_its_own(server: Server) -> None:
    base = server.url.removesuffix("/qe")
    sid = server.start("a real one", options={"max_new_tokens": 16})
    assert server.context.runs.wait(sid, 20)
    bad: list[str] = []
    tried = [exercise(operation, base, sid, bad) for operation in operations(server)]
    assert bad == []
    assert len(tried) >= 15 and min(tried) >= 1
    assert httpx.get(f"{base}/qe/health", timeout=30).json()["status"] == "ok"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from([2**63, -1, 1e308, 10**400, 10**60, "\ud800", "é" * 100]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*QEvictConfig().to_dict(), "nope"]


@many
@given(
    st.dictionaries(st.sampled_from([*OPTIONS, "nope"]), VALUES, max_size=4),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    st.dictionaries(st.sampled_from(["prompt", "model", "title", "preset", "watched_row", "lang", "zz"]), VALUES),
)
def test_no_settings_are_more_than_a_sentence(options: Any, config: Any, rest: Any) -> None:
    try:
        request = build_request({"prompt": "x", **rest, "options": options, "config": config})
        check(request, Settings())
    except EngineError as error:
        printable(str(error)).encode()


@many
@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), st.text(max_size=12) | st.integers().map(str), max_size=4))
def test_no_variable_is_more_than_a_sentence(env: dict[str, str]) -> None:
    try:
        Settings.from_env(env)
    except EngineError as error:
        assert "\n" not in str(error).replace(repr("\n"), "") or any("\n" in value for value in env.values())


@pytest.fixture(scope="module")
def messages(server: Server) -> list[bytes]:
    sid = server.start("wire", options={"max_new_tokens": 80})
    assert server.context.runs.wait(sid, 20)
    return server.lines(f"/s/{sid}/trace")


@many
@given(data=st.data())
def test_no_wire_message_is_more_than_a_trace_error(messages: list[bytes], data: st.DataObject) -> None:
    body = bytearray(data.draw(st.sampled_from(messages)))
    kind = data.draw(st.sampled_from(["bytes", "cut", "field", "random"]))
    if kind == "bytes":
        for _ in range(data.draw(st.integers(1, 6))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        body = body[: data.draw(st.integers(0, len(body)))]
    elif kind == "field":
        fields = json.loads(bytes(body))
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(VALUES)
        body = bytearray(json.dumps(fields).encode())
    else:
        body = bytearray(data.draw(st.binary(max_size=60)))
    for read in (decode, head):
        try:
            read(bytes(body))
        except TraceError as error:
            assert len(str(error)) < 1000


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_everywhere(server: Server, text: str) -> None:
    sid = server.start(text, title=text, options={"max_new_tokens": 8})
    assert server.context.runs.wait(sid, 20)
    assert server.http.post(f"/s/{sid}/marks", json={"text": text, "author": text[:40]}).status_code == 201
    info = server.http.get(f"/s/{sid}").json()
    assert info["settings"]["prompt"] == text, "what was asked is kept as it is"
    notes = server.http.get(f"/s/{sid}/marks").json()["marks"]
    for shown in (info["title"], notes[0]["text"], notes[0]["author"]):
        assert shown and not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
    for path in ("", "/trace", "/marks", "/export.html", "/export.csv", "/events"):
        answer = server.http.get(f"/s/{sid}{path}")
        assert answer.status_code == 200, path
        # Nothing of ours is markup from our address, whatever is in it.
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'", path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "a" not in answer.cookies
        if path.startswith("/export."):
            assert answer.headers["content-disposition"].startswith("attachment")
        if path == "/export.html" and "<" in text:
            assert text not in answer.text
    assert server.lines(f"/s/{sid}/trace")


def test_hostile_text_in_the_list_of_the_page_and_in_the_terminal(server: Server, capsys: Any) -> None:
    from app.cli import plain
    from app.tabs.replays import sessions_html

    for text in HOSTILE:
        server.context.runs.wait(server.start("x", title=text, options={"max_new_tokens": 2}), 20)
    html = sessions_html(server.context.sessions.list(), "en")
    for tag in ("<script", "<img", "<svg", "onerror=alert(1)>"):
        assert tag not in html
    for text in HOSTILE:
        assert not any(ord(char) < 32 and char not in "\n\t" for char in plain(text))


def test_many_bad_requests_at_once_leave_the_server_well(server: Server) -> None:
    statuses: list[int] = []

    def shoot(number: int) -> None:
        bodies = [b"{", b"[]", b'{"prompt": 1}', b"\xff", b'{"prompt": "' + b"x" * 5000 + b'"}']
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for body in bodies:
                headers = {"content-type": "application/json"}
                statuses.append(client.post("/runs", content=body, headers=headers).status_code)
            statuses.append(client.get(f"/s/{'x' * number}/events").status_code)

    threads = [threading.Thread(target=shoot, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(statuses) == 16 * 6 and set(statuses) <= {400, 404, 413, 422}
    assert server.http.get("/health").json()["status"] == "ok"
