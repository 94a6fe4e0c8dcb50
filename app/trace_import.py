"""A run that comes back from a file: the offline page or the lines that a session was exported as.

The file may come from anybody: it is read as data, checked event by event on a board of its own, numbered anew, and
nothing in it is ever markup. Knows the store and the trace; knows no route and no page.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import html
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from app.session_info import clean_title
from engine.errors import EngineError, TraceError
from engine.trace import EndEvent, Mark, RunMeta, TraceEvent, decode, encode, num_windows
from engine.trace_board import Board

if TYPE_CHECKING:
    from app.sessions import Sessions

MOST_BYTES: Final = 64_000_000
"""Bytes of lines, unpacked."""
MOST_EVENTS: Final = 200_000
MOST_CELLS: Final = 16_000_000
MOST_MARKS: Final = 500
MOST_WINDOWS: Final = 64
TEXT_CHARS: Final = 500
LARGEST: Final = 2**31 - 1

_DATA = re.compile(r'<script type="application/json" id="qe-trace">(.*?)</script>', re.DOTALL)
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


class ImportFileError(EngineError, ValueError):
    """The file is no run that this program exported; the text says why."""


def import_trace(sessions: Sessions, data: bytes, user: str = "", name: str = "") -> str:
    """Stores the run in a file as a new session and returns its id.

    Args:
        sessions: the store.
        data: an offline replay page (HTML), or one wire event a line (JSONL).
        user: whom the session belongs to.
        name: the file's name, for a title where the file has none.

    Raises:
        ImportFileError: the file holds no whole run. StoreError: it could not be stored.
    """
    title, lines = _lines(data)
    meta: RunMeta | None = None
    board: Board | None = None
    rows: list[bytes] = []
    marks: list[Mark] = []
    end: EndEvent | None = None
    for number, line in enumerate(lines):
        if number >= MOST_EVENTS:
            raise ImportFileError(f"a run may have at most {MOST_EVENTS} events.")
        try:
            event = decode(line)
            if isinstance(event, Mark):
                marks.append(event)
                continue
            if event.seq < 0:
                continue
            if isinstance(event, RunMeta):
                if meta is not None:
                    raise TraceError("it holds two runs.")
                meta, board = event, _board(event)
            if board is None:
                raise TraceError("it does not begin with what the run was.")
            _refuse_longer(event, board)
            board.forward(event)
            if isinstance(event, EndEvent):
                end = event
            rows.append(encode(replace(event, seq=len(rows)), len(rows)))
        except (TraceError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise ImportFileError(f"the file is damaged at event {number}: {error}") from error
    if meta is None:
        raise ImportFileError("the file holds no run.")
    if end is None:
        end = EndEvent("interrupted", {}, len(rows))
        rows.append(encode(end))
    session = sessions.create(
        model=clean_title(str(meta.model)),
        policy=clean_title(str(meta.policy)),
        settings={"config": dict(meta.settings)},
        title=title or clean_title(name),
        versions=dict(meta.versions),
        user=user,
    )
    sessions.append(session, rows)
    summary = end.summary if isinstance(end.summary, dict) else {}
    sessions.finish(session, "done" if end.why in ("eos", "length") else "interrupted", summary)
    sessions.flush()
    for mark in marks[:MOST_MARKS]:
        _keep(sessions, session, mark)
    return session


def _board(meta: RunMeta) -> Board:
    sizes = (meta.rows, meta.max_windows, meta.window_size, meta.num_layers)
    if not all(isinstance(size, int) and 0 < size <= LARGEST for size in sizes):
        raise TraceError("its sizes must be whole numbers above 0.")
    if meta.rows * meta.max_windows > MOST_CELLS:
        raise TraceError(f"a board may have at most {MOST_CELLS} cells.")
    return Board(meta)


def _refuse_longer(event: TraceEvent, board: Board) -> None:
    """A made-up length must not fill the memory."""
    length = getattr(event, "seq_len", 0)
    if not isinstance(length, int) or length < 0:
        raise TraceError("a length must be a whole number.")
    if num_windows(length, board.meta.sink_tokens, board.meta.window_size) * board.meta.rows > MOST_CELLS:
        raise TraceError(f"a board may have at most {MOST_CELLS} cells.")


def _keep(sessions: Sessions, session: str, mark: Mark) -> None:
    """Stores a note, unless it is none."""
    numbers: list[Any] = [mark.event_id, mark.row, *mark.windows[:MOST_WINDOWS]]
    whole = all(type(number) is int and 0 <= number <= LARGEST for number in numbers)
    text = clean_title(mark.text, TEXT_CHARS) if isinstance(mark.text, str) else ""
    author = clean_title(mark.author) if isinstance(mark.author, str) else ""
    if whole and text:
        sessions.mark(session, mark.event_id, mark.row, mark.windows[:MOST_WINDOWS], text, author)


def _lines(data: bytes) -> tuple[str, Iterator[bytes]]:
    """(title, wire events one by one) of a file."""
    if not data.lstrip().startswith(b"<"):
        if len(data) > MOST_BYTES:
            raise ImportFileError(f"a run may have at most {MOST_BYTES} bytes.")
        return "", (line for line in data.splitlines() if line.strip())
    page = data.decode("utf-8", "replace")
    found = _DATA.search(page)
    if found is None:
        raise ImportFileError("this page holds no run: choose one that was downloaded here as an offline replay.")
    title = _TITLE.search(page)
    try:
        payload = json.loads(found[1])
        if "packed" in payload:
            lines = _unpacked(payload["packed"]).splitlines()
        else:
            lines = [str(row).encode() for row in payload["rows"]]
    except ImportFileError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ImportFileError("the run in this page is damaged.") from error
    return clean_title(html.unescape(title[1])) if title else "", (line for line in lines if line.strip())


def _unpacked(packed: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(base64.b64decode(packed, validate=True))) as file:
            data = file.read(MOST_BYTES + 1)
    except (binascii.Error, OSError, EOFError, zlib.error) as error:
        raise ImportFileError("the run in this page is damaged.") from error
    if len(data) > MOST_BYTES:
        raise ImportFileError(f"a run may have at most {MOST_BYTES} bytes.")
    return data
