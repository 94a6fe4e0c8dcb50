"""Load: a class follows its teacher, thirty pages over HTTP, against a server process of its own.

    python -m tests.load.presentation --followers 30 --seconds 20

The teacher steps through a stored run ten times a second, then through one that goes on, where each follower's one
stream carries the run too. Prints one JSON object: places that were lost, how far followers lag behind the teacher,
whether all end where the teacher does, and what the engine was asked. Exit code 1 where something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tests.faults.server import ServerProcess

PUSHES_PER_SECOND = 10.0
TOKENS = 400


@dataclass
class Seen:
    """What one follower was told."""

    places: list[int] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    ended: bool = False
    failed: str = ""


class Lesson:
    """One teacher and a class on one session."""

    def __init__(self, url: str, sid: str, followers: int, *, run: bool) -> None:
        self.url, self.sid, self.run = f"{url}/s/{sid}", sid, run
        self.pushed: dict[int, float] = {}
        self.seen = [Seen() for _ in range(followers)]
        self.ready = 0

    async def teach(self, seconds: float) -> None:
        """Begins, waits until all are there, steps, ends; the followers' streams end with it."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            pages = [asyncio.ensure_future(self._follow(client, seen)) for seen in self.seen]
            until = time.monotonic() + 30
            while self.ready < len(pages) and time.monotonic() < until:
                await asyncio.sleep(0.05)
            token = (await client.post(f"{self.url}/present")).raise_for_status().json()["token"]
            for number in range(int(seconds * PUSHES_PER_SECOND)):
                due = time.monotonic() + 1 / PUSHES_PER_SECOND
                self.pushed[number] = time.monotonic()
                body = {"token": token, "r": number, "row": number % 4, "cursor": number}
                (await client.put(f"{self.url}/present", json=body)).raise_for_status()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await client.request("DELETE", f"{self.url}/present", json={"token": token})
            await asyncio.wait(pages, timeout=30)
            for page in pages:
                page.cancel()
            await asyncio.gather(*pages, return_exceptions=True)

    async def _follow(self, client: httpx.AsyncClient, seen: Seen) -> None:
        query = "?run=true" if self.run else ""
        try:
            async with client.stream("GET", f"{self.url}/present/events{query}") as stream:
                stream.raise_for_status()
                self.ready += 1
                presents, run_over = False, not self.run
                async for line in stream.aiter_lines():
                    if line == "event: present":
                        presents = True
                    elif line.startswith("id: "):
                        seen.messages.append(int(line[4:]))
                    elif line.startswith("data: ") and presents:
                        presents = False
                        self._told(seen, json.loads(line[6:]))
                    elif line.startswith('data: {"k":"end"'):
                        run_over = True
                    if seen.ended and run_over:
                        return
        except httpx.HTTPError as error:
            seen.failed = repr(error)

    def _told(self, seen: Seen, state: dict[str, Any]) -> None:
        if not state["on"]:
            seen.ended = bool(seen.places)
            return
        if state["r"] in self.pushed and (not seen.places or state["r"] != seen.places[-1]):
            seen.lags.append(time.monotonic() - self.pushed[state["r"]])
            seen.places.append(state["r"])

    def figures(self) -> dict[str, Any]:
        """What was lost, and how far behind the class was."""
        pushed = list(self.pushed)
        lags = sorted(lag for seen in self.seen for lag in seen.lags)

        def at(share: float) -> float | None:
            return round(1000 * lags[min(len(lags) - 1, int(share * len(lags)))], 1) if lags else None

        gaps = [sum(after - before != 1 for before, after in pairwise(seen.messages)) for seen in self.seen]
        return {
            "pushed": len(pushed),
            "followers": len(self.seen),
            "lost": sum(len(set(pushed) - set(seen.places)) for seen in self.seen),
            "out_of_order": sum(seen.places != sorted(seen.places) for seen in self.seen),
            "at_the_end": sum(bool(seen.places) and seen.places[-1] == pushed[-1] for seen in self.seen),
            "told_the_end": sum(seen.ended for seen in self.seen),
            "failed": [seen.failed for seen in self.seen if seen.failed][:3],
            "lag_ms": {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99)},
            "run_messages": min((len(seen.messages) for seen in self.seen), default=0),
            "run_gaps": sum(gaps),
        }


def _runs(url: str) -> dict[str, float]:
    """What the server says of its engine: figures that only runs change."""
    lines = httpx.get(f"{url}/../metrics", timeout=20).text.splitlines()
    wanted = ("qevict_runs", "qevict_tokens", "qevict_running")
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(wanted)}


def _wait(url: str, sid: str, state: str) -> float:
    began = time.monotonic()
    while httpx.get(f"{url}/s/{sid}/status", timeout=20).json()["state"] != state:
        time.sleep(0.1)
    return time.monotonic() - began


def trial(folder: Path, seconds: float, followers: int, delay: float = 0.02) -> dict[str, Any]:
    """Starts a server, teaches twice, and returns the figures."""
    server = ServerProcess(folder, delay)
    try:
        sid = server.start(options={"max_new_tokens": TOKENS})
        alone = _wait(server.url, sid, "ended")
        before = _runs(server.url)
        stored = Lesson(server.url, sid, followers, run=False)
        asyncio.run(stored.teach(seconds))
        engine = {"before": before, "after": _runs(server.url)}
        sid = server.start(options={"max_new_tokens": TOKENS})
        live = Lesson(server.url, sid, followers, run=True)
        began = time.monotonic()
        asyncio.run(live.teach(seconds))
        _wait(server.url, sid, "ended")
        took = time.monotonic() - began
        left = httpx.get(f"{server.url}/s/{sid}/present", timeout=20).json()
    finally:
        server.end()
    return {
        "stored": stored.figures(),
        "live": live.figures(),
        "engine": engine,
        "run_alone_s": round(alone, 2),
        "run_followed_at_most_s": round(took, 2),
        "left": left,
    }


def faults(figures: dict[str, Any]) -> list[str]:
    """What must not be, in words; empty where all is well."""
    found = []
    for name in ("stored", "live"):
        part = figures[name]
        for fault in ("lost", "out_of_order", "run_gaps", "failed"):
            if part[fault]:
                found.append(f"{name}: {fault} {part[fault]}")
        for whole in ("at_the_end", "told_the_end"):
            if part[whole] != part["followers"]:
                found.append(f"{name}: only {part[whole]} of {part['followers']} {whole}")
    if figures["engine"]["before"] != figures["engine"]["after"]:
        found.append(f"followers cost the engine something: {figures['engine']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--followers", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = trial(Path(folder), arguments.seconds, arguments.followers)
    print(json.dumps(figures, indent=2))
    return int(bool(faults(figures)))


if __name__ == "__main__":
    sys.exit(main())
