"""A comparison as it is kept and handed out: plain values to store and to read again, a JSON file, a CSV table.

Its board is kept beside it as the very bytes that the browser gets. Knows the outcome and the figures; knows no
database and no page.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from app.compare_lines import FIGURES, report, system_label, value_of
from app.compare_request import CompareRequest
from app.engine_import import import_engine
from app.store_file import StoreError
from app.texts import text

if TYPE_CHECKING:
    from engine.compare import CompareResult, SystemResult

EXPORTS = {"json": "application/json", "csv": "text/csv; charset=utf-8"}
"""What a comparison can be exported as, and its media type."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


@dataclass(slots=True)
class Outcome:
    """What a comparison found, with what it was asked.

    Attributes:
        agrees: for each system, whether its likeliest token was FullKV's, step by step.
        model, device, dtype: what it ran on.
        ended: seconds since the epoch.
        kept: whether it is in the store.
    """

    request: CompareRequest
    result: CompareResult
    agrees: list[list[bool]]
    model: str
    device: str
    dtype: str
    ended: float = field(default_factory=lambda: datetime.now(UTC).timestamp())
    kept: bool = True

    @property
    def setup(self) -> dict[str, Any]:
        """What it ran on and what was asked of all systems."""
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "budget": dict(self.request.budget),
            "match_to": self.request.match_to or None,
        }


def to_record(outcome: Outcome) -> dict[str, Any]:
    """Plain values from which `from_record` makes the outcome again, without what the board draws."""
    return {
        "result": outcome.result.to_dict(),
        "agrees": [[int(one) for one in system] for system in outcome.agrees],
        "model": outcome.model,
        "device": outcome.device,
        "dtype": outcome.dtype,
        "ended": outcome.ended,
    }


def request_record(request: CompareRequest) -> dict[str, Any]:
    """Everything that was asked for, as plain values: enough to ask again."""
    values = {one.name: getattr(request, one.name) for one in fields(request)}
    return values | {
        "systems": list(request.systems),
        "budget": dict(request.budget),
        "parameters": {name: dict(given) for name, given in request.parameters.items()},
    }


def request_of_record(record: Mapping[str, Any]) -> CompareRequest:
    """The request in a record.

    Raises:
        StoreError: it is damaged.
    """
    values = _known(CompareRequest, record)
    return CompareRequest(**{**values, "systems": tuple(values["systems"])})


def from_record(request: Mapping[str, Any], record: Mapping[str, Any]) -> Outcome:
    """The outcome in a record: all figures and texts; frames and pieces are in the board alone.

    Raises:
        StoreError: the record is damaged.
    """
    import_engine()
    from engine.baselines.recorder import FutureMass
    from engine.compare import CompareResult, SystemResult

    try:
        body = record["result"]
        systems = []
        for one in body["systems"]:
            values = _known(SystemResult, one)
            values["future"] = [FutureMass(**_known(FutureMass, mass)) for mass in values.get("future", [])]
            systems.append(SystemResult(**values))
        result = CompareResult(**{**_known(CompareResult, {"pieces": [], **body}), "systems": systems})
        return Outcome(
            request_of_record(request),
            result,
            [[bool(agreed) for agreed in system] for system in record["agrees"]],
            str(record["model"]),
            str(record["device"]),
            str(record["dtype"]),
            float(record["ended"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError("the stored comparison is damaged: its figures can't be read.") from error


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a class takes: an earlier or later release may have kept others.

    Raises:
        StoreError: one is missing that it can't do without.
    """
    found = {one.name: values[one.name] for one in fields(kind) if one.name in values}
    missing = [
        one.name
        for one in fields(kind)
        if one.name not in found and one.default is MISSING and one.default_factory is MISSING
    ]
    if missing:
        raise StoreError(f"the stored comparison is damaged: it has no {missing[0]}.")
    return found


def to_json(outcome: Outcome, board: bytes) -> bytes:
    """The whole comparison as one JSON object: what was asked, every figure with how it was measured, the board.

    Args:
        board: gzipped JSON, see `app.compare_wire.to_wire`.
    """
    body = {
        "request": request_record(outcome.request),
        **report(outcome.result, outcome.setup),
        "agrees": {
            system.name: [int(one) for one in agrees]
            for system, agrees in zip(outcome.result.systems, outcome.agrees, strict=True)
        },
        "ended": datetime.fromtimestamp(outcome.ended, UTC).isoformat(timespec="seconds"),
        "board": json.loads(gzip.decompress(board)),
    }
    return json.dumps(body, ensure_ascii=False, indent=1).encode()


def to_csv(outcome: Outcome, lang: str) -> str:
    """The table: one line per system, figures as numbers; an empty cell was not measured."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    facts = ("mode", "model", "prompt_tokens", "new_tokens", "kv_dtype", "full_kv_bytes", "budget_share")
    writer.writerow(["system", "label", "keeps", "storage", *FIGURES, "expected_bytes", "first_difference", *facts])
    for system in outcome.result.systems:
        writer.writerow([_cell(value) for value in _row(outcome, system, lang)])
    return out.getvalue()


def _row(outcome: Outcome, system: SystemResult, lang: str) -> list[Any]:
    result = outcome.result
    figures = [value_of(system, name) for name in FIGURES]
    budget = None if system.budget is None else system.budget["share"]
    first = "" if result.mode != "free" else system.first_difference
    if result.mode == "free" and first is None:
        first = text(lang, "compare.first_none")
    return [
        system.name,
        system_label(system.name, lang),
        system.keeps,
        system.storage,
        *figures,
        system.expected_bytes,
        first + 1 if isinstance(first, int) else first,
        result.mode,
        outcome.model,
        result.prompt_tokens,
        len(result.token_ids),
        result.kv_dtype,
        result.full_kv_bytes,
        budget,
    ]


def _cell(value: Any) -> Any:
    """A cell that no spreadsheet runs: names of models come from people."""
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
