"""The page in a window of its own, where a display and pywebview are there; else in the browser.

Knows a running server's address; knows no route.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping

TITLE = "QEvict Lab"


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
        except Exception as error:  # a window toolkit fails in its own ways; the page is still there
            reason = f"the window failed ({str(error)[:200]})"
    say(f"no window of its own: {reason}. The page is at {url}")
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or not sys.platform.startswith("linux"):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    wait()


def _window(url: str) -> None:
    import webview

    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
    webview.create_window(TITLE, url, width=1280, height=820)
    webview.start()
