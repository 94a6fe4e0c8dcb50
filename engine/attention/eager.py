"""The readable reference: one joint softmax over everything accessible, in float32.

Materialises probabilities, so that window scores are plain sums of them. Slow; every other backend
must agree with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.state import KVState
from engine.quant import LANES
from engine.scores import group_mean

QUERY_CHUNK = 256


class EagerBackend:
    """Joint softmax over arena, live ledger entries and staging."""

    name = "eager"
    scores_in_step = True
    scores_codes = True
    workspace_bytes = 0

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
        """Stores one token per row; query [B, H_q, 1, d] → (out, None); adds its masses to the scores."""
        state.append(layer, key, value)
        return self._attend(state, layer, query, scale, softcap, start=state.columns - 1, weights=None), None

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
        parts = []
        for begin in range(0, query.shape[2], QUERY_CHUNK):
            chunk = query[:, :, begin : begin + QUERY_CHUNK]
            chosen = None if weights is None else weights[begin : begin + QUERY_CHUNK]
            parts.append(self._attend(state, layer, chunk, scale, softcap, start=start + begin, weights=chosen))
        return torch.cat(parts, dim=2)

    def _attend(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        scale: float,
        softcap: float | None,
        *,
        start: int,
        weights: Tensor | None,
    ) -> Tensor:
        keys, values, visible, sizes = self._accessible(state, layer, start, query.shape[2])
        batch, heads, tokens, dim = query.shape
        kv = state.shape.num_kv_heads
        grouped = query.reshape(batch, kv, heads // kv, tokens, dim).float()
        logits = grouped @ keys.unsqueeze(2).transpose(-1, -2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible.unsqueeze(2), -torch.inf)
        probs = logits.softmax(-1).nan_to_num(0.0)  # a pad query sees nothing
        out = (probs @ values.unsqueeze(2)).reshape(batch, heads, tokens, dim)
        if state.ranker.uses_attention:
            self._score(state, layer, probs.reshape(batch, heads, tokens, -1), sizes, weights)
        return out.to(query.dtype)

    def _accessible(
        self, state: KVState, layer: int, start: int, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]:
        """Keys, values [B, H_kv, K, d] float32, visibility [B, H_kv, T, K], sizes of the three parts."""
        shape, device = state.shape, state.device
        columns = torch.arange(start, start + tokens, device=device)
        pads = torch.tensor(state.pads, device=device)
        keys, values, seen = [], [], []
        arena = ledger = staged = 0
        if state.store is not None:
            key, value, bias = state.arena(layer)
            keys.append(key.float())
            values.append(value.float())
            arena = key.shape[2]
            seen.append(bias >= 0)
            if state.live_used:
                key, value, live = self._ledger(state, layer)
                keys.append(key)
                values.append(value)
                ledger = key.shape[2]
                seen.append(live)
        if state.staging is not None:
            key, value = state.staging.layer(layer)
            keys.append(key.float())
            values.append(value.float())
            staged = key.shape[2]
            at = torch.arange(state.staging.start, state.staging.end, device=device)
            allowed = (at[None, None, :] <= columns[None, :, None]) & (at[None, None, :] >= pads[:, None, None])
            seen.append(allowed.unsqueeze(1))
        visible = torch.cat([part.expand(shape.batch, shape.num_kv_heads, tokens, part.shape[-1]) for part in seen], -1)
        awake = (columns[None, :] >= pads[:, None])[:, None, :, None]
        return torch.cat(keys, 2), torch.cat(values, 2), visible & awake, (arena, ledger, staged)

    def _ledger(self, state: KVState, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Dequantized, rotated entries [B, H_kv, places·Ω, d] and which of them are live."""
        store, shape = state.pool, state.shape
        part = state.layer_slice(layer)
        places = -(-state.live_used // LANES) * LANES
        n = torch.arange(part.start, part.stop, device=state.device).repeat_interleave(places)
        slot = torch.arange(places, device=state.device).repeat(shape.rows_per_layer)
        ids = store.ledger_ids[n, slot]
        shift = state.row_shift[n]
        positions = (store.columns(ids.clamp_min(0)) - shift[:, None]).clamp_min(0)
        key, value = store.dequantized(n, slot, positions, state.rope)

        def spread(tensor: Tensor) -> Tensor:
            rows = tensor.view(shape.rows_per_layer, places, shape.heads, state.config.window_size, shape.head_dim)
            return rows.transpose(1, 2).reshape(shape.batch, shape.num_kv_heads, -1, shape.head_dim)

        live = (ids >= 0).repeat_interleave(state.config.window_size)
        return spread(key), spread(value), live.view(shape.batch, shape.groups, 1, -1)

    def _score(
        self, state: KVState, layer: int, probs: Tensor, sizes: tuple[int, int, int], weights: Tensor | None
    ) -> None:
        """Adds Σ weight · a^power to every accessible window of the layer."""
        window = state.config.window_size
        mass = probs**state.ranker.power if state.ranker.power != 1.0 else probs
        total = mass.sum(2) if weights is None else torch.einsum("t,bhtk->bhk", weights, mass)
        rows = group_mean(total, state.shape.groups)
        arena, ledger, _ = sizes
        if arena:
            state.add_scores(layer, rows[:, :arena].unflatten(1, (-1, window)).sum(-1), None)
        if ledger:
            part = rows[:, arena : arena + ledger].unflatten(1, (-1, window)).sum(-1)
            state.add_scores(layer, None, part)
        if state.staging is not None:
            scores = state.staging.layer_scores(layer)
            scores += block_sums(state, rows[:, arena + ledger :])


def block_sums(state: KVState, masses: Tensor) -> Tensor:
    """Column masses over staged columns [R, columns], summed by block: [R, staged blocks]."""
    staging = state.staging
    if staging is None:
        raise RuntimeError("nothing is staged")
    window = state.config.window_size
    front = staging.start - state.grid.first_column(staging.first_block)
    total = staging.scores.shape[1] * window
    padded = torch.nn.functional.pad(masses, (front, total - front - masses.shape[1]))
    return torch.sum(padded.reshape(padded.shape[0], -1, window), dim=-1)
