"""The real cache on the tokens of a FullKV trace: its own decisions, and its scores head by head.

What `engine.policies` leaves out is here: windows are ranked by attention under quantized, evicted execution.
The same tokens are fed, so that a run lines up with the trace event by event. Batch row 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.attention.ledger import ledger_logits
from engine.cache import QEvictCache, RoutingRecord
from engine.cache_part import CachePart
from engine.metrics.history import TierHistory
from engine.metrics.qsa import Agreement, agreement
from engine.models import LoadedModel
from engine.policies import HORIZON, FullTrace, Policy, PolicyRun, by_blocks, horizon_masses
from engine.prompt import PREFILL_CHUNK, prompt_parts
from engine.scores import key_masses
from engine.trace import Tier
from engine.windows import Grid


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A real run on a trace's tokens. `agreement` is None where the policy has no Quant tier."""

    run: PolicyRun
    agreement: Agreement | None
    seconds: float


class WatchedPart(CachePart):
    """Layers that also sum, for every query head, what each block has received since the prompt."""

    heads: Tensor | None = None
    """float32 [L, H_q, blocks] on the host, grown as blocks begin."""

    def score_ring(self) -> None:
        self._watch()
        super().score_ring()

    def _watch(self) -> None:
        state, ring = self.state, self.state.ring
        if ring is None or not ring.count or state.store is None:
            return
        store, shape, count = state.store, state.shape, ring.count
        blocks = state.grid.num_blocks(state.columns)
        have = torch.zeros(shape.num_layers, state.num_heads, 0) if self.heads is None else self.heads
        total = torch.nn.functional.pad(have, (0, blocks - have.shape[2]))
        at = torch.arange(state.columns - count, state.columns, device=self.device)
        for layer in range(shape.num_layers):
            part = state.layer_slice(layer)
            query, lse = ring.query[layer, :, :, :count], ring.lse[layer, :, :, :count]
            key, _, bias = state.arena(layer)
            ids = store.arena_ids[part, : state.arena_used]
            seen = store.columns(ids).flatten(1).view(1, shape.groups, 1, -1) <= at[None, None, :, None]
            masses = key_masses(
                query,
                key,
                lse,
                scale=self.scale,
                softcap=self.softcap,
                visible=(bias >= 0) & seen,
                weights=None,
                power=1.0,
            )
            sums = masses[0].unflatten(-1, (-1, state.config.window_size)).sum(-1)
            _add(total[layer], sums, ids)
            if state.live_used:
                logits, _ = ledger_logits(state, layer, query, scale=self.scale, softcap=self.softcap)
                normal = lse.reshape(shape.rows_per_layer, shape.heads, 1, -1, 1, 1)
                mass = (logits - normal).exp().unflatten(3, (state.group_heads, count)).sum((4, 5))
                sums = mass.permute(0, 1, 3, 2, 4).flatten(3).reshape(state.num_heads, -1)
                _add(total[layer], sums, store.ledger_ids[part, : sums.shape[1]])
        self.heads = total


class HeadScores(QEvictCache):
    """A cache that knows what every query head gave each block."""

    part_class = WatchedPart

    @property
    def heads(self) -> Tensor | None:
        """float32 [L, H_q, blocks] since the prompt; None before a query was scored."""
        found = [part.heads for part in self.parts if isinstance(part, WatchedPart) and part.heads is not None]
        return torch.cat(found) if found else None


def _add(total: Tensor, sums: Tensor, ids: Tensor) -> None:
    """Adds sums [H, places] to blocks of total [H, blocks]; ids [G, places], negative where nothing lives."""
    groups = ids.shape[0]
    wide = ids.long().repeat_interleave(sums.shape[0] // groups, 0)
    total.scatter_add_(1, wide.clamp_min(0), torch.where(wide >= 0, sums, 0.0).cpu())


@torch.inference_mode()
def run_live(
    loaded: LoadedModel,
    ids: Sequence[int],
    trace: FullTrace,
    policy: Policy,
    *,
    kv_dtype: str = "float16",
    horizon: int = HORIZON,
) -> LiveRun:
    """Feeds the trace's tokens to a real cache and measures it against the trace.

    Args:
        ids: the token ids that `trace` was recorded on.

    Raises:
        BudgetError: the policy's budget is infeasible at this length.
    """
    began = time.perf_counter()
    config = policy.config.replace(
        planned_new_tokens=trace.steps, kv_dtype=kv_dtype, backend="sdpa", prefill_routing="end"
    )
    cache = HeadScores(loaded.model, config)
    records: list[RoutingRecord] = []
    scores: list[Tensor | None] = []

    def routed(record: RoutingRecord) -> None:
        records.append(record)
        scores.append(cache.heads)

    cache.on_route = routed
    decoder = loaded.model.base_model
    keyword: dict[str, Any] = {cache_keyword(decoder): cache}
    prompt = list(ids[: trace.prompt_tokens])
    at = 0
    for part in [*prompt_parts(prompt, PREFILL_CHUNK), *([token] for token in ids[trace.prompt_tokens :])]:
        if at == trace.prompt_tokens:
            cache.settle()
        decoder(
            input_ids=torch.tensor([part], device=cache.device),
            position_ids=torch.arange(at, at + len(part), device=cache.device)[None],
            use_cache=True,
            **keyword,
        )
        at += len(part)
    history = _history(records, config.window_size, config.sink_tokens)
    plan = cache.plan
    run = PolicyRun(policy, plan, history, horizon_masses(trace, history, config, horizon))
    found = None if config.quant_share == 0 else _agreement(trace, policy, history, scores)
    return LiveRun(run, found, time.perf_counter() - began)


def _history(records: list[RoutingRecord], window_size: int, sink_tokens: int) -> TierHistory:
    sink = Grid(window_size, sink_tokens).sink_blocks
    width = max(record.after.shape[1] for record in records) - sink
    tiers = np.full((len(records), records[0].after.shape[0], max(1, width)), int(Tier.EMPTY), dtype=np.uint8)
    for place, record in enumerate(records):
        board = record.after[:, sink:].cpu().numpy()
        tiers[place, :, : board.shape[1]] = board
    ids = np.array([record.event_id for record in records], dtype=np.int64)
    return TierHistory(ids, np.array([record.columns for record in records], dtype=np.int64), tiers)


def _agreement(trace: FullTrace, policy: Policy, history: TierHistory, scores: list[Tensor | None]) -> Agreement:
    """Scores of Q under the run's own execution against the reference's, per head (paper Table 15)."""
    config = policy.config
    sink = Grid(config.window_size, config.sink_tokens).sink_blocks
    events, rows, windows = history.tiers.shape
    groups = rows // trace.num_layers
    shape = (events, trace.num_layers, trace.num_heads, windows)
    ours, theirs = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    prompt = by_blocks(trace.prompt_mass, config)
    for place, boundary in enumerate(history.seq_lens.tolist()):
        reference = by_blocks(trace.past(boundary), config)[:, :, sink:]
        theirs[place, :, :, : reference.shape[2]] = reference.numpy()
        extra = scores[place]
        own = torch.nn.functional.pad(prompt, (0, reference.shape[2] + sink - prompt.shape[2]))
        if extra is not None:
            own = own + torch.nn.functional.pad(extra, (0, own.shape[2] - extra.shape[2]))
        ours[place, :, :, : reference.shape[2]] = own[:, :, sink:].numpy()
    members = history.tiers.reshape(events, trace.num_layers, groups, windows) == Tier.QUANT
    members = members.repeat(trace.num_heads // groups, axis=2)
    return agreement(ours, theirs, members, history.event_ids)
