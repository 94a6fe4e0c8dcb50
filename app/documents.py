"""The sample documents: texts written for this project, each with an early fact and a late question.

Reads assets/documents; knows no model and no page.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.errors import EngineError

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "documents"
DEFAULT_DOCUMENT = "bakery-order-book"


class DocumentError(EngineError, LookupError):
    """There is no such sample document."""


@dataclass(frozen=True, slots=True)
class Document:
    """One sample document. `tokens` is a rounded count with the embedded model's tokenizer."""

    id: str
    file: str
    language: str
    tokens: int
    titles: dict[str, str]
    hints: dict[str, str]

    def title(self, lang: str) -> str:
        """Its title in a language of the page."""
        return self.titles[lang]

    def hint(self, lang: str) -> str:
        """One line about it in a language of the page."""
        return self.hints[lang]

    @property
    def text(self) -> str:
        """The whole text, without the newline at its end."""
        return (FOLDER / self.file).read_text(encoding="utf-8").rstrip("\n")

    @property
    def body(self) -> str:
        """The text without the question that its last line asks."""
        return self.text.rpartition("\n")[0].rstrip()


@cache
def load_documents() -> dict[str, Document]:
    """All sample documents by id, shortest first, other languages last."""
    with (FOLDER / "documents.toml").open("rb") as file:
        entries = tomllib.load(file)["documents"]
    return {
        entry["id"]: Document(
            entry["id"], entry["file"], entry["language"], entry["tokens"], entry["title"], entry["hint"]
        )
        for entry in entries
    }


def get_document(name: str) -> Document:
    """One sample document.

    Raises:
        DocumentError: no document of that id.
    """
    documents = load_documents()
    if name not in documents:
        raise DocumentError(f"document must be one of {', '.join(documents)}, got {name[:80]!r}.")
    return documents[name]
