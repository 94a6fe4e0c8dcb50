"""Presentations: who may push, what followers get, limits, ends; and their routes beside the notes'."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from starlette.middleware import Middleware

from app import presenter
from app.api import include_routes
from app.context import AppContext, create_context
from app.events import OPENING, PING
from app.gate import Gate
from app.presenter import (
    BURST,
    KEPT_SECONDS,
    RING,
    NotPresentingError,
    Presentations,
    TakenError,
    TooFastError,
)
from app.presenter_api import merged
from app.presenter_place import LARGEST, Place, PlaceError, read_place
from app.settings import Settings
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def states(chunks: list[bytes]) -> list[dict[str, Any]]:
    """What was said, pings and the like left out."""
    lines = b"".join(chunks).split(b"\n")
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]


class Follower:
    """Reads a stream in a task of its own."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self.chunks: list[bytes] = []
        self.task = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: AsyncIterator[bytes]) -> None:
        async for chunk in stream:
            self.chunks.append(chunk)

    async def until(self, met: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        for _ in range(400):
            if met(states(self.chunks)):
                return states(self.chunks)
            await asyncio.sleep(0.005)
        raise AssertionError(f"never came: {self.chunks}")

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


PLACES = st.builds(
    Place,
    r=st.integers(0, LARGEST),
    row=st.integers(0, LARGEST),
    live=st.booleans(),
    playing=st.booleans(),
    regret=st.booleans(),
    marks=st.booleans(),
    cursor=st.none() | st.integers(-1, LARGEST),
    zoom=st.none() | st.tuples(st.integers(0, LARGEST), st.integers(0, LARGEST)),
    lesson=st.from_regex(r"[a-z_]{0,20}", fullmatch=True),
    step=st.from_regex(r"[a-z_]{0,20}", fullmatch=True),
)


@given(PLACES)
def test_a_place_survives_its_journey(place: Place) -> None:
    assert read_place(json.loads(json.dumps(place.to_dict()))) == place


@pytest.mark.parametrize(
    "body",
    [
        {"x": 1},
        {"r": -1},
        {"r": True},
        {"r": "1"},
        {"row": LARGEST + 1},
        {"live": 1},
        {"cursor": -2},
        {"zoom": [1]},
        {"zoom": "12"},
        {"lesson": "<b>"},
        {"step": "x" * 41},
        {"lesson": None},
    ],
)
def test_what_is_no_place_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(PlaceError):
        read_place(body)


def test_followers_get_every_place_in_order_and_the_end() -> None:
    async def play() -> None:
        rooms = Presentations()
        early = Follower(rooms.follow("k"))
        await early.until(lambda seen: len(seen) == 1)
        token = rooms.begin("k")
        for r in range(30):
            rooms.push("k", token, Place(r=r))
        late = Follower(rooms.follow("k"))
        await late.until(lambda seen: len(seen) == 1)
        assert rooms.push("k", token, Place(r=30, row=2)) == 2
        rooms.end("k", token)
        for follower in (early, late):
            await follower.until(lambda seen: not seen[-1]["on"] and len(seen) > 1)
        said = states(early.chunks)
        assert [one.get("r") for one in said] == [None, *range(31), None]
        assert [one.get("r") for one in states(late.chunks)] == [29, 30, None]
        assert said[-2]["row"] == 2 and said[-1] == {"on": False}
        for follower in (early, late):
            await follower.leave()
        assert (rooms.followers, rooms.count, rooms._rooms) == (0, 0, {})

    asyncio.run(play())


def test_a_slow_follower_jumps_and_ends_at_the_last_place() -> None:
    async def play() -> None:
        clock = Clock()
        rooms = Presentations(clock)
        token = rooms.begin("k")
        stream = rooms.follow("k")
        chunks = [await anext(stream), await anext(stream)]
        for r in range(3 * RING):
            clock.now += 1.0
            rooms.push("k", token, Place(r=r))
        chunks.append(await anext(stream))
        seen = [one["r"] for one in states(chunks)[1:]]
        assert seen == list(range(2 * RING, 3 * RING))
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(play())


def test_only_the_token_pushes_and_only_one_presents() -> None:
    clock = Clock()
    rooms = Presentations(clock)
    token = rooms.begin("k", "ada")
    for wrong in ("", "x", token + "x", "é"):
        with pytest.raises(NotPresentingError):
            rooms.push("k", wrong, Place())
        with pytest.raises(NotPresentingError):
            rooms.end("k", wrong)
    with pytest.raises(TakenError):
        rooms.begin("k", "eve")
    with pytest.raises(TakenError):
        rooms.begin("k")
    again = rooms.begin("k", "ada")  # a page that was loaded anew
    with pytest.raises(NotPresentingError):
        rooms.push("k", token, Place())
    rooms.push("k", again, Place(r=3))
    with pytest.raises(NotPresentingError):
        rooms.push("other", again, Place())
    clock.now += KEPT_SECONDS + 1
    assert rooms.state("k") == {"on": False}
    with pytest.raises(NotPresentingError):
        rooms.push("k", again, Place())
    assert rooms.begin("k", "eve")


def test_a_silent_presenter_is_gone_for_followers_too() -> None:
    async def play() -> None:
        clock = Clock()
        rooms = Presentations(clock)
        rooms.begin("k")
        follower = Follower(rooms.follow("k", ping_seconds=0.01))
        await follower.until(lambda seen: len(seen) == 1 and seen[0]["on"])
        clock.now += KEPT_SECONDS + 1
        assert (await follower.until(lambda seen: len(seen) == 2))[-1] == {"on": False}
        assert PING in follower.chunks and follower.chunks[0] == OPENING
        await follower.leave()

    asyncio.run(play())


def test_pushes_and_presentations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    rooms = Presentations(clock)
    token = rooms.begin("k")
    for _ in range(int(BURST)):
        rooms.push("k", token, Place())
    with pytest.raises(TooFastError):
        rooms.push("k", token, Place())
    clock.now += 0.1
    rooms.push("k", token, Place())
    monkeypatch.setattr(presenter, "MOST_PRESENTATIONS", 2)
    rooms.begin("l")
    with pytest.raises(TakenError):
        rooms.begin("m")
    rooms.end("k", token)
    rooms.begin("m")


def test_close_and_forget_end_every_stream() -> None:
    async def play() -> None:
        rooms = Presentations()
        rooms.begin("k")
        one, other = Follower(rooms.follow("k")), Follower(rooms.follow("l"))
        for follower in (one, other):
            await follower.until(lambda seen: len(seen) == 1)
        rooms.forget("k")
        await asyncio.wait_for(one.task, 2)
        assert states(one.chunks)[-1] == {"on": False}
        rooms.close()
        await asyncio.wait_for(other.task, 2)
        last = Follower(rooms.follow("k"))
        await asyncio.wait_for(last.task, 2)
        assert states(last.chunks) == []
        assert rooms.followers == 0

    asyncio.run(play())


def test_streams_are_merged_as_they_come_and_closed_together() -> None:
    closed = []

    async def say(name: bytes, waits: list[float]) -> AsyncIterator[bytes]:
        try:
            for number, wait in enumerate(waits):
                await asyncio.sleep(wait)
                yield name + b"%d" % number
        finally:
            closed.append(name)

    async def play() -> None:
        chunks = [chunk async for chunk in merged(say(b"a", [0, 0.05]), say(b"b", [0.02, 0.06]))]
        assert chunks == [b"a0", b"b0", b"a1", b"b1"]
        stream = merged(say(b"c", [0, 60]), say(b"d", [60]))
        assert await anext(stream) == b"c0"
        await stream.aclose()
        assert sorted(closed) == [b"a", b"b", b"c", b"d"]

    asyncio.run(play())


@pytest.fixture
def context(tmp_path: Path) -> Iterator[AppContext]:
    made = create_context(
        Settings(data_dir=tmp_path, list_sessions=False),
        engine=FakeEngine(),
        loader=FakeLoader(),
        options=FakeOptions,
    )
    yield made
    made.close()


@pytest.fixture
def app(context: AppContext) -> FastAPI:
    gate = Middleware(Gate, settings=context.settings, signature=context.signature)
    made = FastAPI(middleware=[gate])
    include_routes(made, context)
    return made


def test_the_routes_of_a_session(app: FastAPI, context: AppContext) -> None:
    with TestClient(app) as teacher, TestClient(app) as pupil:
        sid = teacher.post("/qe/runs", json={"prompt": "x"}).json()["sid"]
        assert context.runs.wait(sid, 30)
        path = f"/qe/s/{sid}/present"
        assert pupil.post(path).status_code == 403
        assert pupil.get(path).json() == {"on": False}
        token = teacher.post(path).json()["token"]
        assert teacher.put(path, json={"token": token, "r": 7, "row": 2, "cursor": -1}).json() == {"followers": 0}
        seen = pupil.get(path).json()
        assert (seen["on"], seen["r"], seen["row"], seen["cursor"], seen["marks"]) == (True, 7, 2, -1, True)
        assert "token" not in seen and token not in str(seen)
        assert pupil.put(path, json={"token": "x", "r": 1}).status_code == 403
        assert pupil.request("DELETE", path, json={"token": "x"}).status_code == 403
        for wrong in ({}, {"token": 3}, {"token": token, "r": -1}, {"token": token, "more": 1}):
            assert teacher.put(path, json=wrong).status_code == 422, wrong
        assert teacher.put(path, json={"token": token, "lesson": "x" * 3000}).status_code == 413
        notes = seen["notes"]
        note = {"text": "<b>look</b>", "r": 7, "windows": [3], "row": 1}
        number = teacher.post(f"/qe/s/{sid}/marks", json=note).json()["id"]
        assert pupil.get(path).json()["notes"] == notes + 1
        assert teacher.put(f"/qe/s/{sid}/marks/{number}", json={"text": "other"}).json() == {"kept": True}
        assert pupil.get(f"/qe/s/{sid}/marks").json()["marks"][0]["text"] == "other"
        assert pupil.put(f"/qe/s/{sid}/marks/{number}", json={"text": "mine"}).status_code == 403
        assert pupil.delete(f"/qe/s/{sid}/marks/{number}").status_code == 403
        assert teacher.put(f"/qe/s/{sid}/marks/{number}", json={"text": "  "}).status_code == 422
        assert teacher.put(f"/qe/s/{sid}/marks/{number}", json={"text": "a", "r": 1}).status_code == 422
        assert teacher.delete(f"/qe/s/{sid}/marks/{number}").json() == {"deleted": True}
        assert teacher.delete(f"/qe/s/{sid}/marks/{number}").status_code == 404
        assert pupil.get(path).json()["notes"] == notes + 3
        assert teacher.request("DELETE", path, json={"token": token}).json() == {"ended": True}
        assert pupil.get(path).json() == {"on": False}
        assert teacher.get("/qe/s/no-such/present").status_code == 404
        assert teacher.post("/qe/s/no-such/present").status_code == 404


def test_only_who_began_a_class_presents_in_it(app: FastAPI) -> None:
    with TestClient(app) as teacher, TestClient(app) as pupil:
        code = teacher.post("/qe/class").json()["code"]
        pupil.post(f"/qe/class/{code}", json={"question": "metadata.guess", "device": "d", "picks": [1]})
        path = f"/qe/class/{code}/present"
        assert pupil.post(path).status_code == 403
        token = teacher.post(path).json()["token"]
        place = {"token": token, "r": 3, "lesson": "predict", "step": "guess"}
        assert teacher.put(path, json=place).status_code == 200
        assert pupil.get(path).json()["lesson"] == "predict"
        assert pupil.get("/qe/class/zzzzz/present").status_code == 404
        assert pupil.get("/qe/class/zzzzz/present/events").status_code == 404


def test_one_stream_carries_the_run_and_the_presenter(app: FastAPI, context: AppContext) -> None:
    with TestClient(app) as client:
        sid = client.post("/qe/runs", json={"prompt": "x"}).json()["sid"]
        assert context.runs.wait(sid, 30)

    async def play() -> None:
        token = context.presentations.begin(f"session {sid}")
        context.presentations.push(f"session {sid}", token, Place(r=2))
        stream = merged(context.presentations.follow(f"session {sid}"), context.bus.follow(sid, -1))
        got: list[bytes] = []
        async for chunk in stream:
            got.append(chunk)
            if b'"k":"end"' in chunk:
                break
        await stream.aclose()
        whole = b"".join(got)
        assert b"event: present\ndata: " in whole and whole.count(b"id: ") > 10
        frames = [one for one in whole.split(b"\n\n") if one.startswith(b"event: present")]
        assert all(b"id: " not in one for one in frames)

    asyncio.run(play())


def test_a_full_server_takes_no_more_followers(
    app: FastAPI, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestClient(app) as client:
        code = client.post("/qe/class").json()["code"]
        monkeypatch.setattr(Presentations, "followers", property(lambda _: context.settings.max_followers))
        assert client.get(f"/qe/class/{code}/present/events").status_code == 503
