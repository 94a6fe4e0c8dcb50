"""The slot pools and the write-once ledger: all tensors that persist.

One tensor per tier for all layers. A *decision row* n = (layer, batch row, decision group) owns
`heads` KV heads; N = L·B·G rows in that order. G is 1 (`score_scope="layer"`) or H_kv.

    arena    sink, Full and local blocks in full precision, keys post-RoPE     [N, heads, S, Ω, d]
    ledger   packed windows, keys pre-RoPE; layout in `quant.py`               NB·16 slots

Slots have no order; a block's id says where it belongs. In the arena the occupied slots are a prefix
and the open block, while there is one, is the last of them. In the ledger live entries are a prefix;
entries of promoted windows (shadows) lie behind it, keep their codes and stay charged. An entry is
written once, when its window first leaves full precision. Knows no model and no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.budget import Plan
from engine.config import QEvictConfig
from engine.quant import LANES, QuantizedWindows, dequantize, quantize
from engine.rope import RopeTable
from engine.trace import Tier
from engine.windows import Grid

EMPTY_ID = -1
SHADOW_BASE = -2
"""A shadow of block b is stored as id -2 - b."""

LOW_BIAS = -1e30
"""Finite stand-in for -inf in attention biases: a wholly masked row must not become NaN."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How many decision rows there are and what each owns."""

    num_layers: int
    batch: int
    groups: int
    heads: int
    head_dim: int

    @property
    def rows(self) -> int:
        return self.num_layers * self.batch * self.groups

    @property
    def rows_per_layer(self) -> int:
        return self.batch * self.groups

    @property
    def num_kv_heads(self) -> int:
        return self.groups * self.heads


