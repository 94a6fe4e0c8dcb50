"""Who is asking: a visitor known by a signed cookie or by a login, and what a visitor may see and change.

Nobody gives a name: a cookie holds a random id and this server's signature under it. Knows no route and no page;
reads the page's current request where Gradio keeps it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError

COOKIE = "qe_visitor"
SCOPE_KEY = "qevict.visitor"
KEY_FILE = "cookie.key"
_ID_CHARS = 22


class ForbiddenError(EngineError, PermissionError):
    """The session belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """`user` is an opaque id that a server's sessions are kept under; `address` is where the request came from."""

    user: str
    address: str = ""


current: ContextVar[Visitor | None] = ContextVar("qevict_visitor", default=None)
"""The visitor of the request that is being answered."""


def current_visitor() -> Visitor | None:
    """Who the code that runs now works for; None outside any request, such as in a command."""
    visitor = current.get()
    if visitor is not None:
        return visitor
    gradio = sys.modules.get("gradio.context")
    if gradio is None:
        return None
    # The page's events run in Gradio's own tasks, long after their request was taken in.
    request = getattr(gradio.LocalContext.request.get(None), "request", None)
    found = getattr(request, "scope", {}).get(SCOPE_KEY)
    return found if isinstance(found, Visitor) else None


class Access:
    """What visitors may do with sessions.

    Args:
        shared: everybody sees and changes everything, as on a laptop. Else a session is read by whoever has its
            link, and listed for and changed by the one who made it.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared

    @property
    def listed_user(self) -> str | None:
        """Whose sessions the current visitor is shown; None = all."""
        visitor = current_visitor()
        return None if self.shared or visitor is None else visitor.user

    def may_change(self, user: str) -> bool:
        """Whether the current visitor may stop, rename or delete what belongs to `user`."""
        visitor = current_visitor()
        return self.shared or visitor is None or (bool(user) and hmac.compare_digest(visitor.user, user))

    def demand(self, user: str) -> None:
        """Raises ForbiddenError unless `may_change`."""
        if not self.may_change(user):
            raise ForbiddenError("this session is somebody else's: it can be watched here, not changed.")


class Signature:
    """Makes and checks the cookie's value.

    Args:
        secret: what is signed with; empty = a key kept in `folder`, made at first use.
    """

    def __init__(self, folder: Path, secret: str = "") -> None:
        self._folder = folder
        self._secret = secret
        self._key: bytes | None = None
        self._lock = threading.Lock()

    def new(self) -> tuple[str, str]:
        """(user, cookie value) of somebody who was never here."""
        user = secrets.token_urlsafe(16)
        return user, f"{user}.{self._sign(user)}"

    def read(self, value: str) -> str | None:
        """The user in a cookie's value, None unless this server signed it."""
        user, _, signature = value.partition(".")
        if len(user) != _ID_CHARS or not value.isascii():
            return None
        return user if hmac.compare_digest(signature, self._sign(user)) else None

    def _sign(self, user: str) -> str:
        digest = hmac.new(self._load(), user.encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def _load(self) -> bytes:
        with self._lock:
            if self._key is None:
                self._key = self._secret.encode() if self._secret else _kept_key(self._folder / KEY_FILE)
            return self._key


def _kept_key(path: Path) -> bytes:
    """The key in a file; a folder that can't be written gives one that lasts as long as the process."""
    key = secrets.token_bytes(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        try:
            os.link(part, path)  # whole or not at all, and never over another process's key
        except FileExistsError:
            pass
        finally:
            part.unlink()
        kept = path.read_bytes()
    except OSError:
        return key
    return kept if len(kept) >= 32 else key
