"""QEvictCache: the only stateful core, a transformers Cache with three tiers.

    cache = QEvictCache(model, QEvictConfig(kv_budget=0.2))
    model.generate(**inputs, past_key_values=cache)

One forward of many tokens is *staged* in full precision; the event that ends it (the first
single-token forward, or its own end with `prefill_routing="chunk"`) routes every aged window. In
single-token decoding a routing event follows each time a window ages. One cache serves one batch of
sequences; layers that are not full attention keep their stock cache layer.

Keys and values stay on the device of their layer: a `CachePart` does the work for the layers of one
device, and this file tells the parts of all devices when to do it, plans for them, and joins their
answers. Knows transformers through `adapter.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from engine.adapter import enable
from engine.attention import make_backend
from engine.attention.state import KVState
from engine.budget import KVShape, Plan, larger_plan, make_plan
from engine.cache_layer import QEvictLayer, attention_module, build_layers
from engine.cache_part import CachePart, device_groups
from engine.config import QEvictConfig
from engine.errors import CacheUseError, ConfigError, UnsupportedModelError
from engine.padding import check_padding, left_pads, position_shift
from engine.rope import RopeTable, find_rotary, probe_layout
from engine.scores import Ranker
from engine.tier_board import RoutingRecord
from engine.tiers import PoolShape, TierStore

__all__ = ["QEvictCache", "QEvictLayer", "RoutingRecord"]


class QEvictCache(Cache):
    """Recoverable quantized KV eviction as a cache (paper §2).

    Args:
        model: the model that will run; it is switched to our attention function (other caches keep working). Its
            layers may lie on several devices.
        config: settings; None = defaults.

    Raises:
        UnsupportedModelError: no full-attention layer, shared KV, an unknown RoPE, or offloaded weights.
        BackendError: the chosen backend cannot run on one of the model's devices.
        ConfigError: settings do not fit the model.
    """

    part_class: ClassVar[type[CachePart]] = CachePart

    def __init__(self, model: PreTrainedModel, config: QEvictConfig | None = None) -> None:
        self.config = config or QEvictConfig()
        text = model.config.get_text_config(decoder=True)
        layers, managed = build_layers(self, text)
        super().__init__(layers=layers)
        self._managed = managed
        self._owned: list[QEvictLayer] = [layer for layer in layers if isinstance(layer, QEvictLayer)]
        attention = attention_module(model, managed[0])
        self._weights_dtype = next(attention.parameters()).dtype
        groups = device_groups(model, managed)
        layer_types = getattr(text, "layer_types", None)
        rotary, kind = find_rotary(model), layer_types[managed[0]] if layer_types else None
        ropes = [RopeTable(rotary, kind, group.device) for group in groups]
        self._num_heads = int(text.num_attention_heads)
        self._num_kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self._head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        probe_layout(attention, ropes[0], self._head_dim)
        ropes[0].restart()
        values = self.config.value_group_size
        if values is not None and self._head_dim % values:
            raise ConfigError(f"value_group_size must divide head_dim {self._head_dim}, got {values}.")
        self.parts = [
            self.part_class(
                group,
                rope,
                make_backend(self.config.backend, str(group.device), Ranker(self.config), self._head_dim),
            )
            for group, rope in zip(groups, ropes, strict=True)
        ]
        """One for each device, in order of layers."""
        self._places = [(part, layer) for part in self.parts for layer in range(part.count)]
        self.device = self.parts[0].device
        self._rope_kind = ropes[0].kind
        enable(model)
        self.on_route: Callable[[RoutingRecord], None] | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self.forget()

    # ---- what a caller may ask ----------------------------------------------------------------------

    def forget(self) -> None:
        """Drops the sequence and all pools."""
        for part in self.parts:
            part.forget()
        self._plans: list[Plan] = []
        self.expected_columns = 0
        """Length that the sequence is known to reach; capacities are planned for it, however short the first chunk."""
        self.num_events = 0
        self.prefill_peak_bytes = 0
        self.route_seconds = 0.0
        for layer in self._owned:
            layer.seen, layer.pending = 0, False

    def __bool__(self) -> bool:
        # Phi-3 drops a truthy cache when a longrope prompt exceeds the original length, and would
        # silently run on a cache of its own; elsewhere a cache must be truthy.
        return self._rope_kind != "longrope"

    @property
    def backend_name(self) -> str:
        """The backend that really runs; several names where devices have different ones."""
        return "+".join(dict.fromkeys(part.backend.name for part in self.parts))

    @property
    def managed_layers(self) -> list[int]:
        """Model layers whose KV this cache tiers."""
        return list(self._managed)

    @property
    def batch(self) -> int:
        """Batch rows; 0 before the first forward."""
        held = self.parts[0].held
        return 0 if held is None else held.shape.batch

    @property
    def states(self) -> list[KVState]:
        """Live state of every part, for diagnostics and tests.

        Raises:
            CacheUseError: nothing has been seen yet.
        """
        return [part.state for part in self.parts]

    @property
    def state(self) -> KVState:
        """Live state of a cache on one device, for diagnostics and tests.

        Raises:
            CacheUseError: nothing has been seen yet, or there are several states.
        """
        if len(self.parts) > 1:
            raise CacheUseError(f"the cache lies on {len(self.parts)} devices: ask for `states`, one for each.")
        return self.parts[0].state

    @property
    def lead(self) -> KVState:
        """State of the first part: what is not by layer (columns, padding, grid, staging or not) is the same in all.

        Raises:
            CacheUseError: nothing has been seen yet.
        """
        return self.parts[0].state

    @property
    def pool_shape(self) -> PoolShape:
        """Decision rows of all managed layers: the rows of `board`."""
        return replace(self.lead.shape, num_layers=len(self._managed))

    @property
    def occupied(self) -> NDArray[np.int64]:
        """Arena blocks, live entries and shadows of every decision row, [3, N], as the host knows them."""
        return np.concatenate([state.occupied for state in self.states], 1)

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

        It lies on the host where `on_route` is set, or where there are several devices.
        """
        boards = [part.tiers.on_host for part in self.parts]
        return boards[0] if len(boards) == 1 else torch.cat([board.cpu() for board in boards])

    @property
    def aged_blocks(self) -> int:
        """Leading blocks that had aged at the newest event."""
        return self.parts[0].tiers.aged

    def staged(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a managed layer's staged keys and values, [B, H_kv, T, d], on its device.

        Raises:
            CacheUseError: no prompt is staged.
        """
        part, inside = self._places[layer]
        if part.state.staging is None:
            raise CacheUseError("no prompt is staged: its tokens have been routed, or there was one only.")
        return part.state.staging.layer(inside)

    def adopt(self, states: Sequence[KVState], plans: list[Plan], board: Tensor, aged: int, num_events: int) -> None:
        """Takes over the states of all parts with their pools, as `prefix.put` restores them."""
        self.forget()
        rows = [state.shape.rows for state in states]
        for part, state, tiers in zip(self.parts, states, board.split(rows), strict=True):
            part.adopt(state, tiers, aged)
        self._plans = list(plans)
        self._model_dtype = self._weights_dtype
        self.num_events = num_events
        self._owned = [layer for layer in self.layers if isinstance(layer, QEvictLayer)]
        for layer in self._owned:
            layer.seen = states[0].columns

    def settle(self) -> None:
        """Ends a staged prompt now, as the next single-token forward would."""
        held = self.parts[0].held
        if held is not None and held.staging is not None:
            self._route()

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools, lane padding included; 0 before capacities are fixed."""
        return sum(store.persistent_bytes for store in self._stores())

    @property
    def lane_padding_bytes(self) -> int:
        """Bytes of the pools that the kernel's layout adds to what the plan charges."""
        return sum(store.lane_padding_bytes for store in self._stores())

    def _stores(self) -> list[TierStore]:
        return [part.held.store for part in self.parts if part.held is not None and part.held.store is not None]

    @property
    def scoring_bytes(self) -> int:
        """Workspace of deferred scoring: queries and log-sum-exps since the last event."""
        rings = [part.held.ring for part in self.parts if part.held is not None]
        return sum(ring.nbytes for ring in rings if ring is not None)

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the backends' decode steps: partial results and raw masses that kernels hand on."""
        return sum(part.backend.workspace_bytes for part in self.parts)

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
        self._owned[layer].seen += tokens
        part, inside = self._places[layer]
        out = part.attend(inside, query, key, value, scale, softcap)
        if layer == len(self._owned) - 1:
            self._finish(tokens)
        return out

    def _begin(self, query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Bookkeeping before the first managed layer of a forward, for the layers of all devices."""
        tokens = query.shape[2]
        if mask is not None and mask.dim() != 2:
            raise CacheUseError("a QEvict cache takes a 2D attention mask (padding) only, not a prepared 4D mask.")
        if self.parts[0].held is None:
            self._start(query, key, mask, position_ids)
        state = self.lead
        if query.shape[0] != state.shape.batch:
            raise CacheUseError(f"the cache holds {state.shape.batch} batch rows, a forward of {query.shape[0]} came.")
        if self._owned[-1].seen != state.columns:
            raise CacheUseError("an earlier forward with this cache did not finish: call reset() or build another one.")
        if tokens > 1 and state.columns and mask is not None:
            check_padding(mask, state.pads, state.columns + tokens)
        length = state.columns + tokens - int(state.shift.min())
        for part in self.parts:
            part.rope.ensure(length)
        if tokens > 1:
            staged = sum(part.open_columns(tokens, self._model_dtype) for part in self.parts)
            self.prefill_peak_bytes = max(self.prefill_peak_bytes, staged)
            return
        if state.staging is not None:
            self._route()
        if state.store is None:
            self._allocate()
            for part in self.parts:
                part.state.refresh()
        for part in self.parts:
            part.open_column(query.dtype)

    def _start(self, query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> None:
        batch, heads, tokens, dim = query.shape
        if (heads, key.shape[1], dim) != (self._num_heads, self._num_kv_heads, self._head_dim):
            raise UnsupportedModelError(
                f"the configuration promises {self._num_heads} query heads, {self._num_kv_heads} KV heads of "
                f"{self._head_dim}; attention came with {heads}, {key.shape[1]} of {dim}."
            )
        groups = key.shape[1] if self.config.score_scope == "kv_head" else 1
        self._model_dtype = key.dtype
        pads, shift = left_pads(mask, batch, tokens), position_shift(position_ids, batch, tokens)
        for part in self.parts:
            part.start(
                self.config,
                num_heads=heads,
                batch=batch,
                groups=groups,
                heads=key.shape[1] // groups,
                head_dim=dim,
                pads=list(pads),
                shift=shift,
            )

    def _finish(self, tokens: int) -> None:
        """After the last managed layer: routing events fall here."""
        if tokens > 1:
            if self.config.prefill_routing == "chunk":
                self._route()
            return
        for part in self.parts:
            ring = part.state.ring
            if ring is not None:
                ring.count += 1
        state = self.lead
        if state.grid.ages_at(state.columns, self.config.interval):
            self._route()

    # ---- routing ---------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Fixes capacities at the first event; a later append may only grow them."""
        state, config = self.lead, self.config
        if self._plans:
            config = config.replace(local_tokens=self._plans[0].local_tokens)
        columns = max(1, state.columns, self.expected_columns)
        shape = self.kv_shape
        plans = [make_plan(config, shape, columns, padded=pad > 0) for pad in state.pads]
        if state.store is None:
            self._plans = plans
            for part in self.parts:
                part.allocate(config, plans, self.stored_dtype)
        elif self.config.kv_budget_bytes is None and plans[0].planned_tokens > self._plans[0].planned_tokens:
            self._grow([larger_plan(old, new) for old, new in zip(self._plans, plans, strict=True)])

    def _grow(self, plans: list[Plan]) -> None:
        """Enlarges the pools to plans of all batch rows that are nowhere smaller than the present ones."""
        self._plans = plans
        for part in self.parts:
            part.state.pool.grow(plans)

    def _route(self) -> None:
        """One routing event for all layers and rows: score, decide, move. The host reads from each device once."""
        began = self.clock()
        state = self.lead
        staged = state.staging is not None
        for part in self.parts:
            part.score_ring()
            if staged:
                part.score_tail()
        if staged:
            self._allocate()
        boards = [part.route(self.on_route is not None) for part in self.parts]
        seconds = self.clock() - began
        self.route_seconds += seconds
        event_id = self.num_events
        self.num_events += 1
        if self.on_route is not None:
            one = boards[0] if len(boards) == 1 else [torch.cat(tables) for tables in zip(*boards, strict=True)]
            scores, before, after = one
            self.on_route(RoutingRecord(event_id, state.columns, before, after, scores, seconds))

    # ---- batch rows ------------------------------------------------------------------------------------

    def select_rows(self, index: Tensor) -> None:
        """Keeps, repeats or reorders batch rows; `index` holds old row numbers."""
        if self.parts[0].held is None:
            return
        rows = [int(i) for i in index.tolist()]
        for part in self.parts:
            part.select_rows(rows)
        if self._plans:
            self._plans = [self._plans[i] for i in rows]
