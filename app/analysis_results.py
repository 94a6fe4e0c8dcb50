"""Files of `qevict eval` and `qevict diagnose`, read into one set of tables with where they come from.

A store is read and never mended: it may belong to a sweep that goes on. Whatever is not such a file is refused with
one sentence. Knows files and tables; draws nothing.
"""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError

MOST_BYTES = 24 * 2**20
"""Longest file that is read, unpacked."""
MOST_ROWS = 20_000
LONGEST_WORD = 400
"""Characters of any text from a file that are kept: names and sentences, not answers."""
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TABLES = (
    "scores",
    "answers",
    "pareto",
    "pareto_error",
    "rivals",
    "quantizers",
    "directions",
    "policies",
    "promotion",
    "ablation",
)


class ResultsError(EngineError, ValueError):
    """A file holds no results."""


@dataclass(slots=True)
class Results:
    """What was measured, and by what.

    Attributes:
        tables: by name (`TABLES`), rows as `engine.evaluation.tables` makes them, each with the stem of its "file".
        diagnoses: (name of the file, what `qevict diagnose --json` printed).
        facts: (key of a label, value): model, machine, versions, …; each value once.
        left_out: what the evaluation itself said that it leaves out.
        problems: sentences on files that could not be read.
    """

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in TABLES})
    diagnoses: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.diagnoses and not any(self.tables.values())

    def add_fact(self, key: str, value: object) -> None:
        """Notes a fact once; nothing for an empty value."""
        shown = str(value).strip() if value is not None else ""
        if shown and (key, shown) not in self.facts:
            self.facts.append((key, shown))


def stem_of(name: str) -> str:
    """A file's name without its folder and ending: "abl-q" of "x/abl-q.jsonl.gz"."""
    base = Path(name).name
    for ending in sorted(ENDINGS, key=len, reverse=True):
        if base.endswith(ending):
            return base[: -len(ending)]
    return base


def result_files(folder: Path) -> dict[str, list[Path]]:
    """The result files of a folder by stem, newest stem first; empty where there is no such folder."""
    found: dict[str, list[Path]] = {}
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS) and path.is_file())
        times = {path: path.stat().st_mtime for path in paths}
    except OSError:
        return {}
    for path in paths:
        found.setdefault(stem_of(path.name), []).append(path)
    return dict(sorted(found.items(), key=lambda item: -max(times[path] for path in item[1])))


class ResultCache:
    """Remembers what the last few sets of files held, until one of them changes. Safe from any thread."""

    def __init__(self, keep: int = 6) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[Any, ...], Results] = OrderedDict()

    def read(self, paths: Sequence[Path]) -> Results:
        """`read_results`, or what it gave for the same files before."""
        key = tuple((str(path), stat.st_mtime_ns, stat.st_size) for path in paths if (stat := _stat(path)) is not None)
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        results = read_results(paths)
        with self._lock:
            self._found[key] = results
            while len(self._found) > self._keep:
                self._found.popitem(last=False)
        return results


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None


