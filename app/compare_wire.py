"""What a comparison sends to the browser: its frames packed, its figures step by step. No words: the page has them.

Every frame is the difference to the one before (exclusive or), so that gzip makes it small. Knows the engine's result;
knows no route.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.compare_request import SINK_TOKENS, WINDOW
from app.texts import all_texts

if TYPE_CHECKING:
    from app.compare_record import Outcome
    from engine.compare import CompareResult, Frame, SystemResult

LARGEST = 24_000_000
"""Bytes of all frames above which the heads of a layer are sent as their mean."""
Shares = NDArray[np.uint8]


def to_wire(outcome: Outcome) -> dict[str, Any]:
    """The comparison as plain values.

    `systems[].frames[]`: {"t": tokens known, "w": windows, "f", "q": base64 of uint8 [rows, windows], shares in
    255ths of a window's tokens in full precision and in codes, each xor the frame before; "s": base64 of uint8
    [rows, 2], the same of the sink tokens in front of the windows: full precision, codes}. In free mode each system
    has its own `pieces` after the prompt, and `first_difference`, the first new token that is not FullKV's.
    """
    result = outcome.result
    layers = num_layers(result)
    sizes = sum(frame.full.size * 2 for system in result.systems for frame in system.frames)
    return {
        "mode": result.mode,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "sink_tokens": SINK_TOKENS,
        "window_size": WINDOW,
        "layers": layers,
        "kv_dtype": result.kv_dtype,
        "pieces": result.pieces,
        "longest": max(len(result.token_ids), *(len(system.token_ids) for system in result.systems), 0),
        "systems": [
            _system(system, agrees, layers, mean=sizes > LARGEST)
            for system, agrees in zip(result.systems, outcome.agrees, strict=True)
        ],
    }


def num_layers(result: CompareResult) -> int:
    """Layers that rows of frames stand for; heads of one layer lie side by side."""
    rows = [system.frames[0].full.shape[0] for system in result.systems if system.frames]
    known = [len(system.output_error) for system in result.systems if system.output_error]
    return max(1, known[0] if known else min(rows, default=1))


def _system(system: SystemResult, agrees: list[bool], layers: int, *, mean: bool) -> dict[str, Any]:
    key = f"systems.{system.name.replace('-', '_')}"
    rows = max((frame.full.shape[0] for frame in system.frames), default=layers)
    if mean:
        rows = layers
    return {
        "name": system.name,
        "key": key if key in all_texts("en") else "",
        "keeps": system.keeps,
        "simulated": system.storage != "real",
        "bytes": system.bytes,
        "share": system.share,
        "rows": rows,
        "kl": [round(value, 6) for value in system.kl_steps],
        "agrees": [int(agreed) for agreed in agrees],
        "first_difference": system.first_difference,
        "pieces": system.pieces,
        "frames": _frames(system.frames, rows),
    }


def _frames(frames: list[Frame], rows: int) -> list[dict[str, Any]]:
    out = []
    before: list[Shares] | None = None
    for frame in frames:
        now = [_with_rows(share, rows) for share in (frame.full, frame.quant, frame.sink)]
        packed = [_packed(share, None if before is None else before[place]) for place, share in enumerate(now)]
        out.append({"t": frame.columns, "w": now[0].shape[1], "f": packed[0], "q": packed[1], "s": packed[2]})
        before = now
    return out


def _with_rows(shares: Shares, rows: int) -> Shares:
    """Heads that were all alike are repeated; where fewer rows are wanted, heads are averaged."""
    have = shares.shape[0]
    if have < rows:
        return shares.repeat(rows // have, axis=0)
    if have > rows:
        mean: Shares = shares.reshape(rows, have // rows, -1).mean(1).round().astype(np.uint8)
        return mean
    return shares


def _packed(now: Shares, before: Shares | None) -> str:
    if before is not None:
        known = np.zeros_like(now)
        width = min(before.shape[1], now.shape[1])
        known[:, :width] = before[:, :width]
        now = now ^ known
    return base64.b64encode(np.ascontiguousarray(now).tobytes()).decode("ascii")
