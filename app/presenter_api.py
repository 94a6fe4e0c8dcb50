"""Addresses of presentations: begin, move, end, and the one stream that a follower's page keeps open.

The stream carries the run's own messages too where the page asks for them: a browser has six connections to a
server, and a second one a page would freeze a class that opens two tabs. Knows FastAPI; knows no page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from app.api_route import LARGEST_SEQ
from app.context import AppContext
from app.events import SSE_HEADERS
from app.presenter import NotPresentingError, TakenError, TooFastError
from app.presenter_place import Place, PlaceError, read_place
from app.run_body import read_json
from app.visitors import current_visitor

BODY_BYTES = 2_048
TOKEN_CHARS = 64

Name = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["token"],
                    "additionalProperties": False,
                    "properties": {
                        "token": {"type": "string", "description": "what beginning the presentation answered"},
                        "r": {"type": "integer", "minimum": 0, "description": "routing event"},
                        "row": {"type": "integer", "minimum": 0, "description": "board row"},
                        "live": {"type": "boolean", "description": "stays at the newest event"},
                        "playing": {"type": "boolean"},
                        "regret": {"type": "boolean", "description": "regret layer shown"},
                        "marks": {"type": "boolean", "description": "notes shown"},
                        "cursor": {"type": "integer", "nullable": True, "description": "window pointed at"},
                        "zoom": {"type": "array", "nullable": True, "items": {"type": "integer"}},
                        "lesson": {"type": "string"},
                        "step": {"type": "string"},
                    },
                }
            }
        },
    }
}


def add_presenting(
    router: APIRouter,
    path: str,
    context: AppContext,
    *,
    key: Callable[[str], str],
    exists: Callable[[str], None],
    demand: Callable[[str], None],
    run: bool,
) -> None:
    """Adds the addresses of one kind of thing that can be presented.

    Args:
        router: where they go.
        path: of one presentation; `{name}` in it is the session's id or the class's code.
        key: name -> what its presentation is kept under.
        exists: raises where there is no such thing. demand: raises where the visitor may not present it.
        run: whether the thing is a session, whose messages the stream can carry.
    """
    presentations = context.presentations

    @router.post(path, status_code=201)
    def begin(name: Name) -> dict[str, str]:
        """Begins a presentation; only the token that it answers with moves the followers."""
        demand(name)
        visitor = current_visitor()
        try:
            return {"token": presentations.begin(key(name), "" if visitor is None else visitor.user)}
        except TakenError as error:
            raise HTTPException(409, str(error)) from error

    @router.put(path, openapi_extra=_BODY)
    async def push(request: Request, name: Name) -> dict[str, int]:
        """Moves the followers: {"token", "r", "row", ...}; answers how many there are."""
        token, place = _read(await read_json(request, BODY_BYTES))
        try:
            return {"followers": presentations.push(key(name), token, place)}
        except NotPresentingError as error:
            raise HTTPException(403, str(error)) from error
        except TooFastError as error:
            raise HTTPException(429, str(error), {"Retry-After": "1"}) from error

    @router.delete(path, openapi_extra=_BODY)
    async def end(request: Request, name: Name) -> dict[str, bool]:
        """Ends a presentation: {"token"}. A page that is left sends this as it goes."""
        token, _ = _read(await read_json(request, BODY_BYTES))
        try:
            presentations.end(key(name), token)
        except NotPresentingError as error:
            raise HTTPException(403, str(error)) from error
        return {"ended": True}

    @router.get(path)
    def state(name: Name) -> dict[str, Any]:
        """Where the presenter stands now; {"on": false} while nobody presents."""
        exists(name)
        return presentations.state(key(name))

    async def events(
        request: Request,
        name: Name,
        run: Annotated[bool, Query()] = False,
        after: Annotated[int, Query(ge=-1, le=LARGEST_SEQ)] = -1,
    ) -> StreamingResponse:
        """Follows a presenter as server-sent events; with `run`, the session's own messages come in between."""
        await run_in_threadpool(exists, name)
        last = request.headers.get("last-event-id", "").strip()
        if last:
            if not (last.isascii() and last.isdigit()) or int(last) > LARGEST_SEQ:
                raise HTTPException(400, "Last-Event-ID must be the number of a message.")
            after = int(last)
        if context.bus.followers + presentations.followers >= context.settings.max_followers:
            raise HTTPException(503, f"{context.settings.max_followers} streams are open already: try again later.")
        sources = [presentations.follow(key(name))]
        if run:
            sources.append(context.bus.follow(name, after))
        return StreamingResponse(merged(*sources), headers=SSE_HEADERS)

    if run:
        router.get(f"{path}/events")(events)
    else:

        @router.get(f"{path}/events")
        async def alone(request: Request, name: Name) -> StreamingResponse:
            """Follows a presenter as server-sent events."""
            return await events(request, name)


async def merged(*sources: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """What several streams say, as it comes; ends when all have ended. No stream waits for another."""
    waiting: dict[asyncio.Future[bytes], AsyncIterator[bytes]] = {_next(source): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting.pop(task)
                try:
                    chunk = task.result()
                except StopAsyncIteration:
                    continue
                waiting[_next(source)] = source
                yield chunk
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            if isinstance(source, AsyncGenerator):
                await source.aclose()


def _next(source: AsyncIterator[bytes]) -> asyncio.Future[bytes]:
    async def step() -> bytes:
        return await anext(source)

    return asyncio.ensure_future(step())


def _read(body: Mapping[str, Any]) -> tuple[str, Place]:
    token = body.get("token")
    if not isinstance(token, str) or not 1 <= len(token) <= TOKEN_CHARS:
        raise PlaceError(f"token must be text of 1 to {TOKEN_CHARS} characters.")
    return token, read_place({name: value for name, value in body.items() if name != "token"})
