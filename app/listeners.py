"""How the page's listeners are answered: by an answer of their own, or over the stream of Gradio's queue.

Gradio 6.31 closes a page's stream when nothing waits and opens it with the next event. One that is sent in between
believes the stream open, and its answer reaches nobody: a press of Run in the half second after the page's own events
began a run that the page never showed (1 of 6 presses with a cold browser on a busy machine). So whatever answers at
once does so at once; only what goes on, such as following a run, takes the queue. Knows no component.
"""

from __future__ import annotations

from typing import Any, Final

QUIET: Final[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
"""For generators."""
AT_ONCE: Final[dict[str, Any]] = QUIET | {"queue": False}
"""For all else."""
