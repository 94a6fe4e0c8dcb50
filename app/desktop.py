"""The page in a window of its own, where a display and pywebview are there; else in the browser.

The window is another process (`python -m app.desktop URL`): a toolkit that lacks a system library ends its process
on the spot, and that must not be the one that serves. Knows a running server's address; knows no route.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path

TITLE = "QEvict Lab"
FOLDER = Path(__file__).resolve().parent.parent


def why_not(env: Mapping[str, str], platform: str = sys.platform) -> str:
    """Why no window can be opened; empty if one can. Qt ends the process without a display, so it is asked first."""
    if platform.startswith("linux") and not (env.get("DISPLAY") or env.get("WAYLAND_DISPLAY")):
        return "there is no display"
    if importlib.util.find_spec("webview") is None:
        return 'pywebview is not installed (pip install "qevict-lab[desktop]")'
    return ""


def show(url: str, say: Callable[[str], None], wait: Callable[[], None]) -> None:
    """Shows the page and returns when its window is closed; must be called from the main thread.

    Args:
        say: takes one sentence for the user.
        wait: returns when the server has ended; used where the browser shows the page.
    """
    reason = why_not(os.environ)
    if not reason:
        try:
            _window(url)
            return
        except (OSError, RuntimeError) as error:
            reason = f"the window failed ({str(error)[:200]})"
    say(f"no window of its own: {reason}. The page is at {url}")
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or not sys.platform.startswith("linux"):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    wait()


def _window(url: str) -> None:
    """Returns when the window was closed.

    Raises:
        RuntimeError: its process ended in another way; the text is the last thing that it said.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-m", "app.desktop", url], cwd=FOLDER, stdout=said, stderr=said)
        try:
            code = process.wait()
        finally:
            process.terminate()
        if code:
            said.seek(0)
            lines = said.read().decode(errors="replace").split("\n")
            words = [line.strip() for line in lines if line.strip()]
            raise RuntimeError(words[-1] if words else f"its process ended with {code}")


def open_window(url: str) -> None:
    """Opens the window here and returns when it is closed; must be called from the main thread."""
    import webview

    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
    webview.create_window(TITLE, url, width=1280, height=820)
    webview.start()


if __name__ == "__main__":
    open_window(sys.argv[1])
