"""/v1: the interface that clients of OpenAI's service speak, over the same queue as every other run.

Knows FastAPI, runs and the bus; computes nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.params import Depends as DependsParam
from fastapi.responses import JSONResponse, StreamingResponse

from app.api_route import Route, printable
from app.api_server import model_names
from app.context import AppContext
from app.events import SSE_HEADERS
from app.openai_answer import Answer, refusal_body
from app.openai_body import Wanted, read_chat, read_completion, schema
from app.run_body import read_json
from app.run_messages import RunMessages
from engine.errors import EngineError, ModelNotFoundError

LISTEN_SECONDS = 0.5
"""How often it is asked whether the client is still there."""


class OpenAIRoute(Route):
    """Says errors in the form that OpenAI's clients read."""

    def refusal(self, sentence: str, status: int, headers: dict[str, str]) -> Response:
        status = 400 if status == 422 else status
        return JSONResponse(refusal_body(printable(sentence), status), status, headers)


def create_openai_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Models, chat completions and plain completions."""
    router = APIRouter(prefix="/v1", route_class=OpenAIRoute, dependencies=list(dependencies), tags=["openai"])
    created = int(time.time())

    @router.get("/models")
    def models() -> dict[str, Any]:
        """Models that may be named in a request."""
        listed = [
            {"id": name, "object": "model", "created": created, "owned_by": "qevict"} for name in model_names(context)
        ]
        return {"object": "list", "data": listed}

    @router.post("/chat/completions", openapi_extra=schema(chat=True))
    async def chat(request: Request) -> Response:
        """Answers a conversation. Own fields: kv_budget, quant_share, bits, system, document, preset, reference."""
        body = await read_json(request, context.settings.max_body_bytes)
        return await _answer(context, request, read_chat(body, context.settings), chat=True)

    @router.post("/completions", openapi_extra=schema(chat=False))
    async def completions(request: Request) -> Response:
        """Goes on with a text. Own fields as for conversations."""
        body = await read_json(request, context.settings.max_body_bytes)
        return await _answer(context, request, read_completion(body, context.settings), chat=False)

    return router


async def _answer(context: AppContext, request: Request, wanted: Wanted, *, chat: bool) -> Response:
    try:
        sid = await run_in_threadpool(context.runs.start, wanted.request)
    except ModelNotFoundError as error:
        return JSONResponse(refusal_body(printable(str(error)), 404, "model_not_found"), 404)
    answer = Answer(sid, wanted, chat=chat)
    if wanted.stream:
        return StreamingResponse(_streamed(context, sid, answer), headers=SSE_HEADERS)
    async for _ in _heard(context, sid, answer):
        if await request.is_disconnected():
            context.runs.stop(sid)
            break
    if answer.error:
        status = {"input": 400, "memory": 503}.get(answer.fault, 500)
        return JSONResponse(refusal_body(answer.error, status), status)
    return JSONResponse(answer.whole())


async def _streamed(context: AppContext, sid: str, answer: Answer) -> AsyncIterator[bytes]:
    try:
        yield _frame(answer.opening())
        async for piece in _heard(context, sid, answer):
            if piece:
                yield _frame(answer.chunk(piece))
        if answer.error:
            yield _frame(refusal_body(answer.error, 500))
        else:
            for chunk in answer.closing():
                yield _frame(chunk)
        yield b"data: [DONE]\n\n"
    finally:
        if not answer.ended:  # the client has gone
            context.runs.stop(sid)


async def _heard(context: AppContext, sid: str, answer: Answer) -> AsyncIterator[str]:
    """Feeds a run's messages to the answer and yields text as it may be sent; an empty one now and then."""
    messages = RunMessages(sid, context.bus, context.sessions)
    news = messages.subscribe()
    try:
        while True:
            news.clear()
            try:
                bodies = await asyncio.to_thread(messages.read)
            except EngineError as error:
                answer.fail(str(error))
                return
            for body in bodies:
                piece = answer.take(body)
                if piece:
                    yield piece
                if answer.hit:
                    context.runs.stop(sid)
            if answer.ended:
                return
            yield ""
            context.runs.status(sid)  # a waiting client is somebody who looks at the run
            try:
                async with asyncio.timeout(LISTEN_SECONDS):
                    await news.wait()
            except TimeoutError:
                pass
    finally:
        messages.unsubscribe(news)


def _frame(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
