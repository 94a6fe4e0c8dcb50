"""`qevict report`: one standalone HTML page from finished evaluations and a diagnosis.

Reads stores, makes tables, writes the page. Measures nothing and loads no model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.bench_command import machine
from app.eval_command import tables_of, write_page
from engine.errors import ConfigError


def add(commands: Any) -> None:
    """Adds the subcommand to the parser's commands."""
    parser = commands.add_parser(
        "report",
        help="one standalone HTML page from finished evaluations",
        description="Write one HTML page that needs nothing else, from the cells that qevict eval has kept.",
    )
    parser.add_argument("stores", nargs="*", metavar="STORE.jsonl", help="default: all in the data folder")
    parser.add_argument("--store", metavar="FILE.jsonl", action="append", default=[], help="another one")
    parser.add_argument("--diagnosis", metavar="FILE.json", help="from qevict diagnose --json")
    parser.add_argument("-o", "--output", metavar="FILE.html", default="qevict-report.html")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the page from what the stores hold."""
    from app.settings import Settings
    from engine.evaluation.store import Store, newest

    folder = Settings.from_env().data_dir / "evaluations"
    paths = [Path(name) for name in (*arguments.stores, *arguments.store)] or sorted(folder.glob("*.jsonl"))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"there is no file {missing[0]}: run qevict eval first.")
    diagnosis = _diagnosis(arguments.diagnosis)
    if not paths and diagnosis is None:
        raise ConfigError(f"there is nothing in {folder} yet: run qevict eval quick first.")
    rows = newest(row for path in paths for row in Store(path))
    setups = sorted({_setup(row) for row in rows})
    if len(setups) > 1:
        raise ConfigError(
            f"these results come from several set-ups ({'; '.join(setups)}): name the stores of one of them."
        )
    answer = {
        "suite": ", ".join(path.stem for path in paths) or "diagnosis",
        "model": setups[0] if setups else "",
        "machine": machine(),
        "left_out": [],
        **tables_of(rows, None),
    }
    answer["ablation"] = _ablations(rows)
    from app.eval_page import page

    write_page(Path(arguments.output), page(answer, diagnosis))
    print(arguments.output)
    return 0


def _setup(row: Mapping[str, Any]) -> str:
    """What must be the same in all rows of a page."""
    return f"{row['model']} {row['fingerprint']}, weights {row['weights']}, tokens stored as {row['kv_dtype']}"


def _diagnosis(name: str | None) -> dict[str, Any] | None:
    if not name:
        return None
    try:
        found: dict[str, Any] = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {name} as JSON ({error}).") from error
    return found


def _ablations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table for every setting of which at least two values were tried; budgets need more than the usual three."""
    from engine.evaluation.suites import ABLATIONS
    from engine.evaluation.tables import ablation_table

    out: list[dict[str, Any]] = []
    ours = [row for row in rows if row["kind"] == "item" and row["system"] == "qevict"]
    for what, (name, _, _) in ABLATIONS.items():
        alone = [row for row in ours if set(row["parameters"]) == ({name} if name else set()) and row["kv_budget"]]
        tried = {row["parameters"][name] if name else row["kv_budget"] for row in alone}
        if len(tried) >= (2 if name else 4):
            out += ablation_table(alone, what)
    return out
