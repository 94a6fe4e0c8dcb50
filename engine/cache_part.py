"""CachePart: the managed layers that lie on one device, with their pools, backend, rotation and tier board.

Scores, budgets and moves of a layer never look at another layer, so that parts need nothing of each other.
`QEvictCache` holds one part for each device of its model, nearly always exactly one; it says when columns come and
when to route, and joins what the parts answer. Knows no model, and no plan but those that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import AttentionBackend
from engine.attention.sdpa import layers_at_once, score_pools
from engine.attention.state import KVState
from engine.budget import Plan
from engine.cache_layer import attention_module
from engine.candidates import gather_candidates
from engine.config import QEvictConfig
from engine.errors import CacheUseError, UnsupportedModelError
from engine.event_read import read_event
from engine.rope import RopeTable
from engine.routing import decide
from engine.scores import QueryRing, Ranker
from engine.staging import Staging
from engine.tier_board import TierBoard
from engine.tiers import Moves, PoolShape, TierStore
from engine.windows import Grid


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Neighbouring managed layers on one device; `first` and `count` number managed layers."""

    device: torch.device
    first: int
    count: int


def device_groups(model: PreTrainedModel, managed: Sequence[int]) -> list[DeviceGroup]:
    """Where the managed layers of a model lie, in order of layers: one group wherever the device changes.

    Args:
        managed: model layers.

    Raises:
        UnsupportedModelError: weights of a layer are not in memory.
    """
    return grouped([next(attention_module(model, index).parameters()).device for index in managed], managed)


def grouped(devices: Sequence[torch.device], managed: Sequence[int]) -> list[DeviceGroup]:
    """`device_groups` of layers whose devices are known.

    Raises:
        UnsupportedModelError: weights of a layer are not in memory.
    """
    away = [str(index) for index, device in zip(managed, devices, strict=True) if device.type == "meta"]
    if away:
        raise UnsupportedModelError(
            "every layer must lie on the device that runs it, and these are offloaded (to disk, or to memory beside "
            f"their device): {', '.join(away)}. Give device_map more devices, or load a smaller dtype."
        )
    starts = [at for at, device in enumerate(devices) if at == 0 or device != devices[at - 1]]
    return [
        DeviceGroup(devices[start], start, end - start)
        for start, end in zip(starts, [*starts[1:], len(devices)], strict=True)
    ]


