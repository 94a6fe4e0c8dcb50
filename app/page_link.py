"""What a page's own address asks for, as an event of the page: one that comes only if there is a link.

Not a `gr.State` with a listener to its change: Gradio 6.31 tells the page of a changed state only over its queue, and
calls the listener of one that stands in a tab as soon as that tab is drawn. Knows no tab.
"""

from __future__ import annotations

from typing import Any, Final

import gradio as gr

OPEN_JS: Final = 'watch("value", () => { if (props.value && props.value.sid) trigger("select", props.value); });'
NO_LINK: Final[dict[str, Any]] = {"sid": ""}


class LinkTarget:
    """Fires `select` in the browser once it is told of a session; shows nothing.

    Must stand outside of the tabs, which are drawn late. Its event data is what it was told.
    """

    def __init__(self) -> None:
        self.component = gr.HTML(
            dict(NO_LINK),
            html_template="<i></i>",
            js_on_load=OPEN_JS,
            apply_default_css=False,
            elem_classes=["qe-gone"],
            padding=False,
        )

    @staticmethod
    def value(session: str | None, **place: int | None) -> dict[str, Any]:
        """The component's value for a session and a place in it; for None, the value that fires nothing."""
        return {"sid": session, **place} if session else dict(NO_LINK)
