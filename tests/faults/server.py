"""A server process over the made-up engine, for faults that hit a whole process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.app.test_main import ROOT, free_port


class ServerProcess:
    """`python -m tests.app.served DELAY` with a data folder and a port of its own.

    Args:
        folder: where its log goes, and its data unless `data` says otherwise.
        delay: seconds that the engine takes for a token.
    """

    def __init__(self, folder: Path, delay: float = 0.005, *, data: Path | None = None, **env: str) -> None:
        self.data = data or folder / "data"
        self._log = folder / "server.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/qe"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QEVICT_", "GRADIO_"))}
        kept |= {"QEVICT_DATA_DIR": str(self.data), "PORT": str(port), "PYTHONPATH": str(ROOT)}
        kept |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder), **env}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.app.served", str(delay)],
                cwd=ROOT,
                env=kept,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{self.url}/ping", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"the server did not start: {self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def start(self, **body: Any) -> str:
        answer = httpx.post(f"{self.url}/runs", json={"prompt": "x", **body}, timeout=20)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["sid"])

    def follow(self, sid: str, stop_at: int | None = None) -> list[str]:
        """Wire messages until the stream ends, or until message `stop_at`."""
        got: list[str] = []
        with httpx.stream("GET", f"{self.url}/s/{sid}/events", timeout=30) as stream:
            number = -1
            for line in stream.iter_lines():
                if line.startswith("id: "):
                    number = int(line[4:])
                elif line.startswith("data: "):
                    got.append(line[6:])
                    if stop_at is not None and number >= stop_at:
                        break
        return got

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