class CachePart:
    """What a cache holds and does for the layers of one device; `layer` is the place inside the part.

    Args:
        group: the layers. rope: a table on their device. backend: one of its own, for it keeps workspace.
    """

    def __init__(self, group: DeviceGroup, rope: RopeTable, backend: AttentionBackend) -> None:
        self.device, self.first, self.count = group.device, group.first, group.count
        self.rope, self.backend = rope, backend
        self.scale = 1.0
        self.softcap: float | None = None
        self.forget()

    def forget(self) -> None:
        """Drops the sequence and all pools."""
        self.held: KVState | None = None
        self.tiers = TierBoard(self.device)
        self._tail: list[Tensor] = []

    @property
    def state(self) -> KVState:
        """Live state.

        Raises:
            CacheUseError: nothing has been seen yet.
        """
        if self.held is None:
            raise CacheUseError("the cache is empty: run a forward first.")
        return self.held

    def adopt(self, state: KVState, board: Tensor, aged: int) -> None:
        """Takes over a state with its pools, and the board [N, blocks] after its newest event."""
        self.held = state
        self.tiers.apply(board.to(self.device), aged, None)

    # ---- the path of one forward ---------------------------------------------------------------------

    def start(
        self,
        config: QEvictConfig,
        *,
        num_heads: int,
        batch: int,
        groups: int,
        heads: int,
        head_dim: int,
        pads: list[int],
        shift: Tensor,
    ) -> None:
        """Begins a sequence: `heads` KV heads in each of `groups` decision groups; padding as in `KVState`."""
        self.held = KVState(
            config=config,
            grid=Grid(config.window_size, config.sink_tokens),
            ranker=Ranker(config),
            rope=self.rope,
            shape=PoolShape(self.count, batch, groups, heads, head_dim),
            num_heads=num_heads,
            device=self.device,
            pads=pads,
            shift=shift,
        )
        self.rope.restart()

    def allocate(self, config: QEvictConfig, plans: list[Plan], dtype: torch.dtype) -> None:
        """Makes the pools; `plans` has one for each batch row."""
        self.state.store = TierStore(config, self.state.shape, plans, dtype, self.device)

    def open_column(self, dtype: torch.dtype) -> None:
        """Makes room for one token per row; the host learns nothing from the device here.

        A CUDA graph cannot hold this part all the same: the column, the block that opens and the ring's place are
        Python numbers, which a graph would keep as they were. The kernels of `fused_cuda.py` read theirs from the
        device, so that the attention of a step can be captured between two events.
        """
        state, backend = self.state, self.backend
        store, window = state.pool, state.config.window_size
        if not backend.scores_in_step and state.ranker.uses_attention and state.ring is None:
            shape, like = state.shape, torch.empty(0, dtype=dtype, device=self.device)
            state.ring = QueryRing(
                shape.num_layers, shape.batch, state.num_heads, state.config.interval, shape.head_dim, like
            )
        if backend.scores_in_step and state.ranker.decay != 1.0:
            store.arena_scores *= state.ranker.decay
            store.ledger_scores *= state.ranker.decay
        column = state.columns
        inside = (column + state.grid.offset) % window
        if inside == 0 or column == 0:
            store.open_block(state.grid.block_of(column))
            state.opened()
        state.columns += 1
        state.admit()
        # Rows without padding occupy the same slots: one host integer then places the token in all of them.
        state.place = (state.arena_used - 1 if not any(state.pads) else -1, inside)

    def open_columns(self, tokens: int, dtype: torch.dtype) -> int:
        """Makes room for the tokens of a staged forward; returns the bytes that are staged."""
        self.score_ring()
        state = self.state
        grid, columns = state.grid, state.columns
        decay = state.ranker.decay**tokens
        staging = state.staging
        if staging is None:
            partial = columns > 0 and (columns + grid.offset) % state.config.window_size != 0
            first = grid.block_of(columns - 1) if partial else grid.block_of(columns)
            start = max(0, grid.first_column(first)) if partial else columns
            taken = state.pool.close_block() if partial and state.store is not None else None
            if taken is not None:
                state.refresh()
            staging = state.staging = Staging(
                state.shape, grid, first_block=first, start=start, dtype=dtype, device=self.device
            )
            staging.reserve(columns + tokens)
            if taken is not None:
                staging.put_block(*taken)
        else:
            staging.reserve(columns + tokens)
        if decay != 1.0:
            staging.scores *= decay
            if state.store is not None:
                state.store.arena_scores *= decay
                state.store.ledger_scores *= decay
        state.columns += tokens
        return staging.nbytes

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Stores the newest keys and values of a layer and attends: [B, H_q, T, d] in and out."""
        state = self.state
        self.scale, self.softcap = scale, softcap
        if state.staging is not None:
            tokens = query.shape[2]
            state.staging.write(layer, state.columns - tokens, key, value)
            self._keep_tail(layer, query)
            weights = state.ranker.prompt_weights(tokens, self.device)
            return self.backend.ingest(
                state, layer, query, start=state.columns - tokens, scale=scale, softcap=softcap, weights=weights
            )
        out, lse = self.backend.decode(state, layer, query, key, value, scale=scale, softcap=softcap)
        if lse is not None and state.ring is not None:
            state.ring.put(layer, query, lse)
        return out

    # ---- scores ----------------------------------------------------------------------------------------

    def score_ring(self) -> None:
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
                scale=self.scale,
                softcap=self.softcap,
                weights=weights,
                columns=columns,
                layers=part.stop - layer,
                codes=not self.backend.scores_codes,
            )
        ring.count = 0

    def _keep_tail(self, layer: int, query: Tensor) -> None:
        """Keeps the last n queries of a prompt whose end is not known yet, where only they count."""
        last = self.state.config.prefill_queries
        if last is None or not self.state.ranker.uses_attention:
            return
        if layer == len(self._tail):
            self._tail.append(query[:, :, -last:].clone())
        else:
            self._tail[layer] = torch.cat([self._tail[layer], query], 2)[:, :, -last:].clone()

    def score_tail(self) -> None:
        """Scores the prompt by its last n queries, now that it has ended: they attend once more."""
        state = self.state
        for layer, query in enumerate(self._tail):
            count = query.shape[2]
            self.backend.ingest(
                state,
                layer,
                query,
                start=state.columns - count,
                scale=self.scale,
                softcap=self.softcap,
                weights=state.ranker.tail_weights(count, self.device),
            )
        self._tail = []

    def _score_keys(self, aged: int) -> None:
        """Scores by key norm, once, while a window is still in full precision."""
        state = self.state
        store = state.pool
        fresh = (store.arena_ids >= self.tiers.aged) & (store.arena_ids < aged)
        norms = state.ranker.key_scores(store.arena_key.movedim(1, 2))
        store.arena_scores.copy_(torch.where(fresh, norms, store.arena_scores))
        if state.staging is not None:
            state.staging.scores.copy_(state.ranker.key_scores(state.staging.key.movedim(1, 2)))

    # ---- routing ---------------------------------------------------------------------------------------

    def route(self, traced: bool) -> tuple[Tensor, ...]:
        """Decides and moves for all layers and rows, whose queries have been scored. The host reads once.

        Returns:
            scores, tiers before and tiers after, [N, blocks] on the host; nothing unless it is traced.
        """
        state = self.state
        staging, store = state.staging, state.pool
        grid, columns = state.grid, state.columns
        aged = grid.aged_blocks(columns, store.plans[0].local_tokens)
        num_blocks = grid.num_blocks(columns)
        if not state.ranker.uses_attention:
            self._score_keys(aged)
        owner = store.shadow_slots(num_blocks)
        candidates, protected = gather_candidates(state, aged, owner)
        targets = decide(candidates, store.full_capacity, store.quant_capacity, state.config.promotion)
        targets = torch.where(candidates.blocks >= 0, targets, protected)
        moves = Moves(
            targets=targets,
            shadow_slots=owner,
            shift=state.row_shift,
            rope=self.rope,
            open_block=staging is not None and (columns + grid.offset) % state.config.window_size != 0,
            staged_key=None if staging is None else staging.key,
            staged_value=None if staging is None else staging.value,
            staged_scores=None if staging is None else staging.scores,
            first_staged=0 if staging is None else staging.first_block,
        )
        plan = store.plan(moves)
        board = self.tiers.decided(state, candidates, targets, num_blocks)
        read = read_event(
            plan.sizes(),
            (plan.arena_count, plan.live_count, plan.shadow_count),
            board.came_back,
            (board.scores, board.before, board.after) if traced else (),
        )
        if read.came_back:
            raise CacheUseError("an evicted window came back: the cache's tensors were changed from outside.")
        store.move(moves, plan, read.sizes)
        self.tiers.apply(board.after, aged, read.boards[2] if read.boards else None)
        state.staging = None
        state.refresh(read.occupied)
        return read.boards

    # ---- batch rows ------------------------------------------------------------------------------------

    def select_rows(self, rows: list[int]) -> None:
        """Keeps, repeats or reorders batch rows; `rows` holds old row numbers."""
        state = self.state
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
            self.tiers.select_rows(pick)
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
