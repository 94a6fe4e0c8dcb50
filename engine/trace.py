"""What a run emits, and its one wire form.

A run is a sequence of events. `encode` turns one into bytes (compact JSON, packed arrays in base64)
and `decode` turns them back; the same bytes go to the browser, to SQLite, to a replay file and to a
test. Every event carries `seq`, strictly increasing in a session; gaps show that something was lost.

A *cell* is one window of one board row. Board rows are layers (`score_scope="layer"`), or layer x KV
head. The trace describes batch row 0. Knows numpy; knows no torch, no server.

Rules for a reader:
    * windows are numbered by the grid: w covers positions [sink + wΩ, sink + (w+1)Ω);
    * `num_windows(seq_len)` of them have begun; one that has begun and never moved is LOCAL;
    * a `Keyframe` sets all cells; a `RoutingEvent` moves some. Moves hold from and to, so that a
      reader can step backwards; applying one twice is harmless (it sets `to`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.errors import TraceError

WIRE_VERSION = 1


class Tier(IntEnum):
    """Where a window is. The numbers are the wire's."""

    SINK = 0
    LOCAL = 1
    FULL = 2
    QUANT = 3
    EVICTED = 4
    EMPTY = 5


MIGRATION = np.dtype([("layer", "u1"), ("move", "u1"), ("window", "<u2"), ("score", "<f2")])
"""One moved window in 6 bytes: board row, from << 4 | to, window id, score in float16."""

Migrations: TypeAlias = NDArray[np.void]


def pack_migrations(
    layers: NDArray[Any], sources: NDArray[Any], targets: NDArray[Any], windows: NDArray[Any], scores: NDArray[Any]
) -> Migrations:
    """Builds the `MIGRATION` array from equally long columns; scores beyond float16 saturate."""
    out = np.zeros(len(layers), dtype=MIGRATION)
    out["layer"] = layers
    out["move"] = (np.asarray(sources, dtype=np.uint8) << 4) | np.asarray(targets, dtype=np.uint8)
    out["window"] = windows
    out["score"] = np.clip(scores, -65504.0, 65504.0)
    return out


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Persistent KV bytes of one batch row, all layers, at one moment, by what they hold.

    `local` counts whole blocks that hold local tokens. `shadow` is ledger entries whose window was
    promoted: masked, kept, and charged. `full_kv` is what FullKV would hold at the same length.
    """

    sink: int
    local: int
    full: int
    codes: int
    metadata: int
    shadow: int
    budget: int
    full_kv: int

    @property
    def persistent(self) -> int:
        """Bytes that hold something now."""
        return self.sink + self.local + self.full + self.codes + self.metadata + self.shadow

    def to_list(self) -> list[int]:
        return [getattr(self, f.name) for f in fields(self)]


@dataclass(frozen=True, slots=True)
class RunMeta:
    """First event of a run: everything that stays the same.

    Attributes:
        rows: board rows: layers, times KV heads with `score_scope="kv_head"`.
        max_windows: windows that the planned length can hold.
        full_window_bytes: persistent bytes of one Full window in one layer, index included.
        quant_window_bytes: the same in the Quant tier, codes and metadata and index.
        quant_code_bytes: its packed codes alone.
        allocated: bytes of the pools by name ("sink", "local", "full", "ledger", "lane_padding").
        pieces: the prompt's tokens as text, untrusted.
        settings: the whole configuration; `versions`: packages, engine and model.
    """

    kind: ClassVar[str] = "meta"
    session: str
    model: str
    policy: str
    num_layers: int
    rows: int
    window_size: int
    sink_tokens: int
    local_tokens: int
    max_windows: int
    kv_budget: float
    quant_share: float
    bits: int
    kv_dtype: str
    backend: str
    reference: str
    prompt_tokens: int
    planned_tokens: int
    full_window_bytes: int
    quant_window_bytes: int
    quant_code_bytes: int
    full_capacity: int
    quant_capacity: int
    total_bytes: int
    full_kv_bytes: int
    pieces: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a slow stage has come: "load", "prefill", "reference"."""

    kind: ClassVar[str] = "prog"
    stage: str
    done: int
    total: int
    seq: int = 0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Appended tokens: `seq_len` tokens are known after them; `pieces` is their text, untrusted."""

    kind: ClassVar[str] = "tok"
    seq_len: int
    pieces: list[str]
    ids: list[int] = field(default_factory=list)
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Keyframe:
    """All cells after routing event `event_id`: `tiers` is uint8 [rows, windows]."""

    kind: ClassVar[str] = "key"
    event_id: int
    seq_len: int
    tiers: NDArray[np.uint8]
    memory: MemoryReading
    seq: int = 0


@dataclass(frozen=True, slots=True)
class RoutingEvent:
    """One routing event: what moved, in all board rows.

    `route_ms` is its measured cost, None for a system that decides within its steps.
    """

    kind: ClassVar[str] = "route"
    event_id: int
    seq_len: int
    num_windows: int
    migrations: Migrations
    memory: MemoryReading
    route_ms: float | None
    promotions: int
    demotions: int
    evictions: int
    aged: int
    seq: int = 0


@dataclass(frozen=True, slots=True)
class LateMetrics:
    """What needed the future, about an **older** event. Shares in [0, 1], means over layers and heads.

    `mass_share` is (full, quant, evicted); `regret` lists (board row, window, missed mass), largest first.
    `churn` is None for the first event. `steps` < the horizon where the run ended before it.
    """

    kind: ClassVar[str] = "late"
    event_id: int
    fmm: float
    fmm_history: float
    fmm_fp_only: float
    mass_share: tuple[float, float, float]
    churn: float | None
    steps: int
    regret: list[tuple[int, int, float]] = field(default_factory=list)
    seq: int = 0


@dataclass(frozen=True, slots=True)
class ScoreEvent:
    """Scores of one board row's windows at an event, log-coded in a byte: 0 = none, else relative to `top`."""

    kind: ClassVar[str] = "score"
    event_id: int
    row: int
    top: float
    levels: NDArray[np.uint8]
    seq: int = 0


