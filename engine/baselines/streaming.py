"""StreamingLLM: the first few tokens and the latest ones, the same for all heads and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.baselines.base import MASKED, Context, Resident, Rival, RunPlan, Staged, full_attend, require
from engine.baselines.kept import GROW
from engine.baselines.matching import fit_tokens
from engine.budget import KVShape
from engine.rope import RopeTable, rotate
from engine.trace import Tier

POSITIONS = ("cache", "original")
COUNTER_BYTES = 4
UNBOUNDED = 2**31


def slot_positions(counts: Tensor, sinks: int, recent: int, slots: int) -> Tensor:
    """Which token of its row every slot holds once `counts` [B] tokens have come: int64 [B, slots], -1 = none.

    Slot s < sinks holds token s; the next `recent` are a ring over the latest tokens; the others are spare.
    """
    place = torch.arange(slots, device=counts.device)[None, :]
    newest = counts[:, None] - 1 - sinks
    ring = newest - torch.remainder(newest - (place - sinks), recent) + sinks
    token = torch.where(place < sinks, place, ring)
    inside = (ring >= sinks) & (newest >= 0) & (place < sinks + recent)
    held = torch.where(place < sinks, place < counts[:, None], inside)
    return torch.where(held, token, -1)


class Ring(Resident):
    """Sinks and a ring of recent tokens, [B, H_kv, slots, d], keys as they came (rotated at true positions).

    With `table`, positions are the cache's own: all recent keys moved by the same distance, which a query
    does not notice; only the sinks are seen through a query turned back by the number of dropped tokens.
    The counter is one for the model.

    Args:
        recent: size of the ring once so many columns are known; never falls.
    """

    def __init__(
        self,
        part: Staged,
        context: Context,
        sinks: int,
        recent: Callable[[int], int],
        counter: Tensor,
        table: RopeTable | None,
        owner: bool,
    ) -> None:
        batch, heads, tokens, dim = part.key.shape
        self._sinks, self._size, self._table, self._owner = sinks, recent, table, owner
        self._recent = recent(tokens)
        self._counter = counter
        self._pad_list = list(context.pads)
        self._pads = torch.tensor(context.pads, device=part.key.device)
        self._columns = tokens
        counts = tokens - self._pads
        planned = context.run.planned_new_tokens
        slots = min(sinks + recent(tokens + planned), int(counts.max()) + planned)
        self.key = torch.zeros(batch, heads, slots, dim, dtype=context.dtype, device=part.key.device)
        self.value = torch.zeros_like(self.key)
        held = slot_positions(counts, sinks, self._recent, slots)
        column = (held + self._pads[:, None]).clamp_min(0)[:, None, :, None].expand(-1, heads, -1, dim)
        there = (held >= 0)[:, None, :, None]
        self.key.copy_(torch.where(there, part.key.gather(2, column), 0))
        self.value.copy_(torch.where(there, part.value.gather(2, column), 0))
        self._note()

    def _note(self) -> None:
        """Facts that depend on the count alone: workspace."""
        lengths = [self._columns - pad for pad in self._pad_list]
        self._filled = [min(length, self._sinks + self._recent) for length in lengths]
        self._dropped = [length - filled for length, filled in zip(lengths, self._filled, strict=True)]
        self._counter.fill_(self._columns)

    def append(self, key: Tensor, value: Tensor) -> None:
        for token in range(key.shape[2]):
            self._widen(self._size(self._columns + 1))
            slots = [self._slot(self._columns - pad) for pad in self._pad_list]
            if max(slots) >= self.key.shape[2]:
                size = (*self.key.shape[:2], GROW, self.key.shape[3])
                self.key = torch.cat([self.key, self.key.new_zeros(size)], 2)
                self.value = torch.cat([self.value, self.value.new_zeros(size)], 2)
            if len(set(slots)) == 1:
                self.key[:, :, slots[0]], self.value[:, :, slots[0]] = key[:, :, token], value[:, :, token]
            else:
                rows, places = torch.arange(len(slots), device=key.device), torch.tensor(slots, device=key.device)
                self.key[rows, :, places] = key[:, :, token].to(self.key.dtype)
                self.value[rows, :, places] = value[:, :, token].to(self.value.dtype)
            self._columns += 1
        self._note()

    def _widen(self, recent: int) -> None:
        """A larger ring: every token moves to its new slot. What it held stays, what was dropped stays dropped."""
        if recent <= self._recent:
            return
        before = self._held()
        room = self._sinks + recent - self.key.shape[2]
        if room > 0 and max(self._columns - pad for pad in self._pad_list) >= self.key.shape[2]:
            size = (*self.key.shape[:2], max(room, GROW), self.key.shape[3])
            self.key = torch.cat([self.key, self.key.new_zeros(size)], 2)
            self.value = torch.cat([self.value, self.value.new_zeros(size)], 2)
        self._recent = recent
        after = self._held()
        # A token's old slot, by token: the slots of the new ring that nobody fills yet read anything at all.
        old = torch.zeros(before.shape[0], self._columns + 1, dtype=torch.int64, device=before.device)
        places = torch.arange(before.shape[1], device=before.device).expand_as(before)
        old.scatter_(1, torch.where(before >= 0, before, self._columns), places)
        index = old.gather(1, after.clamp_min(0))[:, None, :, None]
        index = index.expand(-1, self.key.shape[1], -1, self.key.shape[3])
        self.key, self.value = self.key.gather(2, index), self.value.gather(2, index)

    def _slot(self, token: int) -> int:
        """Where a row's token goes."""
        return token if token < self._sinks else self._sinks + (token - self._sinks) % self._recent

    def _bias(self, begin: int, end: int, device: torch.device) -> Tensor | None:
        if min(self._filled) >= end:
            return None
        slots = torch.arange(begin, end, device=device)
        filled = torch.tensor(self._filled, device=device)
        return torch.where(slots[None, :] < filled[:, None], 0.0, MASKED)[:, None, None, :]

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        end, split = max(self._filled), min(self._sinks, max(self._filled))

        def over(asked: Tensor, begin: int, stop: int) -> tuple[Tensor, Tensor]:
            bias = self._bias(begin, stop, query.device)
            return full_attend(asked, self.key[:, :, begin:stop], self.value[:, :, begin:stop], scale, softcap, bias)

        if self._table is None or not any(self._dropped) or not split:
            return [over(query, 0, end)]
        self._table.ensure(max(self._dropped) + 1)
        back = torch.tensor(self._dropped, device=query.device)
        cos, sin = self._table.cos[back][:, None, None], self._table.sin[back][:, None, None]
        turned = rotate(query.float(), cos, -sin).to(query.dtype)
        return [over(turned, 0, split), over(query, split, end)]

    def tensors(self) -> dict[str, Tensor]:
        end = max(self._filled)
        out = {"key": self.key[:, :, :end], "value": self.value[:, :, :end]}
        if self._owner:
            out["counter"] = self._counter
        return out

    def _held(self) -> Tensor:
        counts = self._columns - self._pads
        return slot_positions(counts, self._sinks, self._recent, self.key.shape[2])

    def residency(self, columns: int) -> Tensor:
        batch, heads = self.key.shape[:2]
        out = torch.full((batch, columns + 1), int(Tier.EVICTED), dtype=torch.uint8, device=self.key.device)
        held = self._held()
        where = torch.where(held >= 0, held + self._pads[:, None], columns)
        out.scatter_(1, where, int(Tier.FULL))
        out[:, self._columns : columns] = int(Tier.FULL)
        return out[:, None, :columns].expand(-1, heads, -1).clone()

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Keys renumbered by slot, up to a turn that queries and keys share: a query at its true position fits."""
        held = self._held()[row]
        there = held >= 0
        key = self.key[row].float()
        if self._table is not None and self._dropped[row]:
            self._table.ensure(self._dropped[row] + 1)
            at = torch.tensor(self._dropped[row], device=key.device)
            key = key.clone()
            sinks = key[:, : self._sinks]
            key[:, : self._sinks] = rotate(sinks, self._table.cos[at], self._table.sin[at])
        return [(key[head, there], self.value[row, head, there].float()) for head in range(key.shape[0])]

    def select(self, rows: Tensor) -> None:
        self.key, self.value = self.key.index_select(0, rows), self.value.index_select(0, rows)
        self._pads = self._pads.index_select(0, rows)
        self._pad_list = [self._pad_list[row] for row in rows.tolist()]
        self._note()


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Rival):
    """Sinks and the latest tokens, rolling.

    sinks: first tokens that stay. positions: "cache" numbers what is in the cache from 0, as the article does;
    "original" keeps true positions.
    """

    name = "streamingllm"
    label = "systems.streamingllm"
    grows = True

    sinks: int = 4
    positions: str = "cache"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks must be 0 or more", self.sinks)
        require(self.positions in POSITIONS, f"positions must be one of {', '.join(POSITIONS)}", self.positions)

    def recent(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> int:
        """R: latest tokens that stay; under a running budget, once `prompt_tokens` are known.

        Raises:
            BudgetError: sinks and one recent token do not fit.
        """
        if run.budget is None or run.budget.whole:
            return UNBOUNDED
        fits = fit_tokens(
            run.budget,
            shape,
            prompt_tokens,
            0 if run.running else run.planned_new_tokens,
            fixed=COUNTER_BYTES,
            per_token=shape.token_bytes,
            smallest=self.sinks + 1,
            keeps_new=False,
        )
        return max(1, fits - self.sinks)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        columns = prompt_tokens + generated
        held = min(columns, self.sinks + self.recent(shape, columns if run.running else prompt_tokens, run))
        return shape.full_kv_bytes(held) + COUNTER_BYTES

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        run, shape = context.run, context.shape
        fixed = self.recent(shape, context.columns, run)
        table = context.rope() if self.positions == "cache" and fixed < UNBOUNDED else None

        def recent(columns: int) -> int:
            return self.recent(shape, columns, run) if run.running else fixed

        counter = torch.zeros((), dtype=torch.int32)
        return [
            Ring(part, context, self.sinks, recent, counter, table, owner=index == 0)
            for index, part in enumerate(staged)
        ]
