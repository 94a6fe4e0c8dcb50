"""QEvict by brute force: dictionaries, loops and float64, one token and one head at a time.

Shares no code with the engine but its configuration, its tier numbers and the capacities of a plan. It is fed the
same queries, keys and values as the cache and answers with attention outputs, scores, tiers and codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config import QEvictConfig
from engine.trace import Tier

Array = NDArray[Any]


def half_down(value: float) -> np.float16:
    """The largest float16 that is not above `value`."""
    half = np.float16(value)
    return np.nextafter(half, np.float16(-np.inf)) if float(half) > value else half


def half_up(value: float) -> np.float16:
    """The smallest float16 that is not below `value`."""
    half = np.float16(value)
    return np.nextafter(half, np.float16(np.inf)) if float(half) < value else half


def quantize_line(values: Array, bits: int) -> tuple[list[int], float, float]:
    """Codes, scale and zero of one line of numbers (a key channel over tokens, or a value token over channels)."""
    levels = 2**bits - 1
    zero = float(half_down(float(min(values))))
    scale = float(half_up(max((float(max(values)) - zero) / levels, 2.0**-14)))
    return [min(levels, max(0, round((float(x) - zero) / scale))) for x in values], scale, zero


def turn(key: Array, position: int, inv_freq: Array, scale: float = 1.0, *, back: bool = False) -> Array:
    """RoPE of one key by complex numbers: channel i with channel i + r; the rest passes through."""
    r = len(inv_freq)
    out = key.astype(np.float64).copy()
    z = out[:r] + 1j * out[r : 2 * r]
    angle = np.exp(1j * position * inv_freq)
    z = z / angle / scale if back else z * angle * scale
    out[:r], out[r : 2 * r] = z.real, z.imag
    return out


@dataclass
class Entry:
    """One ledger entry: codes by (kind, head, line), and what they mean."""

    codes: dict[tuple[str, int, int, int], list[int]] = field(default_factory=dict)
    key: dict[tuple[int, int], Array] = field(default_factory=dict)
    """(head, place) to the pre-RoPE key."""
    value: dict[tuple[int, int], Array] = field(default_factory=dict)


@dataclass
class Row:
    """One decision: a layer, a batch row and the KV heads that share it."""

    layer: int
    batch: int
    heads: list[int]
    key: dict[tuple[int, int], Array] = field(default_factory=dict)
    """(KV head, column) to the post-RoPE key that a query sees."""
    value: dict[tuple[int, int], Array] = field(default_factory=dict)
    tier: dict[int, Tier] = field(default_factory=dict)
    """Block to tier."""
    entries: dict[int, Entry] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    pending: list[tuple[bool, dict[int, float]]] = field(default_factory=list)
    """Masses of each query since the last event: (came in a multi-token forward, block to mass)."""
    ever_evicted: set[int] = field(default_factory=set)


@dataclass
class Event:
    """Tiers and scores of one routing event, by row index and block."""

    columns: int
    before: list[dict[int, Tier]]
    after: list[dict[int, Tier]]
    ranked: list[dict[int, float]]
    gap: float
    """Smallest distance between the ranks of two candidates of one row."""


class Oracle:
    """A whole cache. Arrays are [batch, heads, tokens, head_dim]; keys are post-RoPE."""

    def __init__(
        self,
        config: QEvictConfig,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        pads: list[int],
        shift: list[int],
        local_tokens: int,
        full_capacity: list[int],
        quant_capacity: list[int],
        inv_freq: Array,
        scale: float,
        rope_scale: float = 1.0,
        softcap: float | None = None,
        stored: Any = np.float32,
    ) -> None:
        self.config, self.layers, self.heads, self.kv_heads = config, layers, heads, kv_heads
        self.pads, self.shift, self.local_tokens = pads, shift, local_tokens
        self.full_capacity, self.quant_capacity = full_capacity, quant_capacity
        self.inv_freq, self.scale, self.rope_scale, self.softcap = inv_freq, scale, rope_scale, softcap
        self.stored = stored
        self.columns, self.staged = 0, False
        self.events: list[Event] = []
        groups = [[g] for g in range(kv_heads)] if config.score_scope == "kv_head" else [list(range(kv_heads))]
        self.rows = [Row(layer, b, g) for layer in range(layers) for b in range(len(pads)) for g in groups]

    # ---- the grid, written down once more

    def block(self, column: int) -> int:
        """Block of a column: the sink ends on a block border."""
        return (column + -self.config.sink_tokens % self.config.window_size) // self.config.window_size

    def block_columns(self, block: int) -> range:
        first = block * self.config.window_size - -self.config.sink_tokens % self.config.window_size
        return range(first, first + self.config.window_size)

    def sink_blocks(self, row: Row) -> range:
        pad = self.pads[row.batch]
        first = self.block(pad)
        count = math.ceil(self.config.sink_tokens / self.config.window_size) + (1 if pad else 0)
        return range(first, first + count)

    # ---- one forward

    def forward(self, new: list[tuple[Array, Array, Array]]) -> list[Array]:
        """Queries, keys and values of every layer; returns the attention outputs of every layer."""
        tokens = new[0][0].shape[2]
        if tokens == 0:
            return [q.astype(np.float64) for q, _, _ in new]
        if tokens == 1 and self.staged:
            self.route()
        start = self.columns
        self.columns += tokens
        for row in self.rows:
            _, keys, values = new[row.layer]
            for head in row.heads:
                for t in range(tokens):
                    if start + t >= self.pads[row.batch]:
                        key, value = keys[row.batch, head, t], values[row.batch, head, t]
                        if tokens == 1:
                            key, value = key.astype(self.stored), value.astype(self.stored)
                        row.key[head, start + t] = key.astype(np.float64)
                        row.value[head, start + t] = value.astype(np.float64)
        outputs = [np.zeros(q.shape) for q, _, _ in new]
        for row in self.rows:
            for t in range(tokens):
                if start + t >= self.pads[row.batch]:
                    self._attend(row, start + t, new[row.layer][0], t, outputs[row.layer], many=tokens > 1)
        if tokens > 1:
            self.staged = True
            if self.config.prefill_routing == "chunk":
                self.route()
        elif (self.columns + -self.config.sink_tokens % self.config.window_size) % self.config.interval == 0:
            self.route()
        return outputs

    def _attend(self, row: Row, column: int, query: Array, t: int, out: Array, *, many: bool) -> None:
        per_kv = self.heads // self.kv_heads
        masses: dict[int, float] = {}
        for head in row.heads:
            seen = sorted(c for h, c in row.key if h == head and c <= column)
            keys = np.stack([row.key[head, c] for c in seen])
            values = np.stack([row.value[head, c] for c in seen])
            for q_head in range(head * per_kv, (head + 1) * per_kv):
                logits = keys @ query[row.batch, q_head, t].astype(np.float64) * self.scale
                if self.softcap is not None:
                    logits = self.softcap * np.tanh(logits / self.softcap)
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                out[row.batch, q_head, t] = weights @ values
                power = self.config.norm_p if self.config.ranker == "p_norm" else 1.0
                for c, weight in zip(seen, weights, strict=True):
                    block = self.block(c)
                    masses[block] = masses.get(block, 0.0) + float(weight) ** power / (len(row.heads) * per_kv)
        row.pending.append((many, masses))

    # ---- one event

    def route(self) -> None:
        before, after, ranked, gap = [], [], [], math.inf
        for row in self.rows:
            self._settle_scores(row)
            old = {b: row.tier.get(b, Tier.LOCAL) for b in range(self.block(self.columns - 1) + 1)}
            for block in old:
                if block < self.sink_blocks(row).start:
                    old[block] = Tier.EMPTY
                elif block in self.sink_blocks(row):
                    old[block] = Tier.SINK
            table = {b: self._rank(row, b) for b, tier in old.items() if self._competes(row, b, tier)}
            values = sorted(table.values())
            gap = min([gap, *(b - a for a, b in pairwise(values))])
            new = dict(old)
            new.update(self._decide(row, table, old))
            self._move(row, old, new)
            row.tier = dict(new)
            before.append(old)
            after.append(new)
            ranked.append(table)
        self.staged = False
        self.events.append(Event(self.columns, before, after, ranked, gap))

    def _competes(self, row: Row, block: int, tier: Tier) -> bool:
        whole_and_old = self.block_columns(block).stop <= self.columns - self.local_tokens
        return tier in (Tier.FULL, Tier.QUANT) or (tier == Tier.LOCAL and whole_and_old)

    def _settle_scores(self, row: Row) -> None:
        many = sum(1 for came, _ in row.pending if came)
        last = self.config.prefill_queries
        decay = 0.5 ** (1 / self.config.decay_half_life) if self.config.ranker == "decayed" else 1.0
        passed = 0
        for came, masses in row.pending:
            row.scores = {block: score * decay for block, score in row.scores.items()}
            passed += came
            if came and last is not None and passed <= many - last:
                continue
            if self.config.ranker == "key_norm":
                continue
            for block, mass in masses.items():
                row.scores[block] = row.scores.get(block, 0.0) + mass
        row.pending = []

    def _rank(self, row: Row, block: int) -> float:
        if self.config.ranker == "key_norm":
            if row.tier.get(block) not in (Tier.FULL, Tier.QUANT):
                norms = [np.linalg.norm(row.key[h, c]) for h in row.heads for c in self.block_columns(block)]
                row.scores[block] = self.config.key_norm_sign * float(np.mean(norms))
            return row.scores[block]
        score = row.scores.get(block, 0.0)
        if self.config.age_normalised:
            score /= max(1, self.columns - max(0, self.block_columns(block).start))
        return score

    def _decide(self, row: Row, table: dict[int, float], old: dict[int, Tier]) -> dict[int, Tier]:
        order = sorted(table, key=lambda b: (-table[b], b))
        may_rise = [b for b in order if self.config.promotion or old[b] != Tier.QUANT]
        full = may_rise[: self.full_capacity[row.batch]]
        shadows = sum(1 for b in full if b in row.entries)
        rest = [b for b in order if b not in full]
        quant = rest[: max(0, self.quant_capacity[row.batch] - shadows)]
        return {b: Tier.FULL if b in full else Tier.QUANT if b in quant else Tier.EVICTED for b in order}

    def _move(self, row: Row, old: dict[int, Tier], new: dict[int, Tier]) -> None:
        for block, tier in new.items():
            if old[block] == Tier.EVICTED and tier != Tier.EVICTED:
                raise ValueError(f"block {block} came back")
            places = [(h, c) for h in row.heads for c in self.block_columns(block) if (h, c) in row.key]
            if tier == Tier.EVICTED:
                row.entries.pop(block, None)
                row.scores.pop(block, None)
                row.ever_evicted.add(block)
                for place in places:
                    del row.key[place], row.value[place]
                continue
            if tier == Tier.QUANT:
                if block not in row.entries:
                    row.entries[block] = self._quantize(row, block)
                self._show(row, block)
            else:
                for place in places:
                    row.key[place] = row.key[place].astype(self.stored).astype(np.float64)
                    row.value[place] = row.value[place].astype(self.stored).astype(np.float64)

    def _position(self, row: Row, column: int) -> int:
        return column - self.shift[row.batch]

    def _quantize(self, row: Row, block: int) -> Entry:
        entry, columns, bits = Entry(), self.block_columns(block), self.config.bits
        for head in row.heads:
            pre = np.stack(
                [
                    turn(row.key[head, c], self._position(row, c), self.inv_freq, self.rope_scale, back=True)
                    for c in columns
                ]
            )
            restored = np.zeros_like(pre)
            for channel in range(pre.shape[1]):
                codes, scale, zero = quantize_line(pre[:, channel], bits)
                entry.codes["key", head, channel, 0] = codes
                restored[:, channel] = [zero + scale * code for code in codes]
            for place, c in enumerate(columns):
                entry.key[head, place] = restored[place]
                value = row.value[head, c]
                size = self.config.value_group_size or len(value)
                parts = []
                for group in range(len(value) // size):
                    codes, scale, zero = quantize_line(value[group * size : (group + 1) * size], bits)
                    entry.codes["value", head, place, group] = codes
                    parts += [zero + scale * code for code in codes]
                entry.value[head, place] = np.array(parts)
        return entry

    def _show(self, row: Row, block: int) -> None:
        """What queries see of a Quant window: its dequantized self, rotated."""
        entry = row.entries[block]
        for head in row.heads:
            for place, c in enumerate(self.block_columns(block)):
                row.key[head, c] = turn(entry.key[head, place], self._position(row, c), self.inv_freq, self.rope_scale)
                row.value[head, c] = entry.value[head, place]
