"""A real server process for the browser: its own port, data folder and end; with the real engine or a made-up one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


class ServerProcess:
    """Starts `command` with PORT and QEVICT_DATA_DIR of its own, and waits until it answers.

    Args:
        folder: where its sessions and its log go.
        command: arguments of the interpreter; the default is the product as a user starts it.
    """

    def __init__(self, folder: Path, command: tuple[str, ...] = ("-m", "app", "serve")) -> None:
        self.log = folder / "server.log"
        env = {name: value for name, value in os.environ.items() if not name.startswith("QEVICT_")}
        env |= {"QEVICT_DATA_DIR": str(folder / "data"), "PORT": "0", "PYTHONUNBUFFERED": "1"}
        env["OMP_NUM_THREADS"] = "1"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT
            )
        self.url = self._wait()

    def _wait(self, seconds: float = 90.0) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._process.poll() is None:
            for line in self.log.read_text("utf-8", errors="replace").splitlines():
                if " is at http://" in line:
                    url = line.split(" is at ", 1)[1].split(" ", 1)[0]
                    if _answers(url):
                        return url
            time.sleep(0.2)
        self.close()
        raise RuntimeError(f"the server did not start: {self.log.read_text('utf-8', errors='replace')[-2000:]}")

    def close(self) -> None:
        """Ends the process, kindly first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}qe/ping", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
