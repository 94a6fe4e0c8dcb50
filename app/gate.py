"""What every request passes before page and routes: host, origin, login, identity, size; and the headers of answers.

One ASGI wrapper, so that nothing behind it can be reached without it, the page's own addresses included. Knows
visitors and limits; knows no session and no page.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import hmac
import json
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics import Metrics
from app.openai_answer import refusal_body
from app.settings import Settings
from app.visitors import COOKIE, SCOPE_KEY, Signature, Visitor, current

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
CLOSED_POLICY = "default-src 'none'; frame-ancestors 'none'"
"""For everything that is not the page: should a browser ever show it as one, nothing in it runs."""

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
COOKIE_SECONDS = 180 * 86_400
FAILED_LOGINS = 20
"""Wrong passwords that one address may send in a minute."""
REMEMBERED_ADDRESSES = 4096
STARTED_PATH = "/gradio_api/startup-events"
"""Asked by Gradio's own `launch` before it says that the server is up; gives nothing away."""

_SCRIPT = re.compile(rb"<script(?P<tag>[^>]*)>(?P<body>.*?)</script>", re.DOTALL | re.IGNORECASE)


class TooLargeError(Exception):
    """A body has more bytes than a request may have."""


def page_policy(html: bytes, ancestors: Iterable[str], extra: Iterable[str] = ()) -> str:
    """The content security policy of a page: its own inline scripts by their hashes, no other, nothing from elsewhere.

    Args:
        html: the page as it is sent.
        ancestors: origins that may show it in a frame.
        extra: inline scripts that the page's own code puts in again.
    """
    bodies = [match["body"] for match in _SCRIPT.finditer(html) if b"src=" not in match["tag"]]
    bodies += [script.encode() for script in extra]
    hashes = " ".join(dict.fromkeys(_hash(body) for body in bodies if body.strip()))
    return "; ".join(
        (
            "default-src 'self'",
            # Gradio makes its listeners' JavaScript with `new Function`: hence unsafe-eval. Markup brings no script.
            f"script-src 'self' 'unsafe-eval' {hashes}".rstrip(),
            "script-src-attr 'none'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "media-src 'self' data: blob:",
            "connect-src 'self'",
            "worker-src 'self' blob:",
            "object-src 'none'",
            "base-uri 'self'",
            "form-action 'self'",
            " ".join(("frame-ancestors 'self'", *ancestors)),
        )
    )


def _hash(body: bytes) -> str:
    # A browser hashes what its parser made of the source, where a line ends with \n alone.
    text = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def inline_scripts(markup: str) -> list[str]:
    """The inline scripts of a piece of markup."""
    return [match["body"].decode() for match in _SCRIPT.finditer(markup.encode()) if b"src=" not in match["tag"]]


