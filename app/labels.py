"""Labels: which component shows which words, so that one event can say the whole page in another language.

Knows components and text keys; knows neither layout nor what a component is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import gradio as gr
from gradio.blocks import Block

from app.texts import DEFAULT, LANGUAGES, text

Props = dict[str, Any]
BlockT = TypeVar("BlockT", bound=Block)


def pick_language(*wishes: str | None) -> str:
    """The first wish that is a language we speak ("zh-CN,zh;q=0.9" is one), else English."""
    for wish in wishes:
        head = (wish or "").strip().lower().replace("_", "-")
        for part in head.split(","):
            name = part.split(";")[0].strip().split("-")[0]
            if name in LANGUAGES:
                return name
            if name:
                break
    return DEFAULT


class Labels:
    """Remembers, for each component, how to make its words.

    Components are built with English words; `updates(lang)` returns what turns them into another language,
    in the order of `components`.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Block, Callable[[str], Props]]] = []

    def bind(self, component: BlockT, **keys: str) -> BlockT:
        """Says that property `name` of `component` shows text `key`, for each `name=key`."""
        return self.bind_with(component, lambda lang: {name: text(lang, key) for name, key in keys.items()})

    def bind_with(self, component: BlockT, make: Callable[[str], Props]) -> BlockT:
        """Says that `make(lang)` gives the language-dependent properties of `component`."""
        self._entries.append((component, make))
        return component

    @property
    def components(self) -> list[Block]:
        """Every bound component, in order."""
        return [component for component, _ in self._entries]

    def updates(self, lang: str) -> list[Any]:
        """One update for each of `components`."""
        return [gr.update(**make(lang)) for _, make in self._entries]
