"""The whole application: page and routes under one roof, from either entry."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


SERVE = "from app.main import serve; from app.settings import Settings; serve(Settings.from_env())"


@pytest.mark.parametrize("arguments", [["-c", SERVE], ["space.py"]], ids=["serve", "space"])
def test_page_and_routes_answer_and_the_server_ends_cleanly(tmp_path: Path, arguments: list[str]) -> None:
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("QEVICT_", "GRADIO_", "SPACE_"))}
    env |= {
        "QEVICT_DATA_DIR": str(tmp_path / "data"),
        "PORT": str(port),
        "GRADIO_SSR_MODE": "true",  # a platform may set it; it must not take our addresses
        "PYTHONPATH": str(ROOT),
    }
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stdout=log, stderr=log)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                ping = httpx.get(f"{base}/qe/ping", timeout=5)
                if ping.status_code == 200 and ping.headers["content-type"] == "application/json":
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                pytest.fail(f"the server did not come up: {log.read()}")
            time.sleep(0.2)
        assert ping.json() == {"ok": True}
        page = httpx.get(f"{base}/", timeout=30)
        assert page.status_code == 200 and "QEvict Lab" in page.text
        assert httpx.get(f"{base}/qe/health", timeout=30).json()["status"] == "ok"
        assert httpx.get(f"{base}/qe/s/nobody/trace", timeout=30).status_code == 404
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        log.close()
    assert list((tmp_path / "data").glob("*.owner")) == [], "the store was not closed"


def test_importing_does_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, threading; import app.main, app.api, app.runs, app.settings;"
        "bad = [m for m in ('gradio', 'torch', 'transformers') if m in sys.modules];"
        "print(bad, threading.active_count())"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == "[] 1", out.stderr
    assert list(tmp_path.iterdir()) == []