class TierStore:
    """Arena and ledger of all managed layers on one device.

    Args:
        config: settings; `bits` and `value_group_size` shape the ledger.
        shape: decision rows.
        plans: one plan per batch row; they may differ in sink blocks and capacities only.
        dtype: what the arena stores.
    """

    def __init__(
        self, config: QEvictConfig, shape: PoolShape, plans: Sequence[Plan], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.shape = shape
        self.grid = Grid(config.window_size, config.sink_tokens)
        self.dtype = dtype
        self.device = device
        self.value_groups = 1 if config.value_group_size is None else shape.head_dim // config.value_group_size
        self.slots = 0
        self.lane_blocks = 0
        self.quant_slots = 0
        self._allocate(plans)
        rows = shape.rows
        self.arena_count = torch.zeros(rows, dtype=torch.int32, device=device)
        self.live_count = torch.zeros(rows, dtype=torch.int32, device=device)

    # ---- storage ------------------------------------------------------------------------------

    def _allocate(self, plans: Sequence[Plan]) -> None:
        self.plans = list(plans)
        shape, config = self.shape, self.config
        self.slots = max(plan.arena_blocks for plan in plans)
        self.quant_slots = max(plan.quant_capacity for plan in plans)
        self.lane_blocks = -(-self.quant_slots // LANES)
        n, h, d, w = shape.rows, shape.heads, shape.head_dim, config.window_size
        nb, places = self.lane_blocks, self.lane_blocks * LANES
        kb = w * config.bits // 8

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.arena_key = zeros(n, h, self.slots, w, d, dtype=self.dtype)
        self.arena_value = zeros(n, h, self.slots, w, d, dtype=self.dtype)
        self.arena_ids = torch.full((n, self.slots), EMPTY_ID, dtype=torch.int32, device=self.device)
        self.arena_scores = zeros(n, self.slots, dtype=torch.float32)
        half = torch.float16
        self.key_codes = zeros(n, h, nb, d, kb, LANES, dtype=torch.uint8)
        self.key_scale = zeros(n, h, nb, d, LANES, dtype=half)
        self.key_zero = zeros(n, h, nb, d, LANES, dtype=half)
        self.value_codes = zeros(n, h, places, kb, d, dtype=torch.uint8)
        self.value_scale = zeros(n, h, nb, self.value_groups, w, LANES, dtype=half)
        self.value_zero = zeros(n, h, nb, self.value_groups, w, LANES, dtype=half)
        self.ledger_ids = torch.full((n, places), EMPTY_ID, dtype=torch.int32, device=self.device)
        self.ledger_scores = zeros(n, places, dtype=torch.float32)
        self._place_capacities()

    def _place_capacities(self) -> None:
        def per_row(values: list[int]) -> Tensor:
            row = torch.tensor(values, dtype=torch.int64, device=self.device)
            return row.repeat_interleave(self.shape.groups).repeat(self.shape.num_layers)

        self.full_capacity = per_row([plan.full_capacity for plan in self.plans])
        self.quant_capacity = per_row([plan.quant_capacity for plan in self.plans])
        self.sink_blocks = per_row([plan.sink_blocks for plan in self.plans])

    def grow(self, plans: Sequence[Plan]) -> None:
        """Reallocates for larger plans and copies everything over; capacities never shrink."""
        old = {name: getattr(self, name) for name in self._names()}
        slots, places, nb = self.slots, self.lane_blocks * LANES, self.lane_blocks
        self._allocate(plans)
        for name in ("arena_key", "arena_value"):
            getattr(self, name)[:, :, :slots] = old[name]
        for name in ("arena_ids", "arena_scores"):
            getattr(self, name)[:, :slots] = old[name]
        for name in ("key_codes", "key_scale", "key_zero", "value_scale", "value_zero"):
            getattr(self, name)[:, :, :nb] = old[name]
        self.value_codes[:, :, :places] = old["value_codes"]
        for name in ("ledger_ids", "ledger_scores"):
            getattr(self, name)[:, :places] = old[name]

    @staticmethod
    def _names() -> tuple[str, ...]:
        return (
            "arena_key",
            "arena_value",
            "arena_ids",
            "arena_scores",
            "key_codes",
            "key_scale",
            "key_zero",
            "value_codes",
            "value_scale",
            "value_zero",
            "ledger_ids",
            "ledger_scores",
        )

    def persistent_tensors(self) -> dict[str, Tensor]:
        """Everything that survives to the next step, by name."""
        return {name: getattr(self, name) for name in self._names()}

    @property
    def persistent_bytes(self) -> int:
        """Summed `nbytes` of the persistent tensors, lane padding included."""
        return sum(tensor.nbytes for tensor in self.persistent_tensors().values())

    @property
    def lane_padding_bytes(self) -> int:
        """Bytes of ledger slots beyond the capacity, that only fill the kernel's lanes."""
        spare = self.lane_blocks * LANES - self.quant_slots
        cost = self.plans[0].costs.quant
        return spare * cost * self.shape.num_layers * self.shape.batch

    def select_rows(self, index: Tensor) -> None:
        """Keeps, repeats or reorders batch rows; `index` holds old row numbers."""
        index = index.to(self.device)
        self.plans = [self.plans[i] for i in index.tolist()]
        old = self.shape
        for name in (*self._names(), "arena_count", "live_count"):
            tensor = getattr(self, name)
            split = tensor.view(old.num_layers, old.batch, old.groups, *tensor.shape[1:])
            setattr(self, name, split.index_select(1, index).flatten(0, 2).contiguous())
        self.shape = PoolShape(old.num_layers, len(index), old.groups, old.heads, old.head_dim)
        self._place_capacities()

    # ---- where things are -----------------------------------------------------------------------

    def columns(self, blocks: Tensor) -> Tensor:
        """Columns of blocks [...] as [..., Ω]; negative in front of block 0."""
        inside = torch.arange(self.config.window_size, device=self.device)
        return blocks.long()[..., None] * self.config.window_size - self.grid.offset + inside

    def shadow_slots(self, num_blocks: int) -> Tensor:
        """Ledger slot of the shadow that each arena slot's block owns, -1 for none; int64 [N, S]."""
        rows = self.shape.rows
        lookup = torch.full((rows, num_blocks + 1), -1, dtype=torch.int64, device=self.device)
        shadow = self.ledger_ids <= SHADOW_BASE
        where = torch.where(shadow, SHADOW_BASE - self.ledger_ids.long(), num_blocks)
        places = torch.arange(self.ledger_ids.shape[1], device=self.device).expand(rows, -1)
        lookup.scatter_(1, where, places)
        lookup[:, num_blocks] = -1
        held = torch.where(self.arena_ids >= 0, self.arena_ids.long(), num_blocks)
        return lookup.gather(1, held)

    def open_block(self, block: int) -> None:
        """Takes the next arena slot of every row for a new, empty block."""
        slot = self.arena_count.long()[:, None]
        self.arena_ids.scatter_(1, slot, block)
        self.arena_scores.scatter_(1, slot, 0.0)
        self.arena_count += 1

    def close_block(self) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the last arena block of every row out: (keys, values [N, heads, Ω, d], scores [N])."""
        self.arena_count -= 1
        n = torch.arange(self.shape.rows, device=self.device)
        slot = self.arena_count.long()
        key, value = self.arena_key[n, :, slot].clone(), self.arena_value[n, :, slot].clone()
        scores = self.arena_scores[n, slot].clone()
        self.arena_ids[n, slot] = EMPTY_ID
        self.arena_scores[n, slot] = 0.0
        return key, value, scores

    # ---- ledger entries -------------------------------------------------------------------------

    def read_entries(self, n: Tensor, slot: Tensor) -> QuantizedWindows:
        """Packed entries at (row, slot) pairs, leading shape [M, heads]."""
        block, lane = slot // LANES, slot % LANES
        return QuantizedWindows(
            self.key_codes[n, :, block, :, :, lane],
            self.key_scale[n, :, block, :, lane],
            self.key_zero[n, :, block, :, lane],
            self.value_codes[n, :, slot],
            self.value_scale[n, :, block, :, :, lane],
            self.value_zero[n, :, block, :, :, lane],
        )

    def _write_entries(self, n: Tensor, slot: Tensor, windows: QuantizedWindows) -> None:
        block, lane = slot // LANES, slot % LANES
        self.key_codes[n, :, block, :, :, lane] = windows.key_codes
        self.key_scale[n, :, block, :, lane] = windows.key_scale
        self.key_zero[n, :, block, :, lane] = windows.key_zero
        self.value_codes[n, :, slot] = windows.value_codes
        self.value_scale[n, :, block, :, :, lane] = windows.value_scale
        self.value_zero[n, :, block, :, :, lane] = windows.value_zero

    def dequantized(self, n: Tensor, slot: Tensor, positions: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor]:
        """Post-RoPE keys and values of entries, float32 [M, heads, Ω, d]; positions are [M, Ω]."""
        key, value = dequantize(self.read_entries(n, slot), self.config.bits)
        return rope.apply(key, positions[:, None, :].expand(-1, self.shape.heads, -1)), value

    # ---- moving ---------------------------------------------------------------------------------

    def move(self, moves: Moves) -> None:
        """Carries one routing decision out: quantize, promote, evict, take staged blocks in.

        Everything that moves is read before anything is written, so that slots can be swapped.
        """
        arena, ledger, staged = moves.split(self.slots, self.lane_blocks * LANES)
        kept = (arena == Tier.SINK) | (arena == Tier.LOCAL) | (arena == Tier.FULL)
        demoted = arena == Tier.QUANT
        promoted = ledger == Tier.FULL
        incoming = (staged == Tier.SINK) | (staged == Tier.LOCAL) | (staged == Tier.FULL)
        owner = moves.shadow_slots
        written = torch.cat([demoted & (owner < 0), staged == Tier.QUANT], dim=1)

        new_entries = self._first_demotions(written, moves)
        risen = self._promotions(promoted, moves)
        revived = self._owned(owner, demoted & (owner >= 0))
        still_shadow = self._owned(owner, kept & (owner >= 0))
        revived_scores = self._owned_scores(owner, demoted & (owner >= 0))

        self._rebuild_ledger(
            live=(ledger == Tier.QUANT) | revived,
            shadow=promoted | still_shadow,
            revived=revived,
            revived_scores=revived_scores,
            written=written,
            new_entries=new_entries,
            moves=moves,
        )
        self._rebuild_arena(kept, promoted, incoming, risen, moves)

    def _owned(self, owner: Tensor, which: Tensor) -> Tensor:
        """Marks the ledger slots that the chosen arena slots own; bool [N, places]."""
        out = torch.zeros_like(self.ledger_ids, dtype=torch.bool)
        n, slot = which.nonzero(as_tuple=True)
        out[n, owner[n, slot]] = True
        return out

    def _owned_scores(self, owner: Tensor, which: Tensor) -> Tensor:
        out = torch.zeros_like(self.ledger_scores)
        n, slot = which.nonzero(as_tuple=True)
        out[n, owner[n, slot]] = self.arena_scores[n, slot]
        return out

    def _first_demotions(self, written: Tensor, moves: Moves) -> tuple[QuantizedWindows, Tensor, Tensor] | None:
        """Quantizes windows that leave full precision for the first time: entries, block ids, scores."""
        n, place = written.nonzero(as_tuple=True)
        if not len(n):
            return None
        key, value, blocks, scores = self._gather_full(n, place, moves)
        positions = self.columns(blocks) - moves.shift[n, None]
        plain = moves.rope.undo(key, positions[:, None, :].expand(-1, self.shape.heads, -1))
        return quantize(plain, value, self.config.bits, self.value_groups), blocks, scores

    def _gather_full(self, n: Tensor, place: Tensor, moves: Moves) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Full-precision windows at places of [arena | staging]: key, value float32, ids, scores."""
        staged = place >= self.slots
        shape = (len(n), self.shape.heads, self.config.window_size, self.shape.head_dim)
        key = torch.empty(shape, device=self.device)
        value = torch.empty_like(key)
        blocks = torch.empty(len(n), dtype=torch.int32, device=self.device)
        scores = torch.empty(len(n), device=self.device)
        a_n, a_slot = n[~staged], place[~staged]
        key[~staged] = self.arena_key[a_n, :, a_slot].float()
        value[~staged] = self.arena_value[a_n, :, a_slot].float()
        blocks[~staged] = self.arena_ids[a_n, a_slot]
        scores[~staged] = self.arena_scores[a_n, a_slot]
        if moves.staged_key is not None and moves.staged_value is not None and moves.staged_scores is not None:
            s_n, s_block = n[staged], place[staged] - self.slots
            key[staged] = moves.staged_key[s_n, :, s_block].float()
            value[staged] = moves.staged_value[s_n, :, s_block].float()
            blocks[staged] = (s_block + moves.first_staged).to(torch.int32)
            scores[staged] = moves.staged_scores[s_n, s_block]
        return key, value, blocks, scores

    def _promotions(self, promoted: Tensor, moves: Moves) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Dequantizes promoted windows: keys, values, block ids, scores."""
        n, slot = promoted.nonzero(as_tuple=True)
        if not len(n):
            return None
        blocks = self.ledger_ids[n, slot]
        positions = self.columns(blocks) - moves.shift[n, None]
        key, value = self.dequantized(n, slot, positions, moves.rope)
        return key, value, blocks, self.ledger_scores[n, slot].clone()

    def _rebuild_ledger(
        self,
        *,
        live: Tensor,
        shadow: Tensor,
        revived: Tensor,
        revived_scores: Tensor,
        written: Tensor,
        new_entries: tuple[QuantizedWindows, Tensor, Tensor] | None,
        moves: Moves,
    ) -> None:
        """Marks, compacts and fills the ledger: live entries a prefix, shadows behind it."""
        places = self.ledger_ids.shape[1]
        if not places:
            return
        ids = self.ledger_ids.long()
        blocks = torch.where(ids <= SHADOW_BASE, SHADOW_BASE - ids, ids)
        scores = torch.where(revived, revived_scores, self.ledger_scores)
        live_count = live.sum(1) + written.sum(1)
        place = torch.arange(places, device=self.device).expand(live.shape[0], -1)
        front = place < live_count[:, None]
        usable = place < self.quant_capacity[:, None]
        settled = (live & front) | (shadow & ~front)
        live_movers, shadow_movers = live & ~front, shadow & front

        from_n, from_slot = live_movers.nonzero(as_tuple=True)
        moved_live = (self.read_entries(from_n, from_slot), blocks[from_n, from_slot], scores[from_n, from_slot])
        s_n, s_slot = shadow_movers.nonzero(as_tuple=True)
        moved_shadow = (self.read_entries(s_n, s_slot), blocks[s_n, s_slot], scores[s_n, s_slot])

        self.ledger_ids.copy_(torch.where(settled, torch.where(live, blocks, SHADOW_BASE - blocks), EMPTY_ID))
        self.ledger_scores.copy_(torch.where(settled, scores, 0.0))

        free = front & ~settled
        # Row by row, free places in front are as many as movers plus new entries: the two lists align.
        to_n, to_slot = free.nonzero(as_tuple=True)
        source = torch.cat([live_movers, written], dim=1)
        _, src_place = source.nonzero(as_tuple=True)
        is_new = src_place >= places
        for chosen, packed in ((~is_new, moved_live), (is_new, new_entries)):
            if packed is None:
                continue
            entries, entry_blocks, entry_scores = packed
            n, slot = to_n[chosen], to_slot[chosen]
            if len(n):
                self._write_entries(n, slot, entries)
                self.ledger_ids[n, slot] = entry_blocks.to(torch.int32)
                self.ledger_scores[n, slot] = entry_scores
        if len(s_n):
            back = usable & ~front & ~settled
            wanted = shadow_movers.sum(1)
            chosen_back = back & (back.cumsum(1) <= wanted[:, None])
            n, slot = chosen_back.nonzero(as_tuple=True)
            entries, entry_blocks, entry_scores = moved_shadow
            self._write_entries(n, slot, entries)
            self.ledger_ids[n, slot] = (SHADOW_BASE - entry_blocks).to(torch.int32)
            self.ledger_scores[n, slot] = entry_scores
        self.live_count.copy_(live_count)

    def _rebuild_arena(
        self,
        kept: Tensor,
        promoted: Tensor,
        incoming: Tensor,
        risen: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        moves: Moves,
    ) -> None:
        """Fills the arena's holes so that occupied slots are a prefix and an open block is the last."""
        count = kept.sum(1) + promoted.sum(1) + incoming.sum(1)
        slot = torch.arange(self.slots, device=self.device).expand(kept.shape[0], -1)
        front = slot < (count - (1 if moves.open_block else 0))[:, None]
        settled = kept & front
        movers = kept & ~front
        places = promoted.shape[1]

        m_n, m_slot = movers.nonzero(as_tuple=True)
        moved = (
            self.arena_key[m_n, :, m_slot],
            self.arena_value[m_n, :, m_slot],
            self.arena_ids[m_n, m_slot],
            self.arena_scores[m_n, m_slot],
        )
        i_n, i_block = incoming.nonzero(as_tuple=True)
        staged: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        if moves.staged_key is not None and moves.staged_value is not None and moves.staged_scores is not None:
            staged = (
                moves.staged_key[i_n, :, i_block],
                moves.staged_value[i_n, :, i_block],
                (i_block + moves.first_staged).to(torch.int32),
                moves.staged_scores[i_n, i_block],
            )
        self.arena_ids.copy_(torch.where(settled, self.arena_ids, EMPTY_ID))
        self.arena_scores.copy_(torch.where(settled, self.arena_scores, 0.0))

        free = (slot < count[:, None]) & ~settled
        to_n, to_slot = free.nonzero(as_tuple=True)
        source = torch.cat([movers, promoted, incoming], dim=1)
        _, src_place = source.nonzero(as_tuple=True)
        kinds = (
            (src_place < self.slots, moved),
            ((src_place >= self.slots) & (src_place < self.slots + places), risen),
            (src_place >= self.slots + places, staged),
        )
        for chosen, content in kinds:
            if content is None:
                continue
            key, value, blocks, scores = content
            n, place = to_n[chosen], to_slot[chosen]
            self.arena_key[n, :, place] = key.to(self.dtype)
            self.arena_value[n, :, place] = value.to(self.dtype)
            self.arena_ids[n, place] = blocks
            self.arena_scores[n, place] = scores
        self.arena_count.copy_(count)


@dataclass(frozen=True, slots=True)
class Moves:
    """One routing decision, ready to be carried out.

    Attributes:
        targets: uint8 [N, S + places + staged]: where each arena slot, ledger slot and staged block goes;
            SINK, LOCAL and FULL keep or bring a block into the arena, EMPTY means nothing is there.
        shadow_slots: ledger slot of the shadow that each arena slot owns, -1 for none, [N, S].
        shift: column minus position of each decision row, [N].
        rope: the model's rotation.
        open_block: the last staged block is partial and must become the last arena slot.
        staged_key, staged_value: [N, heads, blocks, Ω, d] post-RoPE, or None.
        staged_scores: [N, blocks]; first_staged: block id of the first of them.
    """

    targets: Tensor
    shadow_slots: Tensor
    shift: Tensor
    rope: RopeTable
    open_block: bool = False
    staged_key: Tensor | None = None
    staged_value: Tensor | None = None
    staged_scores: Tensor | None = None
    first_staged: int = 0

    def split(self, slots: int, places: int) -> tuple[Tensor, Tensor, Tensor]:
        """(arena, ledger, staged) parts of the targets."""
        return (
            self.targets[:, :slots],
            self.targets[:, slots : slots + places],
            self.targets[:, slots + places :],
        )
