"""What all our routes share: errors as one sentence, headers, the form of a session's id.

Knows the program's errors and their HTTP status; knows no single route.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from app import gate
from app.run_queue import QueueFullError
from app.sessions import UnknownSessionError
from app.store_file import StoreError
from app.visitors import ForbiddenError
from engine.errors import EngineError

SECURITY_HEADERS = {**gate.SECURITY_HEADERS, "Content-Security-Policy": gate.CLOSED_POLICY}
NDJSON = "application/x-ndjson"
LARGEST_SEQ = 2**53

SessionId = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Seq = Annotated[int, Query(ge=0, le=LARGEST_SEQ)]


class Route(APIRoute):
    """Turns the program's own errors into clear answers, and adds the security headers to every answer."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                response: Response = await handle(request)
            except HTTPException as error:
                headers = dict(error.headers or {})
                response = self.refusal(str(error.detail), error.status_code, headers)
            except RequestValidationError as error:
                response = self.refusal(_sentence(error), 404 if _is_bad_id(error) else 422, {})
            except EngineError as error:
                status = status_of(error)
                headers = {"Retry-After": "10"} if status in (429, 503) else {}
                response = self.refusal(str(error), status, headers)
            for name, value in SECURITY_HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded

    def refusal(self, sentence: str, status: int, headers: dict[str, str]) -> Response:
        """The answer that says why not."""
        return JSONResponse({"detail": printable(sentence)}, status, headers)


def printable(sentence: str) -> str:
    """The sentence with half surrogates shown: they come from a request and can't be sent as they are."""
    return sentence.encode("utf-8", "backslashreplace").decode()


def status_of(error: EngineError) -> int:
    """The HTTP status that goes with one of the program's errors."""
    if isinstance(error, UnknownSessionError):
        return 404
    if isinstance(error, ForbiddenError):
        return 403
    if isinstance(error, QueueFullError):
        return 429
    return 503 if isinstance(error, StoreError) else 422


def program_version() -> str:
    """The installed version of this program."""
    try:
        return version("qevict-lab")
    except PackageNotFoundError:
        return _version_in_checkout()


@cache
def _version_in_checkout() -> str:
    """A hosted Space runs from the files alone: nothing is installed there under our name."""
    file = FilePath(__file__).resolve().parent.parent / "pyproject.toml"
    try:
        return str(tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, ValueError, KeyError):
        return "unknown"


def _is_bad_id(error: RequestValidationError) -> bool:
    return any(tuple(fault["loc"])[:2] == ("path", "sid") for fault in error.errors())


def _sentence(error: RequestValidationError) -> str:
    if _is_bad_id(error):
        return "there is no such session."
    fault = error.errors()[0]
    return f"{fault['loc'][-1]}: {fault['msg']}."