class Gate:
    """Wraps an application.

    Args:
        inline: scripts that the page puts into itself, beside those in its markup.
        metrics: told how long answers take.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        signature: Signature,
        inline: Iterable[str] = (),
        metrics: Metrics | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings
        self._signature = signature
        self._inline = tuple(inline)
        self._failures = _Failures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start" and self._metrics is not None:
                status = f"{message['status'] // 100}xx"
                self._metrics.observe("qevict_request_seconds", time.monotonic() - began, status=status)
            await send(message)

        await self._pass(scope, receive, timed)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        address = client_address(scope, headers, self._settings.proxy_hops)
        refused = self._refuse(scope, headers)
        name: str | None = None
        if refused is None and self._settings.login and scope["path"] != STARTED_PATH:
            name, refused = self._log_in(headers, address)
        if refused is not None:
            await _answer(scope, send, *refused)
            return
        visitor, cookie = self._visitor(scope, headers, address, name)
        scope[SCOPE_KEY] = visitor
        if _is_page(scope):
            # The policy needs the page as it is: it is compressed here, after that.
            _drop_header(scope, b"accept-encoding")
        reply = _Reply(scope, headers, send, self._settings, cookie, self._inline)
        token = current.set(visitor)
        try:
            await self._app(scope, _bounded(receive, self._settings.max_body_bytes), reply.send)
        except TooLargeError:
            if reply.started:
                raise
            await _answer(scope, send, *self._too_large())
        finally:
            current.reset(token)

    def _refuse(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        allowed = self._settings.allowed_hosts
        if allowed and _name_of(host) not in allowed:
            return 403, "this server is not asked for under that name: add it to QEVICT_ALLOWED_HOSTS."
        if scope["method"] not in SAFE_METHODS and _from_elsewhere(headers, host, self._settings):
            return 403, "a page of another site can't change anything here."
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > self._settings.max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> tuple[int, str]:
        return 413, f"the body must have at most {self._settings.max_body_bytes} bytes."

    def _log_in(self, headers: Headers, address: str) -> tuple[str | None, tuple[int, str] | None]:
        """(name, None) with right words, else (None, refusal)."""
        given = _credentials(headers.get("authorization", ""))
        if given is not None and self._failures.too_many(address):
            return None, (429, "too many wrong passwords: try again in a minute.")
        if given is not None:
            for name, password in self._settings.login:
                if hmac.compare_digest(f"{name}:{password}".encode(), given.encode()):
                    return name, None
            self._failures.add(address)
        return None, (401, "log in first.")

    def _visitor(self, scope: Scope, headers: Headers, address: str, name: str | None) -> tuple[Visitor, str | None]:
        """The visitor and, for one who was never here, the cookie to be set."""
        if name is not None:
            return Visitor(f"login:{name}", address), None
        for value in _cookies(headers.get("cookie", ""), COOKIE):
            user = self._signature.read(value)
            if user is not None:
                return Visitor(user, address), None
        user, value = self._signature.new()
        # Only where somebody comes in: the files of one page are asked for at once and must not each make a visitor.
        enters = _is_page(scope) or (scope["method"] == "POST" and scope["path"].startswith(("/qe/", "/v1/")))
        return Visitor(user, address), self._cookie(value, scope, headers) if enters else None

    def _cookie(self, value: str, scope: Scope, headers: Headers) -> str:
        secure = scope.get("scheme") == "https" or headers.get("x-forwarded-proto", "").lower() == "https"
        parts = [f"{COOKIE}={value}", "Path=/", f"Max-Age={COOKIE_SECONDS}", "HttpOnly"]
        if self._settings.frame_ancestors:
            # Shown inside another site's page, where a browser keeps no plainer cookie.
            parts += ["SameSite=None", "Secure", "Partitioned"]
        else:
            parts += ["SameSite=Lax", *(["Secure"] if secure else [])]
        return "; ".join(parts)


class _Reply:
    """Adds headers to an answer; a page is gathered first, since its policy depends on what is in it."""

    def __init__(
        self, scope: Scope, asked: Headers, send: Send, settings: Settings, cookie: str | None, inline: tuple[str, ...]
    ) -> None:
        self.started = False
        self._scope = scope
        self._asked = asked
        self._send = send
        self._settings = settings
        self._cookie = cookie
        self._inline = inline
        self._page: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(raw=list(message["headers"]))
            message = {**message, "headers": headers.raw}
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            if self._cookie is not None:
                headers.append("Set-Cookie", self._cookie)
                headers["Cache-Control"] = "no-store"
            if _is_page(self._scope) and headers.get("content-type", "").startswith("text/html"):
                self._page = message
                return
            headers.setdefault("Content-Security-Policy", CLOSED_POLICY)
        elif self._page is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            page, self._page = self._page, None
            await self._send_page(page, bytes(self._body))
            return
        await self._send(message)

    async def _send_page(self, start: Message, body: bytes) -> None:
        headers = MutableHeaders(raw=start["headers"])
        policy = page_policy(body, self._settings.frame_ancestors, self._inline)
        headers.setdefault("Content-Security-Policy", policy)
        if not self._settings.frame_ancestors:
            headers.setdefault("X-Frame-Options", "SAMEORIGIN")
        if body and "content-encoding" not in headers:
            headers.add_vary_header("Accept-Encoding")
            if "gzip" in self._asked.get("accept-encoding", ""):
                body = gzip.compress(body, 5, mtime=0)
                headers["Content-Encoding"] = "gzip"
        if self._scope["method"] != "HEAD":
            headers["Content-Length"] = str(len(body))
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


class _Failures:
    """Wrong passwords of the last minute, by address."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def too_many(self, address: str) -> bool:
        with self._lock:
            times = self._times.get(address)
            while times and time.monotonic() - times[0] > 60:
                times.popleft()
            return times is not None and len(times) >= FAILED_LOGINS

    def add(self, address: str) -> None:
        with self._lock:
            self._times.setdefault(address, deque(maxlen=FAILED_LOGINS)).append(time.monotonic())
            self._times.move_to_end(address)
            while len(self._times) > REMEMBERED_ADDRESSES:
                self._times.popitem(last=False)


def client_address(scope: Scope, headers: Headers, proxy_hops: int) -> str:
    """Where a request comes from: what the outermost trusted proxy saw, else the other end of the connection."""
    client = scope.get("client")
    seen = [part.strip() for part in headers.get("x-forwarded-for", "").split(",") if part.strip()]
    if proxy_hops and seen:
        return seen[max(0, len(seen) - proxy_hops)][:64]
    return str(client[0]) if client else ""


def _is_page(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and scope["path"] in ("/", "/docs")


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    return host.rpartition(":")[0] if re.search(r":\d+$", host) else host


def _from_elsewhere(headers: Headers, host: str, settings: Settings) -> bool:
    """Whether a browser sends this for a page of another site."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site") == "cross-site"
    hosts = {host, settings.public_host or host}
    if settings.proxy_hops:
        hosts.add(headers.get("x-forwarded-host", host))
    try:
        return urlsplit(origin).netloc not in hosts
    except ValueError:
        return True


def _credentials(header: str) -> str | None:
    """ "name:password" of a Basic or a Bearer header."""
    kind, _, value = header.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _cookies(header: str, name: str) -> list[str]:
    """All values of one cookie: a browser may send one name several times."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for key, _, value in pairs if key == name]


def _drop_header(scope: MutableMapping[str, Any], name: bytes) -> None:
    scope["headers"] = [(key, value) for key, value in scope["headers"] if key.lower() != name]


def _bounded(receive: Receive, limit: int) -> Receive:
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise TooLargeError
        return message

    return bounded


async def _answer(scope: Scope, send: Send, status: int, sentence: str) -> None:
    said: dict[str, Any] = {"detail": sentence}
    if scope["path"].startswith("/v1/"):
        said = refusal_body(sentence, status)
    body = json.dumps(said).encode()
    headers = MutableHeaders(
        {
            **SECURITY_HEADERS,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": CLOSED_POLICY,
        }
    )
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="QEvict Lab", charset="UTF-8"'
    if status == 429:
        headers["Retry-After"] = "60"
    await send({"type": "http.response.start", "status": status, "headers": headers.raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
