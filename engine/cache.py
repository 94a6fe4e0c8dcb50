"""QEvictCache: the only stateful core, a transformers Cache with three tiers.

    cache = QEvictCache(model, QEvictConfig(kv_budget=0.2))
    model.generate(**inputs, past_key_values=cache)

One forward of many tokens is *staged* in full precision; the event that ends it (the first
single-token forward, or its own end with `prefill_routing="chunk"`) routes every aged window. In
single-token decoding a routing event follows each time a window ages. One cache serves one batch of
sequences; layers that are not full attention keep their stock cache layer.

Knows transformers through `adapter.py`; what it computes is decided by `routing.py` and `budget.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from engine.adapter import TAG, LogicalLength, enable
from engine.attention import make_backend
from engine.attention.sdpa import score_pools
from engine.attention.state import KVState
from engine.budget import KVShape, Plan, make_plan
from engine.config import QEvictConfig
from engine.errors import CacheUseError, ConfigError, UnsupportedModelError
from engine.rope import RopeTable, find_rotary, probe_layout
from engine.routing import Candidates, decide
from engine.scores import QueryRing, Ranker
from engine.staging import Staging
from engine.tiers import Moves, PoolShape, TierStore
from engine.trace import Tier
from engine.windows import Grid


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """One routing event as it happened, on the device.

    Attributes:
        event_id: 0 for the end of the prompt.
        columns: columns known at the event.
        before, after: tier of every block, uint8 [N, blocks]; blocks include the sink's.
        scores: what candidates were ranked by, [N, blocks], 0 where a block did not compete.
        seconds: measured cost of scoring, deciding and moving.
    """

    event_id: int
    columns: int
    before: Tensor
    after: Tensor
    scores: Tensor
    seconds: float


class QEvictLayer(CacheLayerMixin):
    """One managed layer: tags keys for our attention function and counts logical columns."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: QEvictCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.index = index
        self.seen = 0
        self.pending = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: pools are allocated when the prompt's length is known."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tags the new keys; the attention function stores and attends."""
        if self.pending:
            self.pending = False
            raise CacheUseError(
                "a QEvict cache must be used with its own attention function: the model attended without it. "
                "Build the cache from the model that runs, and keep its attention implementation."
            )
        self.pending = True
        tagged = key_states.view_as(key_states)
        setattr(tagged, TAG, self)
        return tagged, value_states

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Called by the adapter right after `update`."""
        self.pending = False
        return self.owner.attend(self.index, query, key, value, mask, scale, softcap, position_ids)

    def get_seq_length(self, *args: Any) -> int:
        """Logical columns seen, evicted ones included."""
        return self.seen

    def get_mask_sizes(self, query: Any, *args: Any) -> tuple[int, int]:
        """(logical key length, 0); `query` is a length, or cache positions in older releases."""
        length = query if isinstance(query, int) else int(query.shape[0])
        return LogicalLength(self.seen + length), 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, max_length: int) -> None:
        """Refuses to go back: evicted tokens can't return."""
        if max_length not in (0, self.seen):
            raise CacheUseError(
                "a QEvict cache cannot be cropped: evicted tokens can't come back. "
                "Assisted decoding and prompt lookup need another cache."
            )

    def reset(self) -> None:
        """Forgets the sequence."""
        self.seen, self.pending = 0, False
        if self.index == 0:
            self.owner.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders batch rows; all layers at once, when the first is asked."""
        if self.index == 0:
            self.owner.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some batch rows."""
        if self.index == 0:
            self.owner.select_rows(torch.arange(self.owner.batch)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row."""
        if self.index == 0:
            self.owner.select_rows(torch.arange(self.owner.batch).repeat_interleave(repeats))


class QEvictCache(Cache):
    """Recoverable quantized KV eviction as a cache (paper §2).

    Args:
        model: the model that will run; it is switched to our attention function (other caches keep working).
        config: settings; None = defaults.

    Raises:
        UnsupportedModelError: no full-attention layer, shared KV, or an unknown RoPE.
        BackendError: the chosen backend cannot run on the model's device.
        ConfigError: settings do not fit the model.
    """

    def __init__(self, model: PreTrainedModel, config: QEvictConfig | None = None) -> None:
        self.config = config or QEvictConfig()
        text = model.config.get_text_config(decoder=True)
        layers, managed = _classify(self, text)
        super().__init__(layers=layers)
        self._managed = managed
        self._owned: list[QEvictLayer] = [layer for layer in layers if isinstance(layer, QEvictLayer)]
        attention = _attention_module(model, managed[0])
        self.device = next(attention.parameters()).device
        layer_types = getattr(text, "layer_types", None)
        self._rope = RopeTable(find_rotary(model), layer_types[managed[0]] if layer_types else None, self.device)
        self._num_heads = int(text.num_attention_heads)
        self._num_kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self._head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        probe_layout(attention, self._rope, self._head_dim)
        self._rope.restart()
        groups = self.config.value_group_size
        if groups is not None and self._head_dim % groups:
            raise ConfigError(f"value_group_size must divide head_dim {self._head_dim}, got {groups}.")
        self._backend = make_backend(self.config.backend, str(self.device), Ranker(self.config), self._head_dim)
        enable(model)
        self.on_route: Callable[[RoutingRecord], None] | None = None
        self.forget()

    # ---- what a caller may ask ----------------------------------------------------------------------

    def forget(self) -> None:
        """Drops the sequence and all pools."""
        self._state: KVState | None = None
        self._plans: list[Plan] = []
        self._board = torch.zeros(0, 0, dtype=torch.uint8)
        self._aged_before = 0
        self._tail: list[Tensor] = []
        self.num_events = 0
        self.prefill_peak_bytes = 0
        self.route_seconds = 0.0
        for layer in self._owned:
            layer.seen, layer.pending = 0, False

    def __bool__(self) -> bool:
        # Phi-3 drops a truthy cache when a longrope prompt exceeds the original length, and would
        # silently run on a cache of its own; elsewhere a cache must be truthy.
        return self._rope.kind != "longrope"

    @property
    def backend_name(self) -> str:
        """The backend that really runs."""
        return self._backend.name

    @property
    def managed_layers(self) -> list[int]:
        """Model layers whose KV this cache tiers."""
        return list(self._managed)

    @property
    def batch(self) -> int:
        """Batch rows; 0 before the first forward."""
        return 0 if self._state is None else self._state.shape.batch

    @property
    def state(self) -> KVState:
        """Live state, for diagnostics and tests.

        Raises:
            CacheUseError: nothing has been seen yet.
        """
        if self._state is None:
            raise CacheUseError("the cache is empty: run a forward first.")
        return self._state

    @property
    def plan(self) -> Plan:
        """Plan of batch row 0, after capacities are fixed.

        Raises:
            CacheUseError: no routing event yet.
        """
        if not self._plans:
            raise CacheUseError("capacities are fixed at the first routing event: run a single-token forward first.")
        return self._plans[0]

    @property
    def kv_shape(self) -> KVShape:
        """Shape that byte figures are computed from, in the stored dtype."""
        dtype = self.stored_dtype
        return KVShape(len(self._managed), self._num_kv_heads, self._head_dim, dtype.itemsize)

    @property
    def stored_dtype(self) -> torch.dtype:
        """What the full-precision tier stores."""
        if self.config.kv_dtype != "model":
            stored = getattr(torch, self.config.kv_dtype)
            if not isinstance(stored, torch.dtype):
                raise ConfigError(f"kv_dtype {self.config.kv_dtype!r} is no dtype.")
            return stored
        return self._model_dtype

    _model_dtype: torch.dtype = torch.float32

    @property
    def board(self) -> Tensor:
        """Tier of every block after the newest event, uint8 [N, blocks]: workspace that diagnostics read."""
        return self._board

    def settle(self) -> None:
        """Ends a staged prompt now, as the next single-token forward would."""
        if self._state is not None and self._state.staging is not None:
            self._route()

    @property
    def scoring_bytes(self) -> int:
        """Workspace of deferred scoring: queries and log-sum-exps since the last event."""
        ring = None if self._state is None else self._state.ring
        return 0 if ring is None else ring.nbytes

    # ---- the path of one forward ---------------------------------------------------------------------

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Stores the new keys and values of one managed layer and attends: [B, H_q, T, d] in and out."""
        tokens = query.shape[2]
        if tokens == 0:
            return torch.zeros_like(query)
        if layer == 0:
            self._begin(query, key, mask, position_ids)
        state = self.state
        self._owned[layer].seen += tokens
        self._scale, self._softcap = scale, softcap
        if state.staging is not None:
            state.staging.write(layer, state.columns - tokens, key, value)
            self._keep_tail(layer, query)
            weights = state.ranker.prompt_weights(tokens, self.device)
            out = self._backend.ingest(
                state, layer, query, start=state.columns - tokens, scale=scale, softcap=softcap, weights=weights
            )
        else:
            out = self._decode(layer, query, key, value, scale, softcap)
        if layer == len(self._owned) - 1:
            self._finish(tokens)
        return out

    def _decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        state = self.state
        out, lse = self._backend.decode(state, layer, query, key, value, scale=scale, softcap=softcap)
        if lse is not None and state.ring is not None:
            state.ring.put(layer, query, lse)
        return out

    def _begin(self, query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Bookkeeping before the first managed layer of a forward."""
        tokens = query.shape[2]
        if mask is not None and mask.dim() != 2:
            raise CacheUseError("a QEvict cache takes a 2D attention mask (padding) only, not a prepared 4D mask.")
        if self._state is None:
            self._start(query, key, mask, position_ids)
        state = self.state
        if query.shape[0] != state.shape.batch:
            raise CacheUseError(f"the cache holds {state.shape.batch} batch rows, a forward of {query.shape[0]} came.")
        if self._owned[-1].seen != state.columns:
            raise CacheUseError("an earlier forward with this cache did not finish: call reset() or build another one.")
        if tokens > 1 and state.columns and mask is not None:
            _check_padding(mask, state.pads, state.columns + tokens)
        self._rope.ensure(state.columns + tokens - int(state.shift.min()))
        if tokens == 1:
            self._begin_single(query)
        else:
            self._begin_many(tokens)

    def _start(self, query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> None:
        batch, heads, tokens, dim = query.shape
        if (heads, key.shape[1], dim) != (self._num_heads, self._num_kv_heads, self._head_dim):
            raise UnsupportedModelError(
                f"the configuration promises {self._num_heads} query heads, {self._num_kv_heads} KV heads of "
                f"{self._head_dim}; attention came with {heads}, {key.shape[1]} of {dim}."
            )
        groups = key.shape[1] if self.config.score_scope == "kv_head" else 1
        self._model_dtype = key.dtype
        pads = _left_pads(mask, batch, tokens)
        self._state = KVState(
            config=self.config,
            grid=Grid(self.config.window_size, self.config.sink_tokens),
            ranker=Ranker(self.config),
            rope=self._rope,
            shape=PoolShape(len(self._managed), batch, groups, key.shape[1] // groups, dim),
            num_heads=heads,
            device=self.device,
            pads=pads,
            shift=_shift(position_ids, batch, tokens),
        )
        self._rope.restart()

    def _begin_single(self, query: Tensor) -> None:
        state = self.state
        if state.staging is not None:
            self._route()
        if state.store is None:
            self._allocate()
            state.refresh()
        store = state.pool
        if not self._backend.scores_in_step and state.ranker.uses_attention and state.ring is None:
            state.ring = QueryRing(
                state.shape.num_layers,
                state.shape.batch,
                state.num_heads,
                self.config.interval,
                state.shape.head_dim,
                query,
            )
        if self._backend.scores_in_step and state.ranker.decay != 1.0:
            store.arena_scores *= state.ranker.decay
            store.ledger_scores *= state.ranker.decay
        column = state.columns
        inside = (column + state.grid.offset) % self.config.window_size
        if inside == 0 or column == 0:
            store.open_block(state.grid.block_of(column))
            state.arena_used += 1
        state.columns += 1
        state.admit()
        # Rows without padding occupy the same slots: one host integer then places the token in all of them.
        state.place = (state.arena_used - 1 if not any(state.pads) else -1, inside)

    def _begin_many(self, tokens: int) -> None:
        state = self.state
        self._score_ring()
        grid, columns = state.grid, state.columns
        decay = state.ranker.decay**tokens
        if state.staging is None:
            partial = columns > 0 and (columns + grid.offset) % self.config.window_size != 0
            first = grid.block_of(columns - 1) if partial else grid.block_of(columns)
            start = max(0, grid.first_column(first)) if partial else columns
            taken = state.pool.close_block() if partial and state.store is not None else None
            if taken is not None:
                state.refresh()
            state.staging = Staging(
                state.shape, grid, first_block=first, start=start, dtype=self._model_dtype, device=self.device
            )
            state.staging.reserve(columns + tokens)
            if taken is not None:
                state.staging.put_block(*taken)
        else:
            state.staging.reserve(columns + tokens)
        if decay != 1.0:
            state.staging.scores *= decay
            if state.store is not None:
                state.store.arena_scores *= decay
                state.store.ledger_scores *= decay
        state.columns += tokens
        self.prefill_peak_bytes = max(self.prefill_peak_bytes, state.staging.nbytes)

    def _finish(self, tokens: int) -> None:
        """After the last managed layer: routing events fall here."""
        state = self.state
        if tokens > 1:
            if self.config.prefill_routing == "chunk":
                self._route()
            return
        if state.ring is not None:
            state.ring.count += 1
        if state.grid.ages_at(state.columns, self.config.interval):
            self._route()

    def _score_ring(self) -> None:
        """Deferred scoring of the queries since the last event, for all windows that they could see."""
        state = self.state
        ring = state.ring
        if ring is None or not ring.count or state.store is None:
            return
        count = ring.count
        columns = torch.arange(state.columns - count, state.columns, device=self.device)
        weights = state.ranker.query_weights(count, self.device)
        if state.ranker.decay != 1.0:
            state.store.arena_scores *= state.ranker.decay**count
            state.store.ledger_scores *= state.ranker.decay**count
        for layer in range(state.shape.num_layers):
            score_pools(
                state,
                layer,
                ring.query[layer, :, :, :count],
                ring.lse[layer, :, :, :count],
                scale=self._scale,
                softcap=self._softcap,
                weights=weights,
                columns=columns,
            )
        ring.count = 0

    def _keep_tail(self, layer: int, query: Tensor) -> None:
        """Keeps the last n queries of a prompt whose end is not known yet, where only they count."""
        last = self.config.prefill_queries
        if last is None or not self.state.ranker.uses_attention:
            return
        if layer == len(self._tail):
            self._tail.append(query[:, :, -last:].clone())
        else:
            self._tail[layer] = torch.cat([self._tail[layer], query], 2)[:, :, -last:].clone()

    def _score_tail(self) -> None:
        """Scores the prompt by its last n queries, now that it has ended: they attend once more."""
        state = self.state
        for layer, query in enumerate(self._tail):
            count = query.shape[2]
            self._backend.ingest(
                state,
                layer,
                query,
                start=state.columns - count,
                scale=self._scale,
                softcap=self._softcap,
                weights=state.ranker.tail_weights(count, self.device),
            )
        self._tail = []

    # ---- routing ---------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Fixes capacities at the first event; a later append may only grow them."""
        state = self.state
        config = self.config
        if self._plans:
            config = config.replace(local_tokens=self._plans[0].local_tokens)
        columns = max(1, state.columns)
        shape = self.kv_shape
        plans = [make_plan(config, shape, columns, padded=pad > 0) for pad in state.pads]
        if state.store is None:
            self._plans = plans
            state.store = TierStore(config, state.shape, plans, self.stored_dtype, self.device)
        elif self.config.kv_budget_bytes is None and plans[0].planned_tokens > self._plans[0].planned_tokens:
            self._plans = [_larger(old, new) for old, new in zip(self._plans, plans, strict=True)]
            state.store.grow(self._plans)

    def _route(self) -> None:
        """One routing event for all layers and rows: score, decide, move."""
        began = time.perf_counter()
        self._score_ring()
        state = self.state
        staging = state.staging
        if staging is not None:
            self._score_tail()
            self._allocate()
        store = state.pool
        grid, columns = state.grid, state.columns
        aged = grid.aged_blocks(columns, store.plans[0].local_tokens)
        num_blocks = grid.num_blocks(columns)
        if not state.ranker.uses_attention:
            self._score_keys(aged)
        owner = store.shadow_slots(num_blocks)
        candidates, protected = self._candidates(aged, owner)
        targets = decide(candidates, store.full_capacity, store.quant_capacity, self.config.promotion)
        targets = torch.where(candidates.blocks >= 0, targets, protected)
        before, after, scores = self._record(candidates, targets, aged, num_blocks)
        partial = staging is not None and (columns + grid.offset) % self.config.window_size != 0
        store.move(
            Moves(
                targets=targets,
                shadow_slots=owner,
                shift=state.rows(state.shift),
                rope=self._rope,
                open_block=partial,
                staged_key=None if staging is None else staging.key,
                staged_value=None if staging is None else staging.value,
                staged_scores=None if staging is None else staging.scores,
                first_staged=0 if staging is None else staging.first_block,
            )
        )
        state.staging = None
        state.refresh()
        seconds = time.perf_counter() - began
        self.route_seconds += seconds
        event_id = self.num_events
        self.num_events += 1
        if self.on_route is not None:
            self.on_route(RoutingRecord(event_id, columns, before, after, scores, seconds))

    def _score_keys(self, aged: int) -> None:
        """Scores by key norm, once, while a window is still in full precision."""
        state = self.state
        store = state.pool
        fresh = (store.arena_ids >= self._aged_before) & (store.arena_ids < aged)
        norms = state.ranker.key_scores(store.arena_key.movedim(1, 2))
        store.arena_scores.copy_(torch.where(fresh, norms, store.arena_scores))
        if state.staging is not None:
            state.staging.scores.copy_(state.ranker.key_scores(state.staging.key.movedim(1, 2)))

    def _candidates(self, aged: int, owner: Tensor) -> tuple[Candidates, Tensor]:
        """All windows that compete, and the tier of every block that does not."""
        state = self.state
        store, staging, grid = state.pool, state.staging, state.grid
        pads = state.rows(torch.tensor(state.pads))
        sink_first = ((pads + grid.offset) // self.config.window_size)[:, None]
        sink_end = sink_first + store.sink_blocks[:, None]

        def sort_out(blocks: Tensor) -> tuple[Tensor, Tensor]:
            """(competes, protected tier) of blocks in full precision."""
            there = blocks >= sink_first
            sink = there & (blocks < sink_end)
            competes = there & ~sink & (blocks < aged)
            tier = torch.full_like(blocks, int(Tier.EMPTY), dtype=torch.uint8)
            tier[there & ~sink & ~competes] = int(Tier.LOCAL)
            tier[sink] = int(Tier.SINK)
            return competes, tier

        arena = store.arena_ids.long()
        ledger = store.ledger_ids.long()
        live = ledger >= 0
        competes, tier = sort_out(arena)
        none = torch.full_like(ledger, int(Tier.EMPTY), dtype=torch.uint8)
        blocks = [torch.where(competes, arena, -1), torch.where(live, ledger, -1)]
        scores = [store.arena_scores, store.ledger_scores]
        quantized = [torch.zeros_like(competes), live]
        recorded = [owner >= 0, live]
        tiers = [tier, none]
        if staging is not None:
            count = staging.scores.shape[1]
            ids = staging.first_block + torch.arange(count, device=self.device)
            staged = ids.expand(state.shape.rows, -1)
            competes, tier = sort_out(staged)
            blocks.append(torch.where(competes, staged, -1))
            scores.append(staging.scores)
            quantized.append(torch.zeros_like(competes))
            recorded.append(torch.zeros_like(competes))
            tiers.append(tier)
        ids = torch.cat(blocks, 1)
        raw = torch.cat(scores, 1)
        first = (ids * self.config.window_size - grid.offset).clamp_min(0)
        ranked = state.ranker.rank(raw, first, state.columns)
        return Candidates(ids, ranked, torch.cat(quantized, 1), torch.cat(recorded, 1)), torch.cat(tiers, 1)

    def _record(
        self, candidates: Candidates, targets: Tensor, aged: int, num_blocks: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tier of every block before and after, and the scores of those that competed."""
        state = self.state
        rows = state.shape.rows
        if self._board.shape[0] != rows:
            self._board = torch.zeros(rows, 0, dtype=torch.uint8, device=self.device)
            self._aged_before = 0
        have = self._board.shape[1]
        blocks = torch.arange(num_blocks, device=self.device).expand(rows, -1)
        pads = state.rows(torch.tensor(state.pads))
        first = ((pads + state.grid.offset) // self.config.window_size)[:, None]
        sink = (blocks >= first) & (blocks < first + state.pool.sink_blocks[:, None])
        fresh = torch.where(blocks < first, int(Tier.EMPTY), int(Tier.LOCAL)).to(torch.uint8)
        before = torch.where(sink, int(Tier.SINK), fresh).to(torch.uint8)
        before[:, :have] = self._board
        where = torch.where(candidates.blocks >= 0, candidates.blocks, num_blocks)
        after = torch.cat([before, before[:, :1]], 1).scatter(1, where, targets)[:, :num_blocks]
        scores = torch.zeros(rows, num_blocks + 1, device=self.device).scatter(1, where, candidates.scores)
        self._board = after
        self._aged_before = aged
        return before, after, scores[:, :num_blocks]

    _scale: float = 1.0
    _softcap: float | None = None

    # ---- batch rows ------------------------------------------------------------------------------------

    def select_rows(self, index: Tensor) -> None:
        """Keeps, repeats or reorders batch rows; `index` holds old row numbers."""
        state = self._state
        if state is None:
            return
        rows = [int(i) for i in index.tolist()]
        old = state.shape
        shape = PoolShape(old.num_layers, len(rows), old.groups, old.heads, old.head_dim)
        chosen = torch.tensor(rows, device=self.device)

        def pick(tensor: Tensor) -> Tensor:
            split = tensor.view(old.num_layers, old.batch, old.groups, *tensor.shape[1:])
            return split.index_select(1, chosen).flatten(0, 2).contiguous()

        if state.staging is not None:
            for name in ("key", "value", "scores"):
                setattr(state.staging, name, pick(getattr(state.staging, name)))
            state.staging.shape = shape
        if state.store is not None:
            state.store.select_rows(chosen)
            self._plans = state.store.plans
            self._board = pick(self._board) if self._board.shape[0] else self._board
        if state.ring is not None:
            state.ring.query = state.ring.query.index_select(1, chosen)
            state.ring.lse = state.ring.lse.index_select(1, chosen)
        self._tail = [query.index_select(0, chosen) for query in self._tail]
        state.shape = shape
        state.pads = [state.pads[i] for i in rows]
        state.shift = state.shift[torch.tensor(rows)]
        if state.store is not None:
            # Rows that left may have been the longest, and a lone unpadded row places its tokens by that length.
            state.refresh()


def _larger(old: Plan, new: Plan) -> Plan:
    """`new` with capacities that are never smaller than `old`'s, and that fit the larger budget together."""
    costs, total = new.costs, max(old.total_bytes, new.total_bytes)
    local_blocks = max(old.local_blocks, new.local_blocks)
    history = total - (new.sink_blocks + local_blocks) * costs.full
    full = max(old.full_capacity, min(new.full_capacity, (history - old.quant_capacity * costs.quant) // costs.full))
    quant = max(old.quant_capacity, min(new.quant_capacity, (history - full * costs.full) // costs.quant))
    return replace(
        new,
        total_bytes=total,
        local_tokens=old.local_tokens,
        local_blocks=local_blocks,
        full_capacity=full,
        quant_capacity=quant,
    )


def _classify(owner: QEvictCache, text: Any) -> tuple[list[Any], list[int]]:
    """Cache layers of the model: ours for full attention, stock for the rest.

    Raises:
        UnsupportedModelError: nothing to manage, or layers share their keys and values.
    """
    stock = list(DynamicCache(config=text).layers)
    total = int(text.num_hidden_layers)
    shared = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    if len(stock) < total or shared or any(type(layer).__name__ == "DummyLayer" for layer in stock):
        raise UnsupportedModelError(
            f"{text.model_type}: layers that share keys and values are not supported, every layer must own its cache."
        )
    layers: list[Any] = []
    managed: list[int] = []
    for index, layer in enumerate(stock):
        if type(layer) is DynamicLayer:
            layers.append(QEvictLayer(owner, len(managed)))
            managed.append(index)
        else:
            layers.append(layer)
    if not managed:
        raise UnsupportedModelError(
            f"{text.model_type}: the model must have a full-attention layer; all of its layers are sliding or linear, "
            "and their cache is bounded already."
        )
    return layers, managed


def _attention_module(model: PreTrainedModel, layer_idx: int) -> nn.Module:
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer_idx and type(module).__name__.endswith("Attention"):
            return module
    raise UnsupportedModelError("the model has no attention module with a layer_idx; it cannot be managed.")


def _left_pads(mask: Tensor | None, batch: int, tokens: int) -> list[int]:
    """Left-padding columns of each row.

    Raises:
        CacheUseError: a mask that is not plain left padding.
    """
    if mask is None:
        return [0] * batch
    pads = [int(p) for p in (~mask[:, :tokens].bool()).sum(1).tolist()]
    _check_padding(mask, pads, tokens)
    if max(pads) >= tokens:
        raise CacheUseError(
            f"every batch row needs a token in the first forward; a row begins with {max(pads)} columns of padding and "
            f"{tokens} came: take a prefill chunk longer than the padding."
        )
    return pads


def _check_padding(mask: Tensor, pads: list[int], columns: int) -> None:
    """Raises a `CacheUseError` where the mask hides anything but the padding on the left."""
    wanted = torch.arange(columns, device=mask.device)[None] >= torch.tensor(pads, device=mask.device)[:, None]
    if not torch.equal(mask[:, :columns].bool(), wanted.expand(mask.shape[0], -1)[:, : mask.shape[1]]):
        raise CacheUseError("padding must be on the left and stay: set tokenizer.padding_side = 'left'.")


def _shift(position_ids: Tensor | None, batch: int, tokens: int) -> Tensor:
    """Column minus position of every row, from the last prompt token."""
    if position_ids is None:
        return torch.zeros(batch, dtype=torch.int64)
    if position_ids.dim() != 2:
        raise CacheUseError("position_ids must be 2D; several axes (mrope) are not supported.")
    last = position_ids[:, -1].expand(batch).cpu()
    return tokens - 1 - last