def read_results(paths: Sequence[Path]) -> Results:
    """All files together; one that can't be read is a sentence in `problems`.

    The tables of an evaluation's JSON stand for those of the store beside it, which has the same stem.
    """
    results = Results()
    parsed: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            data = path.read_bytes()
            if not data:
                continue  # a sweep that goes on has opened it and not written yet
            kind, content = parse(path.name, data)
        except OSError as error:
            results.problems.append(f"{path.name}: {error.strerror or error}.")
        except ResultsError as error:
            results.problems.append(str(error))
        else:
            parsed.setdefault(stem_of(path.name), {})[kind] = content
    for stem, kinds in parsed.items():
        try:
            if "answer" in kinds:
                _take_answer(results, stem, kinds["answer"])
            if "rows" in kinds:
                _take_rows(results, stem, kinds["rows"], tables="answer" not in kinds)
            if "diagnosis" in kinds:
                _take_diagnosis(results, stem, kinds["diagnosis"])
        except (EngineError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            results.problems.append(f"{stem}: not as this program writes results ({type(error).__name__}: {error}).")
    return results


def parse(name: str, data: bytes) -> tuple[str, Any]:
    """("rows", list), ("answer", table) or ("diagnosis", table) from a file's bytes.

    Raises:
        ResultsError: too long, not JSON, or JSON of something else.
    """
    if name.endswith(".gz") or data[:2] == b"\x1f\x8b":
        data = _unpacked(name, data)
    if len(data) > MOST_BYTES:
        raise ResultsError(f"{name} is too long: {MOST_BYTES // 2**20} MiB is the most.")
    if ".jsonl" in name:
        return "rows", _rows(name, data)
    whole = _json(name, data)
    if isinstance(whole, dict) and isinstance(whole.get("table14"), list) and isinstance(whole.get("setup"), dict):
        return "diagnosis", whole
    if isinstance(whole, dict) and isinstance(whole.get("scores"), list) and "suite" in whole:
        return "answer", whole
    if isinstance(whole, dict) and "key" in whole:
        return "rows", [whole]
    raise ResultsError(f"{name} holds neither what qevict eval --json nor what qevict diagnose --json prints.")


def _unpacked(name: str, data: bytes) -> bytes:
    try:
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        out = unpacker.decompress(data, MOST_BYTES + 1)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ResultsError(f"{name} can't be unpacked ({error}).") from error
    return out


def _rows(name: str, data: bytes) -> list[dict[str, Any]]:
    """A store's rows, each key once; a last line without its end is one that is being written."""
    found: dict[str, dict[str, Any]] = {}
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        row = _json(f"{name}, line {number},", line)
        if not isinstance(row, dict) or not isinstance(row.get("key"), str) or not isinstance(row.get("kind"), str):
            raise ResultsError(f"{name}, line {number}, is no row of qevict eval.")
        found[row["key"]] = row
        if len(found) > MOST_ROWS:
            raise ResultsError(f"{name} has more than {MOST_ROWS} rows.")
    if not found:
        raise ResultsError(f"{name} holds no finished row yet.")
    return list(found.values())


def _json(name: str, data: bytes) -> Any:
    try:
        return _cut(json.loads(data, parse_constant=_no_constant))
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{name} is not valid JSON ({str(error)[:120]}).") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _cut(value: Any) -> Any:
    """The same with no text longer than `LONGEST_WORD`."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST_WORD else value[: LONGEST_WORD - 1] + "…"
    if isinstance(value, list):
        return [_cut(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key)[:LONGEST_WORD]: _cut(entry) for key, entry in value.items()}
    return value


def _take_answer(results: Results, stem: str, answer: Mapping[str, Any]) -> None:
    for name in TABLES:
        rows = answer.get(name) or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ResultsError(f"{name} is no table")
        results.tables[name] += [{**row, "file": stem} for row in rows]
    results.add_fact("model", answer.get("model"))
    results.add_fact("weights", answer.get("weights"))
    results.add_fact("kv_dtype", answer.get("kv_dtype"))
    machine = answer.get("machine")
    if isinstance(machine, dict):
        parts = [
            f"{machine[name]} {unit}".strip()
            for name, unit in (("processor", ""), ("isa", ""), ("cores", "cores"), ("gpu", ""))
            if machine.get(name)
        ]
        results.add_fact("machine", ", ".join(parts))
        results.add_fact("versions", f"torch {machine['torch']}" if machine.get("torch") else "")
    results.left_out += [str(line) for line in answer.get("left_out") or [] if str(line) not in results.left_out]


def _take_rows(results: Results, stem: str, rows: list[dict[str, Any]], *, tables: bool) -> None:
    if tables:
        from app.eval_command import tables_of

        for name, found in tables_of(rows, None).items():
            if name in results.tables:
                results.tables[name] += [{**row, "file": stem} for row in found]
        for what in ablations_in(stem, rows):
            from engine.evaluation.ablations import ablation_table

            results.tables["ablation"] += [{**row, "file": stem} for row in ablation_table(rows, what)]
    for row in rows:
        if tables:  # else the JSON beside it has said so, with the model's full name
            results.add_fact("model", row.get("model"))
            results.add_fact("weights", row.get("weights"))
            results.add_fact("kv_dtype", row.get("kv_dtype"))
        results.add_fact("versions", ", ".join(f"{name} {v}" for name, v in dict(row.get("versions") or {}).items()))
    prompts = sorted({int(row["prompt_tokens"]) for row in rows if row.get("prompt_tokens")})
    if prompts:
        results.add_fact("prompts", f"{prompts[0]}" if len(prompts) == 1 else f"{prompts[0]} – {prompts[-1]}")
    results.add_fact("cells", f"{stem}: {len(rows)}")


def ablations_in(stem: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ablations whose values the rows vary; a budget is no parameter, so the file's name must say that one."""
    from engine.evaluation.suites import ABLATIONS

    varied: dict[str, set[str]] = {}
    for row in rows:
        if row["kind"] == "item" and row.get("system") == "qevict":
            for name, value in dict(row.get("parameters") or {}).items():
                varied.setdefault(name, set()).add(str(value))
    found = [what for what, (name, _, _) in ABLATIONS.items() if len(varied.get(name, ())) > 1]
    return [*found, *(["budget"] if "budget" in stem and "budget" not in found else [])]


def _take_diagnosis(results: Results, stem: str, diagnosis: dict[str, Any]) -> None:
    setup = diagnosis["setup"]
    results.diagnoses.append((stem, diagnosis))
    results.add_fact("model", setup.get("model"))
    results.add_fact("weights", setup.get("weights"))
    results.add_fact("kv_dtype", setup.get("kv_dtype"))
    results.add_fact("prompts", f"{setup['prompt_tokens']} + {setup['steps']}")
