"""A sweep: independent cells, each run once, finished ones kept.

Groups of different tasks take turns, so that a sweep that is stopped leaves an even table. Knows the store and what
cells are; prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.evaluation.cells import Cell, Group, Part, Suite, cells_of, describe, parts_of, run_part
from engine.evaluation.store import Store, cell_key
from engine.models import LoadedModel

Runner = Callable[[Iterator[Part]], Iterable[tuple[Part, Iterable[tuple[Cell, Cell]]]]]
"""Takes parts as it has room for them, and gives back each finished one once with its cells and rows, in any order."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sweep is: cells done and in all, seconds used, an estimate of those left, and what runs now."""

    done: int
    total: int
    seconds: float
    left: float | None
    now: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Rows of all finished cells of the suite, in order; `missing` cells were not reached."""

    rows: list[dict[str, Any]]
    missing: int
    seconds: float
    ran: int


def in_turns(*lists: Sequence[Group]) -> tuple[Group, ...]:
    """One from each list in turn; all lists end at about the same time, as far as their lengths allow."""
    longest = max((len(groups) for groups in lists), default=0)
    spread = [
        (at * longest / len(groups), number, at, group)
        for number, groups in enumerate(lists)
        for at, group in enumerate(groups)
    ]
    return tuple(entry[3] for entry in sorted(spread, key=lambda entry: entry[:3]))


def suite_keys(loaded: LoadedModel, suite: Suite) -> list[str]:
    """Keys of all cells of a suite, in order."""
    return [cell_key(cell) for group in suite.groups for cell in cells_of(loaded, suite, group)]


def run_sweep(
    loaded: LoadedModel,
    suite: Suite,
    store: Store,
    *,
    seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    runner: Runner | None = None,
) -> SweepResult:
    """Runs the cells that the store does not have.

    Args:
        seconds: no part is begun that would probably end later than this.
        should_stop: asked between parts.
        runner: what runs the parts; None runs them here, one after another. The store is written here alone.
    """
    began = time.perf_counter()
    work = [(group, cells_of(loaded, suite, group)) for group in suite.groups]
    parts = [
        part
        for group, cells in work
        for part in parts_of(loaded, group, [cell for cell in cells if cell_key(cell) not in store])
    ]
    total = sum(len(cells) for _, cells in work)
    done = total - sum(len(part.cells) for part in parts)
    ran = 0
    spent, whole = 0.0, sum(part.cost for part in parts)

    def offered() -> Iterator[Part]:
        for part in parts:
            used = time.perf_counter() - began
            pace = used / spent if spent else None
            if progress is not None:
                left = None if pace is None else pace * (whole - spent)
                progress(Progress(done, total, used, left, describe(part.group)))
            if should_stop is not None and should_stop():
                return
            if seconds is not None and used + (part.cost * pace if pace else 0.0) > seconds:
                return
            yield part

    def here(wanted: Iterator[Part]) -> Iterator[tuple[Part, Iterator[tuple[Cell, Cell]]]]:
        for part in wanted:
            yield part, run_part(loaded, suite, part)

    for part, rows in (runner or here)(offered()):
        for cell, row in rows:
            store.add(cell_key(cell), row)
            done, ran = done + 1, ran + 1
        spent += part.cost
    seconds_used = time.perf_counter() - began
    if progress is not None:
        progress(Progress(done, total, seconds_used, 0.0 if done == total else None, ""))
    keys = [cell_key(cell) for _, cells in work for cell in cells]
    return SweepResult(store.rows(list(dict.fromkeys(keys))), total - done, seconds_used, ran)
