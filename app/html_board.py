"""What the page's boards share as Gradio components: a small dict in, a canvas view of assets/js out.

Knows how a value reaches the browser and how the addresses of files are made; knows neither board.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar

import gradio as gr

from app.texts import LANGUAGES, all_texts
from visuals.replay import lean_script, script_json


def static_address(name: str, data: bytes) -> str:
    """The address of one of our files, such as "js/board.js"; it changes with the content."""
    return f"qe/static/{name}?v={hashlib.sha256(data).hexdigest()[:12]}"


def words_of(*areas: str, without: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """The words whose key begins with one of `areas` and ends with none of `without`, by language and flat key."""
    return {
        lang: {
            key: words
            for key, words in all_texts(lang).items()
            if key.startswith(areas) and not (without and key.endswith(without))
        }
        for lang in LANGUAGES
    }


class HtmlBoard(gr.HTML):
    """A board in a Gradio page. The value says what to show, never the data itself: the browser fetches that.

    A subclass names its script, the value that shows nothing, its words and its files. These stand in the script as
    the constant `board`, {id, texts, files}, not in Gradio's `props`: there an update that leaves the board alone, as
    every `gr.skip()` is, takes their place, and a board that is mounted after it would find none.
    """

    SCRIPT: ClassVar[str]
    """JavaScript that makes the view in `element`, as `board` says, and follows `props.value`."""
    NOTHING: ClassVar[dict[str, Any]]
    ID: ClassVar[str]
    """The element's id, where none is named."""

    def __init__(
        self,
        value: dict[str, Any] | str | None = None,
        *,
        elem_id: str | None = None,
        elem_classes: list[str] | str | None = None,
        visible: bool = True,
        render: bool = True,
        key: int | str | None = None,
    ) -> None:
        name = elem_id or self.ID
        board = {"id": name, "texts": self.texts(), "files": self.files()}
        super().__init__(
            value=value if value is not None else dict(self.NOTHING),
            html_template='<div class="qe-host"></div>',
            js_on_load=f"const board={script_json(board)};{lean_script(self.SCRIPT)}",
            apply_default_css=False,
            elem_id=name,
            elem_classes=elem_classes,
            visible=visible,
            render=render,
            key=key,
            padding=False,
        )

    @classmethod
    def texts(cls) -> dict[str, dict[str, str]]:
        """The words of the view, by language and flat key."""
        raise NotImplementedError

    @classmethod
    def files(cls) -> Any:
        """Addresses of what the view fetches, in the form that its script reads."""
        raise NotImplementedError

    def preprocess(self, payload: Any) -> dict[str, Any]:  # type: ignore[override]
        """The value as a dict; anything else shows nothing."""
        return payload if isinstance(payload, dict) else dict(self.NOTHING)

    def postprocess(self, value: dict[str, Any] | str | None) -> dict[str, Any]:  # type: ignore[override]
        """A dict as it is, JSON read, None shows nothing."""
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        return dict(value) if isinstance(value, dict) else dict(self.NOTHING)

    def api_info(self) -> dict[str, Any]:
        return {"type": "object"}

    def example_payload(self) -> dict[str, Any]:
        return dict(self.NOTHING)

    def example_value(self) -> dict[str, Any]:
        return dict(self.NOTHING)
