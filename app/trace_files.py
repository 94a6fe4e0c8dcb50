"""A session as a file to keep, and the recorded run that comes with the program.

Knows which picture maker takes what; the making is in visuals.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from app.events import head
from app.settings import ASSETS
from app.texts import all_texts, language
from engine.errors import TraceError
from engine.trace import Mark, RunMeta, decode, decode_all, encode

EXPORTS = {
    "html": "text/html; charset=utf-8",
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/x-ndjson",
    "gif": "image/gif",
}
"""What a session can be exported as, and its media type."""

_one_at_a_time = threading.Semaphore(1)


def export(kind: str, rows: Sequence[bytes], title: str, lang: str) -> bytes:
    """The file's bytes; one is made at a time, since a picture takes much of a small machine.

    Raises:
        TraceError: the run ended before it had anything to show.
    """
    if not any(isinstance(decode(row), RunMeta) for row in rows[:64]):
        raise TraceError("this session ended before its run began: there is nothing to export.")
    from visuals import replay

    with _one_at_a_time:
        if kind == "html":
            return replay.to_html(rows, title=title, texts=all_texts(lang), lang=language(lang)).encode()
        if kind == "csv":
            return replay.to_csv(list(decode_all(iter(rows)))).encode()
        return replay.to_gif(list(decode_all(iter(rows))))


def with_marks(rows: Iterable[bytes], marks: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """The rows of a trace, then its notes as wire messages of their own, as `Sessions.marks` gives them."""
    seq = -1
    for row in rows:
        seq = max(seq, head(row)[1])
        yield row
    for number, mark in enumerate(marks, seq + 1):
        author = mark["author"] or ""
        yield encode(Mark(mark["r"], mark["row"], list(mark["windows"]), mark["text"], author), number)


@cache
def first_trace() -> bytes | None:
    """The bundled recorded run, one wire message per line; None where it is not installed."""
    folder = ASSETS / "traces"
    packed = folder / "first.ndjson.gz"
    if packed.is_file():
        return gzip.decompress(packed.read_bytes())
    plain = folder / "first.ndjson"
    return plain.read_bytes() if plain.is_file() else None
