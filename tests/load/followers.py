"""Load: many followers of one run and a queue of users, for some minutes, against a server process of its own.

    python -m tests.load.followers --minutes 10 --followers 30 --users 10

Prints one JSON object: events that were lost or doubled, latency from the engine to a follower, memory, requests
that went wrong. The engine is made up: what is measured is the server. Exit code 1 where something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.server import ServerProcess

PROBE_SECONDS = 0.25
TOKENS_A_RUN = 400


@dataclass
class Tally:
    """What was seen."""

    events: int = 0
    lost: int = 0
    doubled: int = 0
    streams: int = 0
    cut: int = 0
    reconnects: int = 0
    requests: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    runs_done: int = 0
    waits: list[float] = field(default_factory=list)


class Load:
    """One trial.

    Args:
        url: the server's /qe address.
        seconds: how long.
        followers: streams on the run that goes on.
        users: visitors that keep runs in the queue.
    """

    def __init__(self, url: str, seconds: float, followers: int, users: int) -> None:
        self.url, self.followers, self.users = url, followers, users
        self.until = time.monotonic() + seconds
        self.tally = Tally()
        self.current = ""

    async def run(self) -> Tally:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=30)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            self.client = client
            tasks = [self._user(number) for number in range(self.users)]
            tasks += [self._follower(number) for number in range(self.followers)]
            await asyncio.gather(*tasks, self._watch())
        return self.tally

    async def _ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        self.tally.requests += 1
        try:
            answer = await self.client.request(method, self.url + path, **options)
        except httpx.HTTPError as error:
            self.tally.failed.append(f"{method} {path}: {error!r}")
            return None
        if answer.status_code == 429:
            self.tally.refused += 1
        elif answer.status_code >= 400:
            self.tally.failed.append(f"{method} {path}: {answer.status_code} {answer.text[:100]}")
        return answer

    async def _user(self, number: int) -> None:
        """Starts a run, waits for its end, starts the next one; looks at the list meanwhile."""
        while time.monotonic() < self.until:
            body = {"prompt": f"user {number}", "options": {"max_new_tokens": TOKENS_A_RUN}}
            answer = await self._ask("POST", "/runs", json=body)
            if answer is None or answer.status_code != 202:
                await asyncio.sleep(0.5)
                continue
            sid, asked = answer.json()["sid"], time.monotonic()
            while time.monotonic() < self.until + 5:
                status = await self._ask("GET", f"/s/{sid}/status")
                state = status.json()["state"] if status is not None and status.status_code == 200 else ""
                if state == "running":
                    self.current = sid
                    if asked:
                        self.tally.waits.append(time.monotonic() - asked)
                        asked = 0.0
                if state == "ended":
                    self.tally.runs_done += 1
                    break
                await asyncio.sleep(0.4)
                if time.monotonic() >= self.until and state != "ended":
                    await self._ask("POST", f"/s/{sid}/stop")
                    break
            await self._ask("GET", "/sessions?limit=20")

    async def _follower(self, number: int) -> None:
        """Follows whatever runs now to its end; every third one loses its connection now and then."""
        seen = ""
        while time.monotonic() < self.until:
            sid = self.current
            if not sid or sid == seen:
                await asyncio.sleep(0.05)
                continue
            seen = sid
            await self._follow(sid, breaks=number % 3 == 0)

    async def _follow(self, sid: str, *, breaks: bool) -> None:
        tally, last, ended, broken = self.tally, -1, False, 0
        tally.streams += 1
        while not ended:
            opened = time.monotonic()
            headers = {} if last < 0 else {"Last-Event-ID": str(last)}
            got = 0
            try:
                async with self.client.stream("GET", f"{self.url}/s/{sid}/events", headers=headers) as stream:
                    if stream.status_code == 204:
                        return
                    if stream.status_code != 200:
                        tally.failed.append(f"events: {stream.status_code}")
                        return
                    async for line in stream.aiter_lines():
                        if not line.startswith("id: "):
                            ended = ended or line.startswith('data: {"k":"end"')
                            if line.startswith('data: {"k":"tok"'):
                                made = float(json.loads(line[6:])["p"][-1])
                                # What was made before this stream was there is history, not lag.
                                if made > opened:
                                    tally.lags.append(time.monotonic() - made)
                            continue
                        number = int(line[4:])
                        tally.events += 1
                        tally.lost += max(0, number - last - 1)
                        tally.doubled += number <= last
                        last = max(last, number)
                        got += 1
                        if breaks and broken < 2 and got > 25:
                            broken += 1
                            tally.reconnects += 1
                            break
                    else:
                        if not ended:
                            tally.cut += 1
                            return
            except httpx.HTTPError as error:
                tally.failed.append(f"events: {error!r}")
                return

    async def _watch(self) -> None:
        """Reads the server's memory, and how long an answer takes while all this goes on."""
        began = time.monotonic()
        while time.monotonic() < self.until:
            answer = await self._ask("GET", "/../metrics")
            if answer is not None and answer.status_code == 200:
                for line in answer.text.splitlines():
                    if line.startswith("qevict_memory_bytes "):
                        self.tally.memory.append((time.monotonic() - began, float(line.split()[1])))
            await asyncio.sleep(PROBE_SECONDS * 4)


def report(tally: Tally, seconds: float) -> dict[str, Any]:
    """The figures of a trial. Memory growth is judged after a third of the time, when everything is warm."""
    warm = [value for at, value in tally.memory if at > seconds / 3]
    growth = None
    if len(warm) >= 6:
        part = max(1, len(warm) // 5)
        growth = sorted(warm[-part:])[part // 2] / sorted(warm[:part])[part // 2] - 1
    lags = sorted(tally.lags)

    def at(share: float) -> float | None:
        return round(1000 * lags[min(len(lags) - 1, int(share * len(lags)))], 1) if lags else None

    return {
        "seconds": round(seconds),
        "events": tally.events,
        "lost": tally.lost,
        "doubled": tally.doubled,
        "streams": tally.streams,
        "cut": tally.cut,
        "reconnects": tally.reconnects,
        "lag_ms": {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99)},
        "requests": tally.requests,
        "refused": tally.refused,
        "failed": tally.failed[:5],
        "num_failed": len(tally.failed),
        "runs_done": tally.runs_done,
        "longest_wait_s": round(max(tally.waits, default=0.0), 1),
        "memory_mb": round(warm[-1] / 1e6, 1) if warm else None,
        "memory_growth": None if growth is None else round(growth, 4),
    }


def trial(folder: Path, seconds: float, followers: int, users: int, delay: float = 0.02) -> dict[str, Any]:
    """Starts a server, loads it, and returns the figures."""
    server = ServerProcess(folder, delay, QEVICT_QUEUE_LENGTH=str(users + 2))
    try:
        tally = asyncio.run(Load(server.url, seconds, followers, users).run())
    finally:
        server.end()
    return report(tally, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--followers", type=int, default=30)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds that the made-up engine takes for a token")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = trial(Path(folder), arguments.minutes * 60, arguments.followers, arguments.users, arguments.delay)
    print(json.dumps(figures, indent=2))
    return int(bool(figures["lost"] or figures["doubled"] or figures["cut"] or figures["num_failed"]))


if __name__ == "__main__":
    sys.exit(main())
