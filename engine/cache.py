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
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from engine.adapter import enable
from engine.attention import make_backend
from engine.attention.sdpa import layers_at_once, score_pools
from engine.attention.state import KVState
from engine.budget import KVShape, Plan, make_plan
from engine.cache_layer import QEvictLayer, attention_module, build_layers
from engine.candidates import gather_candidates
from engine.config import QEvictConfig
from engine.errors import CacheUseError, ConfigError, UnsupportedModelError
from engine.event_read import read_event
from engine.padding import check_padding, left_pads, position_shift
from engine.rope import RopeTable, find_rotary, probe_layout
from engine.routing import decide
from engine.scores import QueryRing, Ranker
from engine.staging import Staging
from engine.tier_board import RoutingRecord, TierBoard
from engine.tiers import Moves, PoolShape, TierStore
from engine.windows import Grid

__all__ = ["QEvictCache", "QEvictLayer", "RoutingRecord"]


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
        layers, managed = build_layers(self, text)
        super().__init__(layers=layers)
        self._managed = managed
        self._owned: list[QEvictLayer] = [layer for layer in layers if isinstance(layer, QEvictLayer)]
        attention = attention_module(model, managed[0])
        parameter = next(attention.parameters())
        self.device, self._weights_dtype = parameter.device, parameter.dtype
        spread = {next(attention_module(model, index).parameters()).device for index in managed}
        if len(spread) > 1:
            raise UnsupportedModelError(
                f"all layers must lie on one device, this model is spread over {', '.join(sorted(map(str, spread)))}."
            )
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
        self.clock: Callable[[], float] = time.perf_counter
        self.forget()

    # ---- what a caller may ask ----------------------------------------------------------------------

    def forget(self) -> None:
        """Drops the sequence and all pools."""
        self._state: KVState | None = None
        self._plans: list[Plan] = []
        self._tiers = TierBoard(self.device)
        self.expected_columns = 0
        """Length that the sequence is known to reach; capacities are planned for it, however short the first chunk."""
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
        """Tier of every block after the newest event, uint8 [N, blocks]: workspace that diagnostics read.

        It lies on the host where `on_route` is set.
        """
        return self._tiers.on_host

    @property
    def aged_blocks(self) -> int:
        """Leading blocks that had aged at the newest event."""
        return self._tiers.aged

    @property
    def rope(self) -> RopeTable:
        """The model's rotation, with tables that grow."""
        return self._rope

    def adopt(self, state: KVState, plans: list[Plan], board: Tensor, aged: int, num_events: int) -> None:
        """Takes over a state with its pools, as `prefix.put` restores it."""
        self.forget()
        self._state, self._plans = state, list(plans)
        self._tiers.apply(board.to(self.device), aged, None)
        self._model_dtype = self._weights_dtype
        self.num_events = num_events
        self._owned = [layer for layer in self.layers if isinstance(layer, QEvictLayer)]
        for layer in self._owned:
            layer.seen = state.columns

    def settle(self) -> None:
        """Ends a staged prompt now, as the next single-token forward would."""
        if self._state is not None and self._state.staging is not None:
            self._route()

    @property
    def scoring_bytes(self) -> int:
        """Workspace of deferred scoring: queries and log-sum-exps since the last event."""
        ring = None if self._state is None else self._state.ring
        return 0 if ring is None else ring.nbytes

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the backend's decode steps: partial results and raw masses that kernels hand on."""
        return self._backend.workspace_bytes

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
            check_padding(mask, state.pads, state.columns + tokens)
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
        pads = left_pads(mask, batch, tokens)
        self._state = KVState(
            config=self.config,
            grid=Grid(self.config.window_size, self.config.sink_tokens),
            ranker=Ranker(self.config),
            rope=self._rope,
            shape=PoolShape(len(self._managed), batch, groups, key.shape[1] // groups, dim),
            num_heads=heads,
            device=self.device,
            pads=pads,
            shift=position_shift(position_ids, batch, tokens),
        )
        self._rope.restart()

    def _begin_single(self, query: Tensor) -> None:
        """Makes room for one token per row; the host learns nothing from the device here, unless a prompt ends.

        A CUDA graph cannot hold this part all the same: the column, the block that opens and the ring's place are
        Python numbers, which a graph would keep as they were. The kernels of `fused_cuda.py` read theirs from the
        device, so that the attention of a step can be captured between two events.
        """
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
            state.opened()
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
        whole = state.shape.num_layers
        together = layers_at_once(state, count)
        for layer in range(0, whole, together):
            part = slice(layer, min(layer + together, whole))
            score_pools(
                state,
                layer,
                ring.query[part, :, :, :count].flatten(0, 1),
                ring.lse[part, :, :, :count].flatten(0, 1),
                scale=self._scale,
                softcap=self._softcap,
                weights=weights,
                columns=columns,
                layers=part.stop - layer,
                codes=not self._backend.scores_codes,
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
        columns = max(1, state.columns, self.expected_columns)
        shape = self.kv_shape
        plans = [make_plan(config, shape, columns, padded=pad > 0) for pad in state.pads]
        if state.store is None:
            self._plans = plans
            state.store = TierStore(config, state.shape, plans, self.stored_dtype, self.device)
        elif self.config.kv_budget_bytes is None and plans[0].planned_tokens > self._plans[0].planned_tokens:
            self._plans = [larger_plan(old, new) for old, new in zip(self._plans, plans, strict=True)]
            state.store.grow(self._plans)

    def _route(self) -> None:
        """One routing event for all layers and rows: score, decide, move. The host reads from the device once."""
        began = self.clock()
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
        candidates, protected = gather_candidates(state, aged, owner)
        targets = decide(candidates, store.full_capacity, store.quant_capacity, self.config.promotion)
        targets = torch.where(candidates.blocks >= 0, targets, protected)
        moves = Moves(
            targets=targets,
            shadow_slots=owner,
            shift=state.row_shift,
            rope=self._rope,
            open_block=staging is not None and (columns + grid.offset) % self.config.window_size != 0,
            staged_key=None if staging is None else staging.key,
            staged_value=None if staging is None else staging.value,
            staged_scores=None if staging is None else staging.scores,
            first_staged=0 if staging is None else staging.first_block,
        )
        plan = store.plan(moves)
        board = self._tiers.decided(state, candidates, targets, num_blocks)
        read = read_event(
            plan.sizes(),
            (plan.arena_count, plan.live_count, plan.shadow_count),
            board.came_back,
            () if self.on_route is None else (board.scores, board.before, board.after),
        )
        if read.came_back:
            raise CacheUseError("an evicted window came back: the cache's tensors were changed from outside.")
        store.move(moves, plan, read.sizes)
        self._tiers.apply(board.after, aged, read.boards[2] if read.boards else None)
        state.staging = None
        state.refresh(read.occupied)
        seconds = self.clock() - began
        self.route_seconds += seconds
        event_id = self.num_events
        self.num_events += 1
        if self.on_route is not None:
            scores, before, after = read.boards
            self.on_route(RoutingRecord(event_id, columns, before, after, scores, seconds))

    def _score_keys(self, aged: int) -> None:
        """Scores by key norm, once, while a window is still in full precision."""
        state = self.state
        store = state.pool
        fresh = (store.arena_ids >= self._tiers.aged) & (store.arena_ids < aged)
        norms = state.ranker.key_scores(store.arena_key.movedim(1, 2))
        store.arena_scores.copy_(torch.where(fresh, norms, store.arena_scores))
        if state.staging is not None:
            state.staging.scores.copy_(state.ranker.key_scores(state.staging.key.movedim(1, 2)))

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
            self._tiers.select_rows(pick)
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


def larger_plan(old: Plan, new: Plan) -> Plan:
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
