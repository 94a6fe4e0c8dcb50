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
from engine.move_plan import MovedWindows, MovePlan, plan_moves
from engine.quant import LANES, QuantizedWindows, dequantize, quantize
from engine.rope import RopeTable
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

    def plan(self, moves: Moves) -> MovePlan:
        """What `move` will do, worked out without a word to the host."""
        return plan_moves(
            moves.targets,
            moves.shadow_slots,
            self.quant_capacity,
            places=self.lane_blocks * LANES,
            open_block=moves.open_block,
        )

    def move(self, moves: Moves, plan: MovePlan, sizes: Sequence[int]) -> None:
        """Carries one routing decision out: quantize, promote, evict, take staged blocks in.

        Everything that moves is read before anything is written, so that slots can be swapped.

        Args:
            plan: of these moves. sizes: `plan.sizes()`, read by the host.
        """
        blocks, scores = self._tables(moves, plan)
        (settled, risen, taken), (demoted, shifted, staged) = plan.lists(sizes)
        first = self.slots + self.lane_blocks * LANES
        windows: list[tuple[MovedWindows, Tensor, Tensor]] = []
        entries: list[tuple[MovedWindows, QuantizedWindows]] = []
        if len(settled):
            windows.append((settled, *self._arena_windows(settled)))
        if len(risen):
            positions = self._positions(blocks, risen, moves)
            windows.append((risen, *self.dequantized(risen.row, risen.source - self.slots, positions, moves.rope)))
        if len(shifted):
            entries.append((shifted, self.read_entries(shifted.row, shifted.source - self.slots)))
        if len(demoted):
            entries.append((demoted, self._quantized(blocks, demoted, *self._arena_windows(demoted), moves)))
        if moves.staged_key is not None and moves.staged_value is not None:
            if len(taken):
                at = taken.source - first
                windows.append((taken, moves.staged_key[taken.row, :, at], moves.staged_value[taken.row, :, at]))
            if len(staged):
                at = staged.source - first
                key, value = moves.staged_key[staged.row, :, at], moves.staged_value[staged.row, :, at]
                entries.append((staged, self._quantized(blocks, staged, key, value, moves)))
        for moved, key, value in windows:
            self.arena_key[moved.row, :, moved.to] = key.to(self.dtype)
            self.arena_value[moved.row, :, moved.to] = value.to(self.dtype)
        for moved, packed in entries:
            self._write_entries(moved.row, moved.to, packed)
        self._relabel(blocks, scores, plan)

    def _tables(self, moves: Moves, plan: MovePlan) -> tuple[Tensor, Tensor]:
        """Block id and score of every place before the event, the last column for places that hold nothing."""
        rows = self.shape.rows
        held = torch.where(self.ledger_ids <= SHADOW_BASE, SHADOW_BASE - self.ledger_ids, self.ledger_ids)
        blocks, scores = [self.arena_ids, held], [self.arena_scores]
        # A window that goes down again brings the score that it has earned above.
        scores.append(torch.where(plan.revived, self.arena_scores.gather(1, plan.revived_by), self.ledger_scores))
        if moves.staged_scores is not None:
            count = moves.staged_scores.shape[1]
            ids = torch.arange(moves.first_staged, moves.first_staged + count, dtype=torch.int32, device=self.device)
            blocks.append(ids.expand(rows, -1))
            scores.append(moves.staged_scores)
        blocks.append(self.arena_ids.new_full((rows, 1), EMPTY_ID))
        scores.append(self.arena_scores.new_zeros(rows, 1))
        return torch.cat(blocks, 1), torch.cat(scores, 1)

    def _relabel(self, blocks: Tensor, scores: Tensor, plan: MovePlan) -> None:
        """Gives every slot the block and the score of what lies there now."""
        self.arena_ids.copy_(blocks.gather(1, plan.arena_source))
        self.arena_scores.copy_(scores.gather(1, plan.arena_source))
        held = blocks.gather(1, plan.ledger_source)
        front = torch.arange(held.shape[1], device=self.device) < plan.live_count[:, None]
        # SHADOW_BASE - EMPTY_ID is EMPTY_ID: places behind the shadows stay empty.
        self.ledger_ids.copy_(torch.where(front, held, SHADOW_BASE - held))
        self.ledger_scores.copy_(scores.gather(1, plan.ledger_source))
        self.arena_count.copy_(plan.arena_count)
        self.live_count.copy_(plan.live_count)

    def _arena_windows(self, moved: MovedWindows) -> tuple[Tensor, Tensor]:
        """Keys and values that lie in the arena, [M, heads, Ω, d]."""
        return self.arena_key[moved.row, :, moved.source], self.arena_value[moved.row, :, moved.source]

    def _positions(self, blocks: Tensor, moved: MovedWindows, moves: Moves) -> Tensor:
        """Positions of the tokens of windows, int64 [M, Ω]."""
        return self.columns(blocks[moved.row, moved.source]) - moves.shift[moved.row, None]

    def _quantized(
        self, blocks: Tensor, moved: MovedWindows, key: Tensor, value: Tensor, moves: Moves
    ) -> QuantizedWindows:
        """Entries of windows that leave full precision for the first time."""
        positions = self._positions(blocks, moved, moves)[:, None, :].expand(-1, self.shape.heads, -1)
        return quantize(moves.rope.undo(key, positions), value, self.config.bits, self.value_groups)


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
