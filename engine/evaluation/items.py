"""What is measured on one text: a prompt, the tokens fed after it, and which of them are scored.

All systems see the same tokens one by one after the prompt, so that a difference between two of them is theirs.
Knows tokenizers; knows no model and no cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, PromptError

MAIN = "answer"
"""Name of the span that decides a task's score."""


@dataclass(frozen=True, slots=True)
class Span:
    """Forced tokens [begin, end) that are scored; begin ≥ 1, so that every system has compressed its prompt."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Item:
    """One question, or one text to go on with.

    Attributes:
        task: its generator. index: which of the seeded items. length: tokens asked for; `prompt` has about as many.
        prompt: token ids that are prefilled together. forced: token ids that are fed one by one after them.
        spans: scored parts of `forced`, by name; `MAIN` decides.
        choices: first tokens of the possible answers, where the task is a choice; the first is the right one.
        question: "after" compression, or "inside" the prompt.
        source: where its text came from.
    """

    task: str
    index: int
    length: int
    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    spans: Mapping[str, Span]
    choices: tuple[int, ...] = ()
    question: str = "after"
    source: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, span in self.spans.items():
            if not 1 <= span.begin < span.end <= len(self.forced):
                raise ConfigError(
                    f"span {name} must lie in tokens 1 to {len(self.forced)}, got {span.begin} to {span.end}."
                )

    @property
    def prompt_hash(self) -> str:
        """16 hex digits over all token ids."""
        text = json.dumps([list(self.prompt), list(self.forced)], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Text:
    """One text with a name; `name` goes into every row measured on it."""

    name: str
    text: str


def read_texts(folder: Path) -> list[Text]:
    """All .txt files of a folder, or of its subfolder "texts", by name; non-English ones named zh_* are left out.

    Raises:
        PromptError: no such folder, or no text in it.
    """
    place = folder / "texts" if (folder / "texts").is_dir() else folder
    if not place.is_dir():
        raise PromptError(f"--data must be a folder with .txt files, got {folder}.")
    found = []
    for path in sorted(place.glob("*.txt")):
        if path.name.startswith("zh_"):
            continue
        try:
            found.append(Text(path.stem, path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"cannot read {path} as UTF-8 text ({error}).") from error
    if not found:
        raise PromptError(f"{place} holds no .txt file.")
    return found


def encode(tokenizer: Any, text: str, *, begin: bool = False) -> list[int]:
    """Token ids; `begin` adds what the tokenizer puts in front of a text (a BOS, where it has one)."""
    return [int(token) for token in tokenizer(text, add_special_tokens=begin, verbose=False)["input_ids"]]


def sentences(text: str) -> list[str]:
    """Sentences of a text, whitespace folded."""
    folded = " ".join(text.split())
    return [part for part in re.split(r"(?<=[.!?])\s+", folded) if part]


def continuations(tokenizer: Any, texts: Sequence[Text], prompt_tokens: int, steps: int, count: int) -> list[Item]:
    """Up to `count` stretches of text, none overlapping, taken from the texts in turn: task "book".

    All forced tokens but the first are scored.
    """
    need = prompt_tokens + steps
    pieces: list[list[tuple[str, list[int]]]] = []
    for text in texts:
        ids = encode(tokenizer, text.text, begin=True)
        starts = range(0, len(ids) - need + 1, need)
        pieces.append([(f"{text.name}@{start}", ids[start : start + need]) for start in starts])
    turns = max((len(piece) for piece in pieces), default=0)
    chosen = [piece[turn] for turn in range(turns) for piece in pieces if turn < len(piece)][:count]
    return [
        Item(
            "book",
            index,
            prompt_tokens,
            tuple(ids[:prompt_tokens]),
            tuple(ids[prompt_tokens:]),
            {MAIN: Span(1, steps)},
            source=name,
        )
        for index, (name, ids) in enumerate(chosen)
    ]
