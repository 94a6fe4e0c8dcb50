"""How the log looks: one plain line a record for a person, or one JSON object a line for a machine.

Knows the standard library's logging alone.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FIELDS = ("run", "session", "address", "status")
"""Attributes of a record that a JSON line carries, where the record has them."""


class JsonLines(logging.Formatter):
    """Each record as one JSON object: time, level, logger, message, ids, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        out |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            out["trace"] = self.formatException(record.exc_info)
        return json.dumps(out, ensure_ascii=True, default=str)


class PlainLines(logging.Formatter):
    """Each record as a line that can't steer a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


def set_up(as_json: bool) -> None:
    """Sends this program's records from INFO on, and everybody else's warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("qevict").setLevel(logging.INFO)
