"""A bundled trace as a lesson reads it: its events, its boards, and the places that a lesson asks for by name.

Knows traces; knows no lesson's words and no page.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.settings import ASSETS
from engine.errors import TraceError
from engine.trace import (
    SCORE_DECADES,
    EndEvent,
    Keyframe,
    LateMetrics,
    RoutingEvent,
    RunMeta,
    ScoreEvent,
    StepEvent,
    Tier,
    TraceEvent,
    decode,
)
from engine.trace_board import Board

FOLDER = ASSETS / "traces"
Position = RoutingEvent | Keyframe
Tiers = NDArray[np.uint8]

PROMOTED = Tier.QUANT << 4 | Tier.FULL
ENOUGH_FUTURE = 32
"""Tokens that must have followed an event for its regret to be shown."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step stands: routing event, board row, and the windows that it is about, in order of the text."""

    event: int
    row: int
    windows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranked:
    """One candidate's standing at an event: place from 1, of how many, and its score over the best one's."""

    place: int
    of: int
    share: float


class LessonTrace:
    """One trace, all of it in memory."""

    def __init__(self, name: str, events: list[TraceEvent]) -> None:
        self.name = name
        self.events = events
        metas = [event for event in events if isinstance(event, RunMeta)]
        if not metas:
            raise TraceError(f"trace {name!r} has no meta event.")
        self.meta = metas[0]
        self.end = next((event for event in events if isinstance(event, EndEvent)), EndEvent("interrupted"))
        self.late = {event.event_id: event for event in events if isinstance(event, LateMetrics)}
        self.positions: list[Position] = []
        self.tiers: list[Tiers] = []
        board = Board(self.meta)
        for event in events:
            board.forward(event)
            if isinstance(event, RoutingEvent) or (isinstance(event, Keyframe) and not self.positions):
                self.positions.append(event)
                self.tiers.append(board.tiers.copy())
        if not self.positions:
            raise TraceError(f"trace {name!r} has no routing event.")

    @property
    def last_event(self) -> int:
        """Number of the last routing event; the first is 0."""
        return self.positions[-1].event_id

    @property
    def windows(self) -> int:
        """Windows on the board at the last event."""
        return int((self.tiers[-1][0] != Tier.EMPTY).sum())

    def tier(self, event: int, row: int, window: int) -> Tier:
        """Where a window is after an event."""
        return Tier(int(self.tiers[event][row, window]))

    def count(self, event: int, row: int, tier: Tier) -> int:
        """Windows of a row in a tier after an event."""
        return int((self.tiers[event][row] == tier).sum())

    def moves(self, event: int, row: int) -> dict[int, tuple[Tier, Tier]]:
        """Window to (from, to) of what moved in a row at an event."""
        position = self.positions[event]
        if not isinstance(position, RoutingEvent):
            return {}
        mine = position.migrations[position.migrations["layer"] == row]
        return {int(m["window"]): (Tier(int(m["move"]) >> 4), Tier(int(m["move"]) & 15)) for m in mine}

    def text_of(self, window: int) -> str:
        """A window's tokens as text."""
        first = self.meta.sink_tokens + window * self.meta.window_size
        return "".join(self.pieces[first : first + self.meta.window_size])

    @cached_property
    def pieces(self) -> list[str]:
        """All tokens as text, prompt first."""
        said = [piece for event in self.events if isinstance(event, StepEvent) for piece in event.pieces]
        return [*self.meta.pieces, *said]

    @cached_property
    def _scores(self) -> dict[tuple[int, int], NDArray[np.float64]]:
        return {(e.event_id, e.row): _shares(e) for e in self.events if isinstance(e, ScoreEvent)}

    @cached_property
    def row(self) -> int:
        """The row with most promotions among those whose scores are known at every event, else among all."""
        back = np.zeros(self.meta.rows, dtype=int)
        for position in self.positions:
            if isinstance(position, RoutingEvent):
                rows = position.migrations["layer"][position.migrations["move"] == PROMOTED]
                np.add.at(back, rows, 1)
        scored = [row for row in range(self.meta.rows) if self._scored(row)]
        return max(scored or range(self.meta.rows), key=lambda row: (back[row], -row))

    def _scored(self, row: int) -> bool:
        return all((position.event_id, row) in self._scores for position in self.positions)

    def rank(self, event: int, row: int, window: int) -> Ranked | None:
        """How a window stood among the candidates of an event; None where its row's scores were not recorded."""
        shares = self._scores.get((event, row))
        if shares is None or event == 0:
            return None
        moved = self.moves(event, row)
        before, after = (self.tiers[at][row][: len(shares)] for at in (event - 1, event))
        candidate = np.isin(before, (Tier.FULL, Tier.QUANT))
        candidate[[w for w, (source, _) in moved.items() if source == Tier.LOCAL]] = True
        if not candidate[window]:
            return None
        # Scores are rounded, tiers are not: whoever went to a higher tier stood before, whatever the rounding says.
        higher = candidate & (after < after[window])
        beside = candidate & (after == after[window]) & (shares > shares[window])
        return Ranked(int(higher.sum() + beside.sum()) + 1, int(candidate.sum()), float(shares[window]))

    # ---- places -------------------------------------------------------------------------------------

    def find(self, name: str) -> Place:
        """The place that a lesson names.

        Raises:
            TraceError: the trace has no such place.
        """
        finders = {
            "start": lambda: Place(0, self.row),
            "end": lambda: Place(self.last_event, self.row),
            "busiest": self._busiest,
            "promotion": self._promotion,
            "predict": lambda: self._predict(0),
            "reveal": lambda: self._predict(1),
            "regret": self._regret,
            "return": self._return,
        }
        place = finders[name]()
        if place is None:
            raise TraceError(f"trace {self.name!r} has no place {name!r}.")
        return place

    def _busiest(self) -> Place:
        event = max(range(1, len(self.positions)), key=lambda e: len(self.moves(e, self.row)))
        return Place(event, self.row)

    def _returns(self) -> Iterator[tuple[int, int, int, int]]:
        """(events spent in Quant, event, row, window) of every promotion."""
        since: dict[tuple[int, int], int] = {}
        for row, window in np.argwhere(self.tiers[0] == Tier.QUANT).tolist():
            since[row, window] = 0
        for position in self.positions[1:]:
            if not isinstance(position, RoutingEvent):
                continue
            for move in position.migrations:
                key = (int(move["layer"]), int(move["window"]))
                if int(move["move"]) & 15 == Tier.QUANT:
                    since[key] = position.event_id
                elif int(move["move"]) == PROMOTED:
                    yield position.event_id - since.get(key, 0), position.event_id, *key

    def _promotion(self) -> Place | None:
        found = [item for item in self._returns() if item[2] == self.row] or list(self._returns())
        if not found:
            return None
        _, event, row, window = max(found, key=lambda item: item[1])
        return Place(event, row, (window,))

    def _return(self) -> Place | None:
        found = list(self._returns())
        if not found:
            return None
        _, event, row, window = max(found, key=lambda item: (item[0], -item[1]))
        return Place(event, row, (window,))

    def _predict(self, later: int) -> Place | None:
        """An event of the scored row at which windows go different ways, or the moment before it."""
        best: tuple[int, int, tuple[int, ...]] = (0, 0, ())
        for event in range(1, len(self.positions)):
            chosen = self._ways(event)
            ways = len({self.tier(event, self.row, window) for window in chosen})
            kinds = len({self.moves(event, self.row).get(window) for window in chosen})
            if ways == 3 and (kinds, event) > best[:2]:
                best = (kinds, event, chosen)
        return Place(best[1] - 1 + later, self.row, best[2]) if best[2] else None

    def _ways(self, event: int) -> tuple[int, ...]:
        """At most four windows of one event, one for each way to go, and one that stays."""
        moved = self.moves(event, self.row)
        chosen: dict[tuple[Tier, Tier], int] = {}
        for window, way in sorted(moved.items()):
            chosen.setdefault(way, window)
        taken = list(chosen.values())
        for tier in (Tier.FULL, Tier.QUANT):
            stay = [w for w in np.flatnonzero(self.tiers[event][self.row] == tier).tolist() if w not in moved]
            far = [w for w in stay if all(abs(w - other) > 3 for other in taken)]
            if len(taken) < 4 and far:
                taken.append(far[len(far) // 2])
        return tuple(sorted(taken[:4]))

    def _regret(self) -> Place | None:
        found = [
            (mass, event, row, window)
            for event, late in self.late.items()
            if late.steps >= ENOUGH_FUTURE
            for row, window, mass in late.regret
        ]
        if not found:
            return None
        _, event, row, window = max(found)
        return Place(event, row, (window,))

    def missed(self, event: int, row: int, window: int) -> float:
        """Attention of the following tokens that an evicted window would have got, as a share."""
        late = self.late.get(event)
        found = [mass for r, w, mass in (late.regret if late else []) if (r, w) == (row, window)]
        return found[0] if found else 0.0

    def gone_since(self, event: int, row: int, window: int) -> int | None:
        """The event at which a window was evicted, up to `event`; None where it was not."""
        for earlier in range(event + 1):
            if self.tier(earlier, row, window) == Tier.EVICTED:
                return earlier
        return None

    def quantized_since(self, event: int, row: int, window: int) -> int:
        """The last event before `event` at which a window came to Quant."""
        at = event - 1
        while at > 0 and self.tier(at - 1, row, window) == Tier.QUANT:
            at -= 1
        return at


def _shares(event: ScoreEvent) -> NDArray[np.float64]:
    levels = event.levels.astype(np.float64)
    shares = 10.0 ** ((levels - 255.0) * (SCORE_DECADES / 254.0))
    return np.where(event.levels > 0, shares, 0.0)


@cache
def trace_bytes(name: str) -> bytes | None:
    """A bundled trace, one wire message a line; None where there is no such trace."""
    path = FOLDER / f"{Path(name).name}.ndjson.gz"
    return gzip.decompress(path.read_bytes()) if path.is_file() else None


@cache
def load_trace(name: str) -> LessonTrace:
    """A bundled trace, read.

    Raises:
        TraceError: it is missing or can't be read.
    """
    data = trace_bytes(name)
    if data is None:
        raise TraceError(f"trace {name!r} is missing: the program's files are not complete.")
    return LessonTrace(name, [decode(line) for line in data.splitlines()])
