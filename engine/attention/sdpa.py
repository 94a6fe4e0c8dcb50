"""Torch's attention with its log-sum-exp over every part, merged; windows are scored later.

Decode: arena by torch's kernel, live ledger entries by `ledger.py`, merged by log-sum-exp; the query
and its log-sum-exp go into the ring. Prompt: flash attention below the diagonal, row by row without
padding, then column masses in chunks. No probabilities of a whole prompt are materialised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.eager import block_sums
from engine.attention.ledger import attend_ledger, ledger_logits
from engine.attention.softmax import NO_KEYS, attend, merge
from engine.attention.state import KVState
from engine.quant import LANES
from engine.scores import group_mean, key_masses, prompt_column_masses

SCORING_BYTES = 16 * 2**20
"""Workspace of deferred scoring on a CPU: what fits its caches is fastest."""
SCORING_BYTES_DEVICE = 512 * 2**20


class SdpaBackend:
    """Partitions merged by log-sum-exp; deferred scoring."""

    name = "sdpa"
    scores_in_step = False

    @property
    def scores_codes(self) -> bool:
        """Whether decode scores windows of the Quant tier itself."""
        return self.scores_in_step

    @property
    def workspace_bytes(self) -> int:
        """Bytes that steps write and read again; torch's own temporaries are not counted."""
        return 0

    def decode(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Stores one token per row; query [B, H_q, 1, d] → (out, lse [B, H_q])."""
        state.append(layer, key, value)
        out, lse = merge(self._pools(state, layer, query, scale, softcap))
        return out.to(query.dtype), lse[..., 0]

    def _pools(
        self, state: KVState, layer: int, query: Tensor, scale: float, softcap: float | None
    ) -> list[tuple[Tensor, Tensor]]:
        key, value, bias = state.arena(layer)
        arena = self.attend_full(query, key, value, bias, scale, softcap)
        if not state.live_used:
            return [arena]
        return [arena, attend_ledger(state, layer, query, scale=scale, softcap=softcap)]

    def attend_full(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """The full-precision part: (out, lse)."""
        dtype = query.dtype
        return attend(query, key.to(dtype), value.to(dtype), scale=scale, bias=bias, softcap=softcap)

    def ingest(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        *,
        start: int,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> Tensor:
        """Queries [B, H_q, T, d] at columns `start` on, over pools and staging; scores them all."""
        staging = state.staging
        if staging is None:
            raise RuntimeError("a multi-token forward must be staged")
        key, value = staging.layer(layer)
        past = start - staging.start
        out = torch.zeros_like(query)
        lse = torch.full(query.shape[:3], NO_KEYS, device=query.device)
        for row, pad in enumerate(state.pads):
            skip = min(max(0, pad - start), query.shape[2])
            if skip == query.shape[2]:
                continue
            hidden = max(0, pad - staging.start)
            q = query[row : row + 1, :, skip:]
            k, v = key[row : row + 1], value[row : row + 1]
            now = slice(past + skip, None)
            parts = [attend(q, k[:, :, now], v[:, :, now], scale=scale, causal=True, softcap=softcap)]
            if past > hidden:
                before = slice(hidden, past)
                parts.append(attend(q, k[:, :, before], v[:, :, before], scale=scale, softcap=softcap))
            part_out, part_lse = merge(parts)
            out[row, :, skip:], lse[row, :, skip:] = part_out[0].to(out.dtype), part_lse[0]
        if state.store is not None:
            out, lse = merge([(out, lse), *self._pools(state, layer, query, scale, softcap)])
        if state.ranker.uses_attention:
            self._score_ingest(state, layer, query, lse, start, scale, softcap, weights)
        return out.to(query.dtype)

    def _score_ingest(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        lse: Tensor,
        start: int,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> None:
        staging = state.staging
        if staging is None:
            return
        key, _ = staging.layer(layer)
        scores = staging.layer_scores(layer)
        groups = state.shape.groups
        for row, pad in enumerate(state.pads):
            one = slice(row, row + 1)
            scores[row * groups : (row + 1) * groups] += self.staged_masses(
                state,
                query[one],
                key[one],
                lse[one],
                start=start,
                pad=pad,
                scale=scale,
                softcap=softcap,
                weights=weights,
            )
        if state.store is not None:
            score_pools(state, layer, query, lse, scale=scale, softcap=softcap, weights=weights, columns=None)

    def staged_masses(
        self,
        state: KVState,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        *,
        start: int,
        pad: int,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> Tensor:
        """Block sums of one batch row's queries [1, H_q, T, d] over its staged keys, [G, blocks]."""
        staging = state.staging
        if staging is None:
            raise RuntimeError("prompt scores need staged keys")
        columns = prompt_column_masses(
            query,
            key,
            lse,
            scale=scale,
            softcap=softcap,
            query_start=start,
            key_start=staging.start,
            first_valid=pad,
            weights=weights,
            power=state.ranker.power,
        )
        return block_sums(state, group_mean(columns[None], state.shape.groups))


def layers_at_once(state: KVState, tokens: int) -> int:
    """Layers whose `tokens` queries are scored together: all, or as many as a bounded workspace holds."""
    shape = state.shape
    keys = state.arena_used + -(-state.live_used // LANES) * LANES
    # Keys in float32 with their rotation's temporaries, and the logits with theirs.
    numbers = 3 * shape.num_kv_heads * shape.head_dim + 2 * state.num_heads * tokens
    each = 4 * numbers * keys * state.config.window_size * shape.batch
    bound = SCORING_BYTES if state.device.type == "cpu" else SCORING_BYTES_DEVICE
    return max(1, min(shape.num_layers, bound // max(1, each)))


def score_pools(
    state: KVState,
    layer: int,
    query: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    weights: Tensor | None,
    columns: Tensor | None,
    layers: int = 1,
    codes: bool = True,
) -> None:
    """Adds the masses of queries [layers·B, H_q, T, d] to the windows of one layer, or of several from it on.

    `columns` are the queries' columns [T]; None = they all come after every pooled token. `codes`: the Quant
    tier's windows too.
    """
    window = state.config.window_size
    key, _, bias = state.arena(layer, layers)
    visible = bias >= 0
    if columns is not None:
        store, part = state.pool, state.layer_slice(layer, layers)
        at = store.columns(store.arena_ids[part, : state.arena_used]).flatten(1)
        at = at.view(query.shape[0], state.shape.groups, 1, -1)
        visible = visible & (at <= columns[None, None, :, None])
    masses = key_masses(
        query,
        key,
        lse,
        scale=scale,
        softcap=softcap,
        visible=visible,
        weights=weights,
        power=state.ranker.power,
    )
    arena = group_mean(masses, state.shape.groups).unflatten(1, (-1, window)).sum(-1)
    ledger = None
    if codes and state.live_used:
        logits, _ = ledger_logits(state, layer, query, scale=scale, softcap=softcap, layers=layers)
        rows, tokens = layers * state.shape.rows_per_layer, query.shape[2]
        normal = lse.reshape(rows, state.shape.heads, 1, state.group_heads * tokens, 1, 1)
        mass = logits.sub_(normal).exp_()
        if state.ranker.power != 1.0:
            mass = mass**state.ranker.power
        if weights is not None:
            mass = mass * weights.repeat(state.group_heads)[:, None, None]
        # Mean over the group's query heads, sum over queries and tokens: [R, places].
        total = mass.sum((3, 4)).sum(1) / (state.shape.heads * state.group_heads)
        ledger = total.reshape(rows, -1)
    state.add_scores(layer, arena, ledger, layers)
