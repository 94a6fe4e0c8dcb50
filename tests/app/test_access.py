"""Who may see and change what: visitors, links, logins, and what the gate keeps out."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.gate import CLOSED_POLICY, FAILED_LOGINS, client_address, inline_scripts, page_policy
from app.main import create_app
from app.settings import Settings
from app.visitors import COOKIE, KEY_FILE, Access, Signature, Visitor, current
from tests.app.fake_engine import FakeEngine
from tests.app.test_api import Server

LOGIN = (("teacher", "correct horse"), ("aide", "battery staple"))


def application(settings: Settings) -> FastAPI:
    """The whole application, built inside an event loop: without one Gradio makes loops and closes none."""

    async def build() -> FastAPI:
        return create_app(settings)

    return asyncio.run(build())


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Server]:
    built = Server(tmp_path, FakeEngine(), list_sessions=False)
    yield built
    built.close()


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Server]:
    built = Server(tmp_path, FakeEngine(delay=0.002), login=LOGIN)
    yield built
    built.close()


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_a_visitor_lists_and_changes_only_what_is_theirs(private: Server) -> None:
    mine = private.start("mine")
    assert private.context.runs.wait(mine, 20)
    with httpx.Client(base_url=private.url) as other:
        assert other.post("/runs", json={"prompt": "theirs"}).status_code == 202
        listed = other.get("/sessions").json()["sessions"]
        assert len(listed) == 1 and listed[0]["id"] != mine
        # A link is enough to look, not to change.
        assert other.get(f"/s/{mine}").json()["yours"] is False
        assert other.get(f"/s/{mine}/trace").status_code == 200
        for method, path, body in (
            ("DELETE", f"/s/{mine}", None),
            ("POST", f"/s/{mine}/marks", {"text": "mine now"}),
        ):
            answer = other.request(method, path, json=body)
            assert answer.status_code == 403 and "somebody else" in answer.json()["detail"], path
    assert private.http.get(f"/s/{mine}").json()["yours"] is True
    assert private.http.delete(f"/s/{mine}").json() == {"deleted": True}


def test_a_running_session_is_stopped_by_its_owner_only(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(delay=0.01), list_sessions=False)
    sid = server.start("x", options={"max_new_tokens": 3000})
    for path in ("stop", "row?row=1"):
        assert httpx.post(f"{server.url}/s/{sid}/{path}").status_code == 403
    assert httpx.delete(f"{server.url}/s/{sid}").status_code == 403
    assert server.context.runs.status(sid).state != "ended"
    assert server.http.post(f"/s/{sid}/stop").json() == {"stopped": True}
    server.close()


def test_who_made_a_session_is_never_shown(private: Server) -> None:
    sid = private.start("x")
    assert private.context.runs.wait(sid, 20)
    user = private.context.sessions.get(sid).user
    assert len(user) == 22
    for path in ("/sessions", f"/s/{sid}", f"/s/{sid}/trace", f"/s/{sid}/status", f"/s/{sid}/export.jsonl"):
        assert user not in private.http.get(path).text, path


def test_a_cookie_that_this_server_did_not_sign_is_nobody(private: Server, tmp_path: Path) -> None:
    sid = private.start("x")
    assert private.context.runs.wait(sid, 20)
    user = private.context.sessions.get(sid).user
    _, other = Signature(tmp_path / "elsewhere").new()
    for value in (user, f"{user}.", f"{user}.{'A' * 43}", f"{user}.{other.partition('.')[2]}", other, "é", "x" * 9000):
        answer = httpx.get(f"{private.url}/sessions", headers=[(b"Cookie", f"{COOKIE}={value}".encode())])
        assert answer.json() == {"sessions": []}, value[:40]


def test_the_cookie_can_not_be_read_by_scripts_and_its_key_by_nobody_else(private: Server, tmp_path: Path) -> None:
    answer = httpx.post(f"{private.url}/runs", json={"prompt": "x"})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Path=/" in cookie
    assert answer.headers["cache-control"] == "no-store"
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0
    assert Signature(tmp_path).read(cookie.split(";")[0].partition("=")[2]) is not None


def test_in_a_frame_of_another_site_the_cookie_is_partitioned(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(), frame_ancestors=("https://huggingface.co",))
    cookie = httpx.post(f"{server.url}/runs", json={"prompt": "x"}).headers["set-cookie"]
    assert "SameSite=None; Secure; Partitioned" in cookie
    server.close()


def test_ids_can_not_be_guessed(private: Server) -> None:
    sids = {private.start("x") for _ in range(20)}
    assert len(sids) == 20 and all(len(sid) == 22 for sid in sids)


ROUTES = (
    ("GET", "/qe/ping"),
    ("GET", "/qe/health"),
    ("GET", "/qe/sessions"),
    ("GET", "/qe/presets"),
    ("GET", "/qe/first"),
    ("GET", "/qe/static/js/page.js"),
    ("POST", "/qe/runs"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
)


def test_without_the_password_nothing_answers(locked: Server) -> None:
    with httpx.Client(base_url=locked.url.removesuffix("/qe")) as client:
        sid = client.post("/qe/runs", json={"prompt": "x"}, headers=basic(*LOGIN[0])).json()["sid"]
        paths = [*ROUTES, *(("GET", f"/qe/s/{sid}{part}") for part in ("", "/events", "/trace", "/key?before=1"))]
        for headers in ({}, basic("teacher", "wrong"), {"Authorization": "Basic ???"}, {"Authorization": "Bearer no"}):
            for method, path in paths if not headers else paths[:1]:
                answer = client.request(
                    method, path, json={"prompt": "x"} if method == "POST" else None, headers=headers
                )
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"].startswith("Basic"), path
                assert "set-cookie" not in answer.headers
        with client.stream("GET", f"/qe/s/{sid}/events", headers=basic(*LOGIN[1])) as stream:
            assert stream.status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer aide:battery staple"}).status_code == 200


def test_guessing_passwords_is_slowed_down(locked: Server) -> None:
    statuses = [
        httpx.get(f"{locked.url}/ping", headers=basic("teacher", str(number))).status_code
        for number in range(FAILED_LOGINS + 2)
    ]
    assert statuses == [401] * FAILED_LOGINS + [429] * 2


def test_the_login_covers_the_page_too(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    settings = Settings(data_dir=tmp_path, login=LOGIN)
    with TestClient(application(settings)) as client:
        for path in ("/", "/config", "/gradio_api/info", "/gradio_api/heartbeat/x", "/qe/ping", "/qe/s/x/events"):
            assert client.get(path).status_code == 401, path
        assert client.post("/gradio_api/queue/join", json={}).status_code == 401
        page = client.get("/", headers=basic(*LOGIN[0]))
        assert page.status_code == 200 and "gradio_config" in page.text


def test_a_page_of_another_site_can_change_nothing(private: Server) -> None:
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        answer = private.http.post("/runs", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 403, headers
    own = private.url.removesuffix("/qe")
    assert private.http.post("/runs", json={"prompt": "x"}, headers={"Origin": own}).status_code == 202


def test_a_name_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(), allowed_hosts=("lab.example",))
    assert server.http.get("/ping").status_code == 403
    for host in ("lab.example", "lab.example:7860"):
        assert server.http.get("/ping", headers={"Host": host}).status_code == 200
    server.close()


def test_a_large_body_is_refused_before_it_is_read(private: Server) -> None:
    limit = private.context.settings.max_body_bytes
    answer = private.http.post("/runs", content=b" " * (limit + 1), headers={"content-type": "application/json"})
    assert answer.status_code == 413 and str(limit) in answer.json()["detail"]

    def endless() -> Iterator[bytes]:
        for _ in range(limit // 65_536 + 2):
            yield b" " * 65_536

    # A server may close the connection before all is sent.
    try:
        answer = private.http.post("/runs", content=endless(), headers={"content-type": "application/json"})
    except httpx.TransportError:
        return
    assert answer.status_code in (400, 413)


def test_every_answer_has_the_headers(private: Server) -> None:
    base = private.url.removesuffix("/qe")
    for path in ("/qe/ping", "/nothing", "/metrics", "/v1/models", "/qe/s/x"):
        headers = httpx.get(f"{base}{path}").headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["content-security-policy"] == CLOSED_POLICY, path
        assert headers["referrer-policy"] == "no-referrer" and "permissions-policy" in headers, path


def test_the_docs_page_runs_no_script_and_names_every_address(private: Server) -> None:
    base = private.url.removesuffix("/qe")
    page = httpx.get(f"{base}/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text and "https://" not in page.text
    schema = httpx.get(f"{base}/openapi.json").json()
    assert {"/qe/runs", "/v1/chat/completions", "/qe/s/{sid}/events", "/metrics"} <= set(schema["paths"])
    for path in schema["paths"]:
        assert path in page.text


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> httpx.Response:
    from starlette.testclient import TestClient

    with TestClient(application(Settings(data_dir=tmp_path_factory.mktemp("page")))) as client:
        return client.get("/")


def test_the_page_runs_its_own_scripts_and_no_other(page: Any) -> None:
    policy = page.headers["content-security-policy"]
    script_src = next(part for part in policy.split("; ") if part.startswith("script-src "))
    assert "'unsafe-inline'" not in script_src and "http" not in script_src and "*" not in script_src
    assert script_src.count("'sha256-") >= len(inline_scripts(page.text)) > 1
    assert "script-src-attr 'none'" in policy and "object-src 'none'" in policy
    assert "frame-ancestors 'self'" in policy and page.headers["x-frame-options"] == "SAMEORIGIN"
    assert page.headers["content-encoding"] == "gzip"
    assert COOKIE in page.headers["set-cookie"]


def test_the_policy_changes_with_the_page() -> None:
    one, two = page_policy(b"<script>a()</script>", ()), page_policy(b"<script>b()</script>", ("https://x.example",))
    assert one != two and two.endswith("frame-ancestors 'self' https://x.example")
    assert re.search(r"'sha256-[A-Za-z0-9+/]{43}='", one)
    assert page_policy(b'<script src="a.js"></script>', ()).count("sha256") == 0


def test_an_address_is_taken_from_trusted_proxies_only() -> None:
    from starlette.datastructures import Headers

    scope = {"client": ("10.0.0.9", 1)}
    headers = Headers({"x-forwarded-for": "6.6.6.6, 1.2.3.4, 10.0.0.1"})
    assert client_address(scope, headers, 0) == "10.0.0.9"
    assert client_address(scope, headers, 1) == "10.0.0.1"
    assert client_address(scope, headers, 2) == "1.2.3.4"
    assert client_address(scope, headers, 9) == "6.6.6.6"
    assert client_address(scope, Headers({}), 2) == "10.0.0.9"


def test_what_nobody_made_is_changed_by_nobody_but_commands() -> None:
    access = Access(shared=False)
    assert access.may_change("") and access.listed_user is None  # no request: a command
    token = current.set(Visitor("a" * 22))
    try:
        assert not access.may_change("") and not access.may_change("b" * 22) and access.may_change("a" * 22)
        assert access.listed_user == "a" * 22
        assert Access(shared=True).may_change("b" * 22) and Access(shared=True).listed_user is None
    finally:
        current.reset(token)