SCORE_DECADES = 5.0


def score_levels(scores: NDArray[Any]) -> tuple[float, NDArray[np.uint8]]:
    """Returns (top, levels): level 255 is the top score, 1 is `SCORE_DECADES` decades below, 0 is none."""
    values = np.asarray(scores, dtype=np.float64)
    top = float(values.max(initial=0.0))
    if top <= 0.0:
        return 0.0, np.zeros(len(values), dtype=np.uint8)
    with np.errstate(divide="ignore"):
        decades = np.log10(np.maximum(values, 0.0) / top)
    levels = np.clip(np.round(255.0 + decades * (254.0 / SCORE_DECADES)), 1, 255)
    return top, np.where(values > 0.0, levels, 0).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Mark:
    """A note on windows and an event, by a person."""

    kind: ClassVar[str] = "mark"
    event_id: int
    row: int
    windows: list[int]
    text: str
    author: str = ""
    seq: int = 0


@dataclass(frozen=True, slots=True)
class EndEvent:
    """Last event: why the run ended ("eos", "length", "stop", "interrupted", "error") and its summary."""

    kind: ClassVar[str] = "end"
    why: str
    summary: dict[str, Any] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """One clear sentence about what went wrong; an `EndEvent` follows."""

    kind: ClassVar[str] = "err"
    message: str
    run_id: str = ""
    seq: int = 0


TraceEvent: TypeAlias = (
    RunMeta | Progress | StepEvent | Keyframe | RoutingEvent | LateMetrics | ScoreEvent | Mark | EndEvent | ErrorEvent
)


