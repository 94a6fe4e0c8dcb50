"""A resumable store of finished cells: one JSON object a line, keyed by a hash of everything that decides a cell.

A cell that is there is not run again; a changed text, model, setting or version is another cell. Appends are flushed
line by line, so that a stop loses at most the line being written. Knows nothing of what is measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

FORMAT = 1


def cell_key(cell: Mapping[str, Any]) -> str:
    """16 hex digits over a cell's description, independent of the order of its keys."""
    text = json.dumps({"format": FORMAT, **cell}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SAME = (
    "kind", "model", "fingerprint", "dtype", "weights", "device", "task", "index", "length", "question", "prompt_hash",
    "kv_dtype", "seed", "system", "kv_budget", "parameters", "match_to", "config", "horizon",
)  # fmt: skip
"""What two rows of one cell share, whatever release measured them."""


def newest(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last row of every cell: a store keeps what earlier releases measured, and an average must not mix them."""
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        key = cell_key({name: row.get(name) for name in SAME})
        last.pop(key, None)
        last[key] = dict(row)
    return list(last.values())


class Store:
    """Rows on disk. A half-written last line, left by a stop, is dropped; any other broken line is an error.

    Args:
        path: of the file; made with its folder on the first append. None keeps rows in memory only.

    Raises:
        ConfigError: a file that is not such a store, or cannot be read.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"cannot read the results in {path} ({error.strerror or error}).") from error
        whole = b"\n".join(lines[:-1])
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                row = json.loads(line)
                self._rows[row["key"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is no store of results: line {number} is broken. Name another.") from error
        if lines[-1]:
            # The line that a stop cut off: what comes next must not be glued to it.
            path.write_bytes(whole + b"\n" if whole else b"")

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows.values())

    def rows(self, keys: list[str] | None = None) -> list[dict[str, Any]]:
        """All rows, or those of some cells that are finished, in the order of `keys`."""
        if keys is None:
            return list(self._rows.values())
        return [self._rows[key] for key in keys if key in self._rows]

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Adds a finished cell.

        Raises:
            ConfigError: the file cannot be written.
        """
        full = {"key": key, **row}
        line = json.dumps(full, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self._rows[key] = json.loads(line)
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
        except OSError as error:
            raise ConfigError(f"cannot write results to {self.path} ({error.strerror or error}).") from error
