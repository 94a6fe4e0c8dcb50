"""Classes under /qe/class: begin one, answer in one, read its tally, present in it.

Knows FastAPI; knows no Gradio and no session.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.params import Depends as DependsParam

from app.api_route import Route
from app.classroom import Classroom, ClassroomError, NoClassError
from app.context import AppContext
from app.presenter_api import add_presenting
from app.run_body import read_json
from app.visitors import ForbiddenError, current_visitor

BODY_BYTES = 2_048
DEVICE_CHARS = 40
MOST_PICKS = 16

Code = Annotated[str, Path(max_length=8, pattern=r"^[a-z0-9]+$")]

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["question", "device", "picks"],
                    "additionalProperties": False,
                    "properties": {
                        "question": {"type": "string"},
                        "device": {"type": "string", "description": "a random name that the device made up"},
                        "picks": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    },
                }
            }
        },
    }
}


def create_class_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Classes of this server. Of `context` only the presentations are needed: a class has no session."""
    router = APIRouter(prefix="/qe/class", route_class=Route, dependencies=list(dependencies), tags=["classes"])
    classes = Classroom()

    @router.post("", status_code=201)
    def begin() -> dict[str, str]:
        """Begins a class; its code is all that a device needs to answer in it."""
        visitor = current_visitor()
        return {"code": classes.begin("" if visitor is None else visitor.user)}

    @router.get("/{code}")
    def tally(code: Code, question: Annotated[str, Query(max_length=80)]) -> dict[str, Any]:
        """How many devices answered a question, and what they chose."""
        try:
            answered, counts = classes.tally(code, question)
        except NoClassError as error:
            raise HTTPException(404, str(error)) from error
        return {"answered": answered, "counts": counts}

    @router.post("/{code}", openapi_extra=_BODY)
    async def answer(request: Request, code: Code) -> dict[str, bool]:
        """Answers a question: {"question", "device", "picks"}; the first answer of a device counts."""
        question, device, picks = _read(await read_json(request, BODY_BYTES))
        try:
            classes.answer(code, question, device, picks)
        except NoClassError as error:
            raise HTTPException(404, str(error)) from error
        return {"taken": True}

    def exists(code: str) -> None:
        try:
            classes.owner(code)
        except NoClassError as error:
            raise HTTPException(404, str(error)) from error

    def demand(code: str) -> None:
        exists(code)
        owner, visitor = classes.owner(code), current_visitor()
        if owner and visitor is not None and not hmac.compare_digest(owner, visitor.user):
            raise ForbiddenError("only who began this class presents in it.")

    add_presenting(
        router,
        "/{name}/present",
        context,
        key=lambda code: f"class {code}",
        exists=exists,
        demand=demand,
        run=False,
    )
    return router


def _read(body: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    unknown = sorted(set(body) - {"question", "device", "picks"})
    if unknown:
        raise ClassroomError(f"unknown key {unknown[0][:40]!r}; known are device, picks, question.")
    question, device, picks = body.get("question"), body.get("device"), body.get("picks")
    if not isinstance(question, str):
        raise ClassroomError("question must be text.")
    if not isinstance(device, str) or not 1 <= len(device) <= DEVICE_CHARS:
        raise ClassroomError(f"device must be text of 1 to {DEVICE_CHARS} characters.")
    if not isinstance(picks, list) or len(picks) > MOST_PICKS or not all(type(pick) is int for pick in picks):
        raise ClassroomError(f"picks must be a list of at most {MOST_PICKS} whole numbers.")
    return question, device, tuple(picks)
