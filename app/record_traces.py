"""Records the runs that come with the product into assets/traces: `python -m app.record_traces [NAME ...]`.

Runs that are compared follow the tokens of the first one, so that what differs is the cache alone.
Knows the engine, the sample documents and the presets; knows no server.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from app.documents import get_document
from app.settings import ASSETS
from engine.config import QEvictConfig
from engine.models import LoadedModel, load_model
from engine.run import Run
from engine.run_options import RunOptions
from engine.trace import (
    LateMetrics,
    Progress,
    RoutingEvent,
    RunMeta,
    ScoreEvent,
    StepEvent,
    Tier,
    TraceEvent,
    encode,
)
from presets.loader import load_preset

FOLDER = ASSETS / "traces"
MOST_REGRET = 64
"""Regretted windows kept per event where the trace is there for its figures."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One run to record.

    Attributes:
        name: the trace's id and the file's stem.
        document, preset: what is read, and how.
        options: how it is generated.
        follows: the recording whose tokens it is fed; None = it chooses its own.
        lean: leave out scores, which only the board's small print needs.
    """

    name: str
    document: str
    preset: str
    options: RunOptions = field(default_factory=RunOptions)
    follows: str | None = None
    lean: bool = False


OWN = RunOptions(max_new_tokens=200, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
LED = RunOptions(max_new_tokens=200, ignore_eos=True, keyframe_every=1000)

RECORDINGS = (
    Recording("first", "bakery-order-book", "paper-20", OWN),
    Recording("tokens", "bakery-order-book", "r1", LED, "first", lean=True),
    Recording("coarse", "bakery-order-book", "r4", LED, "first", lean=True),
    Recording("q-0", "bakery-order-book", "r2", LED, "first", lean=True),
    Recording("q-30", "bakery-order-book", "q-30", LED, "first", lean=True),
    Recording("q-90", "bakery-order-book", "q-90", LED, "first", lean=True),
    Recording("one-way", "bakery-order-book", "promotion-off", LED, "first", lean=True),
)
"""Every bundled run; the embedded model, float16 keys and values."""


def run_events(
    loaded: LoadedModel, recording: Recording, tokens: Sequence[int] = (), row: int | None = None
) -> list[TraceEvent]:
    """The events of one run. `tokens` are fed if there are any; scores are of board row `row`, or of each in turn."""
    config: QEvictConfig = load_preset(recording.preset).config
    prompt = get_document(recording.document).text
    run = Run(loaded, prompt, config, recording.options, "recorded", "qevict", "", None)
    run.given = tokens
    watched = None if row is None else (lambda: row)
    return list(run.events(watched, None))


def token_ids(events: Sequence[TraceEvent]) -> list[int]:
    """What the run generated."""
    return [token for event in events if isinstance(event, StepEvent) for token in event.ids]


def liveliest_row(events: Sequence[TraceEvent]) -> int:
    """The board row in which most windows came back to Full."""
    counts = [0] * next(event.rows for event in events if isinstance(event, RunMeta))
    for event in events:
        if isinstance(event, RoutingEvent):
            back = event.migrations[event.migrations["move"] == (Tier.QUANT << 4 | Tier.FULL)]
            for row in back["layer"].tolist():
                counts[row] += 1
    return counts.index(max(counts))


def kept(events: Sequence[TraceEvent], recording: Recording) -> Iterator[TraceEvent]:
    """What goes into the file: no progress, and of a lean recording no scores and only the largest regrets."""
    for event in events:
        if isinstance(event, Progress) or (recording.lean and isinstance(event, ScoreEvent)):
            continue
        if recording.lean and isinstance(event, LateMetrics):
            object.__setattr__(event, "regret", event.regret[:MOST_REGRET])
        yield event


def with_scores_of(events: Sequence[TraceEvent], watched: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """`events`, and after each of its score events the one of the same run that watched a single row."""
    extra = {event.event_id: event for event in watched if isinstance(event, ScoreEvent)}
    for event in events:
        yield event
        if isinstance(event, ScoreEvent) and extra[event.event_id].row != event.row:
            yield extra[event.event_id]


def record(loaded: LoadedModel, recording: Recording, tokens: Sequence[int]) -> list[TraceEvent]:
    """One recording, numbered from 0 by whoever encodes it."""
    events = run_events(loaded, recording, tokens)
    if recording.lean:
        return list(kept(events, recording))
    again = run_events(loaded, recording, tokens, liveliest_row(events))
    if token_ids(again) != token_ids(events):
        raise RuntimeError(f"{recording.name} said something else the second time: record on a quiet machine.")
    return list(kept(list(with_scores_of(events, again)), recording))


def main(names: Sequence[str]) -> None:
    """Writes the recordings called `names`, or all."""
    torch.set_num_threads(1)
    loaded = load_model("embedded")
    FOLDER.mkdir(parents=True, exist_ok=True)
    said: dict[str, list[int]] = {}
    for recording in RECORDINGS:
        needed = not names or recording.name in names or recording.name in {r.follows for r in RECORDINGS}
        if not needed:
            continue
        events = record(loaded, recording, said[recording.follows] if recording.follows else ())
        said[recording.name] = token_ids(events)
        if names and recording.name not in names:
            continue
        lines = [encode(event, seq) for seq, event in enumerate(events)]
        path = FOLDER / f"{recording.name}.ndjson.gz"
        path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", 9, mtime=0))
        print(f"{path.name}: {len(lines)} events, {path.stat().st_size / 1000:.1f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
