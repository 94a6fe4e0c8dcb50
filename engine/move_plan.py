"""Where every slot of the pools is filled from at one routing event, worked out on the device.

All decision rows at once, with dense tables and no list whose length the device alone knows: the host learns six
lengths together with everything else that it reads at an event, and only then are lists of moved windows made.
A *place* is a column of [arena S | ledger P | staged I | nothing]. Knows targets and who owns which shadow;
knows no ids, keys, values or scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.trace import Tier


@dataclass(frozen=True, slots=True)
class MovedWindows:
    """M windows that change their slot: decision row, slot they go to, place they come from; int64 [M] each."""

    row: Tensor
    to: Tensor
    source: Tensor

    def __len__(self) -> int:
        return self.row.shape[0]


@dataclass(frozen=True, slots=True)
class MovePlan:
    """One routing decision as tables.

    Attributes:
        arena_source: place that each arena slot is filled from, its own where nothing moves, int64 [N, S].
        ledger_source: the same for ledger slots, [N, P].
        arena_moved, ledger_moved: what moves, by kind of source (arena, ledger, staged), bool [3, N, slots].
        arena_count, live_count, shadow_count: occupied slots after the event, int64 [N].
        revived: ledger slots whose window comes back from the arena, bool [N, P]; revived_by: that arena slot.
    """

    arena_source: Tensor
    ledger_source: Tensor
    arena_moved: Tensor
    ledger_moved: Tensor
    arena_count: Tensor
    live_count: Tensor
    shadow_count: Tensor
    revived: Tensor
    revived_by: Tensor

    def sizes(self) -> Tensor:
        """Number of moved windows of the six kinds, int64 [6]: what the host must know."""
        return torch.cat([self.arena_moved.sum((1, 2)), self.ledger_moved.sum((1, 2))])

    def lists(self, sizes: Sequence[int]) -> tuple[list[MovedWindows], list[MovedWindows]]:
        """(to the arena, to the ledger), each by kind of source, in row order."""
        arena, ledger = tuple(sizes[:3]), tuple(sizes[3:])
        return (
            _lists(self.arena_moved, self.arena_source, arena),
            _lists(self.ledger_moved, self.ledger_source, ledger),
        )


def plan_moves(targets: Tensor, owner: Tensor, quant_capacity: Tensor, *, places: int, open_block: bool) -> MovePlan:
    """Turns target tiers into moves.

    Occupied arena slots stay a prefix, an open block the last of them; live ledger entries stay a prefix, shadows
    of promoted windows behind it. What is in a good slot already does not move.

    Args:
        targets: uint8 [N, S + P + I], a tier for each arena slot, ledger slot and staged block.
        owner: ledger slot of the shadow that each arena slot owns, -1 for none, int64 [N, S].
        quant_capacity: ledger slots that a row has paid for, int64 [N].
        places: P. open_block: the last staged block is partial.
    """
    rows, slots = owner.shape
    staged_count = targets.shape[1] - slots - places
    arena, ledger, staged = targets.split([slots, places, staged_count], 1)
    place = torch.arange(targets.shape[1], device=targets.device)
    own_arena, own_ledger, from_staged = place.split([slots, places, staged_count])
    nothing = targets.shape[1]

    # Sink, Local and Full are the lowest three numbers: what lies, or comes to lie, in the arena.
    kept, incoming = arena <= int(Tier.FULL), staged <= int(Tier.FULL)
    demoted, promoted = arena == int(Tier.QUANT), ledger == int(Tier.FULL)
    owned = owner >= 0
    # 0: no owner stays; 1 + slot: demoted from that arena slot; -1: its owner stays above it.
    mark = torch.where(demoted, own_arena + 1, torch.where(kept, -1, 0))
    marks = mark.new_zeros(rows, places + 1)
    marks = marks.scatter_(1, torch.where(owned, owner, places), mark)[:, :places]
    revived = marks > 0

    live = (ledger == int(Tier.QUANT)) | revived
    shadow = promoted | (marks < 0)
    written = torch.cat([demoted & ~owned, staged == int(Tier.QUANT)], 1)
    live_count = live.sum(1) + written.sum(1)
    slot = torch.arange(places, device=targets.device)
    front = slot < live_count[:, None]
    settled = torch.where(front, live, shadow)
    free = front & ~live
    order = _in_order(
        torch.cat([live & ~front, written], 1), torch.cat([own_ledger, own_arena, from_staged])
    )  # fmt: skip
    ledger_source = torch.where(settled, own_ledger, nothing)
    ledger_source = torch.where(free, _fill(free, order), ledger_source)
    behind = shadow & front
    back = (slot < quant_capacity[:, None]) & ~front & ~shadow
    back &= back.cumsum(1) <= behind.sum(1, keepdim=True)
    ledger_source = torch.where(back, _fill(back, _in_order(behind, own_ledger)), ledger_source)

    arena_count = kept.sum(1) + promoted.sum(1) + incoming.sum(1)
    slot = torch.arange(slots, device=targets.device)
    stays = kept & (slot < (arena_count - int(open_block))[:, None])
    room = (slot < arena_count[:, None]) & ~stays
    order = _in_order(torch.cat([kept & ~stays, promoted, incoming], 1), place)
    arena_source = torch.where(stays, own_arena, nothing)
    arena_source = torch.where(room, _fill(room, order), arena_source)

    kinds = torch.arange(3, device=targets.device)[:, None, None]

    def by_kind(moved: Tensor, source: Tensor) -> Tensor:
        kind = (source >= slots).long() + (source >= slots + places)
        return moved & (kind == kinds)

    return MovePlan(
        arena_source,
        ledger_source,
        by_kind(room, arena_source),
        by_kind(free | back, ledger_source),
        arena_count,
        live_count,
        shadow.sum(1),
        revived,
        (marks - 1).clamp_min(0),
    )


def _in_order(mask: Tensor, values: Tensor) -> Tensor:
    """Values [W] at the True places of mask [N, W], moved to the front of their rows: [N, W + 1]."""
    rows, width = mask.shape
    # The last column takes what is not wanted.
    to = torch.where(mask, mask.cumsum(1) - 1, width)
    return values.new_zeros(rows, width + 1).scatter_(1, to, values.expand(rows, -1))


def _fill(free: Tensor, order: Tensor) -> Tensor:
    """The k-th of `order` at the k-th True place of a row of `free`; anything elsewhere."""
    return order.gather(1, (free.cumsum(1) - 1).clamp_min(0))


def _lists(moved: Tensor, source: Tensor, sizes: tuple[int, ...]) -> list[MovedWindows]:
    """The True places of [3, N, W] as three lists, whose lengths the caller knows."""
    total, width = sum(sizes), source.shape[1]
    if not total:
        none = source.new_zeros(0)
        return [MovedWindows(none, none, none)] * len(sizes)
    # The k-th True place is where the running count reaches k: unlike nonzero, this asks the host nothing.
    wanted = torch.arange(1, total + 1, device=source.device)
    cell = torch.searchsorted(moved.flatten().cumsum(0), wanted) % source.numel()
    parts = zip(
        (cell // width).split(sizes), (cell % width).split(sizes), source.flatten()[cell].split(sizes), strict=True
    )
    return [MovedWindows(*part) for part in parts]