def num_windows(seq_len: int, sink_tokens: int, window_size: int) -> int:
    """Windows that have begun when `seq_len` tokens are known."""
    return max(0, -(-(seq_len - sink_tokens) // window_size))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _pack_cells(tiers: NDArray[np.uint8]) -> str:
    flat = tiers.reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return _b64((flat[0::2] | (flat[1::2] << 4)).astype(np.uint8).tobytes())


def _unpack_cells(text: str, rows: int, windows: int) -> NDArray[np.uint8]:
    raw = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    flat = np.empty(raw.size * 2, dtype=np.uint8)
    flat[0::2] = raw & 15
    flat[1::2] = raw >> 4
    return flat[: rows * windows].reshape(rows, windows).copy()


def encode(event: TraceEvent, seq: int | None = None) -> bytes:
    """One event as compact JSON bytes (UTF-8, no newline); `seq` overrides the event's own."""
    number = event.seq if seq is None else seq
    body: dict[str, Any] = {"k": event.kind, "s": number}
    match event:
        case RunMeta():
            body["v"] = WIRE_VERSION
            body.update({f.name: getattr(event, f.name) for f in fields(event) if f.name != "seq"})
        case StepEvent():
            body.update(t=event.seq_len, p=event.pieces, i=event.ids)
        case Keyframe():
            rows, windows = event.tiers.shape
            body.update(r=event.event_id, t=event.seq_len, rows=rows, n=windows)
            body.update(b=_pack_cells(event.tiers), mem=event.memory.to_list())
        case RoutingEvent():
            body.update(r=event.event_id, t=event.seq_len, n=event.num_windows, mv=len(event.migrations))
            body.update(b=_b64(event.migrations.tobytes()), mem=event.memory.to_list())
            body.update(ms=None if event.route_ms is None else round(event.route_ms, 3))
            body.update(c=[event.promotions, event.demotions, event.evictions, event.aged])
        case LateMetrics():
            body.update(r=event.event_id, fmm=_short(event.fmm), fmm_hist=_short(event.fmm_history))
            body.update(fmm_fp=_short(event.fmm_fp_only), mass=[_short(x) for x in event.mass_share])
            body.update(churn=None if event.churn is None else _short(event.churn), h=event.steps)
            body.update(regret=[[row, window, _short(mass)] for row, window, mass in event.regret])
        case ScoreEvent():
            body.update(r=event.event_id, l=event.row, top=_short(event.top), b=_b64(event.levels.tobytes()))
        case Mark():
            body.update(r=event.event_id, l=event.row, w=event.windows, text=event.text, by=event.author)
        case EndEvent():
            body.update(why=event.why, summary=event.summary)
        case ErrorEvent():
            body.update(msg=event.message, run=event.run_id)
        case Progress():
            body.update(stage=event.stage, done=event.done, total=event.total)
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def decode(data: bytes | str) -> TraceEvent:
    """The event that `encode` wrote.

    Raises:
        TraceError: not JSON, an unknown kind or version, or fields that do not fit.
    """
    try:
        body = json.loads(data)
        if body["k"] == "meta" and body["v"] != WIRE_VERSION:
            raise TraceError(f"trace version must be {WIRE_VERSION}, got {body['v']}: made by another release.")
        return _build(body)
    except TraceError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise TraceError(f"not a trace event: {error}.") from error


def _build(body: dict[str, Any]) -> TraceEvent:
    seq = int(body["s"])
    match body["k"]:
        case "meta":
            names = {f.name for f in fields(RunMeta)} - {"seq"}
            return RunMeta(**{name: body[name] for name in names if name in body}, seq=seq)
        case "tok":
            return StepEvent(body["t"], list(body["p"]), list(body.get("i", [])), seq)
        case "key":
            tiers = _unpack_cells(body["b"], body["rows"], body["n"])
            return Keyframe(body["r"], body["t"], tiers, MemoryReading(*body["mem"]), seq)
        case "route":
            moves = np.frombuffer(base64.b64decode(body["b"]), dtype=MIGRATION).copy()
            promotions, demotions, evictions, aged = body["c"]
            return RoutingEvent(
                body["r"],
                body["t"],
                body["n"],
                moves,
                MemoryReading(*body["mem"]),
                body["ms"],
                promotions,
                demotions,
                evictions,
                aged,
                seq,
            )
        case "late":
            full, quant, evicted = body["mass"]
            regret = [(int(row), int(window), float(mass)) for row, window, mass in body["regret"]]
            return LateMetrics(
                body["r"],
                body["fmm"],
                body["fmm_hist"],
                body["fmm_fp"],
                (full, quant, evicted),
                body["churn"],
                body["h"],
                regret,
                seq,
            )
        case "score":
            levels = np.frombuffer(base64.b64decode(body["b"]), dtype=np.uint8).copy()
            return ScoreEvent(body["r"], body["l"], body["top"], levels, seq)
        case "mark":
            return Mark(body["r"], body["l"], list(body["w"]), body["text"], body["by"], seq)
        case "end":
            return EndEvent(body["why"], body["summary"], seq)
        case "err":
            return ErrorEvent(body["msg"], body["run"], seq)
        case "prog":
            return Progress(body["stage"], body["done"], body["total"], seq)
        case other:
            raise TraceError(f"unknown event kind {other!r}.")


def decode_all(rows: Sequence[bytes] | Iterator[bytes]) -> Iterator[TraceEvent]:
    """Decodes rows one after the other."""
    for row in rows:
        yield decode(row)
